"""What GDPO promises: each reward is normalised by itself, so that different groups look different.

The order: the paper's example, the three steps as loops, groups without signal, a note on CPPO, and
bad input.
"""

import statistics

import pytest
import torch

from family.gdpo import decoupled_advantages
from grpo import group_advantages
from tests.examples import F64, ours, seeded

# --- the definition -------------------------------------------------------------------------------

# Two rewards, two questions, two completions. The sums are (0, 1) and (0, 2).
EXAMPLE = torch.tensor([[[0.0, 1.0], [0.0, 1.0]], [[0.0, 0.0], [0.0, 1.0]]], dtype=F64)


def test_grpo_cannot_tell_the_papers_two_groups_apart_and_gdpo_can():
    h = 0.5**0.5  # 0.71
    same = torch.tensor([[-h, h], [-h, h]], dtype=F64)
    torch.testing.assert_close(group_advantages(EXAMPLE.sum(dim=0)), same, rtol=2e-4, atol=0)
    different = torch.tensor([[-h, h], [-2 * h, 2 * h]], dtype=F64)
    advantages = decoupled_advantages(EXAMPLE, normalize_batch=False)
    torch.testing.assert_close(advantages, different, rtol=2e-4, atol=0)


def test_the_papers_example_normalised_over_the_batch():
    """Mean 0, unbiased std √((½ + ½ + 2 + 2) / 3)."""
    expected = torch.tensor([[-1.0, 1.0], [-2.0, 2.0]], dtype=F64) * (0.5 / (5 / 3)) ** 0.5
    torch.testing.assert_close(decoupled_advantages(EXAMPLE), expected, rtol=4e-4, atol=0)


def normalized(values, eps):
    mean, std = statistics.fmean(values), statistics.stdev(values)
    return [(x - mean) / (std + eps) for x in values]


@pytest.mark.parametrize("options", [
    {"eps": 1e-4}, {"eps": 0.5}, {"eps": 1e-4, "normalize_batch": False}, *ours({})])
@pytest.mark.parametrize("weights", [None, (1.0, 0.5, 2.0), torch.tensor([0.0, 1.0, -1.0])])
def test_the_advantages_equal_the_papers_three_steps(weights, options):
    """With unbiased stds. eps is 1e-4 by default, and the batch is normalised."""
    scales = torch.tensor([1.0, 10.0, 0.1])[:, None, None]
    rewards = torch.randn(3, 4, 5, generator=seeded(0), dtype=F64) * scales
    rewards[1, 2] = 3.3  # one reward says nothing about one question
    numbers = [1.0] * 3 if weights is None else [float(w) for w in weights]
    eps, expected = options.get("eps", 1e-4), [0.0] * 20
    for w, one in zip(numbers, rewards.tolist()):
        own = [a for group in one for a in normalized(group, eps)]
        expected = [total + w * a for total, a in zip(expected, own)]
    if options.get("normalize_batch", True):
        expected = normalized(expected, eps)
    advantages = decoupled_advantages(rewards, weights=weights, **options)
    expected = torch.tensor(expected, dtype=F64).view(4, 5)
    torch.testing.assert_close(advantages, expected, rtol=1e-9, atol=1e-12)


# --- properties -----------------------------------------------------------------------------------


def test_the_scale_of_a_reward_does_not_matter_and_its_weight_does():
    rewards = torch.rand(2, 3, 4, generator=seeded(3), dtype=F64)
    scaled = rewards * torch.tensor([100.0, 1.0], dtype=F64)[:, None, None]
    plain = decoupled_advantages(rewards)
    torch.testing.assert_close(decoupled_advantages(scaled), plain, rtol=1e-2, atol=1e-3)
    assert (decoupled_advantages(rewards, weights=[100.0, 1.0]) - plain).abs().max() > 0.1


# --- known mistakes -------------------------------------------------------------------------------


@pytest.mark.ours
@pytest.mark.parametrize("seed", range(20))
def test_a_group_without_signal_is_exactly_zero_beside_groups_with_signal(seed):
    """The mean over the batch is 0 up to its rounding error. Subtracted, it would be a signal."""
    rewards = torch.randint(0, 3, (2, 8, 16), generator=seeded(seed)).float()
    rewards[:, 3] = 3.3
    assert (decoupled_advantages(rewards)[3] == 0).all()
    assert (decoupled_advantages(rewards[:, [3]]) == 0).all()


# --- a note on CPPO -------------------------------------------------------------------------------


def test_how_rewards_are_merged_decides_what_cppo_prunes():
    """The example of the module: 9 of 16 are right (2 points each), 14 are well formatted (1 each).

    The two badly formatted ones are right. The sum prunes them first, GDPO keeps them first.
    """
    accuracy = torch.tensor([[2.0] * 9 + [0.0] * 7])
    form = torch.tensor([[0.0] * 2 + [1.0] * 14])
    summed = group_advantages(accuracy + form)[0].abs()
    decoupled = decoupled_advantages(torch.stack([accuracy, form]), normalize_batch=False)[0]
    assert summed[:2].tolist() == [0.0, 0.0] and summed[2:].min() > 1
    assert decoupled[:2].tolist() == pytest.approx([-1.71, -1.71], abs=5e-3)
    assert decoupled[2:].abs().max() < 1.3


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.ours
@pytest.mark.parametrize("weights", [[1.0], [1.0, 1.0, 1.0], []])
def test_there_must_be_one_weight_for_each_reward(weights):
    with pytest.raises(ValueError, match="weights for 2 rewards"):
        decoupled_advantages(torch.rand(2, 3, 4), weights=weights)
