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
    more = {"help": help.replace("%", "%%")} | ({"choices": choices} if choices else {})
    return field(default=default, metadata={"limits": limits, "argument": more})


# --- a config made of records ---


def records(config_class):
    """{name: dataclass} of the records of a config; of a config without records {None: itself}."""
    found = {f.name: f.type for f in fields(config_class) if is_dataclass(f.type)}
    return found or {None: config_class}


def flat(config):
    """{name: value} of all options of a config."""
    parts = [config] if None in records(type(config)) else vars(config).values()
    return {name: value for part in parts for name, value in vars(part).items()}


def compose(config_class, values):
    """A config with these options, each in the record that has it. values: {name: value}."""
    of = {f.name: name for name, record in records(config_class).items() for f in fields(record)}
    if unknown := values.keys() - of:
        raise TypeError(f"no such option: {', '.join(sorted(unknown))}")
    made = {
        name: record(**{option: value for option, value in values.items() if of[option] == name})
        for name, record in records(config_class).items()}
    return made[None] if None in made else config_class(**made)


def option_fields(config_class):
    """The fields of all options, in their order."""
    return [f for record in records(config_class).values() for f in fields(record)]


def check_limits(config):
    """Refuse a number outside the limits of its option."""
    values = flat(config)
    for f in option_fields(type(config)):
        value, limits = values[f.name], f.metadata["limits"]
        if limits and value is not None:
            limits = limits.replace("∞)", f"{LARGEST}]")
            low, high = map(float, limits[1:-1].split(", "))
            inside = low < value < high
            at_an_end = (value == low and limits[0] == "[") or (value == high and limits[-1] == "]")
            if not (inside or at_an_end):
                raise UserError(f"--{f.name} must lie in {limits}, not {value}.")


# --- from words and files ---


def as_words(values, config_class, source):
    """Options of a file as words of a command line, so that one parser checks both. source: the
    file, for messages."""
    types = {f.name: str(f.type) for f in option_fields(config_class)}
    words = []
    for key, value in values.items():
        if key not in types:
            hint = meant(str(key), types).replace("--", "") or f"the keys are {', '.join(types)}."
            raise UserError(f"{source} has an unknown key '{key}': {hint}")
        takes_list = "list" in types[key]
        if isinstance(value, dict) or (isinstance(value, list) and not takes_list):
            raise UserError(f"{source}: '{key}' must be a single value, not {value!r}.")
        if isinstance(value, list):
            words += [f"--{key}", *map(str, value)]
        elif value is not None:
            words += [f"--{key}={value}"]
    return words


def read_recipe(path, config_class):
    refuse([(not Path(path).exists(), f"the recipe {path} does not exist.")])
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    # ValueError: no UTF-8; 5,000 digits
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"the recipe {path} cannot be read as YAML: {one_line(error)}") from None
    if not isinstance(values, dict):
        raise UserError(f"the recipe {path} must hold lines of the form 'option: value'.")
    return as_words(values, config_class, f"the recipe {path}")


def truth(word):
    """The value of a flag: --resume, --resume true, --resume false."""
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if word.lower() not in words:
        raise argparse.ArgumentTypeError(f"'{word}' is neither true nor false")
    return words[word.lower()]


def parse(config_class, argv, earlier=()):
    """The command line as a config. The words `argv` win over the recipe, the recipe wins over
    `earlier` words. Each record of the config is a group of `--help`.
    """
    # as transformers' HfArgumentParser, whose import would take as long as a user is ready to wait
    # for `--help`
    parser = argparse.ArgumentParser(
        allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.error = mistake
    for record in records(config_class).values():
        group = parser.add_argument_group(getattr(record, "_argument_group_name", None))
        for f in fields(record):  # the type is X or list[X], each also with | None
            kind = get_args(f.type)[0] if isinstance(f.type, UnionType) else f.type
            how = {"type": truth, "nargs": "?", "const": True} if kind is bool else {"type": kind}
            if get_origin(kind) is list:
                how = {"nargs": "+", "type": get_args(kind)[0]}
            names = dict.fromkeys([f"--{f.name}", f"--{f.name.replace('_', '-')}"])  # hyphens, too
            group.add_argument(*names, default=f.default, **how, **f.metadata["argument"])
    values, unknown = parser.parse_known_args(argv)
    if unknown:
        name = unknown[0].split("=")[0]
        hint = meant(name.lstrip("-"), list(vars(values)))
        raise UserError(
            f"unknown option {name}" + (f": {hint}" if hint else ". `--help` lists all options."))
    name = getattr(values, "recipe", None)
    recipe = read_recipe(name, config_class) if name else []
    try:
        parser.parse_args(recipe)
    except UserError as error:
        raise UserError(f"the recipe {name}: {error}") from None
    return compose(config_class, vars(parser.parse_args([*earlier, *recipe, *argv])))


def mistake(message):
    raise UserError(f"{message}. `--help` lists all options.")


# --- an unknown option, and how a program ends ---

# Ours: theirs. docs/names.md says where they differ. verl's names stand here without their folders,
# as n for actor_rollout_ref.rollout.n
THEIRS = {
    "model": "model_name_or_path path",
    "dataset": "dataset_name train_files",
    "group_size": "num_generations n",
    "questions_per_step": "per_device_train_batch_size steps_per_generation train_batch_size",
    "minibatches": "steps_per_generation gradient_accumulation_steps train_batch_size "
                   "ppo_mini_batch_size",
    "micro_batch_tokens": "per_device_train_batch_size ppo_micro_batch_size_per_gpu "
                          "ppo_max_token_len_per_gpu",
    "mu": "num_iterations ppo_epochs",
    "beta": "kl_loss_coef use_kl_loss",
    "clip_low": "epsilon clip_ratio_low",
    "clip_high": "epsilon_high clip_ratio_high",
    "max_new_tokens": "max_completion_length max_response_length",
    "max_prompt_tokens": "max_prompt_length",
    "rewards": "reward_funcs reward_weights",
    "algorithm": "loss_type loss_agg_mode scale_rewards norm_adv_by_std_in_grpo "
                 "importance_sampling_level loss_mode",
    "max_rollouts": "filter_groups",
    "mask_truncated": "mask_truncated_completions",
    "importance_cap": "vllm_importance_sampling_mode rollout_is",
    "importance_low": "vllm_importance_sampling_clip_min",
    "lr": "learning_rate",
    "warmup": "warmup_steps lr_warmup_steps_ratio",
    "lr_schedule": "lr_scheduler_type",
    "max_grad_norm": "clip_grad",
    "epochs": "num_train_epochs total_epochs",
    "steps": "max_steps total_training_steps",
    "rollout": "use_vllm name",
    "vllm_share": "vllm_gpu_memory_utilization gpu_memory_utilization",
    "save_every": "save_steps save_freq",
    "save_total_limit": "max_actor_ckpt_to_keep",
    "log": "report_to logger",
}


def meant(name, options):
    """What a user may have meant by an unknown option: the end of a sentence, or "". options: the
    known names."""
    last = name.replace("-", "_").rpartition(".")[2]  # actor_rollout_ref.actor.optim.lr is lr
    ours = [o for o in options if o == last or last in THEIRS.get(o, "").split()]
    if ours:
        return f"in this project it is {' or '.join(f'--{o}' for o in ours)} (docs/names.md)."
    near = difflib.get_close_matches(f"--{name}", [f"--{o}" for o in options], n=1, cutoff=0.85)
    return f"did you mean {near[0]}?" if near else ""


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
        report = {
            "message": sentence,
            "extraInfo": {"py_callstack": sentence, "timestamp": str(int(time.time()))},
        }
        # as a whole: torchrun may end this process at any moment, and fails on a part of a report
        files.write(file, json.dumps({"message": report}))
    print(sentence, file=sys.stderr, flush=True)
    time.sleep(1 if file else 0)  # the others end first: torchrun would report whom it has to kill
    return 2
