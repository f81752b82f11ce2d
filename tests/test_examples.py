"""examples/: a reward, a rule, an algorithm and a data set of one's own, each run as its first
lines say."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.base.files import own_function
from examples.my_algorithm import leave_one_out
from examples.my_loss import cispo_loss
from tests.training import one_step

ROOT = Path(__file__).parents[1]


def test_rules_of_ones_own():
    per_token, group_length = (
        own_function(f"{ROOT}/examples/my_rule.py:{name}", "--keep")
        for name in ("per_token", "group_length")
    )
    rollout = SimpleNamespace(lengths=torch.tensor([[2, 8, 2], [1, 3, 2]]))
    advantages = torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.3, -0.4]])
    # |A| / length: 0.5, 0.25, 0.25; 0, 0.1, 0.2
    assert per_token(rollout, advantages, 1).tolist() == [0, 5]
    rows, own = group_length(rollout, advantages, 2)
    # A |o| / 4; and / 2
    assert rows.tolist() == [0, 1, 4, 5] and own.tolist() == pytest.approx([0.5, -4, 0.45, -0.4])


def test_a_reward_of_ones_own_pays_for_brevity():
    brevity = own_function(f"{ROOT}/examples/my_reward.py:brevity", "--rewards")
    assert brevity(["", "x" * 20, "x" * 200], answer=["", "", ""]) == [1.0, 0.8, 0.0]


def test_an_advantage_of_ones_own_compares_with_the_others():
    A = leave_one_out(SimpleNamespace(total=torch.tensor([[1.0, 0, 0, 0], [2, 1, 1, 0]])))
    expected = [[3.0, -1, -1, -1], [4, 0, 0, -4]]  # thirds
    torch.testing.assert_close(3 * A, torch.tensor(expected))


def test_a_loss_of_ones_own_bounds_the_ratio_and_keeps_every_gradient():
    torch.manual_seed(0)
    logp, old_logp, weights = torch.randn(3, 3, 4, dtype=torch.float64).unbind()
    A, mask, weights = torch.tensor([1.0, -2.0, 0.5]), torch.ones(3, 4).bool(), weights.exp()
    clip = {"weights": weights, "beta": 0.0, "clip_low": 1.0, "clip_high": 0.5}
    loss, stats = cispo_loss(logp.requires_grad_(), old_logp, A, mask, **clip)
    ratio = (logp.detach() - old_logp).exp()
    # ∂ loss / ∂ log π = −w min(ρ, 1.5) A
    gradient = -weights * ratio.clamp(max=1.5) * A[:, None]
    torch.testing.assert_close(torch.autograd.grad(loss, logp)[0], gradient)
    share = (weights * (ratio > 1.5)).sum() / weights.sum()
    assert stats["clip_fraction"].item() == pytest.approx(share.item())


@pytest.mark.slow
def test_a_run_takes_a_loss_of_ones_own_which_may_ask_for_the_entropy(small, tmp_path):
    options = ["--eval_questions", "1", "--dtype", "float32", "--mu", "1", "--minibatches", "1"]
    options += ["--algorithm"]
    one, other = (
        one_step(small, tmp_path / name, *options, name, program="examples/my_loss.py")
        for name in ("cispo", "cispo_entropy")
    )
    assert one["clip_fraction"] == other["clip_fraction"] == 0
    assert one["grad_norm"] != other["grad_norm"]
    assert other["loss"] == pytest.approx(one["loss"] - 0.001 * one["entropy_trained"], abs=1e-7)


def test_a_run_takes_a_rule_and_a_reward_of_ones_own(small, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    mine = [
        "--keep", "examples/my_rule.py:per_token", "--rewards", "toy_accuracy",
        "examples/my_reward.py:brevity:0.1",
    ]
    metrics = one_step(small, tmp_path, "--eval_questions", "1", *mine)
    assert metrics["kept"] == metrics["completions"] // 4 and 0 < metrics["reward/brevity"] < 1


@pytest.mark.slow
def test_a_run_takes_an_algorithm_of_ones_own(small, tmp_path):
    words = ["--algorithm", "mine", "--eval_questions", "1"]
    metrics = one_step(small, tmp_path, *words, program="examples/my_algorithm.py")
    assert metrics["kept"] == 16


def test_a_run_takes_a_data_set_of_ones_own(small, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = [
        "--dataset", "examples/my_dataset.jsonl", "--rewards", "number_accuracy",
        "--max_new_tokens", "8",
    ]
    metrics = one_step(small, tmp_path, *words)
    assert metrics["questions"] == 4 and "reward/number_accuracy" in metrics
