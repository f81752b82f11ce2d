"""How a run ends when it is asked to end: after its step, with a checkpoint."""

import signal
import time

from engine.base import progress, ranks


class Interrupt:
    """After Ctrl-C, a scheduler's SIGTERM, or SIGHUP, the run finishes its step and ends. A second
    one ends it at once.

    SIGHUP says that the terminal is gone, for example with its ssh connection; `nohup` lets a run
    ignore it. A scheduler and torchrun may both pass on one signal, so a signal within a second of
    the first does not count.
    """

    def __enter__(self):
        self.asked = self.noted = 0
        numbers = [signal.SIGINT, signal.SIGTERM]
        numbers += [signal.SIGHUP] * (signal.getsignal(signal.SIGHUP) != signal.SIG_IGN)
        self.before = {number: signal.signal(number, self.note) for number in numbers}
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

    def share(self, device):
        """Tell all ranks what one rank was asked. No rank obeys before, so all ranks end after the
        same step."""
        self.asked = int(ranks.all_sum({"noted": self.noted}, device, op="max")["noted"])
