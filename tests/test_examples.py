"""examples/: a reward, a rule, an algorithm and a data set of one's own, each run as its first
lines say."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.base.files import own_function
from examples.my_algorithm import by_length
from examples.my_loss import dual_clip_loss
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


def test_an_advantage_of_ones_own_compares_with_a_mean_by_length():
    lengths = torch.tensor([[1, 2, 2, 5], [3, 1, 1, 1]])
    rewards = torch.tensor([[1.0, 0, 0, 0], [2, 1, 1, 0]])
    A = by_length(SimpleNamespace(total=rewards, lengths=lengths))
    expected = [[0.9, -0.1, -0.1, -0.1], [2 / 3, -1 / 3, -1 / 3, -4 / 3]]
    torch.testing.assert_close(A, torch.tensor(expected))


def test_a_loss_of_ones_own_bounds_a_bad_token_that_has_become_likely():
    """The ratios 1, 2, 4 at A = −2 and 0.5: 3A takes the place of 4A, and nothing else changes."""
    logp = torch.tensor([[1.0, 2.0, 4.0]] * 2, dtype=torch.float64).log().requires_grad_()
    A, old_logp, mask = torch.tensor([-2.0, 0.5]), torch.zeros(2, 3), torch.ones(2, 3).bool()
    clip = {"weights": torch.ones(2, 3), "beta": 0.0, "clip_low": 0.2, "clip_high": 0.2}
    loss, stats = dual_clip_loss(logp, old_logp, A, mask, **clip)
    assert loss.item() == pytest.approx(2 + 4 + 6 - 0.5 - 0.6 - 0.6)
    # ∂ loss / ∂ log π = −ρA, and 0 where a bound acts
    gradient = torch.autograd.grad(loss, logp)[0]
    torch.testing.assert_close(gradient, torch.tensor([[2.0, 4, 0], [-0.5, 0, 0]]).double())
    assert stats["clip_fraction"].item() == pytest.approx(1 / 6)


@pytest.mark.slow
def test_a_run_takes_a_loss_of_ones_own_which_may_ask_for_the_entropy(small, tmp_path):
    options = ["--eval_questions", "1", "--dtype", "float32", "--mu", "1", "--minibatches", "1"]
    options += ["--algorithm"]
    one, other = (
        one_step(small, tmp_path / name, *options, name, program="examples/my_loss.py")
        for name in ("dual_clip", "with_entropy")
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
