"""The rewards of a run: their functions, their weights, and the values that they give to
completions."""

import copy
import functools
import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

import rewards
from answers import after_thoughts, extract_answer, extract_code, last_number
from engine.base import ranks
from engine.base.errors import UserError, with_place
from engine.base.files import builtin_or_custom
from judges.mathematics import math_accuracy
from judges.programs import code_accuracy, code_runs
from tasks.table import task_of

REWARDS = {
    function.__name__: function
    for function in (
        rewards.gsm8k_accuracy, math_accuracy, rewards.toy_accuracy, rewards.number_accuracy,
        rewards.format_reward, rewards.soft_format_reward, code_accuracy, rewards.code_format,
        rewards.soft_code_format, code_runs,
    )
}
NOT_FOR_REWARDS = ("prompt", "begun", "system_prompt")  # columns of a question
# seconds that a call of a reward of one's own may take, and at least for each of its completions
TIMEOUT, EACH = 60, 1


@dataclass
class Reward:
    name: str  # as it is written in the logs
    function: Callable  # (completions, **columns) → list of floats
    weight: float = 1.0


def load_rewards(words, option="--rewards"):
    """The rewards that `--rewards` names, each as NAME or NAME:WEIGHT.

    NAME is one of REWARDS, or FILE.py:FUNCTION. A call of a FILE.py:FUNCTION has a time limit; the
    other rewards have limits of their own. option: the option that has these words,
    for error messages. Raises UserError if there is no such reward.
    """
    chosen = {}
    for word in words:
        name, _, last = word.rpartition(":")
        try:
            weight = float(last)
        except ValueError:
            weight = math.nan
        if not math.isfinite(weight):  # nan and inf may be names of functions
            name, weight = word, 1.0
        function = builtin_or_custom(name, REWARDS, "reward", option)
        if name not in REWARDS:
            name, function = name.partition(":")[2], limited(function, TIMEOUT)
        if name in (*chosen, "overlong"):
            raise UserError(f"{option} {word}: two rewards must not have one name (overlong is "
                            "DAPO's penalty).")
        chosen[name] = Reward(name, function, weight)
    return list(chosen.values())


def choose_accuracy_reward(reward_functions, dataset, eval_dataset):
    """The function that says whether a completion is right: the run's first reward.

    If `eval_dataset` is no local file and has other rewards than `dataset`, it is the first reward
    of `eval_dataset`.
    """
    if judged_alike(dataset, eval_dataset):
        return reward_functions[0].function
    return REWARDS[task_of(eval_dataset).rewards[0]]


def is_custom(function):
    """Whether a reward is the user's own."""
    return function not in REWARDS.values()


def is_graded(function, value):
    """Whether this value of a reward says more than right or wrong: the reward is the user's own,
    and the value is not 0, 1 or −1. NaN says nothing."""
    return is_custom(function) and value not in (-1, 0, 1) and not math.isnan(value)


def judged_alike(dataset, other):
    """Whether the first reward of a run on `dataset` also judges the questions of `other`."""
    return Path(other).is_file() or task_of(other).rewards == task_of(dataset).rewards


def read_answer(name, text):
    """What the reward `name` takes for the answer of a completion; None: it finds none. How a
    reward of the user's own reads is not known: it is taken to read as most do."""
    if name == "number_accuracy":
        return last_number(after_thoughts(text))
    if name in ("code_accuracy", "code_runs"):
        return extract_code(text)
    return extract_answer(text)


class Hung(BaseException):
    """What the alarm raises in a reward that takes too long. It is no Exception, so that an `except
    Exception` there lets it pass."""


def limited(function, seconds):
    """`function` with a time limit: a call that takes longer raises Hung. It may take `seconds`,
    and for each completion EACH, or twice as long as one has taken so far.

    An alarm (SIGALRM) interrupts a loop in Python, a sleep, a wait for the network, or a regular
    expression. It cannot interrupt C code that does not look for signals, such as a long call of
    numpy: the alarm waits until it returns. There is no limit after the function sets its own
    alarm, as math-verify does. Threads and processes that the function has started live on.
    """
    each = EACH

    @functools.wraps(function)
    def call(completions, **columns):
        nonlocal each
        limit = seconds + each * len(completions)

        def ring(number, frame):
            raise Hung(f"it took longer than {limit:g} s: make it faster")

        handler = signal.signal(signal.SIGALRM, ring)
        # the alarm rings again every second, because a bare `except:` may catch the first ring
        signal.setitimer(signal.ITIMER_REAL, limit, 1.0)
        begin = time.perf_counter()
        try:
            values = function(completions=completions, **columns)
            each = max(each, 2 * (time.perf_counter() - begin) / max(1, len(completions)))
            return values
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)

    return call


def reward_columns(questions, group_size=1):
    """The columns that a reward gets besides the completions: {name: values}, a value for each
    completion."""
    columns = {}
    for name in questions[0] if questions else ():
        if name not in NOT_FOR_REWARDS:
            columns[name] = [row[name] for row in questions for _ in range(group_size)]
    return columns


def reward_values(reward, texts, columns):
    """(a float for each text, None), or (None, the error) if the reward fails. NaN: the reward says
    None, so it does not apply to this completion.

    It is called as TRL's trainers do: the completions, `prompts` (the questions) and all columns by
    name. It gets copies: what it changes in them, no other reward sees. Raises UserError if the
    values are not one finite number for each text.
    """
    try:
        columns = copy.deepcopy(columns)
        columns["prompts"] = columns.get("question")
        returned = reward.function(completions=list(texts), **columns)
        # a list, or an array of numpy or torch
        values = [value if value is None else float(value) for value in returned]
    except (Exception, SystemExit, Hung) as error:
        return None, error
    if len(values) != len(texts):
        raise UserError(
            f"the reward {reward.name} returned {len(values)} values for {len(texts)} completions: "
            "it must return a list with one number for each."
        )
    for value, text in zip(values, texts):
        if value is not None and not abs(value) < 1e30:  # NaN and infinity, too
            raise UserError(
                f"the reward {reward.name} returned {value} for the completion {text!r:.200}: it "
                "must be a finite number."
            )
    return [math.nan if value is None else value for value in values], None


def one_by_one(reward, texts, columns, first):
    """Call a reward once more, for each completion by itself: it has failed on all at once, with
    the error `first`. Returns the values.

    A completion on which it fails has the value None. Raises UserError if it fails on all of
    several completions, or hangs on three.
    """
    values, hung = [], 0
    for i, text in enumerate(texts):
        value, error = reward_values(reward, [text], {name: [x[i]] for name, x in columns.items()})
        values += value or [None]
        hung += isinstance(error, Hung)
        if hung == 3:
            break
    failed = values.count(None)
    if hung == 3 or failed == len(texts) > 1:
        raise UserError(
            f"the reward {reward.name} failed on {failed} of {len(values)} completions: "
            f"{with_place(first)}. It is called with completions, a list of texts, and the columns "
            f"{', '.join(columns)}, by name, and must return a list of numbers.")
    return values


def score(reward_functions, texts, columns):
    """Every reward of every completion. Returns ({name: (N,) float32}, how often a reward failed on
    a completion). NaN: the reward does not apply to this completion.

    columns: {name: N values}. A reward that raises, hangs, calls sys.exit or returns something else
    than numbers is called again, for each completion by itself. If it fails again, that completion
    gets the lowest value that the reward gives to any of these texts, and at most 0. So a policy
    that learns how to make a reward fail gains nothing. If the completion were left out of its
    group, the failure would cost nothing either, and the policy would not learn to avoid it. Every
    rank calls this. Raises AgreedError, on every rank, if on one of them a reward fails on all of
    several completions, hangs on many, or returns another number of values, NaN or infinity.
    """
    scores = {reward.name: torch.zeros(len(texts)) for reward in reward_functions}
    failures, problems = 0, []
    # a device without a question has no columns, either
    for reward in reward_functions if texts else ():
        try:
            values, error = reward_values(reward, texts, columns)
            if error:
                values = one_by_one(reward, texts, columns, error)
        except UserError as problem:
            problems = [str(problem)]
            break
        if error:
            lowest = min([0.0, *(value for value in values if value is not None)])
            failed = values.count(None)
            values = [lowest if value is None else value for value in values]
            failures += failed
            tqdm.write(
                f"the reward {reward.name} failed: {with_place(error)}. It was called again, for "
                f"each completion by itself, and failed on {failed} of {len(texts)}, which get "
                f"the lowest value, {lowest:g}."
            )
        scores[reward.name] = torch.tensor(values, dtype=torch.float32)
    problems = ranks.gather(problems)
    if problems:
        raise ranks.AgreedError(problems[0])
    return scores, failures
