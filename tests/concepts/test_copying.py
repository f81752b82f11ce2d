"""What a copier may rely on: each public function of the paper and of the family, pasted below four
imports into an empty file, does what it does here.

A function is pasted alone, or together with the functions that its docstring names in `…`. A reward
needs answers/ beside it, and scores.py needs numpy.
"""

import ast
import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.examples import ADVANTAGES, LOGP, MASK, OLD, REF, seeded

ROOT = Path(__file__).parents[2]
FAMILY = [f"family/{path.name}" for path in sorted(ROOT.glob("family/[!_]*.py"))]
FILES = ["grpo.py", "cppo.py", "allocate.py", "scores.py", "rewards.py", *FAMILY]
IMPORTS = "import math, re, heapq, torch\n"
EXTRA = {
    "scores.py": "import numpy as np\n",
    "rewards.py": "from answers import *\n",
}

REWARDS = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 0.0, 2.0, 0.5]])
A = torch.tensor([[-1.5, 0.3, 0.2, 1.0], [0.1, -0.2, 0.3, -0.4]])
P = torch.tensor([[1.0, 0.4, 0.3, 0.3], [0.5, 0.5, 0.5, 0.5]])
U = torch.tensor([[0.2], [0.7]])
LOGITS = torch.randn(6, 5, 7, generator=seeded(1))
TOKENS = torch.randint(7, (6, 5), generator=seeded(2))
TEXTS = ["<think>1+2</think>\n<answer>3</answer>", "<answer>4</answer>"]
CODE = ["<think>easy</think>\n```python\nprint(3)\n```", "```python"]
RECORDS = [
    {"index": i, "completion": str(n), "correct": n == 1} for i in range(3) for n in (1, i, 2)]
LOSS = (LOGP, OLD, ADVANTAGES, MASK)


def given(*args, **options):
    return args, options


CALLS = {  # {file: {public function: the arguments of a call}}
    "grpo.py": {
        "group_advantages": given(REWARDS),
        "token_logprobs": given(LOGITS, TOKENS, temperature=0.7),
        "token_entropies": given(LOGITS),
        "kl_k1": given(LOGP, REF),
        "kl_k2": given(LOGP, REF),
        "kl_k3": given(LOGP, REF),
        "importance_ratio": given(LOGP, OLD, MASK),
        "clipped_surrogate": given(LOGP.exp(), ADVANTAGES),
        "sequence_mean_weights": given(MASK),
        "surrogate_loss": given(LOGP.exp(), ADVANTAGES, LOGP, MASK, MASK, ref_logp=REF),
        "grpo_loss": given(*LOSS, ref_logp=REF),
    },
    "cppo.py": {
        "keep_count": given(10, 0.9),
        "prune": given(A, 2, allowed=A < 0.9),
        "batch_rows": given(torch.tensor([[0, 3], [1, 2]]), 4),
        "prune_below": given(A, 0.3),
        "prune_pooled": given(A, 3),
    },
    "allocate.py": {
        "questions_per_step": given(2, 16, 3),
        "fill": given([3, 4, 5], 8),
        "micro_batches": given([3, 9, 4, 1], 10),
        "balance": given([3, 9, 4, 1], 2),
        "step_time": given([10, 20], overhead=1.0),
    },
    "scores.py": {
        "verdict": given(0.5),
        "pass_at_k": given(5, 2, 3),
        "majority_is_right": given(RECORDS[:3], int),
        "interval": given([0.0, 0.5, 1.0]),
        "paired": given([0, 1, 0, 1], [1, 1, 0, 1], draws=100),
        "summarize": given(RECORDS, int),
        "mean_value": given(RECORDS, "correct"),
        "group_by_question": given(RECORDS),
    },
    "rewards.py": {
        "gsm8k_accuracy": given(TEXTS, answer=["#### 3", "5"]),
        "toy_accuracy": given(TEXTS, answer=["3", "5"]),
        "number_accuracy": given(TEXTS, answer=["3", "5"]),
        "format_reward": given(TEXTS),
        "soft_format_reward": given(TEXTS),
        "code_format": given(CODE),
        "soft_code_format": given(CODE),
    },
    "family/cispo.py": {"cispo_loss": given(*LOSS, ref_logp=REF, beta=0.1)},
    "family/dapo.py": {
        "token_mean_weights": given(MASK),
        "has_signal": given(REWARDS),
        "overlong_penalty": given(torch.tensor([16, 17, 25]), max_length=20, cache=4),
        "dapo_loss": given(*LOSS),
    },
    "family/deepseek_v32.py": {
        "unbiased_kl": given(LOGP, OLD, REF),
        "off_policy_mask": given(ADVANTAGES, LOGP, OLD, MASK, threshold=0.1),
        "deepseek_v32_loss": given(*LOSS, ref_logp=REF),
        "kept_logprobs": given(LOGITS, TOKENS, LOGITS > -9),
    },
    "family/drgrpo.py": {
        "constant_weights": given(MASK, max_tokens=5),
        "drgrpo_loss": given(*LOSS, max_tokens=5),
    },
    "family/gdpo.py": {"decoupled_advantages": given(torch.stack([REWARDS, A]))},
    "family/gfpo.py": {
        "retain": given(A, 2),
        "token_efficiency": given(REWARDS, torch.tensor([[1, 2, 3, 0], [4, 5, 6, 7]])),
        "retained_advantages": given(REWARDS, torch.tensor([[0, 1], [1, 3]])),
        "adaptive_k": given(torch.tensor([0.1, 0.9]), torch.tensor([0.2, 0.5, 0.8])),
    },
    "family/gspo.py": {
        "sequence_ratio": given(LOGP, OLD, MASK),
        "token_ratio": given(LOGP, OLD, MASK),
        "gspo_loss": given(*LOSS, token_level=True),
    },
    "family/lite_ppo.py": {"batch_std_advantages": given(REWARDS)},
    "family/maxrl.py": {"mean_normalized_advantages": given(REWARDS)},
    "family/nat.py": {
        "prefix_chances": given(MASK, share=0.5),
        "random_prefixes": given(MASK[:2], U, share=0.5),
        "prefix_factors": given(MASK[:2], U, share=0.5),
    },
    "family/pods.py": {"max_variance_subset": given(REWARDS, 2)},
    "family/ppo.py": {
        "token_rewards": given(ADVANTAGES, OLD, REF, MASK, beta=0.1),
        "gae": given(OLD, REF, MASK),
        "whiten": given(OLD, MASK),
        "ppo_loss": given(LOGP, OLD, REF, MASK, ref_logp=REF),
        "value_loss": given(LOGP, OLD, REF, MASK),
    },
    "family/rloo.py": {"leave_one_out_advantages": given(REWARDS)},
    "family/sapo.py": {"sapo_loss": given(*LOSS, ref_logp=REF, beta=0.1)},
    "family/tis.py": {
        "truncated_importance_weights": given(LOGP, OLD, MASK, cap=1.2, low=0.5),
        "sequence_importance_weights": given(LOGP, OLD, MASK, cap=1.2, masked=True),
    },
    "family/unbiased.py": {
        "keep_probabilities": given(A.abs(), 2),
        "draw": given(P, U),
        "reweighted": given(A, P),
    },
}
# these put other functions together; all others that are no loss are pasted alone
OF_SEVERAL = {"paired", "summarize", "token_ratio", "unbiased_kl", "kept_logprobs",
              "prefix_factors"}


def functions_of(file):
    """{name: node} of the public functions of a file."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")}


def lifted(file, name):
    """{name: source} of a function and of those that its docstring names, and so on, of its file or
    of grpo.py."""
    known = functions_of("grpo.py") | functions_of(file)
    found, wanted = {}, [name]
    for wanted_name in wanted:  # it grows
        node = known[wanted_name]
        found[wanted_name] = ast.unparse(node)
        named = re.findall(r"`(\w+)`", ast.get_docstring(node))
        wanted += [other for other in named if other in known and other not in wanted]
    return found


def pasted(file, name):
    """The function in a file that has nothing else but imports and, if the function may need them,
    the functions that its docstring names."""
    sources = lifted(file, name)
    if not name.endswith("_loss") and name not in OF_SEVERAL:
        sources = {name: sources[name]}
    alone = {}
    exec("\n\n".join([IMPORTS, EXTRA.get(file, ""), *sources.values()]), alone)
    return alone[name]


@pytest.mark.parametrize("file", FILES)
def test_every_public_function_is_called_here(file):
    called, there = {*CALLS.get(file, ())}, {*functions_of(file)}
    assert called == there, (
        f"add a call to CALLS in this file of {there - called}, or take out {called - there}")


PASTED = [(file, name) for file, calls in CALLS.items() for name in calls]


@pytest.mark.parametrize("file, name", PASTED)
def test_a_function_that_is_pasted_does_what_it_does_here(file, name):
    args, options = CALLS[file][name]
    here = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    right = getattr(here, name)(*args, **options)
    assert repr(pasted(file, name)(*args, **options)) == repr(right)


def test_grpos_loss_is_six_functions():
    assert len(lifted("grpo.py", "grpo_loss")) == 6


@pytest.mark.parametrize("file, name", PASTED)
def test_a_function_has_at_most_one_check(file, name):
    """An assert that says which shape is meant. No function raises anything itself."""
    nodes = list(ast.walk(functions_of(file)[name]))
    checks = [node for node in nodes if isinstance(node, ast.Assert)]
    assert len(checks) <= 1 and all(check.msg for check in checks)
    assert not [node for node in nodes if isinstance(node, ast.Raise)]


# --- whole files ---

ANSWERS = [f"answers/{path.name}" for path in ROOT.glob("answers/*.py")]
NEEDS = {"allocate.py": set(), "scores.py": {"numpy"}}
NEEDS |= dict.fromkeys([*ANSWERS, "rewards.py"], {"answers"})
NEEDS |= dict.fromkeys(["grpo.py", "loop/records.py"], {"torch"})
NEEDS |= dict.fromkeys(["cppo.py", *FAMILY], {"torch", "grpo"})


@pytest.mark.parametrize("file", NEEDS)
def test_a_copied_file_needs_no_more_than_it_says(file):
    """Python's own modules aside. An import inside a function counts, too."""
    text = (ROOT / file).read_text(encoding="utf-8")
    names = re.findall(r"^ *from (\w+)\S* import", text, re.MULTILINE)
    names += re.findall(r"^ *import (\w+)", text, re.MULTILINE)
    assert {*names} - {*sys.stdlib_module_names} <= NEEDS[file]
