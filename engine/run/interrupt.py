"""Signals and failures: how a run ends early."""

import signal
import time

import torch

from engine.base import progress, ranks
from engine.base.errors import CANNOT_WRITE, UserError, one_line
from engine.run.folder import how_to_resume


class Interrupt:
    """After Ctrl-C, or a scheduler's SIGTERM, the run finishes its step and ends. A second one ends
    it at once.

    After Ctrl-C torchrun passes on a signal too. So a signal within a second of the first does not
    count.
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
        if not self.noted:
            self.noted, self.when = number, time.monotonic()
            progress.note("finishing this step; once more to stop now")
        elif time.monotonic() > self.when + 1:
            raise KeyboardInterrupt

    def agree(self, device):
        """Tell all ranks what one rank was asked. No rank obeys before, so all ranks end after the
        same step."""
        self.asked = int(ranks.all_reduce(device, maxima={"noted": self.noted})["noted"])

    def tell(self, step, steps, run_dir):
        """Say how to go on. Returns the exit code: 130 after Ctrl-C, and 0 after SIGTERM, because a
        run that is ended from outside has not failed."""
        progress.note(f"stopped after step {step} of {steps}. {how_to_resume(run_dir)}")
        return 130 if self.asked == signal.SIGINT else 0


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
