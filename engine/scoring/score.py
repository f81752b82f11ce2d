"""The rewards of a run: their functions, their weights, and the values that they give to
completions."""

import copy
import functools
import math
import numbers
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

import rewards
from engine.base.errors import UserError, one_line
from engine.base.files import own_function
from engine.model.folders import find
from engine.scoring.mathematics import math_accuracy
from engine.scoring.programs import code_accuracy, code_runs
from engine.tasks.table import task_of

REWARDS = {
    function.__name__: function
    for function in (
        rewards.gsm8k_accuracy, math_accuracy, rewards.toy_accuracy, rewards.number_accuracy,
        rewards.format_reward, rewards.soft_format_reward, code_accuracy, rewards.code_format,
        code_runs,
    )
}
# a gold answer that is no number is a mistake, mostly
WANT_NUMBERS = (rewards.gsm8k_accuracy, rewards.number_accuracy)
PATIENCE = 300  # seconds that one batch may lose because a reward hangs on some completions
CURES = {  # by the type of what a reward returned
    "NoneType": ", and it has no `return`", "coroutine": ", so write `def` in place of `async def`",
    "generator": ", so write `return` in place of `yield`",
}


@dataclass
class Reward:
    name: str  # as it stands in the logs
    function: Callable  # (completions, **columns) → list of floats
    weight: float = 1.0


def choose(words, device=None, timeout=60.0, option="--rewards"):
    """The rewards that `--rewards` names, each as NAME or NAME:WEIGHT.

    NAME is one of REWARDS, FILE.py:FUNCTION, or RewardModel:MODEL. device None: a reward model is
    not loaded. timeout: seconds that a call of a FILE.py:FUNCTION may take; the other rewards have
    limits of their own. option: the option that has these words, for error messages. Raises
    UserError if there is no such reward. """
    chosen = []
    for word in words:
        name, _, last = word.rpartition(":")
        try:
            weight = float(last)
        except ValueError:
            name, weight = word, 1.0
        if not name or not math.isfinite(weight):
            raise UserError(
                f"{option} {word}: the form is NAME or NAME:WEIGHT, as format_reward:0.5."
            )
        kind, _, rest = name.partition(":")
        if kind.endswith(".py"):  # without a function, too: own_function says what is missing
            chosen.append(Reward(rest, limited(own_function(name, option), timeout), weight))
        elif kind == "RewardModel" and rest:
            find(rest)  # a missing folder is told before any work
            chosen.append(
                Reward(Path(rest).name, load_judge(rest, device) if device else None, weight)
            )
        elif name in REWARDS:
            chosen.append(Reward(name, REWARDS[name], weight))
        else:
            raise UserError(
                f"unknown reward '{name}': there are {', '.join(REWARDS)}, RewardModel:MODEL, and "
                "FILE.py:FUNCTION."
            )
    # in the logs, overlong is DAPO's penalty
    names = [*(reward.name for reward in chosen), "overlong"]
    for name in {name for name in names if names.count(name) > 1}:
        raise UserError(f"--rewards names {name} twice." if name != "overlong" else
                        "--rewards: overlong is the name of DAPO's penalty.")
    return chosen


def judge(chosen, dataset, eval_dataset):
    """The function that judges whether a completion is right: the run's first reward.

    If `eval_dataset` is no local file and has other rewards than `dataset`, it is the first reward
    of `eval_dataset`. """
    eval_rewards = task_of(eval_dataset).rewards
    return (
        chosen[0].function
        if eval_rewards == task_of(dataset).rewards or Path(eval_dataset).is_file()
        else REWARDS[eval_rewards[0]]
    )


def overshadowing(differ):
    """The reward that a run would learn in place of its first one; None if there is none.

    differ: {name: in how many groups the values of this reward differ}. Where the first reward is
    equal for all completions, the std of the group divides away the weight of another one, which
    then trains at full strength. So another reward is in the way if it differs in more than four
    times as many groups. """
    first, *others = differ
    most = max(others, key=differ.get, default=first)
    return most if differ[most] > 4 * differ[first] else None


def load_judge(name, device):
    # takes seconds to import, and few runs need it
    from engine.scoring.reward_model import RewardModel

    try:
        return RewardModel(name, device=device)
    except (OSError, ValueError) as error:
        raise UserError(
            f"--rewards: the reward model {name} cannot be loaded: {one_line(error)}."
        ) from None


class Hung(Exception):
    """A call of a reward took longer than `seconds`."""

    def __init__(self, seconds):
        super().__init__(f"it took longer than {seconds:g} s")
        self.seconds = seconds


class Alarm(BaseException):
    """What the alarm raises inside a reward. It is no Exception, so that an `except Exception`
    there lets it pass."""


def limited(function, seconds):
    """`function` with a time limit: a call that takes longer than `seconds` raises Hung. 0: no
    limit.

    An alarm (SIGALRM) interrupts a loop in Python, a sleep, a wait for the network, or a regular
    expression. It cannot interrupt C code that does not look for signals, such as a long call of
    numpy: the alarm waits until it returns. There is no limit outside the main thread, and none
    after the function sets its own alarm, as math-verify does. Threads and processes that the
    function has started live on. An alarm that was set before is set again afterwards. It comes
    late if it was due during the call. """

    @functools.wraps(function)
    def call(*args, **columns):
        if threading.current_thread() is not threading.main_thread():
            return function(*args, **columns)
        running = True

        def ring(number, frame):
            if running:
                raise Alarm

        handler = signal.signal(signal.SIGALRM, ring)
        start = time.monotonic()
        # the alarm rings again every second, because a bare `except:` may catch the first ring
        earlier, interval = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
        try:
            return function(*args, **columns)
        except Alarm:
            raise Hung(seconds) from None
        finally:
            running = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
            if earlier:
                signal.setitimer(
                    signal.ITIMER_REAL, max(1e-6, earlier - (time.monotonic() - start)), interval
                )

    return call


def call(reward, texts, columns):
    """The values of a reward: a float for each text. It gets copies: what it changes in them, no
    other reward sees.

    numpy and torch may hold the values, too. Raises UserError if they are not one finite number for
    each text. """
    values = reward.function(list(texts), **copy.deepcopy(columns))
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, (list, tuple)):
        kind = type(values).__name__
        raise UserError(
            f"the reward {reward.name} returned {kind}: it must return a list of "
            f"numbers{CURES.get(kind, '')}."
        )
    if len(values) != len(texts):
        raise UserError(
            f"the reward {reward.name} returned {len(values)} values for {len(texts)} completions: "
            "it must return one for each."
        )
    values = [value.item() if getattr(value, "shape", None) == () else value for value in values]
    for value, text in zip(values, texts):
        # NaN and infinity are refused here, too
        if not isinstance(value, numbers.Real) or not abs(value) < 1e30:
            raise UserError(
                f"the reward {reward.name} returned {value!r:.60} ({type(value).__name__}) for the "
                f"completion {text!r:.200}: it must be a finite number."
            )
    return [float(value) for value in values]


def one_by_one(reward, texts, columns):
    """Call a reward once more, for each completion by itself: it has failed on all at once. Returns
    (values, errors).

    If the reward fails on a completion, its value is None. Raises UserError if the reward fails on
    all of several completions, or hangs so often that the run would stand still. """
    values, errors, hung = [], [], 0
    for i, text in enumerate(texts):
        try:
            values += call(
                reward, [text], {column: [entries[i]] for column, entries in columns.items()}
            )
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            values.append(None)
            errors.append(one_line(error))
            if isinstance(error, Hung):
                hung += 1
                if hung >= max(3, PATIENCE / error.seconds):
                    raise UserError(
                        f"the reward {reward.name} took longer than {error.seconds:g} s on {hung} "
                        f"of {i + 1} "
                        "completions, one by one: repair it, or set another --reward_timeout."
                    ) from None
    if len(errors) == len(texts) > 1:
        calls = f" It is called with completions and the columns {', '.join(columns)}, by name."
        wrong_call = errors[0].startswith(("TypeError", "KeyError"))  # it may miss a column
        raise UserError(
            f"the reward {reward.name} failed on all {len(texts)} completions: {errors[0]}."
            + calls * wrong_call
        )
    return values, errors


def score(chosen, texts, columns):
    """Every reward of every completion. Returns ({name: (N,) float32}, how often a reward failed on
    a completion).

    columns: {name: N values}. A reward that raises, hangs or calls sys.exit is called again, for
    each completion by itself. If it fails again, that completion gets the lowest value that the
    reward gives to any of these texts, and at most 0. So a policy that learns how to make a reward
    fail gains nothing. If the completion were left out of its group, the failure would cost nothing
    either, and the policy would not learn to avoid it. Raises UserError if a reward fails on all of
    several completions, hangs on many, or does not return numbers. """
    scores, failures = {}, 0
    for reward in chosen:
        name, errors = reward.name, []
        try:
            values = call(reward, texts, columns) if texts else []
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            if isinstance(error, Hung):
                tqdm.write(
                    f"the reward {name} took longer than {error.seconds:g} s for {len(texts)} "
                    "completions and is called for each by itself: if it is slow and does not "
                    "hang, raise --reward_timeout."
                )
            values, errors = one_by_one(reward, texts, columns)
        lowest = min([0.0, *(value for value in values if value is not None)])
        if errors:
            tqdm.write(
                f"the reward {name} failed on {len(errors)} of {len(texts)} completions, which get "
                f"the lowest value, {lowest:g}: {errors[0]}"
            )
        failures += len(errors)
        scores[name] = torch.tensor(
            [lowest if value is None else value for value in values], dtype=torch.float32
        )
    return scores, failures
