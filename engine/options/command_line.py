"""Command line and YAML recipe, made of a dataclass."""

import argparse
import json
import os
import re
import shlex
import sys
from dataclasses import field, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import get_args, get_origin

import yaml

from algorithms import ALGORITHMS
from engine.base.errors import UserError, nearest, one_line
from engine.options.names import NAMES, bare
from tasks.table import TASKS


def option(default, help, *, limits=None, choices=None, alone=None):
    """A dataclass field with a line of help.

    limits: the interval of its numbers, as "[0, 1)", in which 0 belongs to it and 1 does not; ∞ is
    10¹²: no option needs more, and a seed times a million still fits 64 bits. None means off, or
    that another layer says it. choices: the words that are allowed. alone: the value if the option
    is given without one.
    """
    about = {"help": help, "limits": limits, "choices": choices, "alone": alone}
    return field(default=default, metadata=about)


# --- a config made of records ---


def records(config):
    """The records of a config. A config without records is its own only record."""
    found = [value for value in vars(config).values() if is_dataclass(value)]
    return found or [config]


def option_fields(config):
    """[(record, field)] of all options of a config."""
    return [(record, f) for record in records(config) for f in fields(record) if f.metadata]


def flat(config):
    """{name: value} of all options of a config."""
    return {f.name: getattr(record, f.name) for record, f in option_fields(config)}


def compose(config_class, values):
    """A config with these options, each in the record that has it. values: {name: value}."""
    chosen = {}
    for f in fields(config_class):
        if is_dataclass(f.type):
            chosen[f.name] = compose(f.type, values)
        elif f.name in values:
            chosen[f.name] = values[f.name]
    return config_class(**chosen)


# --- from words and files ---


def parse_bool(word):
    """The value of a flag: --resume, --resume true, --resume false. Another word: ValueError."""
    return ("false", "no", "0", "true", "yes", "1").index(word.lower()) > 2


def json_object(word):
    """{"name": value} as a dict. Another word: ValueError or TypeError."""
    return dict(json.loads(word))


def parser_of(config_class):
    """The parser of the options. It returns only what was given.

    In `--help` the config's `most_used` options come first. Then each record is a group. The lines
    have 100 columns, an option and its words stand in one line if they fit.
    """
    # of the program: what it does, how it is called, how long it takes
    about = (sys.modules["__main__"].__doc__ or "").split("\n\n")[:2]
    about.append("The value None (in a recipe null) gives an option its default.")
    # as transformers' HfArgumentParser, whose import would take as long as a user is ready to wait
    # for `--help`
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--OPTION VALUE ...]", allow_abbrev=False, exit_on_error=False,
        argument_default=argparse.SUPPRESS,
        description="\n\n".join(about), formatter_class=partial(
            argparse.RawDescriptionHelpFormatter, max_help_position=26, width=100))
    parser._negative_number_matcher = re.compile(r"-\.?\d")  # -1e-4 too, as Python 3.14 has it
    most_used = getattr(config_class, "most_used", ())
    first = parser.add_argument_group("most used")
    for record in records(config_class()):
        group = parser.add_argument_group(getattr(record, "_argument_group_name", None))
        for _, f in option_fields(record):
            place = first if f.name in most_used else group
            place.add_argument(f"--{f.name}", **argument_of(f))
    return parser


def argument_of(f):
    """How argparse reads a field. Its type is X, X | None, list[X] | None, or dict | None."""
    kind, *_ = get_args(f.type) or [f.type]
    help = f.metadata["help"].replace("%", "%%")
    if f.default is not None:
        help += f" (default: {f.default})"
    choices, alone = f.metadata["choices"], f.metadata["alone"]
    if kind is bool:
        kind, alone = parse_bool, True
    if kind is dict:
        kind = json_object
    argument = {"help": help, "choices": choices and (*choices, None),
                "metavar": None if choices else "X"}
    if get_origin(kind) is list:
        kind = get_args(kind)[0]
        argument["nargs"] = "+"
    if alone is not None:
        argument |= {"nargs": "?", "const": alone}
    return argument | {"type": reader(kind, f.metadata["limits"])}


def reader(kind, limits):
    """A type for argparse: the word None is None, and a number must lie within its limits."""
    def read_word(word):
        value = None if word == "None" else kind(word)
        if limits and value is not None and not within(limits, value):
            interval = limits.replace("∞", "10¹²")
            raise argparse.ArgumentTypeError(f"must lie in {interval}, not {value}")
        return value

    read_word.__name__ = kind.__name__  # for argparse's messages
    return read_word


def within(limits, value):
    """Whether a number lies in an interval as of `option`."""
    low, high = map(float, limits[1:-1].replace("∞", "1e12").split(", "))
    if value == low:
        return limits[0] == "["
    if value == high:
        return limits[-1] == "]"
    return low < value < high


def parse_given(config_class, argv):
    """{name: value} of the options that the command line gives, and those of its recipe.

    The command line wins. Raises UserError at a mistake.
    """
    parser = parser_of(config_class)
    values = parse_words(parser, argv)
    if recipe := values.get("recipe"):
        values = parse_words(parser, words_of(recipe), f"the recipe {recipe}: ") | values
    if "" in (values.get("stop") or ()):
        raise UserError("--stop is given an empty text: give it a text, or leave it out.")
    return {name: value for name, value in values.items() if value not in (None, [None])}


def parse(config_class, argv):
    """The command line as a config: `given`, on top of the defaults."""
    return compose(config_class, parse_given(config_class, argv))


def parse_words(parser, words, source=""):
    """{name: value} of words. source: where they come from, for a message."""
    try:
        values, unknown = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise UserError(f"{source}{error}. `--help` lists all options.") from None
    if unknown:
        raise UserError(f"{source}unknown option {suggest(parser, unknown[0].split('=')[0])}")
    return vars(values)


def suggest(parser, word):
    """A word that is no option, or has none before it, and what to say about it."""
    options = [action.dest for action in parser._actions]
    known = {"algorithm": ALGORITHMS, "dataset": TASKS, "benchmark": TASKS}
    for here in options:
        if word in known.get(here, ()) or here == "model" and Path(word).is_dir():
            return f"{word}: did you mean --{here} {word}?"
    name = bare(word)
    elsewhere = NAMES.get(name, "")
    first = re.match(r"--(\w+)|no option", elsewhere)
    if first and first[1] in (None, *options):
        return f"{word}: {name} is here {elsewhere}. `python -m engine.options.names` says more."
    # --no_resume is not --resume
    near = [] if name.startswith("no_") else nearest(name, options, alike=0.8)
    if near and word.startswith("-"):
        return f"{word}: did you mean --{near[0]}?"
    return f"{word}: `--help` lists all options."


def words_of(recipe):
    """The lines of a YAML file as words of a command line, so that one parser checks both."""
    try:
        text = Path(recipe).read_text(encoding="utf-8")
        values, root = yaml.safe_load(text), yaml.compose(text)
    # ValueError: no UTF-8; 5,000 digits
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"the recipe {recipe} cannot be read as YAML: {one_line(error)}") from None
    if not isinstance(values, dict) or "recipe" in values:
        raise UserError(f"the recipe {recipe} must hold lines of the form 'option: value', without "
                        "another recipe.")
    names = [key.value for key, _ in root.value]
    for name in names:
        if names.count(name) > 1:  # YAML itself takes the last one in silence
            raise UserError(f"the recipe {recipe} gives --{name} twice: leave out one of them.")
    return words_from(values)


def words_from(values):
    """The words of a command line that give these options, {name: value}."""
    words = []
    for name, value in values.items():
        if isinstance(value, dict):
            value = json.dumps(value)
        if isinstance(value, list):
            words += [f"--{name}", *map(str, value)]
        else:
            words.append(f"--{name}={value}")
    return words


def command(values, processes=None):
    """A command that starts this program with these options, {name: value}, as one can paste it.
    processes: how many; None: as many as now."""
    processes = str(processes or os.environ.get("WORLD_SIZE", "1"))
    start = ["python"] if processes == "1" else ["torchrun", "--nproc-per-node", processes]
    return shlex.join([*start, sys.argv[0], *words_from(values)])
