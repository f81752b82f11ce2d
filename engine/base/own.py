"""Functions of the user's own: what they return is checked here, before anything trains on it."""

import copy
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from engine.base import progress
from engine.base.errors import UserError, one_line


def call(function, name, wanted, fits, *arguments, **named):
    """function(*arguments, **named), if that fits. Otherwise a UserError says what came, what is
    wanted, and where.

    name: of the function. wanted: what it must return, in words. fits(returned, *arguments,
    **named) → bool; an error of it means no.
    """
    try:
        returned = function(*arguments, **named)
    except (UserError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:
        raise failed(name, error) from error
    try:
        good = fits(returned, *arguments, **named)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        good = False
    if not good:
        raise misfit(name, wanted, returned)
    return returned


def failed(name, error):
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(place.filename).name}, line {place.lineno}"
    return UserError(f"{name} failed: {one_line(error)} ({where}).")


def misfit(name, wanted, returned):
    shape = f" of shape {tuple(returned.shape)}" if torch.is_tensor(returned) else ""
    shown = " ".join(repr(returned).split())
    return UserError(f"{name} must return {wanted}. It returned {shown:.80}{shape}.")


def name_of(function):
    """The file and the name of a function, or of that in a partial one."""
    function = getattr(function, "func", function)
    code = getattr(function, "__code__", None)
    file = Path(code.co_filename).name if code else function.__module__
    return f"{file}:{function.__qualname__}"


def checked(algorithm):
    """An Algorithm whose advantages and whose loss are checked at each call."""
    advantages, loss = algorithm.advantages, algorithm.loss
    return replace(
        algorithm,
        advantages=partial(
            call, advantages, f"the advantages {name_of(advantages)}",
            "a tensor (Q, G) of finite floats, as rollout.total is",
            lambda A, rollout: A.shape == rollout.rewards.shape[1:] and A.is_floating_point()
            and bool(A.isfinite().all())),
        loss=partial(
            call, loss.func, f"the loss {name_of(loss)}",
            "(loss, stats): a scalar that has a gradient, and a dict",
            lambda pair, *given, **named: len(pair) == 2 and pair[0].shape == ()
            and pair[0].requires_grad and isinstance(pair[1], dict), **loss.keywords))


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
        returned = call(
            function, f"--keep {name}", wanted,
            lambda rows, *given: are_rows(rows, n), copy.deepcopy(rollout), advantages.clone(), k)
        weighted = isinstance(returned, tuple)
        rows, order = torch.as_tensor(returned[0] if weighted else returned).cpu().long().sort()
        if len(rows) < k * len(advantages):
            progress.note_once(
                f"note: --keep {name} keeps fewer than k = {k} completions of each question.")
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
    if rows.dtype != torch.int64 and found:  # for torch an empty list is float32
        return False
    if rows.dim() != 1 or numbers.shape != rows.shape or not numbers.isfinite().all():
        return False
    return len(set(found)) == len(found) and set(found) <= set(range(n))


def check_sampler(sampler, name):
    """Let what the sampler returns be checked."""

    def fits(drawn, prompts, group_size, sampling, *others):
        N = len(prompts) * group_size
        T = drawn.tokens.shape[1]
        kinds = [drawn.tokens.dtype, drawn.mask.dtype, len(drawn.lengths), len(drawn.truncated)]
        shapes = [x.shape for x in (drawn.tokens, drawn.logp, drawn.mask)]
        return (kinds == [torch.int64, torch.bool, N, N] and shapes == [(N, T)] * 3
                and T <= max(1, sampling.max_new_tokens))

    sampler.sample = partial(
        call, sampler.sample, name,
        "Completions: tokens (int64), logp and mask (bool), each (N, T) for N = prompts × "
        "group_size and T ≤ max_new_tokens, and lengths and truncated, each (N,)", fits)
