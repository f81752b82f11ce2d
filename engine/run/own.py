"""The parts of an algorithm that are the user's own: a rule, advantages, a loss. What they return
is checked before anything trains on it.

Rows and advantages are on the CPU, and a loss is asked only for its shape and whether it has a
gradient. So no check waits for a GPU.
"""

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from engine.base.errors import call_own

OURS = ("algorithms", "grpo", "family")  # where the project's advantages and losses are


def name_of_own(function):
    """FILE.py:NAME of a function of the user's own, or of one in a partial; None: it is ours."""
    function = getattr(function, "func", function)
    if function.__module__.split(".")[0] in OURS:
        return None
    return f"{Path(function.__code__.co_filename).name}:{function.__qualname__}"


def checked(algorithm):
    """An Algorithm whose advantages and loss are checked at each call, if they are the user's."""
    advantages, loss = algorithm.advantages, algorithm.loss
    if name := name_of_own(advantages):
        advantages = partial(
            call_own, advantages, f"the advantages {name}",
            "a tensor (Q, G) of finite floats, as rollout.total is", are_advantages)
    if name := name_of_own(loss):
        loss = partial(
            call_own, loss, f"the loss {name}",
            "(loss, stats): a scalar that has a gradient, and a dict", is_loss)
    return replace(algorithm, advantages=advantages, loss=loss)


def are_advantages(A, rollout):
    if A.shape != rollout.rewards.shape[1:]:
        return False
    return A.is_floating_point() and A.isfinite().all()


def is_loss(pair, *given, **named):
    loss, stats = pair
    return loss.shape == () and loss.requires_grad and isinstance(stats, dict)


def own_rule(function, name):
    """A keep rule of the user's own.

    It gets copies: what it changes in them changes nothing in the step. name: of the rule, for the
    messages.
    """

    def keep(rollout, advantages, k):
        n = advantages.numel()
        wanted = (
            f"rows of the batch, whole numbers from 0 to {n - 1} and each once, as "
            "cppo.batch_rows makes them; or such rows and one finite advantage for each")
        returned = call_own(
            function, f"--keep {name}", wanted,
            lambda rows, *given: are_rows(rows, n), copy.deepcopy(rollout), advantages.clone(), k)
        weighted = isinstance(returned, tuple)
        rows, order = torch.as_tensor(returned[0] if weighted else returned).cpu().long().sort()
        if weighted:
            return rows, torch.as_tensor(returned[1]).to("cpu", torch.float32)[order]
        return rows

    return keep


def are_rows(returned, n):
    """Whether these are some of the numbers 0 … n − 1, each at most once, maybe with a finite
    number for each."""
    pair = returned if isinstance(returned, tuple) else (returned, returned)
    rows, numbers = map(torch.as_tensor, pair)
    found = rows.tolist()
    whole = rows.dtype == torch.int64 or not found  # for torch an empty list is float32
    once = len(set(found)) == len(found) and set(found) <= set(range(n))
    return whole and once and numbers.shape == rows.shape and numbers.isfinite().all()
