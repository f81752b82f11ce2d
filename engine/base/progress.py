"""What a program shows while it works: a bar on a terminal, which ends with the words of `say`. A
file gets a line instead, at most one a minute. Only the first rank shows anything."""

import errno
import os
import sys

from tqdm import tqdm

from engine.base import ranks

shown = {"bar": None}
ON_A_TERMINAL = {
    "bar_format": "{desc} {n_fmt}/{total_fmt} {unit} |{bar}| {elapsed}<{remaining}{postfix}",
    "mininterval": 0.5,
}


def say(what, done=None, total=None, unit=""):
    """Tell what the program is doing: say("scoring"), or say("sampling", 37, 96, "tokens")."""
    if shown["bar"]:
        words = what if done is None else f"{what} {done} of {total} {unit}"
        shown["bar"].set_postfix_str(words, refresh=False)
        shown["bar"].update(0)  # draws the bar if it has not been drawn for a while


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


def duration(seconds):
    """ "10 s", "12 min", "1 h 20 min". """
    hours, minutes = divmod(round(seconds / 60), 60)
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


class Lines:
    """A file for tqdm, which prints each bar as a line."""

    def write(self, text):
        if text.strip():
            note(text.strip())


IN_A_FILE = {
    "bar_format": "{desc}: {n_fmt} of {total_fmt} {unit}{postfix}",
    "mininterval": 60, "delay": 60, "file": Lines(),
}


def bar(name, total, unit, *, done=0, leave=False):
    """The bar of a loop: a tqdm."""
    shown["bar"] = tqdm(
        total=total, initial=done, desc=name, unit=unit, leave=leave, miniters=0, smoothing=0,
        disable=ranks.rank() != 0, **(ON_A_TERMINAL if sys.stderr.isatty() else IN_A_FILE),
    )
    return shown["bar"]


def over(items, name, unit):
    """Go through a list, with a bar."""
    with bar(name, len(items), unit) as loop:
        for item in items:
            yield item
            loop.update()
