"""The smallest input on which somebody's answer is not the project's."""

import inspect
from functools import partial

import torch

from conformance import compare
from conformance.probes import Probe
from conformance.theirs import POSITIONAL, arguments

# What is compared of a choice: of equal ones any may be kept, in any order.
WORTH = {
    "prune": lambda advantages, kept: advantages.abs().gather(1, kept).sort().values,
    "prune_pooled": lambda advantages, rows: advantages.abs().flatten()[rows].sort().values,
    "retain": lambda metric, kept: metric.gather(1, kept).sort().values,
    "max_variance_subset": lambda rewards, kept: rewards.double().gather(1, kept).var(1),
    "batch_rows": lambda kept, rows: rows.sort().values,
}
# other answers than ours are right, too; or an argument is a model
NOT_COMPARED = ("fill", "micro_batches", "balance", "draw", "random_prefixes", "logprobs",
                "train_step")
LONGEST = 400  # letters


def smallest(name, yours, ours, calls):
    """A line: the smallest of these inputs on which the answers differ, and both of them. "": there
    is none, or the line would be long. calls: (args, options) of each."""
    if name in NOT_COMPARED:
        return ""
    form = inspect.signature(ours)
    differ = partial(differs, name, yours, ours)
    for given in sorted((arguments(form, *call) for call in calls), key=size):
        if differ(given):
            probe = as_probe(ours, cut(given, differ))
            learns = compare.learns(name)
            got, right = (compare.answers(f, probe, learns) for f in (yours, ours))
            line = compare.shown(ours, probe, got, right, "gradient " * learns)
            return line if len(line) < LONGEST else ""
    return ""


def size(given):
    return sum(x.numel() for x in given.values() if torch.is_tensor(x))


def differs(name, yours, ours, given):
    """Whether your answer is wrong. No, if ours is not finite: then the input is not valid."""
    if "mask" in given and not given["mask"].any(-1).all():  # an empty completion
        return False
    got, right = (compare.answers(worth(name, f), as_probe(ours, given), compare.learns(name))
                  for f in (yours, ours))
    finite = type(right) is list and all(x.isfinite().all() for x in right)
    return finite and not compare.same(got, right, 1e-4)


def worth(name, function):
    """The function, or what its choice is worth."""
    if name not in WORTH:
        return function
    return lambda *args, **options: WORTH[name](args[0], function(*args, **options))


def as_probe(ours, given):
    """What our function requires goes by position, the rest by name."""
    required = [name for name, p in inspect.signature(ours).parameters.items()
                if p.kind in POSITIONAL and p.default is p.empty]
    options = {name: x for name, x in given.items() if name not in required}
    return Probe([given[name] for name in required], options, 1e-4)


def cut(given, differ):
    """The input without the rows, columns and words that its difference does not need."""
    first = [*given][0]
    for dim in range(getattr(given[first], "ndim", 0)):
        for i in reversed(range(given[first].shape[dim])):
            less = without(given, dim, i, given[first].shape[dim])
            if less[first].numel() and differ(less):
                given = less
    return given


def without(given, dim, i, n):
    """The input without the i-th of n rows (dim 0), columns (dim 1) or words (dim 2)."""
    rest = torch.tensor([j for j in range(n) if j != i], dtype=torch.int64)
    fits = lambda x: torch.is_tensor(x) and x.dim() > dim and x.shape[dim] == n
    return {name: x.index_select(dim, rest) if fits(x) else x for name, x in given.items()}
