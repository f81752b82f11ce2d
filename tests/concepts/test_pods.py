"""What PODS promises: the m completions of a question whose rewards have the largest variance.

The paper does not say which of several equal choices is taken, nor in which order they stand.

The order: small examples, brute force over all subsets, right-or-wrong rewards, and which of
several equal choices this project takes.
"""

from itertools import combinations, product

import pytest
import torch

from family.pods import max_variance_subset
from tests.helpers.examples import ours, seeded

# --- small examples -------------------------------------------------------------------------------


@pytest.mark.parametrize("rewards, expected", [
    ([5.0, 1.0, 4.0, 9.0, 6.0, 0.0], [0, 1, 6, 9]),  # both ends
    ([0.0, 0.0, 0.0, 0.0, 9.0, 1.0], [0, 0, 9]),  # the ends need not be equal
])
def test_both_ends_are_kept_and_the_middle_is_not(rewards, expected):
    """Each question is treated alone: another one beside it changes nothing."""
    other = torch.linspace(0, 1000, len(rewards))
    kept = max_variance_subset(torch.stack([torch.tensor(rewards), other]), len(expected))[0]
    assert sorted(rewards[i] for i in kept) == expected and len(kept.unique()) == len(kept)


@pytest.mark.ours
@pytest.mark.parametrize("rewards, expected", [
    ([3.3] * 7, [0, 1, 2]), ([0.0, 2**-24, 1.0, 1.0], [0, 2, 3])])
def test_of_equal_variances_the_low_end_is_taken_in_spite_of_floats(rewards, expected):
    """float32 cannot tell the variances of the second group's subsets apart."""
    kept = max_variance_subset(torch.tensor([rewards]), len(expected))
    assert kept[0].tolist() == expected


# --- brute force ----------------------------------------------------------------------------------


def variance(values):
    """m² times the population variance: exact for whole numbers."""
    return len(values) * sum(x * x for x in values) - sum(values) ** 2


def kept_by_hand(group, m):
    """The largest variance of all subsets, and the i highest and the m − i lowest rewards that have
    it, for the smallest i."""
    best = max(variance(subset) for subset in combinations(group, m))
    order = sorted(range(len(group)), key=lambda i: (group[i], i))
    ends = [order[: m - i] + order[len(group) - i :] for i in range(m + 1)]
    return best, sorted(next(end for end in ends if variance([group[j] for j in end]) == best))


@pytest.mark.parametrize("exact", [False, *ours(True)])
@pytest.mark.parametrize("group_size", [1, 5, 6])
def test_no_subset_varies_more_for_all_rewards_of_0_1_2(group_size, exact):
    """All 3^G groups at once, all m, all subsets. Of several i, this project takes the smallest."""
    groups = list(product(range(3), repeat=group_size))
    for m in range(1, group_size + 1):
        kept = max_variance_subset(torch.tensor(groups, dtype=torch.float32), m)
        assert kept.dtype == torch.int64
        for group, row in zip(groups, kept.tolist(), strict=True):
            best, by_hand = kept_by_hand(group, m)
            if exact:
                assert row == by_hand
            assert len({*row}) == m and variance([group[i] for i in row]) == best


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shift", [0.0, *ours(1e8), -0.3])
def test_no_subset_varies_more_for_real_rewards(shift, dtype):
    shifts = shift * torch.arange(1, 11, dtype=dtype)[:, None]  # each question has its own
    rewards = torch.randn(10, 7, generator=seeded(0), dtype=dtype) + shifts
    centred = rewards.double() - rewards.double()[:, :1]  # exact, and the variances stay
    for m in range(1, 8):
        subsets = torch.tensor(list(combinations(range(7), m)))
        most = centred[:, subsets].var(-1, correction=0).amax(1)
        own = centred.gather(1, max_variance_subset(rewards, m)).var(-1, correction=0)
        torch.testing.assert_close(own, most, rtol=1e-9, atol=0)


# --- properties -----------------------------------------------------------------------------------


@pytest.mark.parametrize("right, kept_right", [(8, 4), (3, 3), (13, 5), (0, 0)])
def test_half_of_the_kept_are_right_if_there_are_enough_of_each(right, kept_right):
    """8 of 16 are kept. With 13 right there are only 3 wrong ones, so 5 right ones are kept."""
    kept = max_variance_subset(torch.tensor([[0.0] * (16 - right) + [1.0] * right]), 8)
    assert (kept >= 16 - right).sum() == kept_right


@pytest.mark.ours
def test_equal_rewards_keep_their_order_in_wide_groups_too():
    """The group is so wide that an unstable sort would mix equal rewards."""
    rewards = torch.randint(0, 2, (300,), generator=seeded(2)).float()
    wrong, right = ((rewards == r).nonzero()[:, 0].tolist() for r in (0, 1))
    kept = max_variance_subset(rewards[None], 100)
    assert kept[0].tolist() == sorted(wrong[:50] + right[-50:])
