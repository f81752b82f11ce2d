"""What a user can correct: one sentence with the cause and the cure, in place of a traceback."""

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


def refuse(mistakes):
    """Raise UserError with the first sentence whose condition holds. mistakes: (condition,
    sentence) each."""
    for wrong, sentence in mistakes:
        if wrong:
            raise UserError(sentence)


def one_line(error):
    """The kind of an error and its message, which is cut between two words."""
    return f"{type(error).__name__}: {shorten(str(error), 300, placeholder=' …')}"
