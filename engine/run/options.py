"""Options: a dataclass becomes a command line and a YAML recipe; a user's mistake becomes one sentence."""

import difflib
import functools
import importlib.util
import math
import sys
from dataclasses import asdict, field, fields, is_dataclass
from pathlib import Path

import yaml


class UserError(Exception):
    """A mistake that its user can mend: one sentence with the cause and the cure."""


def refuse(message):
    raise UserError(f"{message}. `--help` lists all options.")


def option(default, help):
    """A dataclass field with its one line of help."""
    return field(default=default, metadata={"help": help.replace("%", "%%")})


def as_words(values, config_class, source):
    """A mapping of options as command-line words, so that files and command line are checked by the same parser."""
    names = [f.name for f in fields(config_class)]
    words = []
    for key, value in values.items():
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"the keys are {', '.join(names)}."
            raise UserError(f"{source} has an unknown key '{key}': {hint}")
        many = "list" in str(next(f.type for f in fields(config_class) if f.name == key))
        if isinstance(value, dict) or (isinstance(value, list) and not many):
            raise UserError(f"{source}: '{key}' must be a single value, not {value!r}.")
        if isinstance(value, list):
            words += [f"--{key}", *map(str, value)]
        elif value is not None:
            words += [f"--{key}={value}"]
    return words


def read_recipe(path, config_class):
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"the recipe {path} does not exist.") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"the recipe {path} cannot be read as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise UserError(f"the recipe {path} must hold lines of the form 'option: value'.")
    return as_words(values, config_class, f"the recipe {path}")


def parse(config_class, argv, earlier=()):
    """The command line as a `config_class`. What comes later wins: `earlier` words, then the recipe, then `argv`.

    If the class is made of several dataclasses, each is a group of `--help`, the last base first.
    """
    from transformers import HfArgumentParser  # takes half a second to import, and a reader of logs needs no options

    groups = [base for base in reversed(config_class.__bases__) if is_dataclass(base)] or [config_class]
    parser = HfArgumentParser(groups, allow_abbrev=False)
    parser.error = refuse

    def read(words):
        *parts, unknown = parser.parse_args_into_dataclasses(words, return_remaining_strings=True, look_for_args_file=False)
        return config_class(**{name: value for part in parts for name, value in asdict(part).items()}), unknown

    config, unknown = read(argv)
    if unknown:
        name = unknown[0].split("=")[0]
        near = difflib.get_close_matches(name, [f"--{f.name}" for f in fields(config_class)], n=1)
        raise UserError(f"unknown option {name}" + (f": did you mean {near[0]}?" if near else ". `--help` lists all options."))
    recipe = read_recipe(config.recipe, config_class) if getattr(config, "recipe", None) else []
    try:
        parser.parse_args(recipe)
    except UserError as error:
        raise UserError(f"the recipe {config.recipe}: {error}") from None
    return read([*earlier, *recipe, *argv])[0]


@functools.cache
def own_function(word, option):
    """The function of a user's own Python file, which `word`, FILE.py:FUNCTION, names. The file may import its neighbours.

    option: that the word is a value of, for the message of the UserError if there is no such function.
    """
    path, name = word.rsplit(":", 1)
    if not Path(path).is_file():
        raise UserError(f"{option}: the file {path} does not exist.")
    spec = importlib.util.spec_from_file_location(f"own_{Path(path).stem}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.path.append(str(Path(path).resolve().parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UserError(f"{option}: {path} cannot be imported: {one_line(error)}.") from None
    function = getattr(module, name, None)
    if not callable(function):
        there = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UserError(f"{option}: {path} has no function '{name}'. It has {', '.join(there) or 'none'}.")
    return function


def one_line(error):
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def at_least(config, limits):
    """Refuse an option below its least value, or infinite. limits: {option: least}; None is an option not given."""
    for name, least in limits.items():
        value = getattr(config, name)
        if value is not None and not least <= value < math.inf:
            raise UserError(f"--{name} must be at least {least}, not {value}.")


def run_program(main):
    """Call main(argv); a user's mistake ends the program with its sentence and exit code 2."""
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
