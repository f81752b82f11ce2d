"""What `grpo.group_advantages` promises: A_i = (r_i − mean(r)) / (std(r) + eps), in each group.

The first tests compute it by hand. Then come the known mistakes.
"""

import statistics

import pytest
import torch

from grpo import group_advantages
from tests.helpers.examples import F64, seeded

# --- the definition -------------------------------------------------------------------------------


def test_of_four_answers_the_right_one_is_one_and_a_half_stds_above_the_mean():
    """Rewards 1, 0, 0, 0: mean ¼; the squared deviations add up to ¾; std √(¾ / 3) = ½."""
    advantages = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=F64), eps=0)
    assert advantages[0].tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5])


@pytest.mark.parametrize("options, std_of", [
    ({"ddof": 0, "eps": 0.5}, statistics.pstdev), ({}, statistics.stdev),
    ({"divide_by_std": False, "eps": 0}, lambda group: 1.0),
])
def test_the_advantages_equal_a_loop_over_the_groups(options, std_of):
    """By default the std is the unbiased one, which divides by G − 1, plus 1e-4."""
    rewards = torch.randn(4, 6, generator=seeded(0), dtype=F64)
    advantages = group_advantages(rewards, **options)
    for group, row in zip(rewards.tolist(), advantages.tolist(), strict=True):
        mean, std = statistics.fmean(group), std_of(group)
        expected = [(r - mean) / (std + options.get("eps", 1e-4)) for r in group]
        assert row == pytest.approx(expected, rel=1e-6)


# --- known mistakes -------------------------------------------------------------------------------


def test_the_mean_and_the_std_are_not_those_of_the_whole_batch():
    """A question has the same advantages as by itself, and they add up to 0."""
    rewards = torch.tensor([[0.0, 1.0, 0.0, 1.0], [5.0, 9.0, 5.0, 5.0]], dtype=F64)
    both = group_advantages(rewards)
    torch.testing.assert_close(both[1:], group_advantages(rewards[1:]))
    torch.testing.assert_close(both.sum(dim=1), torch.zeros(2, dtype=F64))


@pytest.mark.parametrize("reward", [1.0, 0.1, 1.1, 3.3])
def test_equal_rewards_are_no_signal(reward):
    assert group_advantages(torch.full((2, 7), reward)).abs().max() < 3e-3
