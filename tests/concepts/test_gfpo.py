"""What GFPO promises: it trains on the k completions that are best by a metric, with the mean and
the std of these k.

The order: which are kept, the metric reward per token, the advantages, and adaptive k.
"""

import statistics

import pytest
import torch

from family.gfpo import adaptive_k, retain, retained_advantages, token_efficiency
from tests.helpers.examples import F64, ours, seeded

# --- which are kept -------------------------------------------------------------------------------


def test_the_shortest_are_kept_by_default():
    """In any order."""
    assert sorted(retain(torch.tensor([[30, 10, 20, 40]]), 2)[0].tolist()) == [1, 2]


@pytest.mark.parametrize("exact", [False, *ours(True)])
@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("width, k", [(6, 4), (300, 200)])
def test_none_that_is_left_out_is_better_than_one_that_is_kept(width, k, largest, exact):
    """Whole numbers, full of ties, which may go either way. This project keeps the lower index. In
    wide groups an unstable sort would mix equal metrics."""
    metric = torch.randint(0, 4, (40, width), generator=seeded(k))
    kept = retain(metric, k, largest=largest)
    assert kept.dtype == torch.int64
    for row, indices in zip(metric.tolist(), kept.tolist(), strict=True):
        best = sorted(range(width), key=lambda i, row=row: -row[i] if largest else row[i])[:k]
        if exact:
            assert indices == sorted(best)
        assert len({*indices}) == k
        assert sorted(row[i] for i in indices) == sorted(row[i] for i in best)


def test_token_efficiency_is_reward_per_token():
    rewards, lengths = torch.tensor([[1.0, 1.0, 0.0, 2.0]]), torch.tensor([[10, 40, 1, 25]])
    efficiency = token_efficiency(rewards, lengths)
    torch.testing.assert_close(efficiency, torch.tensor([[0.1, 0.025, 0.0, 0.08]]))


# --- advantages -----------------------------------------------------------------------------------


def test_the_mean_and_the_std_are_those_of_the_kept():
    """Kept 0 and 2: mean 1, population std 1, plus 1e-4. The reward of 100 was filtered out.

    The unbiased std would be √2. The mean of all three would be 34.
    """
    rewards = torch.tensor([[0.0, 100.0, 2.0]], dtype=F64)
    advantages = retained_advantages(rewards, torch.tensor([[0, 2]]))
    expected = torch.tensor([[-1 / 1.0001, 0.0, 1 / 1.0001]], dtype=F64)
    torch.testing.assert_close(advantages, expected)


EQUAL = torch.tensor([[0, 2, 3], [1, 2, 4], [0, 1, 5]])
RAGGED = [torch.tensor(kept) for kept in ([0, 1, 2, 3, 4, 5], [3, 5], [4])]


@pytest.mark.parametrize("eps", [1e-4, 0.5])
@pytest.mark.parametrize("kept", [EQUAL, *ours(RAGGED)], ids=["equal", "ragged"])
def test_the_advantages_equal_a_loop_over_the_kept_and_are_0_elsewhere(kept, eps):
    rewards = torch.randn(3, 6, generator=seeded(1), dtype=F64)
    advantages = retained_advantages(rewards, kept, eps=eps)
    for row, group, s in zip(advantages.tolist(), rewards.tolist(), kept, strict=True):
        own = [group[i] for i in s]
        mean, std = statistics.fmean(own), statistics.pstdev(own)
        expected = [(r - mean) / (std + eps) if i in s else 0.0 for i, r in enumerate(group)]
        assert row == pytest.approx(expected, rel=1e-9, abs=1e-12)


# --- adaptive k -----------------------------------------------------------------------------------

HISTORY = torch.tensor([0.4, 0.0, 0.3, 0.1, 0.2])  # quartiles 0.1, 0.2, 0.3


@pytest.mark.parametrize("dtype", [torch.float32, *ours(F64)])
def test_the_harder_a_question_is_the_more_completions_are_kept(dtype):
    """A mean reward that equals a quartile counts as the easier of the two."""
    means = torch.tensor([0.0, 0.09, 0.1, 0.2, 0.3, 1.0], dtype=dtype)
    k = adaptive_k(means, HISTORY.to(dtype), ks=(1, 2, 3, 4))
    assert k.tolist() == [4, 4, 3, 2, 1, 1] and k.dtype == torch.int64


def test_the_papers_4_6_8_8_are_the_default():
    assert adaptive_k(torch.tensor([0.9, 0.25, 0.15, 0.0]), HISTORY).tolist() == [4, 6, 8, 8]


def test_as_long_as_there_is_no_history_the_largest_k_is_kept():
    k = adaptive_k(torch.tensor([0.0, 1.0]), torch.tensor([]), ks=(4, 9, 8, 8))
    assert k.tolist() == [9, 9] and k.dtype == torch.int64
