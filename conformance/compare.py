"""Compares a function with ours on the probes and, if they differ, with the known versions."""

import importlib
import inspect
import json
import pkgutil
from collections import namedtuple
from functools import partial

import torch

import allocate
import cppo
import family
import grpo
from conformance.mistakes import VERSIONS
from conformance.probes import PROBES

FILES = [module.name for module in pkgutil.iter_modules(family.__path__)]
FAMILY = [importlib.import_module(f"family.{name}") for name in FILES]
# {function: its module}: all that a file of one's own may define
MODULES = {
    name: module.__name__
    for module in (grpo, cppo, allocate, *FAMILY)
    for name, value in vars(module).items()
    if inspect.isfunction(value) and (value.__module__ == module.__name__ or name == "cppo_loss")
    and not name.startswith("_")
    and name != "surrogate_loss"  # what the losses have in common, and no test speaks about it
}
Found = namedtuple("Found", "kind sentence evidence")
# besides the losses, functions through which a gradient flows
LEARN = ("kl_k1", "kl_k2", "kl_k3", "clipped_surrogate", "token_logprobs", "token_entropies",
         "truncated_importance_weights")


def answers(function, probe, learns):
    """Tensors: what a function returns and, if it `learns`, the gradient of its sum on the first
    argument; a sentence, if it raises an error; None, if it says that it does not do this. Of a
    loss, the statistics are left out."""
    first, *rest = (a.clone() if torch.is_tensor(a) else a for a in probe.args)
    first = first.requires_grad_() if learns else first
    try:
        out = function(first, *rest, **probe.options)
        out = out if isinstance(out, tuple) else (out,)
        out = [torch.as_tensor(x) for x in out if not isinstance(x, dict)]
        if any(x.requires_grad for x in out) and not any(x.isnan().any() for x in out):
            out += torch.autograd.grad(sum(x.double().sum() for x in out), first)
    except NotImplementedError:
        return None
    except Exception as error:
        return f"it raises {type(error).__name__}: {error}".split("\n")[0]
    return [x.detach() for x in out]


def same(a, b, atol):
    if isinstance(a, str) or isinstance(b, str):
        return isinstance(a, str) and isinstance(b, str)
    close = partial(torch.allclose, rtol=1e-5, atol=atol, equal_nan=True)
    return len(a) == len(b) and all(
        x.shape == y.shape and close(x.double(), y.double()) for x, y in zip(a, b))


def diagnose(name, theirs):
    """Found: which version gives the same answers as their function on all probes, and the first
    small probe on which theirs clearly differs from ours. None: no probe shows a difference."""
    ours = getattr(importlib.import_module(MODULES[name]), name)
    learns = name.endswith("_loss") or name in LEARN
    answer = partial(answers, learns=learns)
    probes = [probe for probe in PROBES.get(name, ()) if takes(theirs, probe)]
    tried = [(probe, answer(theirs, probe)) for probe in probes]
    probes = [probe for probe, values in tried if values is not None]
    got = [values for _, values in tried if values is not None]
    right = [answer(ours, probe) for probe in probes]
    differ = [i for i in range(len(probes)) if not same(got[i], right[i], probes[i].atol)]
    if not differ:
        return None
    # the first one that shows it clearly, in few numbers
    clear = [i for i in differ if not same(got[i], right[i], 0.01)] or differ
    i = ([i for i in clear if small(probes[i])] or clear)[0]
    evidence = shown(ours, probes[i], got[i], right[i], learns)
    for version in VERSIONS.get(name, ()):
        if all(same(answer(version.function, p), g, p.atol) for p, g in zip(probes, got)):
            return Found(version.kind, version.sentence, evidence)
    return Found("mistake", "no known mistake gives these numbers", evidence)


def small(probe):
    return not torch.is_tensor(probe.args[0]) or probe.args[0].numel() <= 8


def takes(function, probe):
    try:
        inspect.signature(function).bind(*probe.args, **probe.options)
    except TypeError:
        return False
    return True


def shown(ours, probe, got, right, learns):
    """One line: the input, their answer and the right one."""
    given = inspect.signature(ours).bind(*probe.args, **probe.options).arguments
    given |= given.pop("options", {})  # what a loss hands on as **options
    inputs = ", ".join(f"{name} = {text(value)}" for name, value in given.items())
    if isinstance(got, str) or isinstance(right, str):
        return f"{inputs}: {got if isinstance(got, str) else text(got[0])}"
    i = next((i for i, (a, b) in enumerate(zip(got, right)) if not same([a], [b], probe.atol)), 0)
    gradient = "gradient " if learns and i and i == len(right) - 1 else ""
    return f"{inputs}: yours {gradient}{text(got[i])}, right {text(right[i])}"


def text(value):
    if not torch.is_tensor(value):
        return str(value)
    if not value.is_floating_point():
        return str(value.tolist())
    rows = value.detach().double().tolist()
    return str(json.loads(json.dumps(rows), parse_float=lambda x: float(f"{float(x):.5g}")))
