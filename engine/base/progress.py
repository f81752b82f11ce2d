"""What a program shows while it works: a bar on a terminal, which ends with the words of `say`.

A thread draws the bar twice a second. So the bar moves while a step takes minutes, and `say` costs
no more than an assignment. Only the first rank draws. If stderr is a file, a line is printed
instead, at most one a minute. """

import errno
import os
import sys
import threading
import time
from contextlib import contextmanager

from tqdm import tqdm

from engine.base import ranks

LAYOUT = "{desc} {n_fmt}/{total_fmt} {unit} |{bar}| {elapsed}<{remaining}{postfix}"
EVERY = 20  # seconds between the lines of `spoken`
now = {"words": ""}  # what the program is doing


def say(what, done=None, total=None, unit=""):
    """Tell the bar what the program is doing: say("scoring"), or say("sampling", 37, 96,
    "tokens")."""
    now["words"] = what if done is None else f"{what} {done} of {total} {unit}"


def note(text):
    """Print a line above the bar, on the first rank."""
    if ranks.rank() != 0:
        return
    try:
        tqdm.write(text)
        sys.stdout.flush()  # a file gets the line now, and not with the next 8 KB
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        # the terminal is gone (SIGHUP): the run finishes its step and nobody listens
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


@contextmanager
def spoken():
    """While a program without a bar works, print now and then what it is doing."""
    ended = threading.Event()

    def speak():
        while not ended.wait(EVERY):
            note(f"{now['words']} …")

    threading.Thread(target=speak, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        say("")


class Bar:
    """The bar of a loop. facts: words behind what the program is doing."""

    def __init__(self, name, total, unit, *, done=0, leave=False):
        self.bar = tqdm(  # disable=None: nothing is drawn into a file
            total=total, initial=done, desc=name, unit=unit, leave=leave, bar_format=LAYOUT,
            mininterval=0.5, disable=None if ranks.rank() == 0 else True,
        )
        self.name, self.total, self.unit, self.done, self.facts = name, total, unit, done, ""
        self.written, self.ended = time.monotonic(), threading.Event()
        if not self.bar.disable:
            threading.Thread(target=self.draw, daemon=True).start()

    def draw(self):
        while not self.ended.wait(0.5):
            self.bar.set_postfix_str(", ".join(filter(None, [now["words"], self.facts])))

    def update(self, done=1, facts=""):
        self.done, self.facts = self.done + done, facts
        self.bar.update(done)
        if self.bar.disable and time.monotonic() - self.written > 60:
            self.written = time.monotonic()
            note(
                f"{self.name}: "
                f"{', '.join(filter(None, [f'{self.done} of {self.total} {self.unit}', facts]))}"
            )

    def close(self):
        self.ended.set()
        say("")
        self.bar.set_postfix_str(self.facts)
        self.bar.close()


def over(items, name, unit):
    """Go through a list, with a bar."""
    bar = Bar(name, len(items), unit)
    try:
        for item in items:
            yield item
            bar.update()
    finally:
        bar.close()
