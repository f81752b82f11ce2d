"""The parts of an algorithm that are the user's own: a rule, advantages, a loss. What they return
is checked before anything trains on it.

Rows and advantages are on the CPU, and a loss is asked only for its shape and whether it has a
gradient. So no check waits for a GPU.
"""

import copy
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

from algorithms import keep_smallest
from engine.base import progress
from engine.base.errors import UserError, call_own

# where the project's advantages, losses and rules are
OURS = ("algorithms", "grpo", "family", "cppo", "engine")
STATS = ("kl", "clip_fraction", "ratio_mean", "ratio_max")  # of the project's losses


def name_of_own(function):
    """FILE.py:NAME of a function or callable object of the user's own, or of one in a partial;
    None: it is ours."""
    function = getattr(function, "func", function)
    module = str(function.__module__)
    if module.split(".")[0] in OURS:
        return None
    file = getattr(sys.modules.get(module), "__file__", module)
    name = getattr(function, "__qualname__", type(function).__name__)
    return f"{Path(file).name}:{name}"


def checked(algorithm):
    """An Algorithm whose advantages, rule and loss are checked at each call, if they are the
    user's."""
    advantages, keep, loss = algorithm.advantages, algorithm.keep, algorithm.loss
    if name := name_of_own(advantages):
        advantages = partial(own_numbers, advantages, f"the advantages {name}")
    if name := name_of_own(keep):
        keep = own_rule(keep, f"the rule {name}")
    if name := name_of_own(loss):
        loss = partial(own_loss, loss, f"the loss {name}")
    return replace(algorithm, advantages=advantages, keep=keep, loss=loss)


def try_rule(algorithm):
    """Call a rule of the user's own on made-up completions: one that returns another kind of thing
    is refused before any work. If the rule fails, that says nothing yet: these completions hold
    less than those of a run."""
    shape = algorithm.questions_per_step, algorithm.group_size
    A = torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 4 - 2
    made_up = SimpleNamespace(
        step=0, total=A, rewards=A[None], lengths=torch.ones_like(A),
        trainable=torch.ones(shape, dtype=torch.bool))
    try:
        algorithm.keep(made_up, A, algorithm.k)
    except UserError as error:
        if not error.__cause__:
            raise


def own_numbers(function, name, rollout):
    """Advantages of the user's own, or a metric. They get a copy, as a rule does."""
    wanted = "a tensor (Q, G) of finite numbers, as rollout.total is"
    numbers = call_own(function, name, wanted, are_numbers, copy.deepcopy(rollout))
    return numbers.float()


def are_numbers(numbers, rollout):
    return numbers.shape == rollout.rewards.shape[1:] and numbers.isfinite().all()


def own_loss(function, name, *given, **named):
    """(loss, stats) of a loss of the user's own. A stat that no loss of the project has is called
    own/NAME, so it replaces no metric."""
    wanted = "(loss, stats): a scalar that has a gradient, and a dict of numbers"
    loss, stats = call_own(function, name, wanted, is_loss, *given, **named)
    return loss, {key if key in STATS else f"own/{key}": x for key, x in stats.items()}


def is_loss(pair, *given, **named):
    loss, stats = pair
    numbers = [torch.as_tensor(value).shape == () for value in stats.values()]
    return loss.shape == () and loss.requires_grad and all(numbers)


def own_rule(function, name):
    """A keep rule of the user's own.

    It gets copies: what it changes in them changes nothing in the step. name: of the rule, for the
    messages. The first time that it keeps all completions or none, it says so.
    """

    def keep(rollout, advantages, k):
        n = advantages.numel()
        wanted = (
            f"rows of the batch, whole numbers from 0 to {n - 1} and each once, as "
            "cppo.batch_rows makes them (mask.nonzero().flatten() for a mask); or such rows and "
            "one finite advantage for each")
        returned = call_own(
            function, name, wanted, are_rows, copy.deepcopy(rollout), advantages.clone(), k)
        weighted = isinstance(returned, tuple)
        rows, order = torch.as_tensor(returned[0] if weighted else returned).cpu().long().sort()
        if rollout.step and n and len(rows) in (0, n):
            kept = "all" if len(rows) else "none"
            progress.note_once(f"note: {name} has kept {kept} of the completions of a step.")
        if weighted:
            return rows, torch.as_tensor(returned[1]).to("cpu", torch.float32)[order]
        return rows

    return keep


def own_filter(function, name):
    """GFPO's rule with a metric of the user's own, rollout → (Q, G): the smallest are kept."""
    return partial(keep_smallest, metric=partial(own_numbers, function, name))


def are_rows(returned, rollout, advantages, k):
    """Whether these are rows of the batch, each at most once, maybe with a finite number for
    each."""
    pair = returned if isinstance(returned, tuple) else (returned, returned)
    rows, numbers = map(torch.as_tensor, pair)
    found = rows.tolist()
    whole = all(type(row) is int for row in found)  # True is none
    once = len(set(found)) == len(found) and set(found) <= set(range(advantages.numel()))
    return whole and once and numbers.shape == rows.shape and numbers.isfinite().all()
