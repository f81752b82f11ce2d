"""What a user can correct: one sentence with the cause and the cure, in place of a traceback."""

import difflib
import errno
from textwrap import shorten

CANNOT_WRITE = {  # the number of an OSError: what it means to the user
    **dict.fromkeys(
        [errno.ENOSPC, errno.EDQUOT], "the disk is full, and nothing can be written: make room"),
    **dict.fromkeys(
        [errno.EACCES, errno.EPERM, errno.EROFS], "the folder is read-only: make it writable"),
    **dict.fromkeys(
        [errno.EEXIST, errno.ENOTDIR], "there is a file in place of the folder: move the file"),
}


class UserError(Exception):
    """A mistake that the user can correct: one sentence with the cause and the cure."""


def nearest(word, names):
    """The names that `word` may mean: the one that is written most alike, or none."""
    return difflib.get_close_matches(word, names, n=1)


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
