"""What a user can correct: one sentence with the cause and the cure, in place of a traceback."""

import difflib
from textwrap import shorten


class UserError(Exception):
    """A mistake that the user can correct: one sentence with the cause and the cure."""


def nearest(word, names, cutoff=0.6):
    """The names that `word` may mean: the one that is written most alike, or none."""
    return difflib.get_close_matches(word, names, n=1, cutoff=cutoff)


def unknown(what, word, names):
    """ "unknown algorithm 'gprpo': did you mean grpo? There are grpo, cppo", with no full stop."""
    near = nearest(word, names)
    there = f"did you mean {near[0]}? There" if near else "there"
    return f"unknown {what} '{word}': {there} are {', '.join(names)}"


def one_line(error):
    """The kind of an error and its message, which is cut between two words."""
    return f"{type(error).__name__}: {shorten(str(error), 300, placeholder=' …')}"
