"""The cases of golden.json as small inputs, on which somebody's answers are compared with ours."""

import json
from collections import namedtuple
from pathlib import Path

import torch

FILE = Path(__file__).with_name("golden.json")
# atol: how far an answer may be from ours, besides 1e-5 of it. gradient: compare it, too
Probe = namedtuple("Probe", "args options atol gradient", defaults=[{}, 1e-6, True])


def numbers(x):
    """JSON has no ∞ and no NaN: they are texts there."""
    if isinstance(x, list):
        return [numbers(y) for y in x]
    return float(x) if x in ("inf", "-inf", "nan") else x


def tensor(name, x, dtype):
    """Lists become tensors, a mask becomes bool."""
    if not isinstance(x, list):
        return x
    found = torch.tensor(numbers(x), dtype=torch.float64)
    if name == "mask":
        return found.bool()
    whole = torch.tensor(numbers(x)).dtype == torch.int64
    return found.long() if whole else found.to(dtype)


def probe(case, dtype=torch.float64, gradient=True):
    args, options = ({name: tensor(name, x, dtype) for name, x in case[part].items()}
                     for part in ("inputs", "options"))
    return Probe((*args.values(),), options, case["tolerance"], gradient)


# plain Python, not asked with tensors
LISTS = ("fill", "micro_batches", "balance", "extract_answer", "to_number")
CASES = {name: known["cases"] for name, known in json.loads(FILE.read_text("utf-8")).items()
         # no file of one's own may define a ratio
         if name not in (*LISTS, "importance_ratio")}
CASES["cppo_loss"] = CASES["grpo_loss"]
PROBES = {name: [probe(case) for case in cases if not {"rare", "ours"} & case.keys()]
          for name, cases in CASES.items()}
# Inputs that are rare: {name: [(probe, what is said if the answer or the gradient is another)]}.
# In float32: there numbers overflow, and a mean is rounded.
EDGES = {name: [(probe(case, torch.float32, name != "kl_k3"), case["asks"])
                for case in cases if "rare" in case] for name, cases in CASES.items()}
# Here and not in golden.json, because a port needs no `allowed`. At |A| = 0 it counts, too.
NOT_ALLOWED = Probe((torch.tensor([[-2.0, 0.0]]), 1), {"allowed": torch.tensor([[False, True]])})
EDGES |= dict.fromkeys(["prune", "prune_pooled"], [
    (NOT_ALLOWED, "a completion that is not `allowed` is kept before one that is")])
# A tiny spread shows the eps of (r − mean)/(std + eps); three spreads show where it is added.
PAIRS = [torch.tensor([[0.0, d]], dtype=torch.float64) for d in (1e-9, 1e-6, 1.0)]
SPREADS = {"group_advantages": [Probe((r,)) for r in PAIRS],
           "decoupled_advantages": [Probe((r[None],)) for r in PAIRS]}
