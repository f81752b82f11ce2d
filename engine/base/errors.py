"""What a user can correct: one sentence with the cause and the cure, in place of a traceback."""

import difflib
import errno
import traceback
from pathlib import Path
from textwrap import shorten

import torch

ENGINE = Path(__file__).resolve().parents[1]
# numbers of an OSError: there is no room, it is not allowed, or a file stands in place of a folder
CANNOT_WRITE = (
    errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR)


class UserError(Exception):
    """A mistake that the user can correct: one sentence with the cause and the cure."""


def nearest(word, names, alike=0.6):
    """The names that `word` may mean, in capitals or not: the one with two letters swapped, or the
    one that is written most alike, or none. alike: how much, 0 … 1."""
    word = word.lower()
    small = {name.lower(): name for name in names}
    for i in range(len(word) - 1):
        swapped = word[:i] + word[i + 1] + word[i] + word[i + 2 :]
        if swapped in small:
            return [small[swapped]]
    near = difflib.get_close_matches(word, small, n=1, cutoff=alike)
    return [small[name] for name in near]


def unknown(what, word, names):
    """ "unknown algorithm 'gprpo': did you mean grpo? There are grpo, cppo", with no full stop."""
    near = nearest(word, names)
    there = f"did you mean {near[0]}? There" if near else "there"
    if "," in word:
        there = "put spaces, not commas, between names; there"
    return f"unknown {what} '{word}': {there} are {', '.join(names)}"


def one_line(error):
    """The kind of an error and its message, which is cut between two words."""
    return f"{type(error).__name__}: {shorten(str(error), 300, placeholder=' …')}"


def with_place(error):
    """`one_line`, and the file and line of the user's own code that raised the error. If the own
    code calls a library, it is the line of the call."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [f for f in frames if ENGINE not in Path(f.filename).resolve().parents]
    if not outside:  # it could not even be called
        return one_line(error)
    last = [frame for frame in outside if frame.filename == outside[0].filename][-1]
    return f"{one_line(error)} ({Path(last.filename).name}, line {last.lineno})"


def call_custom(function, name, wanted, fits, *arguments, **named):
    """function(*arguments, **named) of a function of the user's own. If it fails, or returns what
    does not fit, a UserError says what came, what is wanted, and where.

    name: of the function. wanted: what it must return, in words. fits(returned, *arguments,
    **named) → bool; an error of it means no.
    """
    try:
        returned = function(*arguments, **named)
    except (UserError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{name} failed: {with_place(error)}.") from error
    try:
        good = fits(returned, *arguments, **named)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        good = False
    if not good:
        shape = f" of shape {tuple(returned.shape)}" if torch.is_tensor(returned) else ""
        shown = " ".join(repr(returned).split())
        raise UserError(f"{name} must return {wanted}. It returned {shown:.80}{shape}.")
    return returned
