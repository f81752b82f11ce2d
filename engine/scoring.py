"""The rewards of a run: which functions they are, how much each counts, and what they say of completions."""

import functools
import importlib.util
import math
import numbers
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

import rewards
from engine.options import UserError

NAMES = (
    "gsm8k_accuracy", "math_accuracy", "toy_accuracy", "format_reward", "soft_format_reward", "code_accuracy", "code_format", "code_runs",
)
OF_DATASET = {  # the first one judges accuracy: a completion is right where it is above 0
    "toy": ["toy_accuracy"],
    "toy_code": ["code_accuracy"],
    **dict.fromkeys(["math", "math500", "amc23", "aime24"], ["math_accuracy", "format_reward"]),
}


@dataclass
class Reward:
    name: str  # of its part in the logs
    function: Callable  # (completions, **columns) → list of floats
    weight: float = 1.0


def default(dataset):
    return OF_DATASET.get(dataset, ["gsm8k_accuracy", "format_reward"])


def choose(words, device=None):
    """The rewards that `--rewards` names, each as NAME or NAME:WEIGHT.

    NAME is one of rewards.py, FILE.py:FUNCTION, or RewardModel:MODEL. Without a device a reward model is only named.
    Raises UserError where there is no such reward.
    """
    chosen = []
    for word in words:
        name, _, last = word.rpartition(":")
        try:
            weight = float(last)
        except ValueError:
            name, weight = word, 1.0
        if not name or not math.isfinite(weight):
            raise UserError(f"--rewards {word}: the form is NAME or NAME:WEIGHT, as format_reward:0.5.")
        kind, _, rest = name.partition(":")
        if kind.endswith(".py"):
            chosen.append(Reward(rest, from_file(kind, rest), weight))
        elif kind == "RewardModel" and rest:
            chosen.append(Reward(Path(rest).name, load_model(rest, device) if device else None, weight))
        elif name in NAMES:
            chosen.append(Reward(name, getattr(rewards, name), weight))
        else:
            raise UserError(f"unknown reward '{name}': there are {', '.join(NAMES)}, RewardModel:MODEL, and FILE.py:FUNCTION.")
    names = [*(reward.name for reward in chosen), "overlong"]  # the name of DAPO's penalty
    for name in {name for name in names if names.count(name) > 1}:
        raise UserError(f"--rewards names {name} twice." if name != "overlong" else "--rewards: overlong is the name of DAPO's penalty.")
    return chosen


def judge(chosen, dataset, eval_dataset):
    """The function by which a completion is right or wrong: the first reward, unless `eval_dataset` needs another than `dataset`."""
    own = default(eval_dataset)
    return chosen[0].function if own == default(dataset) or Path(eval_dataset).is_file() else getattr(rewards, own[0])


@functools.cache
def from_file(path, name):
    """The function `name` of a user's own Python file, which may import its neighbours."""
    if not Path(path).is_file():
        raise UserError(f"--rewards: the file {path} does not exist.")
    spec = importlib.util.spec_from_file_location(f"rewards_of_{Path(path).stem}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.path.append(str(Path(path).resolve().parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UserError(f"--rewards: {path} cannot be imported: {one_line(error)}.") from None
    function = getattr(module, name, None)
    if not callable(function):
        there = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UserError(f"--rewards: {path} has no function '{name}'. It has {', '.join(there) or 'none'}.")
    return function


def load_model(name, device):
    try:
        return rewards.RewardModel(name, device=device)
    except (OSError, ValueError) as error:
        raise UserError(f"--rewards: the reward model {name} cannot be loaded: {one_line(error)}.") from None


def one_line(error):
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def score(chosen, texts, columns):
    """Every reward of every completion: {name: (N,) float32}, and how many scored 0 because the function failed on them.

    columns: {name: N values}. A function that raises is called again for each completion by itself; where it fails there,
    that completion scores 0 and the mistake is shown. Raises UserError where it fails on all of several, or returns no numbers.
    """
    parts, failures = {}, 0
    for reward in chosen:
        name = reward.name
        try:
            values = reward.function(texts, **columns) if texts else []
        except Exception:
            values, errors = [], []
            for i, text in enumerate(texts):
                try:
                    values += reward.function([text], **{column: [those[i]] for column, those in columns.items()})
                except Exception as error:
                    values.append(0.0)
                    errors.append(one_line(error))
            if len(errors) == len(texts) > 1:
                raise UserError(f"the reward {name} failed on all {len(texts)} completions: {errors[0]}.") from None
            if errors:
                tqdm.write(f"the reward {name} failed on {len(errors)} of {len(texts)} completions, which score 0: {errors[0]}")
            failures += len(errors)
        if not isinstance(values, (list, tuple)):
            raise UserError(f"the reward {name} returned {type(values).__name__}: it must return a list of numbers.")
        if len(values) != len(texts):
            raise UserError(f"the reward {name} returned {len(values)} values for {len(texts)} completions: it must return one for each.")
        for value, text in zip(values, texts):
            if not isinstance(value, numbers.Real) or not abs(value) < 1e30:  # NaN and infinity fail this too
                raise UserError(f"the reward {name} returned {value} for the completion {text!r:.200}: it must be a finite number.")
        parts[name] = torch.tensor(values, dtype=torch.float32)
    return parts, failures


def merge(parts, weights):
    """Σ_n w_n r_n. parts: (R, …), the R rewards. weights: R numbers. Returns (…)."""
    return sum((weight * part for weight, part in zip(weights, parts)), torch.zeros(parts.shape[1:]))
