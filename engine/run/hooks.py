"""--hooks FILE.py: a file of the user's own that a run asks at each step. It has one to three
functions.

    schedule(step, progress) → {option: value}
        the options of the algorithm that this step shall have, for example {"pruning_rate": 0.5};
        all others are those of the run. step: the number of the step, from 1. progress: the share
        of the run that is over before it, 0 … 1.
    curriculum(questions, past, count, rng) → count numbers of questions, from 0
        which questions are asked next. questions: the rows of the data set. past: {number of a
        question: its mean reward each time it was asked}. A question that this step has asked
        already is in it, without a mean reward. rng: a random.Random, the same on every device.
    metrics(step) → {name: number}
        what is logged of a Step (records.py) as the metric own/NAME, in metrics.jsonl and in
        curves.png. If there are several devices, each has a Step of its own,
        and the mean over the questions of all devices is logged.
"""

import copy
from collections.abc import Callable
from statistics import fmean
from typing import NamedTuple

from engine.base import ranks
from engine.base.errors import UserError, call_own
from engine.base.files import own_module


class Hooks(NamedTuple):
    path: str | None = None
    schedule: Callable | None = None
    curriculum: Callable | None = None
    metrics: Callable | None = None

    def call(self, name, wanted, fits, *arguments):
        """What the user's function of this name returns."""
        function = getattr(self, name)
        return call_own(function, f"--hooks {self.path}:{name}", wanted, fits, *arguments)

    def options_at(self, step, progress):
        """{option: value} of the schedule."""
        return self.call(
            "schedule", "{option: value}", lambda options, *given: isinstance(options, dict),
            step, progress)

    def choose(self, questions, past, count, rng):
        """The numbers of the next `count` questions. All devices take the first one's choice."""
        numbers = self.call(
            "curriculum", f"{count} numbers of questions, from 0 to {len(questions) - 1}",
            lambda numbers, *given: len(numbers) == count
            and {*map(float, numbers)} <= {*range(len(questions))}, questions, past, count, rng)
        return ranks.from_first([int(number) for number in numbers])

    def measure(self, step):
        """{own/NAME: number} of a Step, the mean over the questions of all devices."""
        if not self.metrics:
            return {}
        numbers = []
        questions = step.rollout.questions
        if questions:  # else there is nothing to measure
            returned = self.call(
                "metrics", "{name: number}",
                lambda found, step: len([*map(float, found.values())]) == len(found),
                copy.deepcopy(step))  # what it changes in it changes no log
            numbers = [(f"own/{name}", float(number)) for name, number in returned.items()]
        of_each = {}
        for name, number in ranks.gather(numbers * len(questions)):
            of_each.setdefault(name, []).append(number)
        return {name: fmean(values) for name, values in of_each.items()}


def load_hooks(path):
    """The Hooks of a file; of None: no hooks. Raises UserError if the file defines none."""
    if path is None:
        return Hooks()
    module, names = own_module(path, "--hooks"), Hooks._fields[1:]
    hooks = Hooks(path, *[getattr(module, name, None) for name in names])
    if not any(map(callable, hooks)):
        raise UserError(f"--hooks: {path} has none of the functions {', '.join(names)}.")
    return hooks
