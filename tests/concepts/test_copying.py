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

from tests.examples import ADVANTAGES, LOGP, MASK, OLD, REF, seeded

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
CALLS = {  # {file: {public function: how it is called}}
    "grpo.py": {
        "group_advantages": lambda f: f(REWARDS),
        "token_logprobs": lambda f: f(LOGITS, TOKENS, temperature=0.7),
        "token_entropies": lambda f: f(LOGITS),
        "kl_k1": lambda f: f(LOGP, REF),
        "kl_k2": lambda f: f(LOGP, REF),
        "kl_k3": lambda f: f(LOGP, REF),
        "importance_ratio": lambda f: f(LOGP, OLD, MASK),
        "clipped_surrogate": lambda f: f(LOGP.exp(), ADVANTAGES),
        "sequence_mean_weights": lambda f: f(MASK),
        "surrogate_loss": lambda f: f(LOGP.exp(), ADVANTAGES, LOGP, MASK, MASK, ref_logp=REF),
        "grpo_loss": lambda f: f(*LOSS, ref_logp=REF),
    },
    "cppo.py": {
        "keep_count": lambda f: f(10, 0.9),
        "prune": lambda f: f(A, 2, allowed=A < 0.9),
        "batch_rows": lambda f: f(torch.tensor([[0, 3], [1, 2]]), 4),
        "prune_below": lambda f: f(A, 0.3),
        "prune_pooled": lambda f: f(A, 3),
    },
    "allocate.py": {
        "questions_per_step": lambda f: f(2, 16, 3),
        "fill": lambda f: f([3, 4, 5], 8),
        "micro_batches": lambda f: f([3, 9, 4, 1], 10),
        "balance": lambda f: f([3, 9, 4, 1], 2),
        "step_time": lambda f: f([10, 20], overhead=1.0),
    },
    "scores.py": {
        "verdict": lambda f: f(0.5),
        "pass_at_k": lambda f: f(5, 2, 3),
        "majority_is_right": lambda f: f(RECORDS[:3], int),
        "interval": lambda f: f([0.0, 0.5, 1.0]),
        "paired": lambda f: f([0, 1, 0, 1], [1, 1, 0, 1], draws=100),
        "summarize": lambda f: f(RECORDS, int),
        "mean_value": lambda f: f(RECORDS, "correct"),
        "group_by_question": lambda f: f(RECORDS),
    },
    "rewards.py": {
        "gsm8k_accuracy": lambda f: f(TEXTS, answer=["#### 3", "5"]),
        "toy_accuracy": lambda f: f(TEXTS, answer=["3", "5"]),
        "number_accuracy": lambda f: f(TEXTS, answer=["3", "5"]),
        "format_reward": lambda f: f(TEXTS),
        "soft_format_reward": lambda f: f(TEXTS),
        "code_format": lambda f: f(CODE),
        "soft_code_format": lambda f: f(CODE),
    },
    "family/cispo.py": {"cispo_loss": lambda f: f(*LOSS, ref_logp=REF, beta=0.1)},
    "family/dapo.py": {
        "token_mean_weights": lambda f: f(MASK),
        "has_signal": lambda f: f(REWARDS),
        "overlong_penalty": lambda f: f(torch.tensor([16, 17, 25]), max_length=20, cache=4),
        "dapo_loss": lambda f: f(*LOSS),
    },
    "family/deepseek_v32.py": {
        "unbiased_kl": lambda f: f(LOGP, OLD, REF),
        "off_policy_mask": lambda f: f(ADVANTAGES, LOGP, OLD, MASK, threshold=0.1),
        "deepseek_v32_loss": lambda f: f(*LOSS, ref_logp=REF),
        "kept_logprobs": lambda f: f(LOGITS, TOKENS, LOGITS > -9),
    },
    "family/drgrpo.py": {
        "constant_weights": lambda f: f(MASK, max_tokens=5),
        "drgrpo_loss": lambda f: f(*LOSS, max_tokens=5),
    },
    "family/gdpo.py": {"decoupled_advantages": lambda f: f(torch.stack([REWARDS, A]))},
    "family/gfpo.py": {
        "retain": lambda f: f(A, 2),
        "token_efficiency": lambda f: f(REWARDS, torch.tensor([[1, 2, 3, 0], [4, 5, 6, 7]])),
        "retained_advantages": lambda f: f(REWARDS, torch.tensor([[0, 1], [1, 3]])),
        "adaptive_k": lambda f: f(torch.tensor([0.1, 0.9]), torch.tensor([0.2, 0.5, 0.8])),
    },
    "family/gspo.py": {
        "sequence_ratio": lambda f: f(LOGP, OLD, MASK),
        "token_ratio": lambda f: f(LOGP, OLD, MASK),
        "gspo_loss": lambda f: [f(*LOSS, token_level=token_level) for token_level in (True, False)],
    },
    "family/lite_ppo.py": {"batch_std_advantages": lambda f: f(REWARDS)},
    "family/maxrl.py": {"mean_normalized_advantages": lambda f: f(REWARDS)},
    "family/nat.py": {
        "prefix_chances": lambda f: f(MASK, share=0.5),
        "random_prefixes": lambda f: f(MASK[:2], U, share=0.5),
        "prefix_factors": lambda f: f(MASK[:2], U, share=0.5),
    },
    "family/pods.py": {"max_variance_subset": lambda f: f(REWARDS, 2)},
    "family/ppo.py": {
        "token_rewards": lambda f: f(ADVANTAGES, OLD, REF, MASK, beta=0.1),
        "gae": lambda f: f(OLD, REF, MASK),
        "whiten": lambda f: f(OLD, MASK),
        "ppo_loss": lambda f: f(LOGP, OLD, REF, MASK, ref_logp=REF),
        "value_loss": lambda f: f(LOGP, OLD, REF, MASK),
    },
    "family/rloo.py": {"leave_one_out_advantages": lambda f: f(REWARDS)},
    "family/sapo.py": {"sapo_loss": lambda f: f(*LOSS, ref_logp=REF, beta=0.1)},
    "family/tis.py": {
        "truncated_importance_weights": lambda f: f(LOGP, OLD, MASK, cap=1.2, low=0.5),
        "sequence_importance_weights": lambda f: f(LOGP, OLD, MASK, cap=1.2, masked=True),
    },
    "family/unbiased.py": {
        "keep_probabilities": lambda f: f(A.abs(), 2),
        "draw": lambda f: f(P, U),
        "reweighted": lambda f: f(A, P),
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


def pasted(file, names):
    """The functions with these names in a file that has nothing else but imports."""
    sources = lifted(file, names[0])
    text = "\n\n".join([IMPORTS + EXTRA.get(file, ""), *(sources[name] for name in names)])
    alone = {}
    exec(text, alone)
    return alone


def needed(file, name):
    """The function, and those that its docstring names if it may need others."""
    others = name.endswith("_loss") or name in OF_SEVERAL
    return list(lifted(file, name)) if others else [name]


@pytest.mark.parametrize("file", FILES)
def test_every_public_function_is_called_here(file):
    assert list(CALLS[file]) == list(functions_of(file))


PASTED = [(file, name) for file, calls in CALLS.items() for name in calls]


@pytest.mark.parametrize("file, name", PASTED)
def test_a_function_that_is_pasted_does_what_it_does_here(file, name):
    call = CALLS[file][name]
    here = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    alone = pasted(file, needed(file, name))
    assert repr(call(alone[name])) == repr(call(getattr(here, name)))


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
NEEDS |= dict.fromkeys(["grpo.py", "records.py"], {"torch"})
NEEDS |= dict.fromkeys(["cppo.py", *FAMILY], {"torch", "grpo"})


@pytest.mark.parametrize("file", NEEDS)
def test_a_copied_file_needs_no_more_than_it_says(file):
    """Python's own modules aside. An import inside a function counts, too."""
    names = []
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module)
    assert {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) <= NEEDS[file]
