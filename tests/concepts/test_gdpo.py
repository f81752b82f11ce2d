"""What GDPO promises: each reward is normalised by itself, so that different groups look different.

The order: the paper's example, the three steps as loops, and a note on CPPO. Groups without signal
are in test_rare_numbers.py.
"""

import statistics

import pytest
import torch

from family.gdpo import decoupled_advantages
from grpo import group_advantages
from tests.helpers.examples import F64, ours, seeded

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


def normalized(values, eps):
    mean, std = statistics.fmean(values), statistics.stdev(values)
    return [(x - mean) / (std + eps) for x in values]


@pytest.mark.parametrize("options", [
    {"eps": 0.5}, {"eps": 1e-4, "normalize_batch": False},
    {"eps": 1e-4, "weights": (1.0, 0.5, 2.0)}, {"eps": 1e-4, "weights": torch.tensor([0, 1, -1])},
    *ours({}),
])
def test_the_advantages_equal_the_papers_three_steps(options):
    """With unbiased stds. eps is 1e-4 by default, and the batch is normalised."""
    scales = torch.tensor([1.0, 10.0, 0.1])[:, None, None]
    rewards = torch.randn(3, 4, 5, generator=seeded(0), dtype=F64) * scales
    rewards[1, 2] = 3.3  # one reward says nothing about one question
    eps, expected = options.get("eps", 1e-4), torch.zeros(20, dtype=F64)
    for weight, one in zip(options.get("weights", [1, 1, 1]), rewards.tolist()):
        each = [normalized(group, eps) for group in one]
        expected += weight * torch.tensor(each, dtype=F64).flatten()
    if options.get("normalize_batch", True):
        expected = torch.tensor(normalized(expected.tolist(), eps), dtype=F64)
    advantages = decoupled_advantages(rewards, **options)
    torch.testing.assert_close(advantages, expected.view(4, 5), rtol=1e-9, atol=1e-12)


# --- a note on CPPO -------------------------------------------------------------------------------


def test_how_rewards_are_merged_decides_what_cppo_prunes():
    """The example of the module: 9 of 16 are right (2 points each), 14 are well formatted (1 each).

    The two badly formatted ones are right. The sum prunes them first, GDPO keeps them first.
    """
    accuracy = torch.tensor([[2.0] * 9 + [0.0] * 7])
    form = torch.tensor([[0.0] * 2 + [1.0] * 14])
    summed = group_advantages(accuracy + form)[0].abs()
    decoupled = decoupled_advantages(torch.stack([accuracy, form]), normalize_batch=False)[0]
    assert summed[:2].max() < 1e-9 and summed[2:].min() > 1
    assert decoupled[:2].tolist() == pytest.approx([-1.71, -1.71], abs=5e-3)
    assert decoupled[2:].abs().max() < 1.3
