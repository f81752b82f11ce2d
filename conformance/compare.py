"""Compares a function with ours on the probes and, if they differ, with the known versions."""

import importlib
import inspect
import itertools
import json
import pkgutil
import time
from collections import namedtuple
from functools import partial

import torch

import allocate
import cppo
import family
import grpo
from conformance.mistakes import FITTED, LOSSES, VERSIONS, Version, plus, taken_apart
from conformance.probes import EDGES, PROBES, SPREADS
from conformance.theirs import IN_PLACE, Broken, LeftOut, arguments

FILES = [module.name for module in pkgutil.iter_modules(family.__path__)]
FAMILY = [importlib.import_module(f"family.{name}") for name in FILES]
# what our functions have in common: no test asks theirs about it
SHARED = ("surrogate_loss", "importance_ratio")
# {name: our function}: all that a file of one's own may define
OURS = {
    name: value
    for module in (grpo, cppo, allocate, *FAMILY)
    for name, value in vars(module).items()
    if inspect.isfunction(value) and (value.__module__ == module.__name__ or name == "cppo_loss")
    and not name.startswith("_")
    and name not in SHARED
}
MODULES = {name: value.__module__ for name, value in OURS.items()} | {"cppo_loss": "cppo"}
# kind: mistake, choice, edge, unknown; or broken, if it answers no probe
Found = namedtuple("Found", "kind sentence evidence", defaults=[""])
# besides the losses, functions through which a gradient flows
LEARN = ("kl_k1", "kl_k2", "kl_k3", "clipped_surrogate", "token_logprobs", "token_entropies",
         "truncated_importance_weights")
SEARCH = 30  # seconds, after which the search for a reason is given up
UNKNOWN = "the kit finds no mistake and no choice that gives these numbers"
KEPT = ("prune", "prune_pooled", "retain")  # they choose completions by a score
# nobody takes a gradient there: two choose tokens, and at A = 0 the surrogate has a kink in A
NO_GRADIENT = ("mask", "weights", "advantages")
TURNED = "the sign is turned round"
ORDER = "another order"
STILL = "no gradient flows: nothing is learned"
TIMES = "the loss is {:.3g} times as large: a constant in it acts like the learning rate"
LEAK = ("a gradient flows into `{0}`: the loss is right only if the caller hands `{0}` over "
        "detached")


def learns(name):
    return name.endswith("_loss") or name in LEARN


def answers(function, probe, with_gradient=False):
    """Tensors: what a function returns and, if asked for, the gradient of its sum with respect to
    the first argument. A sentence, if it breaks. None, if it is not asked. Of a loss, the
    statistics are left out."""
    first, *rest = (a.clone() if torch.is_tensor(a) else a for a in probe.args)
    first = first.requires_grad_() if with_gradient else first
    try:
        out = outputs(function, (first, *rest), probe.options)
        if with_gradient and not any(x.isnan().any() for x in out):
            out.append(gradients(out, [first])[0])
    except LeftOut:
        return None
    except Broken as error:
        return str(error)
    except Exception as error:
        return f"it raises {type(error).__name__}: {error}".split("\n")[0]
    return [x.detach() for x in out]


def outputs(function, args, options):
    """What a function returns, as tensors, without the statistics of a loss."""
    out = function(*args, **options)
    out = out if isinstance(out, tuple) else (out,)
    return [torch.as_tensor(x) for x in out if not isinstance(x, dict)]


def gradients(out, inputs):
    """The gradient of the sum of all answers with respect to each input; 0 if there is none."""
    total = sum(x.double().sum() for x in out)
    if not total.requires_grad:
        return [torch.zeros_like(x) for x in inputs]
    found = torch.autograd.grad(total, inputs, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found)]


def same(a, b, atol):
    if str in (type(a), type(b)):
        return type(a) is type(b)
    close = partial(torch.allclose, rtol=1e-5, atol=atol, equal_nan=True)
    return len(a) == len(b) and all(
        x.shape == y.shape and close(x.double(), y.double()) for x, y in zip(a, b))


def answered(name, theirs):
    """(probe, their answer, the right one) for each probe that they can be asked."""
    answer = partial(answers, with_gradient=learns(name))
    tried = [(probe, answer(theirs, probe)) for probe in PROBES.get(name, ())]
    return [(p, got, answer(OURS[name], p)) for p, got in tried if got is not None]


def diagnose(name, theirs, tried=None):
    """Found: which version gives the same answers as their function on all probes, and the first
    small probe on which theirs clearly differs from ours. None: nothing shows a difference.

    tried: from `answered`, if it is known."""
    tried = answered(name, theirs) if tried is None else tried
    differ = [(p, got, right) for p, got, right in tried if not same(got, right, p.atol)]
    found, version = None, OURS[name]
    if differ:
        # the same completions in another order show no other difference
        others = [row for row in differ if name in KEPT and not same_set(*row)]
        found, version = explained(name, theirs, tried, evidence_of(name, others or differ))
    if found and found.kind in ("mistake", "broken", "unknown"):
        return found
    edges = [edge for edge in (rare(name, theirs, version), leak(name, theirs, version)) if edge]
    if not edges:
        return found
    parts = [found] * bool(found) + edges
    return Found("edge", "; ".join(part.sentence for part in parts), edges[0].evidence)


def explained(name, theirs, tried, evidence):
    """(Found, the version): why some answers are not ours."""
    breaks = [got for _, got, _ in tried if type(got) is str]
    answer = partial(answers, with_gradient=learns(name))
    alike = same_set if name in KEPT else lambda probe, got, right: same(right, got, probe.atol)
    if name in (*KEPT, "batch_rows") and all(same_set(*row) for row in tried):
        return Found("choice", ORDER, evidence), None
    turned = Version(TURNED, lambda *args, **o: tuple(-x for x in outputs(OURS[name], args, o)),
                     "mistake")
    known = itertools.chain(VERSIONS.get(name, ()), fitted(name, theirs), [turned])
    for version in with_parts(name, tried) if name in LOSSES else in_time(known):
        # the last probes are the largest: they tell most versions apart
        if all(alike(p, g, answer(version.function, p)) for p, g, _ in tried[::-1]):
            return Found(version.kind, version.sentence, evidence), version.function
    if not breaks:
        _, got, right = zip(*tried)
        still = learns(name) and flows(right) and not flows(got)
        return Found(*("mistake", STILL) if still else ("unknown", UNKNOWN), evidence), None
    # a change in place of an argument with a gradient is an error of torch's, and not the reason
    plain = [answers(theirs, p) for p, *_ in tried]
    breaks = [x for x in plain if type(x) is str] or breaks
    silent = len(breaks) == len(tried) and IN_PLACE[:15] not in breaks[0]
    kind = "broken" if silent else "mistake"
    return Found(kind, breaks[0], evidence), None


def flows(found):
    """Whether one of these answers has a gradient, which stands last."""
    return any(answer[-1].any() for answer in found)


def in_time(reasons):
    """The reasons one after the other, as long as there is time."""
    end = time.monotonic() + SEARCH
    return itertools.takewhile(lambda _: time.monotonic() < end, reasons)


def same_set(probe, got, right):
    """Whether these are the same indices, in each row if there are rows, in any order."""
    return type(got) is not str and same(
        [x.double().sort(-1).values for x in got], [x.double().sort(-1).values for x in right], 0.0)


def fitted(name, theirs):
    """Versions with the eps that fits their answers: first where eps shows, at a tiny spread; then
    at a spread of 1, because some set a tiny std to a constant."""
    probes = SPREADS.get(name, ())
    got = [answers(theirs, probe) for probe in probes]
    if got and all(type(x) is list for x in got):
        for i in (0, 2):
            for words, function, kind in FITTED[name]:
                eps = fit(function, probes[i], got[i][0].flatten()[-1])
                there = [answers(function(eps), probe) for probe in probes[i:]]
                if all(same(a, b, 0.0) for a, b in zip(there, got[i:])):
                    yield with_eps(words, function, kind, eps)


def with_eps(words, function, kind, eps):
    """The version of a function for this eps: any from 0 to 0.01 is a choice."""
    words = words.format(plus(eps))
    if eps > 0.0101:
        words, kind = f"{words}: an eps of {eps:.2g} shrinks every advantage", "mistake"
    return Version(words, function(eps), kind)


def fit(function, probe, value):
    """The eps with which the last advantage is `value`: it falls as eps grows. Below 1e-13: 0."""
    low, high = -20.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        larger = function(10**middle)(*probe.args).flatten()[-1] > value
        low, high = (middle, high) if larger else (low, middle)
    return 10**low if low > -13 else 0.0


def with_parts(name, tried):
    """Versions of a loss that are theirs, or a constant times as large, as long as no reference and
    no `weights` are given."""
    plain = [row for row in tried if not {"ref_logp", "weights"} & row[0].options.keys()]
    plain.sort(key=lambda row: -row[0].args[0].numel())  # the largest tells most versions apart
    end = time.monotonic() + SEARCH
    fits = lambda function: time.monotonic() < end and factor(function, plain)
    for sentence, function, kind in taken_apart(name, fits):
        c = factor(function, plain)
        if c == 1:
            yield Version(sentence, function, kind)
            continue
        words = f"{sentence}; {TIMES.format(c)}".removeprefix("; ")
        yield Version(words, lambda *args, f=function, c=c, **o: c * f(*args, **o), kind)
        # or the constant is in their own weights
        yield Version(words, lambda *args, f=function, c=c, weights=None, **o:
                      (c if weights is None else 1) * f(*args, weights=weights, **o), kind)


def factor(function, tried):
    """How many times as large as the answers of a version theirs are: 0 if no number fits."""
    c = 0.0
    for probe, got, _ in tried:
        right = answers(function, probe, with_gradient=True)
        if not c and type(got) is list:
            yours, ours = (torch.cat([x.double().flatten() for x in row]) for row in (got, right))
            c = (yours @ ours / (ours @ ours)).item() if len(yours) == len(ours) else 0.0
            c = 1.0 if abs(c - 1) < 1e-5 else c
        if not (c > 0 and same(got, [c * x for x in right], probe.atol)):
            return 0.0
    return c


# --- edges: inputs that are rare ---


def rare(name, theirs, version):
    """Found, if theirs answers a rare input in another way than ours, or a loss than its version.
    Of several questions the first is the rare one."""
    judge = version if name.endswith("_loss") else OURS[name]
    first = lambda found: [x[:1] if x.dim() else x for x in found]
    for probe, words in EDGES.get(name, ()):
        learn = learns(name) and probe.gradient
        got, right = (answers(function, probe, learn) for function in (theirs, judge))
        if type(got) is list and not same(first(got), first(right), probe.atol):
            last = "gradient " * learn
            return Found("edge", words, shown(OURS[name], probe, got, right, last))


def leak(name, theirs, version):
    """Found, if a gradient flows into an argument that has none in ours, or in that version."""
    if not learns(name):
        return None
    for probe in PROBES.get(name, ()):
        given = arguments(inspect.signature(OURS[name]), probe.args, probe.options)
        floats = [key for key, x in given.items()
                  if torch.is_tensor(x) and x.is_floating_point() and key not in NO_GRADIENT][1:]
        try:
            got, right = (all_gradients(f, probe, given, floats) for f in (theirs, version))
        except Exception:
            continue  # what breaks here was told before
        for key in floats:
            if got[key].any() and not same([got[key]], [right[key]], 1e-6):
                evidence = shown(OURS[name], probe, [got[key]], [right[key]], f"{key}: ")
                return Found("edge", LEAK.format(key), evidence)


def all_gradients(function, probe, given, names):
    """{name: gradient of the sum of all answers} for these arguments."""
    new = {k: x.clone() if torch.is_tensor(x) else x for k, x in given.items()}
    new |= {name: new[name].requires_grad_() for name in names}
    args, options = [*new.values()][: len(probe.args)], {k: new[k] for k in probe.options}
    out = outputs(function, args, options)
    return dict(zip(names, gradients(out, [new[name] for name in names])))


# --- evidence ---


def evidence_of(name, differ):
    """The first probe that shows a difference clearly, in few numbers."""
    clear = [row for row in differ if not same(row[1], row[2], 0.01)] or differ
    small = [row for row in clear if torch.as_tensor(row[0].args[0]).numel() <= 8]
    probe, got, right = (small or clear)[0]
    return shown(OURS[name], probe, got, right, "gradient " if learns(name) else "")


def shown(ours, probe, got, right, last):
    """One line: the input, their answer and the right one. last: a word for the last answer."""
    given = arguments(inspect.signature(ours), probe.args, probe.options)
    inputs = ", ".join(f"{name} = {text(value)}" for name, value in given.items())
    if isinstance(got, str):
        return f"{inputs}: {got}"
    i = next((i for i, (a, b) in enumerate(zip(got, right)) if not same([a], [b], probe.atol)), 0)
    word = last if last and i == len(right) - 1 else ""
    return f"{inputs}: yours {word}{text(got[i])}, right {text(right[i])}"


def text(value):
    if not torch.is_tensor(value):
        return str(value)
    if not value.is_floating_point():
        return str(value.tolist())
    rows = value.detach().double().tolist()
    return str(json.loads(json.dumps(rows), parse_float=lambda x: float(f"{float(x):.5g}")))
