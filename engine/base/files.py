"""File helpers: JSON lines, files that are replaced as a whole, and a function of a user's
own file."""

import contextlib
import functools
import importlib.util
import json
import sys
from pathlib import Path

from engine.base.errors import CANNOT_WRITE, UserError, one_line, unknown


def as_json(value, **options):
    """A value as JSON, which has no NaN and no infinity: they become null."""
    value = json.loads(json.dumps(value), parse_constant=lambda name: None)
    return json.dumps(value, ensure_ascii=False, **options) + "\n"


def as_lines(rows):
    return "".join(map(as_json, rows))


def append(path, *rows):
    """Add rows to a log, one line of JSON each."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(as_lines(rows))


def read_lines(path):
    """The rows of a log, without lines that cannot be read: a program that is killed leaves such a
    line. No file: []."""
    path, rows = Path(path), []
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    for line in text.split("\n"):  # splitlines() also splits at U+2028, which a text may hold
        with contextlib.suppress(ValueError, RecursionError):  # 5,000 digits, 100,000 brackets, too
            rows.append(json.loads(line))
    return rows


def write(path, text):
    """Replace a file as a whole: a crash leaves the old file or the new file, never a part."""
    new = Path(f"{path}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


@contextlib.contextmanager
def writing_into(folder):
    """Make the folder of the results. Say what is wrong, if nothing can be written into it. If
    nothing was written, the folder is removed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # it holds files
                folder.rmdir()
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise
        raise UserError(f"nothing can be written into {folder} ({error.strerror}): make room, or "
                        "name another --output_dir.") from None


@functools.cache
def custom_module(path, option):
    """The module that a user's file is. It may import other files of its folder.

    option: the option that has this value, for error messages. Raises UserError if the file cannot
    be imported.
    """
    if not Path(path).is_file():
        raise UserError(f"{option}: the file {path} does not exist.")
    spec = importlib.util.spec_from_file_location(f"own_{Path(path).stem}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.path.append(str(Path(path).resolve().parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UserError(f"{option}: {path} cannot be imported: {one_line(error)}.") from None
    return module


def names_file(word):
    """Whether a word names something of a user's own file, FILE.py:NAME."""
    return word.partition(":")[0].endswith(".py")


def builtin_or_custom(word, known, kind, option):
    """The function or class that `word` names: one of `known`, {name: function}, or that of the
    user's own file, FILE.py:NAME.

    kind: what it is, for the error message. option: as for `custom_module`. Raises UserError if
    there is no such function.
    """
    if word in known:
        return known[word]
    if not names_file(word):
        raise UserError(f"{option}: {unknown(kind, word, known)}, and FILE.py:NAME.")
    path, _, name = word.partition(":")
    module = custom_module(path, option)
    function = getattr(module, name, None)
    if not callable(function):
        there = [other for other, value in vars(module).items()
                 if getattr(value, "__module__", None) == module.__name__]
        missing = f"{path} has no function '{name}': " if name else ""
        raise UserError(f"{option}: {missing}write {path}:FUNCTION, with a function of the file "
                        f"({', '.join(there)}).")
    return function
