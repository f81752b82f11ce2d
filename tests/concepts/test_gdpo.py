"""What GDPO promises: each reward is normalised by itself, so that different groups look different.

The order: the paper's example, the three steps as loops, properties, known mistakes, a note on
CPPO, and bad input.
"""

import statistics

import pytest
import torch

from family.gdpo import decoupled_advantages
from grpo import group_advantages
from tests.examples import F64, seeded

# --- the definition -------------------------------------------------------------------------------

# Two rewards, two questions, two completions. The sums are (0, 1) and (0, 2).
EXAMPLE = torch.tensor([[[0.0, 1.0], [0.0, 1.0]], [[0.0, 0.0], [0.0, 1.0]]], dtype=F64)


def test_grpo_cannot_tell_the_papers_two_groups_apart_and_gdpo_can():
    h = 0.5**0.5  # 0.71
    assert EXAMPLE.sum(dim=0).tolist() == [[0.0, 1.0], [0.0, 2.0]]
    same = torch.tensor([[-h, h], [-h, h]], dtype=F64)
    torch.testing.assert_close(group_advantages(EXAMPLE.sum(dim=0)), same, rtol=2e-4, atol=0)
    different = torch.tensor([[-h, h], [-2 * h, 2 * h]], dtype=F64)
    advantages = decoupled_advantages(EXAMPLE, normalize_batch=False)
    torch.testing.assert_close(advantages, different, rtol=2e-4, atol=0)
    # over the batch: mean 0, unbiased std √((½ + ½ + 2 + 2) / 3)
    expected = different / (5 / 3) ** 0.5
    torch.testing.assert_close(decoupled_advantages(EXAMPLE), expected, rtol=4e-4, atol=0)


def by_loop(rewards, weights, eps, normalize_batch):
    """The three steps in Python floats, with unbiased stds. rewards: lists of R × Q × G floats."""
    sums = [[0.0] * len(rewards[0][0]) for _ in rewards[0]]
    for w, one in zip(weights, rewards, strict=True):
        for q, group in enumerate(one):
            mean, std = statistics.fmean(group), statistics.stdev(group)
            for i, r in enumerate(group):
                sums[q][i] += w * (r - mean) / (std + eps)
    if normalize_batch:
        everything = [a for group in sums for a in group]
        mean, std = statistics.fmean(everything), statistics.stdev(everything)
        sums = [[(a - mean) / (std + eps) for a in group] for group in sums]
    return torch.tensor(sums, dtype=F64)


@pytest.mark.parametrize("normalize_batch", [True, False])
@pytest.mark.parametrize("eps", [1e-4, 0.5])
@pytest.mark.parametrize("weights", [None, (1.0, 0.5, 2.0), torch.tensor([0.0, 1.0, -1.0])])
def test_the_advantages_equal_the_papers_three_steps(weights, eps, normalize_batch):
    scales = torch.tensor([1.0, 10.0, 0.1])[:, None, None]
    rewards = torch.randn(3, 4, 5, generator=seeded(0), dtype=F64) * scales
    rewards[1, 2] = 3.3  # one reward says nothing about one question
    options = {"eps": eps, "normalize_batch": normalize_batch}
    advantages = decoupled_advantages(rewards, weights=weights, **options)
    numbers = [1.0] * 3 if weights is None else [float(w) for w in weights]
    assert advantages.dtype == F64
    torch.testing.assert_close(
        advantages, by_loop(rewards.tolist(), numbers, **options), rtol=1e-9, atol=1e-12
    )


@pytest.mark.ours
def test_the_batch_is_normalised_and_eps_is_1e_4_by_default():
    rewards = torch.rand(2, 3, 4, generator=seeded(1), dtype=F64)
    expected = by_loop(rewards.tolist(), [1.0, 1.0], 1e-4, True)
    torch.testing.assert_close(decoupled_advantages(rewards), expected, rtol=1e-9, atol=1e-12)


# --- properties -----------------------------------------------------------------------------------


@pytest.mark.parametrize("copies", [1, 2, 10])
def test_the_scale_does_not_grow_with_the_number_of_rewards(copies):
    one = torch.rand(1, 3, 4, generator=seeded(2), dtype=F64)
    advantages = decoupled_advantages(one.expand(copies, 3, 4))
    assert advantages.std().item() == pytest.approx(1, abs=1e-3)
    assert advantages.mean().item() == pytest.approx(0, abs=1e-12)
    torch.testing.assert_close(advantages, decoupled_advantages(one), rtol=1e-3, atol=0)


def test_the_scale_of_a_reward_does_not_matter_and_its_weight_does():
    rewards = torch.rand(2, 3, 4, generator=seeded(3), dtype=F64)
    scaled = rewards * torch.tensor([100.0, 1.0], dtype=F64)[:, None, None]
    plain = decoupled_advantages(rewards)
    torch.testing.assert_close(decoupled_advantages(scaled), plain, rtol=1e-2, atol=1e-3)
    assert (decoupled_advantages(rewards, weights=[100.0, 1.0]) - plain).abs().max() > 0.1


# --- known mistakes -------------------------------------------------------------------------------


@pytest.mark.ours
def test_a_batch_without_signal_is_exactly_zero():
    assert (decoupled_advantages(torch.full((2, 3, 7), 3.3)) == 0).all()


@pytest.mark.ours
@pytest.mark.parametrize("seed", range(20))
def test_a_group_without_signal_is_exactly_zero_beside_groups_with_signal(seed):
    """The mean over the batch is 0 up to its rounding error. Subtracted, it would be a signal."""
    rewards = torch.randint(0, 3, (2, 8, 16), generator=seeded(seed)).float()
    rewards[:, 3] = 1
    assert (decoupled_advantages(rewards)[3] == 0).all()


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
