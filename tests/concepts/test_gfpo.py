"""gfpo.py against sorting and Python's statistics, question by question."""

import statistics

import pytest
import torch

from family.gfpo import adaptive_k, retain, retained_advantages, token_efficiency

torch.set_num_threads(1)
F64 = torch.float64


def seeded(seed):
    return torch.Generator().manual_seed(seed)


# --- retain -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("k", range(1, 7))
def test_retain_equals_sorting_each_question_by_hand(k, largest):
    """Best first and, among equals, the lower index: 40 questions of whole numbers, full of ties."""
    metric = torch.randint(0, 4, (40, 6), generator=seeded(k))
    kept = retain(metric, k, largest=largest)
    assert kept.dtype == torch.int64 and kept.shape == (40, k)
    for row, indices in zip(metric.tolist(), kept.tolist(), strict=True):
        assert indices == sorted(sorted(range(6), key=lambda i: (-row[i] if largest else row[i], i))[:k])


@pytest.mark.parametrize("largest", [False, True])
def test_ties_go_to_the_lower_index_in_wide_groups_too(largest):
    """Wide enough that an unstable sort would show."""
    metric = torch.randint(0, 2, (5, 300), generator=seeded(0)).float()
    for row, indices in zip(metric.tolist(), retain(metric, 200, largest=largest).tolist(), strict=True):
        assert indices == sorted(sorted(range(300), key=lambda i: (-row[i] if largest else row[i], i))[:200])


def test_the_shortest_are_kept_by_default():
    assert retain(torch.tensor([[30, 10, 20, 40]]), 2).tolist() == [[1, 2]]


@pytest.mark.parametrize("k", [0, -1, 5])
def test_k_outside_1_to_g_is_refused(k):
    with pytest.raises(ValueError, match="k must lie in 1 … 4"):
        retain(torch.ones(2, 4), k)


def test_token_efficiency_is_reward_per_token():
    """The longer of two right answers, and every wrong one, are left out."""
    efficiency = token_efficiency(torch.tensor([[1.0, 1.0, 0.0, 2.0]]), torch.tensor([[10, 40, 1, 25]]))
    torch.testing.assert_close(efficiency, torch.tensor([[0.1, 0.025, 0.0, 0.08]]))
    assert retain(efficiency, 2, largest=True).tolist() == [[0, 3]]


# --- advantages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [1e-4, 0.5])
@pytest.mark.parametrize("kept", [[[0, 2, 3], [1, 2, 4], [0, 1, 5]], [[0, 1, 2, 3, 4, 5], [3, 5], [4]]], ids=["equal", "ragged"])
def test_advantages_use_mean_and_population_std_of_the_kept_and_are_zero_elsewhere(kept, eps):
    rewards = torch.randn(3, 6, generator=seeded(1), dtype=F64)
    equal = len({len(s) for s in kept}) == 1
    advantages = retained_advantages(rewards, torch.tensor(kept) if equal else [torch.tensor(s) for s in kept], eps=eps)
    for row, group, s in zip(advantages.tolist(), rewards.tolist(), kept, strict=True):
        own = [group[i] for i in s]
        mean, std = statistics.fmean(own), statistics.pstdev(own)
        expected = [(r - mean) / (std + eps) if i in s else 0.0 for i, r in enumerate(group)]
        assert row == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert all(row[i] == 0.0 for i in range(6) if i not in s)


def test_eps_is_1e_4_and_the_filtered_rewards_have_no_say():
    """Kept 0 and 2: mean 1, population std 1. The unbiased std would be √2; over all three the mean would be 34."""
    expected = torch.tensor([[-1 / 1.0001, 0.0, 1 / 1.0001]], dtype=F64)
    torch.testing.assert_close(retained_advantages(torch.tensor([[0.0, 100.0, 2.0]], dtype=F64), torch.tensor([[0, 2]])), expected)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1.1, 3.3])
@pytest.mark.parametrize("k", [1, 3, 7, 15])
def test_equal_rewards_among_the_kept_give_exactly_zero(reward, k):
    """Whatever the filtered ones earned, and also where the float32 mean of equal numbers is not that number."""
    rewards = torch.cat([torch.full((2, k), reward), torch.rand(2, 3, generator=seeded(2))], dim=1)
    assert (retained_advantages(rewards, torch.arange(k).expand(2, k)) == 0).all()


# --- adaptive k -------------------------------------------------------------------------------------------------------

HISTORY = torch.tensor([0.4, 0.0, 0.3, 0.1, 0.2])  # quartiles 0.1, 0.2, 0.3


def test_the_harder_the_question_the_more_are_kept():
    """A mean reward on a quartile counts as the easier of the two."""
    means = torch.tensor([0.0, 0.09, 0.1, 0.2, 0.3, 0.31, 0.9, 1.0])
    k = adaptive_k(means, HISTORY)
    assert k.dtype == torch.int64
    assert k.tolist() == [8, 8, 8, 6, 4, 4, 4, 4]
    assert adaptive_k(means, HISTORY, ks=(1, 2, 3, 4)).tolist() == [4, 4, 3, 2, 1, 1, 1, 1]


def test_adaptive_k_cuts_a_long_history_into_quarters():
    history = torch.rand(1000, generator=seeded(3), dtype=F64)
    counts = torch.bincount(adaptive_k(history, history, ks=(1, 2, 3, 4)))
    assert counts.tolist() == [0, 250, 250, 250, 250]


def test_adaptive_k_keeps_the_most_before_there_is_a_history():
    k = adaptive_k(torch.tensor([0.0, 0.5, 1.0]), torch.tensor([]), ks=(4, 9, 8, 8))
    assert k.tolist() == [9, 9, 9] and k.dtype == torch.int64


def test_each_question_keeps_its_own_number():
    """The three functions together: difficulty gives k, k the kept, the kept the advantages."""
    rewards = torch.tensor([[1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 1.0, 0.0]])
    lengths = torch.tensor([[4, 3, 2, 1], [1, 2, 3, 4]])
    ks = adaptive_k(rewards.mean(dim=1), torch.tensor([0.25, 0.75]), ks=(2, 2, 3, 3))
    kept = [retain(lengths[[q]], int(k))[0] for q, k in enumerate(ks)]
    assert [s.tolist() for s in kept] == [[2, 3], [0, 1, 2]]
    a = retained_advantages(rewards, kept, eps=0.0)
    torch.testing.assert_close(a, torch.tensor([[0, 0, 1, -1], [-(0.5**0.5), -(0.5**0.5), 2**0.5, 0]]))
