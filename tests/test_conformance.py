"""conformance/: other people's functions are checked, and what is wrong is said in one sentence."""

import os
import subprocess
import sys

import pytest

from conformance.compare import MODULES, diagnose
from conformance.mistakes import VERSIONS
from tests.concepts.test_copying import ROOT

# Of the losses, two: the others are made of the same parts.
NAMED = [name for name in VERSIONS if not name.endswith("_loss")]
NAMED += ["grpo_loss", "gspo_loss", "value_loss"]


def conform(path, *words, before=""):
    """(exit code, output) of `python -m conformance`. before: lines that run first."""
    program = f"{before}\nimport runpy\nrunpy.run_module('conformance', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(path), *map(str, words)], cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("name", NAMED)
def test_each_known_version_is_named_as_what_it_is(name):
    for version in VERSIONS[name]:
        if name.endswith("_loss") and "; " in version.sentence:
            continue  # two parts at once
        found = diagnose(name, version.function)
        assert found and (found.sentence, found.kind) == (version.sentence, version.kind)


def test_two_changes_at_once_are_named_both():
    one, two = "max in place of min: the clip acts on the wrong side [1]", "in DAPO"
    [version] = [version for version in VERSIONS["grpo_loss"]
                 if version.sentence.startswith(one) and version.sentence.endswith(two)]
    found = diagnose("grpo_loss", version.function)
    assert found.kind == "mistake" and found.sentence == version.sentence


def test_a_mistake_that_nobody_made_before_is_shown_with_its_input():
    found = diagnose("kl_k3", lambda p, q: 3 * (p - q))
    assert (found.kind, found.sentence) == ("mistake", "no known mistake gives these numbers")
    assert found.evidence == (
        "logp = [[-0.69315]], ref_logp = [[-0.69315]]: yours gradient [[3.0]], right [[-0.0]]")


def test_an_error_is_evidence_too():
    found = diagnose("kl_k3", lambda p, q: p @ q @ 1)
    assert "it raises TypeError" in found.evidence


BROKEN = '''
import math
import torch
import grpo, cppo
from family import dapo, drgrpo, gspo, ppo, tis

def kl_k3(p, q):
    return torch.expm1(p - q) - (p - q)
def group_advantages(rewards):
    return (rewards - rewards.mean()) / (rewards.std() + 1e-4)
def clipped_surrogate(ratio, advantages, *, clip_low=0.2):
    a = advantages.unsqueeze(-1) if advantages.dim() < ratio.dim() else advantages
    return ratio.clamp(1 - clip_low, 1 + clip_low) * a
def token_logprobs(logits, tokens, *, temperature=1.0):
    return grpo.token_logprobs(logits, tokens)
def grpo_loss(logp, old_logp, advantages, mask, *, ref_logp=None, beta=0.04):
    loss, _ = grpo.grpo_loss(logp, old_logp, advantages, mask, ref_logp=ref_logp, beta=-beta)
    return loss
def keep_count(group_size, pruning_rate):
    return int(group_size * (1 - pruning_rate))
def prune(advantages, k):
    return advantages.argsort(dim=1, descending=True, stable=True)[:, :k].sort(dim=1).values
def gspo_loss(logp, old_logp, advantages, mask, *, clip_low=0.2, clip_high=0.2):
    return gspo.gspo_loss(logp, old_logp, advantages, mask, clip_low=clip_low, clip_high=clip_high)
def drgrpo_loss(logp, old_logp, advantages, mask, *, max_tokens, clip_low=0.2, clip_high=None):
    return grpo.grpo_loss(logp, old_logp, advantages, mask, clip_low=clip_low, clip_high=clip_high)
def gae(rewards, values, mask, *, gamma=1.0, lam=0.95):
    advantages, _ = ppo.gae(rewards, values, mask, gamma=gamma, lam=lam)
    advantages = ppo.whiten(advantages, mask)
    return advantages, advantages + values.masked_fill(~mask.bool(), 0.0)

kl_k2 = grpo.kl_k2
'''
SAID = {
    "kl_k3": "k3 with the ratio upside down",
    "group_advantages": "mean and std of the whole batch",
    "clipped_surrogate": "clip(ρ)A without the min",
    "token_logprobs": "the temperature is ignored",
    "grpo_loss": "the sign of the KL term is turned round",
    "keep_count": "⌊G(1−P)⌋ in floats",
    "prune": "the largest A, not the largest |A|",
    "gspo_loss": "clip range 0.2, as GRPO's",
    "drgrpo_loss": "the weights of another algorithm [6]: a mean over each completion",
    "gae": "whitened before the returns are taken",
}


def test_a_deliberate_break_in_each_of_ten_functions_is_named(tmp_path):
    (tmp_path / "mine.py").write_text(BROKEN)
    code, output = conform(tmp_path / "mine.py")
    rows = {line.split()[0]: line for line in output.splitlines() if line[:1].isalpha()}
    assert code == 1 and rows["kl_k2"].endswith("✓ ")
    for name, words in SAID.items():
        assert f"✗ {words}" in rows[name]
        held, of = rows[name].split("✗")[0].split()[1::2]
        assert int(held) < int(of)  # the concept tests notice it, too


ALONE = """
import sys

class Blocked:
    def find_spec(self, name, *_):
        if name.split(".")[0] in ("transformers", "huggingface_hub", "datasets", "peft", "engine"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
"""


@pytest.mark.slow
def test_all_functions_of_ours_hold_with_torch_and_pytest_alone(tmp_path):
    modules = sorted(set(MODULES.values()))
    (tmp_path / "ours.py").write_text("".join(f"from {name} import *\n" for name in modules))
    code, output = conform(tmp_path / "ours.py", before=ALONE)
    assert code == 0, output
    assert output.count("✓") == len(MODULES) + 1 and "0 of 0" not in output


def test_a_checkout_may_have_a_grpo_of_its_own_and_options_that_are_missing_are_not_asked_for(
    tmp_path
):
    (tmp_path / "grpo.py").write_text("def theirs(r):\n    return r - r.mean(1, keepdim=True)\n")
    (tmp_path / "mine.py").write_text("from grpo import theirs as group_advantages\n")
    code, output = conform(tmp_path / "mine.py", "--path", tmp_path)
    assert code == 0 and "≈ no division by the std, as in Dr. GRPO" in output


@pytest.mark.parametrize("text, words", [
    (None, "is no Python file"),
    ("x = 1", "defines none of our functions"),
    ("import no_such_module", "Install it, or name its checkout: --path"),
])
def test_bad_input_is_told_in_one_sentence(text, words, tmp_path):
    if text:
        (tmp_path / "mine.py").write_text(text)
    code, output = conform(tmp_path / "mine.py")
    assert code == 1 and words in output and "Traceback" not in output
