"""Progress bars. On a terminal a bar ends with the words of `say`. A file gets a line instead, at
most one a minute. Only the first rank shows anything."""

import functools
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from tqdm import tqdm

from engine.base import ranks

shown = {"bar": None}
ON_A_TERMINAL = {
    # at 80 columns the last words are cut
    "bar_format": "{desc} {n_fmt}/{total_fmt} {unit} |{bar:8}| {remaining} left{postfix}",
    "mininterval": 0.5,
}


def say(what, done=None, total=None, unit=""):
    """Tell what the program is doing: say("scoring"), or say("sampling", 37, 96, "tokens")."""
    if shown["bar"]:
        words = what if done is None else f"{what} {done}/{total} {unit}"
        shown["bar"].set_postfix_str(words, refresh=False)
        shown["bar"].update(0)  # draws the bar if it has not been drawn for a while


def note(text):
    """Print a line above the bar, on the first rank."""
    if ranks.rank() == 0:
        tqdm.write(text)
        sys.stdout.flush()  # a file gets the line now, and not with the next 8 KB


@functools.cache  # once in a process
def note_once(text):
    note(text)


def count(number, noun):
    """ "1 step", "1,024 steps". """
    return f"{number:,} {noun}{'s' * (number != 1)}"


class Lines:
    """A file for tqdm, which prints each bar as a line."""

    def write(self, text):
        if text.strip():
            note(text.strip())


IN_A_FILE = {
    "bar_format": "{desc}: {n_fmt} of {total_fmt} {unit}, {remaining} left{postfix}",
    "mininterval": 60, "delay": 60, "file": Lines(),
}


# --- a step ---

# what the bar says in each phase of a step
WORDS = {
    "generate": "sampling", "score": "scoring", "logprobs": "log-probabilities", "update": "update",
}


@dataclass
class Clock:
    """Seconds spent in each phase of a step."""

    device: torch.device
    start: float = field(default_factory=time.perf_counter)
    spent: dict = field(default_factory=lambda: dict.fromkeys(WORDS, 0.0))

    @contextmanager
    def phase(self, name):
        say(WORDS[name])
        begin = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.spent[name] += time.perf_counter() - begin

    def seconds(self):
        spent = self.spent | {"total": time.perf_counter() - self.start}
        return {f"seconds/{name}": seconds for name, seconds in spent.items()}


# --- a loop ---


@contextmanager
def bar(name, total, unit, *, done=0):
    """The bar of a loop: a tqdm."""
    look = ON_A_TERMINAL if sys.stderr.isatty() else IN_A_FILE
    shown["bar"] = loop = tqdm(
        total=total, initial=done, desc=name, unit=unit, leave=False, miniters=0, smoothing=0,
        disable=ranks.rank() != 0, **look)
    try:
        yield loop
    finally:
        loop.set_postfix_str("", refresh=False)  # `close` shows the bar, in a file too
        loop.close()


def over(items, name, unit):
    """Go through a list, with a bar."""
    with bar(name, len(items), unit) as loop:
        for item in items:
            yield item
            loop.update()
