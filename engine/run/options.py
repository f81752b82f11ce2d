"""Options: a dataclass becomes a command line and a YAML recipe; a user's mistake becomes one
sentence."""

import argparse
import difflib
import json
import os
import sys
import time
from dataclasses import field, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import get_args, get_origin

import yaml

from engine.base import files
from engine.base.errors import UserError, one_line, refuse

LARGEST = 10**12  # no option needs more, and a seed times a million still fits 64 bits


def option(default, help, *, limits=None, choices=None):
    """A dataclass field with a line of help.

    limits: the interval of its numbers, as "[0, 1)", in which 0 belongs to it and 1 does not; "∞)"
    stands for "LARGEST]". None is always allowed. choices: the words that are allowed.
    """
    argument = {"help": help.replace("%", "%%"), "choices": choices}
    return field(default=default, metadata={"limits": limits, "argument": argument})


# --- a config made of records ---


def records(config):
    """The records of a config. A config without records is its own only record."""
    found = [value for value in vars(config).values() if is_dataclass(value)]
    return found or [config]


def flat(config):
    """{name: value} of all options of a config."""
    return {name: value for record in records(config) for name, value in vars(record).items()}


def compose(config_class, values):
    """A config with these options, each in the record that has it. values: {name: value}."""
    given = {
        f.name: compose(f.type, values) if is_dataclass(f.type) else values[f.name]
        for f in fields(config_class) if is_dataclass(f.type) or f.name in values}
    return config_class(**given)


# --- from words and files ---


def truth(word):
    """The value of a flag: --resume, --resume true, --resume false. Another word: ValueError."""
    return ("false", "no", "0", "true", "yes", "1").index(word.lower()) > 2


def parser_of(config_class):
    """The parser of the options. Each record of the config is a group of `--help`."""
    # as transformers' HfArgumentParser, whose import would take as long as a user is ready to wait
    # for `--help`
    parser = argparse.ArgumentParser(
        allow_abbrev=False, exit_on_error=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for record in records(config_class()):
        group = parser.add_argument_group(getattr(record, "_argument_group_name", None))
        for f in fields(record):  # the type is X or list[X], each also with | None
            kind = get_args(f.type)[0] if isinstance(f.type, UnionType) else f.type
            how = {"type": truth, "nargs": "?", "const": True} if kind is bool else {"type": kind}
            if get_origin(kind) is list:
                how = {"nargs": "+", "type": get_args(kind)[0]}
            names = dict.fromkeys([f"--{f.name}", f"--{f.name.replace('_', '-')}"])  # hyphens, too
            group.add_argument(*names, default=f.default, **how, **f.metadata["argument"])
    return parser


def parse(config_class, argv, saved=None):
    """The command line as a config. The words `argv` win over the recipe, the recipe wins over
    `saved`, the options {name: value} of a run.

    Raises UserError at a mistake, such as a number outside the limits of its option.
    """
    parser = parser_of(config_class)
    switches = {f"no_{f.name}": f.name for record in records(config_class())
                for f in fields(record) if f.type in (bool, bool | None)}

    def read(words, source=""):
        try:
            values, unknown = parser.parse_known_args(words)
        except argparse.ArgumentError as error:
            raise UserError(f"{source}{error}. `--help` lists all options.") from None
        if unknown:
            name, ours = unknown[0].split("=")[0], [f"--{option}" for option in vars(values)]
            near = difflib.get_close_matches(f"--{name.lstrip('-')}", ours, n=1, cutoff=0.85)
            hint = f"did you mean {near[0]}?" if near else (
                "`--help` lists all options, docs/names.md those of TRL and verl with ours.")
            if off := switches.get(name.lstrip("-").replace("-", "_")):
                hint = f"to switch it off, write --{off} false."
            raise UserError(f"{source}unknown option {name}: {hint}")
        return vars(values)

    words = as_words(saved or {})
    if recipe := read(argv).get("recipe"):
        of_recipe = as_words(read_recipe(recipe))
        read(of_recipe, f"the recipe {recipe}: ")  # so that a mistake is told with its source
        words += of_recipe
    config = compose(config_class, read([*words, *argv]))
    check_limits(config)
    return config


def as_words(values):
    """Options {name: value} as words of a command line, so that one parser checks both."""
    words = []
    for name, value in values.items():
        if isinstance(value, list):
            words += [f"--{name}", *map(str, value)]
        elif value is not None:
            words.append(f"--{name}={value}")
    return words


def read_recipe(path):
    """{option: value} of a YAML file."""
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    # ValueError: no UTF-8; 5,000 digits
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"the recipe {path} cannot be read as YAML: {one_line(error)}") from None
    if not isinstance(values, dict):
        raise UserError(f"the recipe {path} must hold lines of the form 'option: value'.")
    return values


def check_limits(config):
    """Refuse a number outside the limits of its option."""
    for record in records(config):
        for f in fields(record):
            value, limits = getattr(record, f.name), f.metadata["limits"]
            if limits and value is not None:
                limits = limits.replace("∞)", f"{LARGEST}]")
                low, high = map(float, limits[1:-1].split(", "))
                left_out = [low] * (limits[0] == "(") + [high] * (limits[-1] == ")")
                refuse([(not low <= value <= high or value in left_out,
                         f"--{f.name} must lie in {limits}, not {value}.")])


# --- how a program ends ---


def run_program(main):
    """Call main(argv). A user's mistake ends the program with one sentence and exit code 2."""
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(tell(f"error: {error}"))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # python eval.py … | head -1
        sys.exit(tell("error: stopped, because the program that read the output has ended."))
    finally:
        try:
            sys.stdout.flush()
        except BrokenPipeError:  # Python, too, writes what is left
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def tell(sentence):
    """Print why the program ends. Returns its exit code, 2.

    Under torchrun every process of a machine may find the same mistake. The first one tells it,
    also to torchrun, which repeats it as the last line of its own report. The others end with code
    0, so that the report is short.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")  # …/attempt_0/RANK/error.json
    if file:
        try:
            Path(file).parents[1].joinpath("told").touch(exist_ok=False)
        except FileExistsError:
            return 0
        more = {"py_callstack": sentence, "timestamp": str(int(time.time()))}
        # as a whole: torchrun may end this process at any moment, and fails on a part of a report
        files.write(file, json.dumps({"message": {"message": sentence, "extraInfo": more}}))
    print(sentence, file=sys.stderr, flush=True)
    time.sleep(1 if file else 0)  # the others end first: torchrun would report whom it has to kill
    return 2
