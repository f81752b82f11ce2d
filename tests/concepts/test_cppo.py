"""What CPPO promises: of every question, it trains on the k completions with the largest |A|.

I is a set, and the paper does not say which of two equal |A| is in it. So kept completions may
come in any order, and a tie may go either way. What this project keeps then is tested as well.

The order: how many are kept, which are kept, which rows of the batch these are, the loss against
the paper's formula as a loop, known mistakes, the length under 1/|o|, signal and noise, the
threshold form, and bad input.
"""

import math
import statistics
from fractions import Fraction

import pytest
import torch

from cppo import batch_rows, cppo_loss, keep_count, prune, prune_below, prune_pooled
from grpo import group_advantages
from tests.helpers.examples import (
    F64,
    TinyPolicy,
    assert_loss,
    by_loop,
    mask_of,
    ours,
    per_completion,
    seeded,
)

# --- how many are kept: k = ⌊G (1 − P)⌋ -----------------------------------------------------------


@pytest.mark.parametrize("rate, k", [(0, 16), (0.5, 8), (0.75, 4), (0.875, 2), (0.9375, 1)])
def test_the_paper_keeps_16_8_4_2_and_1_of_16(rate, k):
    assert keep_count(16, rate) == k and type(keep_count(16, rate)) is int


def test_k_is_rounded_down_exactly_in_spite_of_floats():
    """⌊G(1 − P)⌋ in fractions, for rates of two decimals and of i/G. In floats, 10·(1 − 0.9) is
    below 1."""
    for group_size in range(1, 65):
        rates = [Fraction(i, n) for n in (100, group_size) for i in range(n)]
        for rate in rates:
            k = math.floor(group_size * (1 - rate))
            assert k == 0 or keep_count(group_size, float(rate)) == k, (group_size, rate)


# --- which are kept -------------------------------------------------------------------------------


def test_the_largest_absolute_advantages_are_kept():
    """The choice of the paper: a very bad completion teaches as much as a very good one."""
    kept = prune(torch.tensor([[0.1, -2.0, 0.5, 1.0]]), 2)
    assert kept.sort(dim=1).values.tolist() == [[1, 3]]


@pytest.mark.parametrize("right, kept_right", [(3, 3), (13, 1)])
def test_the_rarer_outcome_is_kept_first(right, kept_right):
    """3 of 16 are right: |A| is 2.02 for these and 0.47 for the others. 13 of 16: the other way."""
    rewards = (torch.arange(16) < right).float()
    assert rewards[prune(group_advantages(rewards[None]), 4)[0]].sum() == kept_right


def kept_by_hand(row, k):
    """The largest |A| first, and among equal ones the lower index."""
    return sorted(sorted(range(len(row)), key=lambda i: (-abs(row[i]), i))[:k])


def assert_the_largest(row, kept, k, exact):
    """k different completions, and those that are left out have no larger |A|."""
    right = kept_by_hand(row, k)
    if exact:
        assert kept == right
    assert len({*kept}) == k
    assert sorted(abs(row[i]) for i in kept) == sorted(abs(row[i]) for i in right)


EXACT = pytest.mark.parametrize("exact", [False, *ours(True)])


@EXACT
@pytest.mark.parametrize("width, k", [(6, 2), (6, 6), (300, 150)])
def test_no_completion_that_is_left_out_has_a_larger_advantage_in_size(width, k, exact):
    """Whole numbers as advantages, full of ties, which may go either way. This project keeps the
    lower index. In wide groups an unstable sort would mix equal |A|."""
    advantages = torch.randint(-2, 3, (40, width), generator=seeded(k)).float()
    kept = prune(advantages, k)
    assert kept.dtype == torch.int64
    for row, indices in zip(advantages.tolist(), kept.tolist(), strict=True):
        assert_the_largest(row, indices, k, exact)


@EXACT
@pytest.mark.parametrize("n_keep", [0, 7, 240])
def test_pooled_pruning_keeps_the_largest_of_the_whole_batch(n_keep, exact):
    advantages = torch.randint(-3, 4, (40, 6), generator=seeded(5)).float()
    kept = prune_pooled(advantages, n_keep)
    assert kept.dtype == torch.int64
    assert_the_largest(advantages.flatten().tolist(), kept.tolist(), n_keep, exact)


# --- which rows of the batch these are ------------------------------------------------------------


def test_completion_i_of_question_q_is_row_q_times_g_plus_i():
    rows = batch_rows(torch.tensor([[0, 3], [1, 2], [0, 2]]), 4)
    assert sorted(rows.tolist()) == [0, 3, 5, 6, 8, 10] and rows.dtype == torch.int64


# --- the loss -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rewards", [
    [[1.5, 0, 3, 2], [0, 0.2, 1, 0.1], [1, 1, 0, 4]],
    *ours([[1.5, 0, 3, 2], [0, 0, 1, 0], [1, 1, 1, 1]]),  # equal |A|, and a question without signal
], ids=["no tie", "ties"])  # fmt: skip
@pytest.mark.parametrize("options", [
    {"beta": 0.0, "clip_low": 0.2}, {"beta": 0.0, "clip_low": 0.1, "clip_high": 0.3}, {"beta": 1.0}
])
def test_the_loss_and_its_gradient_equal_a_sum_over_the_kept_completions(options, rewards):
    """−J of 2503.22342: for each question, 1/k over the k largest |A|, of advantages over all G.

    A known mistake is to take the mean and the std of the kept ones: then A is another number.
    Only the kept rows reach the loss, as in a trainer. For the loop, the pruned ones weigh 0. Some
    completions are empty.
    """
    Q, G, T, k = 3, 4, 5, 2
    mask = mask_of([3, 5, 0, 1, 2, 4, 5, 0, 1, 2, 3, 4])
    logp, old_logp, ref_logp = torch.randn(3, Q * G, T, generator=seeded(6), dtype=F64) / 3 - 1
    logp.requires_grad_()
    reference = {"ref_logp": ref_logp} if options["beta"] else {}

    A, weights = [], torch.zeros(Q * G, T, dtype=F64)
    for q, group in enumerate(rewards):
        mean, std = statistics.fmean(group), statistics.stdev(group)
        own = [(r - mean) / (std + 1e-4) for r in group]
        A += own
        for i in kept_by_hand(own, k):
            row = q * G + i
            weights[row] = per_completion(mask)[row] * G / k  # 1 / (Q k |o_i|)
    expected = by_loop(
        weights, advantages=torch.tensor(A, dtype=F64), logps=(logp, old_logp), **reference,
        **options)

    advantages = group_advantages(torch.tensor(rewards, dtype=F64))
    rows = batch_rows(prune(advantages, k), G)
    reference = {name: x[rows] for name, x in reference.items()}
    loss, _ = cppo_loss(
        logp[rows], old_logp[rows], advantages.flatten()[rows], mask[rows], **reference, **options)
    assert_loss(loss, expected, logp)


# --- known mistakes -------------------------------------------------------------------------------


def test_pooled_pruning_can_keep_15_of_one_question_and_1_of_another():
    """8 of 16 right: every |A| is 0.97. 1 of 16 right: one |A| of 3.75, fifteen of 0.25.

    The published code keeps 15 and 1 of them. The paper's formula keeps 8 of each.
    """
    rewards = torch.tensor([[1.0, 0.0] * 8, [1.0] + [0.0] * 15])
    advantages = group_advantages(rewards)
    pooled = prune_pooled(advantages, 16)
    assert ((pooled < 16).sum().item(), (pooled >= 16).sum().item()) == (15, 1)
    assert prune(advantages, keep_count(16, 0.5)).shape == (2, 8)


# --- the length gets in: E[∇ log π(o) / |o|] = ∇ E[1/|o|] ---


THETA, RIGHT = TinyPolicy.table(14), (TinyPolicy.REWARDS > 0).double()
EACH = torch.ones(15, dtype=F64)
LENGTH = torch.tensor(TinyPolicy.LENGTHS, dtype=F64)


def mean_step(advantages, token_weights):
    """E_π[−∇ loss] of one completion. advantages, token_weights: (15,), one for each completion."""
    theta, weights = THETA.clone().requires_grad_(), token_weights[:, None] * TinyPolicy.MASK
    return -TinyPolicy.expected_gradient(cppo_loss, theta, advantages, weights, beta=0.0)


def slope(values):
    """∇ E_π[f(o)]. values: (15,), f of each completion."""
    theta = THETA.clone().requires_grad_()
    return torch.autograd.grad(TinyPolicy.probabilities(theta) @ values, theta)[0]


def test_equal_advantages_push_the_length_under_1_over_length_and_nothing_under_a_constant():
    """Σ_o π ∇log π / |o| = Σ_o ∇π / |o| = ∇ Σ_o π / |o|. With 1 for 1/|o| this is ∇1 = 0."""
    shorter = mean_step(EACH, 1 / LENGTH)
    torch.testing.assert_close(shorter, slope(1 / LENGTH), rtol=0, atol=1e-7)
    assert shorter.norm() > 0.05 and (shorter * slope(LENGTH)).sum() < -0.02  # shorter
    torch.testing.assert_close(mean_step(EACH, EACH), 0 * THETA, rtol=0, atol=1e-7)


@pytest.mark.parametrize("m, k, b", [(1, 1, 0), (2, 1, 1), (1, 3, "p")])
def test_beside_grpo_the_right_ones_alone_push_shorter_and_the_wrong_ones_alone_longer(m, k, b):
    """G = 3, m right, k kept. The mean step is along ∇E[r/|o|] − b ∇E[1/|o|]: b is 0 if only right
    ones are kept, 1 if only wrong ones are, and the pass rate p if all are kept (GRPO).

    With a constant for 1/|o|, all are along ∇E[r].
    """
    pi = TinyPolicy.probabilities(THETA)
    p = pi @ RIGHT
    A = group_advantages(torch.tensor([[1.0] * m + [0.0] * (3 - m)], dtype=F64))
    kept = A[0, prune(A, k)[0]]
    # right ones are draws from π(o) r(o) / p, wrong ones from π(o) (1 − r(o)) / (1 − p)
    advantages = kept[kept > 0].sum() * RIGHT / p + kept[kept < 0].sum() * (1 - RIGHT) / (1 - p)
    for token_weights in (1 / LENGTH, EACH):
        step = mean_step(advantages, token_weights)
        along = slope(RIGHT * token_weights) - (p if b == "p" else b) * slope(token_weights)
        cosine = torch.cosine_similarity(step.flatten(), along.flatten(), dim=0)
        assert cosine.item() == pytest.approx(1, abs=1e-6)


def test_a_pruned_group_never_teaches_more_than_the_whole_group():
    """Signal against noise, (E[g]·u)² / Var[g] with u along ∇E[r], over all groups of three."""
    pi, u = TinyPolicy.probabilities(THETA), slope(RIGHT).flatten()
    scores = torch.autograd.functional.jacobian(
        lambda theta: TinyPolicy.probabilities(theta).log(), THETA).flatten(1)
    groups = torch.cartesian_prod(*[torch.arange(15)] * 3)
    chance, A = pi[groups].prod(1), group_advantages(RIGHT[groups])
    found = []
    for k in (1, 2, 3):
        kept = prune(A, k)
        g = (A.gather(1, kept)[:, :, None] * scores[groups.gather(1, kept)]).mean(1)
        mean = chance @ g
        found.append((mean @ u) ** 2 / (chance @ (g - mean) ** 2).sum())
    assert found[0] < found[1] < found[2]


# --- the threshold form ---------------------------------------------------------------------------


def test_the_threshold_form_keeps_advantages_at_or_above_the_threshold_in_size():
    """Not k of every question."""
    advantages = torch.tensor([[1.0, -1.0, 0.5, -0.25], [0.0, 0.25, -3.0, -0.75]])
    kept = prune_below(advantages, 1.0)
    assert kept.dtype == torch.bool
    assert kept.tolist() == [[True, True, False, False], [False, False, True, False]]


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.ours
@pytest.mark.parametrize("rate", [-0.1, 0.95, 1.0])
def test_a_rate_that_keeps_none_or_more_than_all_is_refused(rate):
    with pytest.raises(AssertionError, match="keeps (0|17) of 16"):
        keep_count(16, rate)
