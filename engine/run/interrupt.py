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
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def saving_first(self, run):
        """If what is done in here fails, for example in a reward, or if a second signal ends it,
        the last whole step is saved before the run ends, and a sentence says how to go on."""
        before, updates = replace(run.state), run.networks.updates
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            whole = True
            if run.state.step == before.step:  # the new step has not come to its end
                run.state = before
                whole = run.networks.updates == updates
            if whole and can_be_saved(error):
                save_last_step(run)
            if isinstance(error, KeyboardInterrupt):
                raise
            found = as_user_error(error, run.config.run.output_dir)
            if found is error:  # a traceback follows
                progress.note(how_to_resume(run.config.run.output_dir))
                raise
            raise found from None

    def agree(self, device):
        """Tell all ranks what one rank was asked. No rank obeys before, so all ranks end after the
        same step."""
        self.asked = int(ranks.all_reduce(device, maxima={"noted": self.noted})["noted"])

    def tell(self, step, steps, run_dir):
        """Say how to go on. Returns the exit code: 130 after Ctrl-C, and 0 after SIGTERM, because a
        run that is ended from outside has not failed."""
        progress.note(f"stopped after step {step} of {steps}. {how_to_resume(run_dir)}")
        return 130 if self.asked == signal.SIGINT else 0


def can_be_saved(error):
    """Whether a run can be saved after this error: its networks are good, the disk can be written,
    and all ranks have the same error, because they save together."""
    broken = isinstance(error, FloatingPointError) or getattr(error, "errno", None) in CANNOT_WRITE
    return not broken and (ranks.world_size() == 1 or isinstance(error, ranks.AgreedError))


def save_last_step(run):
    """Save the last whole step, unless it has a checkpoint already."""
    path = checkpoint.path_of(run.config.run.output_dir, run.state.step)
    if ranks.from_first(path.exists()):
        return
    with contextlib.suppress(BrokenPipeError):  # nobody reads the output any more
        progress.note(f"saving step {run.state.step}")
    with contextlib.suppress(UserError):  # a note has told why it could not be saved
        run.save(last=True)


def as_user_error(error, run_dir):
    """A UserError that says how to go on, if the user can change what the error means, or if
    another rank has ended; else the error."""
    if isinstance(error, UserError):
        reason = str(error)
    elif isinstance(error, torch.OutOfMemoryError):
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
