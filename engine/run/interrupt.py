"""Signals and failures: how a run ends early."""

import contextlib
import signal
import time
from dataclasses import replace

import torch

from engine.base import progress, ranks
from engine.base.errors import CANNOT_WRITE, UserError, one_line
from engine.run import checkpoint
from engine.run.folder import how_to_resume


class Interrupt:
    """After Ctrl-C, or a scheduler's SIGTERM, the run finishes its step and ends. A second one ends
    the step at once, a third one also the saving of the step before.

    After Ctrl-C torchrun passes on a signal too. So a signal within a second of one that counts
    does not count.
    """

    def __enter__(self):
        self.asked = self.noted = 0
        self.before = {
            number: signal.signal(number, self.note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def note(self, number, frame):
        now = time.monotonic()
        if not self.noted:
            self.noted, self.when = number, now
            progress.note("finishing this step; once more to stop now")
        elif now > self.when + 1:
            self.when = now
            progress.note("stopping this step; once more to stop without saving")
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def saving_first(self, run):
        """If what is done in here fails, for example in a reward, or if a second signal ends it,
        the last whole step is saved before the run ends.

        If an update of the next step has begun, it is too late. If there are several ranks, all
        must have failed, because they save together.
        """
        before, updates = replace(run.state), run.networks.updates
        try:
            yield
        except FloatingPointError:  # the weights are broken
            raise
        except (Exception, KeyboardInterrupt) as error:
            counted = run.state.step > before.step
            if not counted:
                run.state = before
            whole = counted or run.networks.updates == updates
            if whole and (ranks.world_size() == 1 or isinstance(error, ranks.AgreedError)):
                save_last_step(run)
            if isinstance(error, UserError):
                again = how_to_resume(run.config.run.output_dir)
                raise UserError(f"{error} {again}") from None
            raise

    def agree(self, device):
        """Tell all ranks what one rank was asked. No rank obeys before, so all ranks end after the
        same step."""
        self.asked = int(ranks.all_reduce(device, maxima={"noted": self.noted})["noted"])

    def tell(self, step, steps, run_dir):
        """Say how to go on. Returns the exit code: 130 after Ctrl-C, and 0 after SIGTERM, because a
        run that is ended from outside has not failed."""
        progress.note(f"stopped after step {step} of {steps}. {how_to_resume(run_dir)}")
        return 130 if self.asked == signal.SIGINT else 0


def save_last_step(run):
    """Save a run, unless its last step has a checkpoint already."""
    path = checkpoint.path_of(run.config.run.output_dir, run.state.step)
    if not ranks.from_first(path.exists()):
        with contextlib.suppress(UserError):  # a note has told why it could not be saved
            run.save(last=True)


def as_user_error(error, run_dir):
    """A UserError, if the user can change what the error means, or if another rank has ended; else
    the error."""
    if isinstance(error, torch.OutOfMemoryError):
        reason = f"out of memory ({one_line(error)}): `--plan` shows what takes it."
    elif isinstance(error, FloatingPointError):
        reason = ("the model's logits are no longer finite, because its updates were too large: "
                  "lower --lr.")
    elif isinstance(error, BrokenPipeError):
        reason = "stopped, because the program that read the output has ended."
    elif getattr(error, "errno", None) in CANNOT_WRITE:
        reason = (f"nothing can be written ({error.strerror}): make room, or make the folder "
                  "writable.")
    elif ranks.is_alone(error):
        # torchrun is about to end this process, which first says why
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        reason = "another process of this job has ended; torchrun names it and its reason."
    else:
        return error
    return UserError(f"{reason} {how_to_resume(run_dir)}")
