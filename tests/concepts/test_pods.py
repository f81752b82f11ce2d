"""pods.py against brute force over all subsets."""

import statistics
from fractions import Fraction
from itertools import combinations, product

import pytest
import torch

from family.pods import max_variance_subset
from grpo import group_advantages

torch.set_num_threads(1)


def variance(values):
    """m² times the population variance: exact for whole numbers."""
    return len(values) * sum(x * x for x in values) - sum(values) ** 2


@pytest.mark.parametrize("group_size", range(1, 7))
def test_no_subset_varies_more_for_all_rewards_of_0_1_2(group_size):
    """All 3^G groups at once, all m, all subsets. Among equals the fewest high ones are kept, so the choice is one only."""
    groups = list(product(range(3), repeat=group_size))
    for m in range(1, group_size + 1):
        kept = max_variance_subset(torch.tensor(groups, dtype=torch.float32), m)
        assert kept.dtype == torch.int64 and kept.shape == (len(groups), m)
        for group, indices in zip(groups, kept.tolist(), strict=True):
            most = max(variance(subset) for subset in combinations(group, m))
            order = sorted(range(group_size), key=lambda i: (group[i], i))
            ends = [order[: m - i] + order[group_size - i :] for i in range(m + 1)]  # the i highest and the m − i lowest
            assert indices == sorted(next(e for e in ends if variance([group[j] for j in e]) == most)), (group, m)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shift", [0.0, 1e8, -0.3])
def test_no_subset_varies_more_for_real_rewards(shift, dtype):
    rewards = torch.randn(10, 7, generator=torch.Generator().manual_seed(0), dtype=dtype) + shift
    for m in range(1, 8):
        for group, indices in zip(rewards.tolist(), max_variance_subset(rewards, m).tolist(), strict=True):
            assert indices == sorted(set(indices)) and len(indices) == m
            most = max(statistics.pvariance(map(Fraction, subset)) for subset in combinations(group, m))
            assert float(statistics.pvariance([Fraction(group[i]) for i in indices])) == pytest.approx(float(most), rel=1e-9)


@pytest.mark.parametrize("scale", [0.1, 1 / 3, 1.0])
@pytest.mark.parametrize("right, kept_right", [(8, 4), (4, 4), (3, 3), (13, 5), (1, 1), (0, 0), (16, 8)])
def test_right_or_wrong_rewards_are_kept_half_and_half_where_there_are_enough(right, kept_right, scale):
    """8 of 16. With 13 right there are only 3 wrong ones to keep, and 5 right."""
    kept = max_variance_subset(torch.tensor([[0.0] * (16 - right) + [scale] * right]), 8)
    assert (kept >= 16 - right).sum() == kept_right


def test_where_all_rewards_are_equal_the_first_are_kept():
    assert max_variance_subset(torch.full((2, 7), 3.3), 3).tolist() == [[0, 1, 2], [0, 1, 2]]


def test_both_ends_are_kept_and_the_middle_is_not():
    assert max_variance_subset(torch.tensor([[5.0, 1.0, 4.0, 9.0, 6.0, 0.0]]), 4).tolist() == [[1, 3, 4, 5]]
    assert max_variance_subset(torch.tensor([[0.0, 0.0, 0.0, 0.0, 9.0, 1.0]]), 3).tolist() == [[0, 1, 4]]


def test_equal_rewards_at_the_high_end_go_to_the_higher_index():
    assert max_variance_subset(torch.tensor([[1.0, 0.0, 1.0, 0.0, 1.0]]), 2).tolist() == [[1, 4]]


def test_ties_keep_their_order_in_wide_groups_too():
    """Wide enough that an unstable sort would show."""
    rewards = torch.randint(0, 2, (300,), generator=torch.Generator().manual_seed(2)).float()
    wrong, right = ((rewards == r).nonzero()[:, 0].tolist() for r in (0, 1))
    assert max_variance_subset(rewards[None], 100)[0].tolist() == sorted(wrong[:50] + right[-50:])


def test_variances_that_float32_cannot_tell_apart():
    """(0, 2⁻²⁴, 1) varies less than (0, 1, 1), by one part in 2²⁴."""
    assert max_variance_subset(torch.tensor([[0.0, 2**-24, 1.0, 1.0]]), 3).tolist() == [[0, 2, 3]]


def test_each_question_is_treated_alone():
    rewards = torch.randn(5, 6, generator=torch.Generator().manual_seed(1)) * torch.tensor([1.0, 100.0, 0.01, 1.0, 5.0])[:, None]
    alone = torch.cat([max_variance_subset(row[None], 3) for row in rewards])
    assert torch.equal(max_variance_subset(rewards, 3), alone)


@pytest.mark.parametrize("m", [0, -1, 5])
def test_m_outside_1_to_g_is_refused(m):
    with pytest.raises(ValueError, match="m must lie in 1 … 4"):
        max_variance_subset(torch.ones(2, 4), m)


def test_advantages_are_normalised_after_the_selection():
    """One right of six, two kept: mean ½ and unbiased std 1/√2 of the kept (1, 0), so ±1/√2, whatever was dropped."""
    rewards = torch.tensor([[0.0, 0.0, 1.0, 0.0, 0.0, 0.0]])
    kept = max_variance_subset(rewards, 2)
    assert kept.tolist() == [[0, 2]]
    torch.testing.assert_close(group_advantages(rewards.gather(1, kept), eps=0), torch.tensor([[-(0.5**0.5), 0.5**0.5]]))
