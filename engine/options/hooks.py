"""Custom metrics, --hooks FILE.py: its function `metrics` is called at each step.

    metrics(step) → {name: number}
        what is logged of a Step (loop/records.py) as the metric custom/NAME, in metrics.jsonl and
        in curves.png. If there are several devices, each has a Step of its own, and the mean over
        the questions of all devices is logged.
"""

import copy
from functools import partial
from statistics import fmean

import torch

from engine.base import ranks
from engine.base.errors import UserError, call_custom
from engine.base.files import builtin_or_custom


def load_metrics(path):
    """step → ({custom/NAME: number}, the mean over the questions of all devices; [a sentence for
    each device on which the function fails]). path: of the user's file, or None. Raises UserError
    if the file has no metrics."""
    if path is None:
        return lambda step: ({}, [])
    function = builtin_or_custom(f"{path}:metrics", {}, "metrics", "--hooks")
    return partial(custom_metrics, function, path)


def custom_metrics(metrics, path, step):
    numbers, problems = [], []
    questions = step.rollout.questions
    try:
        if questions:  # else there is nothing to measure
            returned = call_custom(
                metrics, f"--hooks {path}:metrics", "{name: number}",
                lambda found, step: len([*map(float, found.values())]) == len(found),
                copy.deepcopy(step))  # what it changes in it changes no log
            numbers = [(f"custom/{name}", float(number)) for name, number in returned.items()]
    except (UserError, torch.OutOfMemoryError) as error:
        problems = [str(error)]
    of_each = {}
    for name, number in ranks.gather(numbers * len(questions)):
        of_each.setdefault(name, []).append(number)
    means = {name: fmean(values) for name, values in of_each.items()}
    return means, ranks.gather(problems)
