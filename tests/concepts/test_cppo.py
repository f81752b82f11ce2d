"""What CPPO promises: of every question, it trains on the k completions with the largest |A|.

The order: how many are kept, which are kept, which rows of the batch these are, the loss against
the paper's formula as a loop, known mistakes, the length under 1/|o|, the other forms of pruning,
and bad input.
"""

import math
from fractions import Fraction
from itertools import combinations, product

import pytest
import torch

from cppo import batch_rows, cppo_loss, keep_count, prune, prune_below, prune_pooled
from family.dapo import token_mean_weights
from grpo import group_advantages, grpo_loss, sequence_mean_weights
from tests.examples import F64, TinyPolicy, mask_of, seeded

# --- how many are kept: k = ⌊G (1 − P)⌋ -----------------------------------------------------------


@pytest.mark.parametrize("rate, k", [(0.0, 16), (0.5, 8), (0.75, 4), (0.875, 2), (0.9375, 1)])
def test_the_paper_keeps_16_8_4_2_and_1_of_16(rate, k):
    assert keep_count(16, rate) == k and type(keep_count(16, rate)) is int


@pytest.mark.parametrize("rate, k", [(0.9, 1), (0.8, 2), (0.7, 3), (0.1, 9), (0.0, 10), (0, 10)])
def test_of_ten_the_rate_says_how_many_tenths_are_pruned(rate, k):
    assert keep_count(10, rate) == k


def test_k_is_rounded_down():
    assert keep_count(16, 0.8) == 3  # 3.2
    assert keep_count(16, 0.9) == 1  # 1.6


def test_a_rate_of_i_over_g_keeps_exactly_g_minus_i():
    for group_size in range(1, 65):
        for i in range(group_size):
            assert keep_count(group_size, i / group_size) == group_size - i, (group_size, i)


def test_a_rate_of_two_decimals_means_the_decimal_number():
    """⌊G(1 − P)⌋ in exact fractions. In floats, 10·(1 − 0.9) is below 1."""
    for group_size, hundredths in product(range(1, 65), range(100)):
        k = math.floor(group_size * (1 - Fraction(hundredths, 100)))
        if k >= 1:
            assert keep_count(group_size, hundredths / 100) == k, (group_size, hundredths)


# --- which are kept -------------------------------------------------------------------------------


def test_the_largest_absolute_advantages_are_kept():
    """The choice of the paper: a very bad completion teaches as much as a very good one."""
    assert prune(torch.tensor([[0.1, -2.0, 0.5, 1.0]]), 2).tolist() == [[1, 3]]


SCORES = {"largest_abs": abs, "smallest_abs": lambda a: -abs(a), "largest": lambda a: a}


def kept_by_hand(row, k, rule):
    """The best score first, and among equal scores the lower index."""
    return sorted(sorted(range(len(row)), key=lambda i: (-SCORES[rule](row[i]), i))[:k])


@pytest.mark.parametrize("rule", SCORES)
@pytest.mark.parametrize("k", range(1, 7))
def test_prune_equals_sorting_each_question_by_hand(rule, k):
    """40 questions with whole numbers as advantages, full of ties."""
    advantages = torch.randint(-2, 3, (40, 6), generator=seeded(k)).float()
    kept = prune(advantages, k, rule=rule)
    assert kept.dtype == torch.int64 and kept.shape == (40, k)
    for row, indices in zip(advantages.tolist(), kept.tolist(), strict=True):
        assert indices == kept_by_hand(row, k, rule)


@pytest.mark.parametrize("rule", SCORES)
def test_ties_go_to_the_lower_index_in_wide_groups_too(rule):
    """The groups are so wide that an unstable sort would mix equal scores."""
    advantages = torch.randint(-1, 2, (5, 300), generator=seeded(0)).float()
    kept = prune(advantages, 150, rule=rule)
    for row, indices in zip(advantages.tolist(), kept.tolist(), strict=True):
        assert indices == kept_by_hand(row, 150, rule)


def test_of_equal_advantages_the_first_are_kept():
    assert prune(torch.zeros(2, 5), 3).tolist() == [[0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize("rule", [*SCORES, "random"])
def test_if_k_is_g_everything_is_kept(rule):
    advantages = torch.randn(3, 5, generator=seeded(1))
    assert prune(advantages, 5, rule=rule).tolist() == [[0, 1, 2, 3, 4]] * 3


def test_random_takes_every_subset_about_equally_often():
    """4 completions have 6 subsets of 2; 6,000 questions: about 1,000 each.

    The advantages do not matter.
    """
    advantages = torch.tensor([[9.0, 0.0, -9.0, 1.0]]).expand(6000, 4)
    counts = dict.fromkeys(combinations(range(4), 2), 0)
    for indices in prune(advantages, 2, rule="random", generator=seeded(2)).tolist():
        counts[tuple(indices)] += 1  # KeyError if two are equal or not ascending
    assert min(counts.values()) > 850 and max(counts.values()) < 1150


def test_random_draws_from_its_generator_and_from_nothing_else():
    def drawn(seed):
        return prune(torch.zeros(50, 8), 4, rule="random", generator=seeded(seed))

    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = drawn(3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert torch.equal(drawn(3), first)
    assert not torch.equal(drawn(4), first)


# --- which rows of the batch these are ------------------------------------------------------------


def test_completion_i_of_question_q_is_row_q_times_g_plus_i():
    assert batch_rows(torch.tensor([[0, 3], [1, 2]]), 4).tolist() == [0, 3, 5, 6]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_batch_rows_of_every_choice_for_three_questions(k):
    """All 1, 27 or 27 ways to keep k of 3 completions of each of 3 questions."""
    for choice in product(combinations(range(3), k), repeat=3):
        rows = batch_rows(torch.tensor(choice), 3)
        assert rows.dtype == torch.int64
        assert rows.tolist() == [3 * q + i for q, kept in enumerate(choice) for i in kept]
        assert rows.tolist() == sorted(set(rows.tolist()))


def test_batch_rows_of_no_question_are_none():
    rows = batch_rows(torch.zeros(0, 2, dtype=torch.int64), 4)
    assert rows.tolist() == [] and rows.dtype == torch.int64


def test_the_batch_at_these_rows_holds_the_kept_completions():
    advantages = torch.randn(5, 4, generator=seeded(8))
    kept = prune(advantages, 2)
    rows = batch_rows(kept, 4)
    assert torch.equal(advantages.flatten()[rows], advantages.gather(1, kept).flatten())


# --- the loss -------------------------------------------------------------------------------------


def problem(seed, questions=3, group_size=4, longest=5):
    """rewards, lengths: (Q, G). logp, old_logp, ref_logp: (Q·G, T) float64. Some are empty."""
    generator, shape = seeded(seed), (questions, group_size)
    rewards = torch.randint(0, 3, shape, generator=generator).double()
    rewards += torch.rand(shape, generator=generator)
    rewards[0] = 1.0  # a question without signal
    lengths = torch.randint(0, longest + 1, shape, generator=generator)
    logp = -1 - torch.rand(questions * group_size, longest, generator=generator, dtype=F64)
    old_logp, ref_logp = logp + 0.4 * torch.randn(2, *logp.shape, generator=generator, dtype=F64)
    return rewards, lengths, logp.requires_grad_(), old_logp, ref_logp


def cppo_by_loop(rewards, lengths, logp, old_logp, ref_logp, k, *, beta, low, high):
    """−J of 2503.22342 in Python floats, and its gradient by hand.

    For each question: 1/k over the k largest |A|.
    """
    loss, gradient = 0.0, torch.zeros_like(logp)
    questions, group_size = rewards.shape
    for q in range(questions):
        group = rewards[q].tolist()
        mean = sum(group) / group_size
        std = math.sqrt(sum((r - mean) ** 2 for r in group) / (group_size - 1))
        advantages = [(r - mean) / (std + 1e-4) for r in group]  # over all G, before pruning
        for i in kept_by_hand(advantages, k, "largest_abs"):
            a, length, row = advantages[i], int(lengths[q, i]), group_size * q + i
            for t in range(length):
                weight = 1 / (questions * k * length)
                ratio = math.exp(logp[row, t] - old_logp[row, t])
                r = math.exp(ref_logp[row, t] - logp[row, t])
                clipped = ratio > 1 + high if a > 0 else ratio < 1 - low
                bounded = ratio if not clipped else 1 + high if a > 0 else 1 - low
                loss -= weight * (bounded * a - beta * (r - math.log(r) - 1))
                gradient[row, t] = -weight * ((not clipped) * ratio * a - beta * (1 - r))
    return loss, gradient


def cppo_as_a_trainer_does(rewards, lengths, logp, old_logp, ref_logp, k, **options):
    """Advantages of all completions; then only the kept rows reach the loss."""
    advantages = group_advantages(rewards)
    rows = batch_rows(prune(advantages, k), rewards.shape[1])
    mask = mask_of(lengths.flatten().tolist(), width=logp.shape[1])
    return cppo_loss(
        logp[rows], old_logp[rows], advantages.flatten()[rows], mask[rows],
        ref_logp=ref_logp[rows], **options,
    )


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("beta, low, high", [(0.0, 0.2, 0.2), (0.04, 0.2, 0.2), (1.0, 0.1, 0.3)])
def test_the_loss_and_its_gradient_equal_the_papers_formula(k, beta, low, high):
    example = problem(6)
    loss, _ = cppo_as_a_trainer_does(*example, k, beta=beta, clip_low=low, clip_high=high)
    loss.backward()
    logp = example[2]
    expected, gradient = cppo_by_loop(
        *(x.detach() for x in example), k, beta=beta, low=low, high=high
    )
    assert loss.item() == pytest.approx(expected, abs=1e-7)  # the weights are float32
    torch.testing.assert_close(logp.grad, gradient, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_pruned_rows_are_never_needed(k):
    """The loss of the kept rows equals that of all rows if the pruned ones have the weight 0."""
    rewards, lengths, logp, old_logp, ref_logp = problem(6)
    few, _ = cppo_as_a_trainer_does(rewards, lengths, logp, old_logp, ref_logp, k)
    advantages = group_advantages(rewards)
    kept = torch.zeros(12, 1).index_fill(0, batch_rows(prune(advantages, k), 4), 1)
    mask = mask_of(lengths.flatten().tolist(), width=5)
    weights = kept * sequence_mean_weights(mask, num_sequences=3 * k)
    all_, _ = grpo_loss(
        logp, old_logp, advantages.flatten(), mask, ref_logp=ref_logp, weights=weights
    )
    torch.testing.assert_close(few, all_)
    few, all_ = (torch.autograd.grad(loss, logp)[0] for loss in (few, all_))
    torch.testing.assert_close(few, all_)
    assert (few[kept[:, 0] == 0] == 0).all()


@pytest.mark.ours
def test_without_pruning_cppo_is_grpo():
    """k = G: the same rows in the same order, the same loss, gradient and statistics."""
    rewards, lengths, logp, old_logp, ref_logp = problem(7)
    mask, advantages = mask_of(lengths.flatten().tolist(), width=5), group_advantages(rewards)
    grpo = grpo_loss(logp, old_logp, advantages.flatten(), mask, ref_logp=ref_logp, beta=0.1)
    k = keep_count(4, 0.0)
    cppo = cppo_as_a_trainer_does(rewards, lengths, logp, old_logp, ref_logp, k, beta=0.1)
    assert cppo == grpo
    assert torch.equal(*(torch.autograd.grad(loss, logp)[0] for loss, _ in (cppo, grpo)))


def test_the_loss_takes_the_weights_of_a_larger_batch():
    """N = 12 for N = 6 halves the loss."""
    rewards, lengths, *rest = problem(6)
    kept_lengths = lengths.flatten()[batch_rows(prune(group_advantages(rewards), 2), 4)]
    mask = mask_of(kept_lengths.tolist(), width=5)
    whole, half = (
        cppo_as_a_trainer_does(
            rewards, lengths, *rest, 2, weights=sequence_mean_weights(mask, num_sequences=n)
        )[0].item()
        for n in (6, 12)
    )
    assert half == pytest.approx(whole / 2, rel=1e-6) and whole != 0


# --- known mistakes -------------------------------------------------------------------------------


def test_each_question_is_pruned_alone_and_not_with_the_whole_batch():
    """A question with small advantages keeps k too, and keeps the same ones as by itself."""
    small = torch.tensor([[0.01, -0.03, 0.02, 0.0]])
    kept = prune(torch.cat([small, 100 * torch.ones(1, 4)]), 2)
    assert kept.shape == (2, 2)
    assert kept[0].tolist() == prune(small, 2)[0].tolist() == [1, 2]


def test_pooled_pruning_can_keep_15_of_one_question_and_1_of_another():
    """8 of 16 right: every |A| is 0.97. 1 of 16 right: one |A| of 3.75, fifteen of 0.25.

    The published code keeps 15 and 1 of them. The paper's formula keeps 8 of each.
    """
    rewards = torch.tensor([[1.0, 0.0] * 8, [1.0] + [0.0] * 15])
    advantages = group_advantages(rewards)
    pooled = prune_pooled(advantages, 16)
    assert ((pooled < 16).sum().item(), (pooled >= 16).sum().item()) == (15, 1)
    assert prune(advantages, keep_count(16, 0.5)).shape == (2, 8)


def test_the_mean_and_the_std_are_taken_before_pruning():
    """Two groups keep the same rewards, 0 and 4, and prune different ones: the advantages differ.

    Group 0: mean 2, std √(8/3). Group 1: mean 2.25, std √(8.25/3). After pruning, all would be
    ±2/√8.
    """
    rewards = torch.tensor([[0.0, 2.0, 2.0, 4.0], [0.0, 2.5, 2.5, 4.0]], dtype=F64)
    advantages = group_advantages(rewards)
    kept = prune(advantages, 2)
    assert rewards.gather(1, kept).tolist() == [[0.0, 4.0], [0.0, 4.0]]
    group_0 = [-2 / math.sqrt(8 / 3), 2 / math.sqrt(8 / 3)]
    group_1 = [-2.25 / math.sqrt(2.75), 1.75 / math.sqrt(2.75)]
    expected = torch.tensor([group_0, group_1], dtype=F64)
    torch.testing.assert_close(advantages.gather(1, kept), expected, rtol=1e-3, atol=0)


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


@pytest.mark.parametrize("m, k, b", [(1, 1, 0), (2, 1, 1), (1, 3, "p"), (2, 3, "p")])
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


def test_a_token_mean_over_n_completions_pushes_the_length_about_n_times_less():
    """E[Σ_i ∇log π(o_i) / Σ_j |o_j|] = ∇E[1 / Σ_j |o_j|]: the same proof, for o_1 … o_n."""
    theta = THETA.clone().requires_grad_()
    logp, pi = TinyPolicy.logp(theta), TinyPolicy.probabilities(theta)
    step = 0
    for i, j in product(range(15), repeat=2):
        mask = TinyPolicy.MASK[[i, j]]
        both, weights = logp[[i, j]], token_mean_weights(mask)
        loss, _ = cppo_loss(both, both.detach(), EACH[:2], mask, beta=0.0, weights=weights)
        step = step - (pi[i] * pi[j]).detach() * loss
    (step,) = torch.autograd.grad(step, theta, retain_graph=True)

    def push(n):  # ∇ Σ_{o_1 … o_n} π(o_1) … π(o_n) / (|o_1| + … + |o_n|)
        chance = [pi[LENGTH == length].sum() for length in (1, 2, 3)]
        of = [math.prod(chance[x - 1] for x in xs) / sum(xs) for xs in product((1, 2, 3), repeat=n)]
        return torch.autograd.grad(sum(of), theta, retain_graph=True)[0]

    torch.testing.assert_close(step, push(2), rtol=0, atol=1e-6)  # the weights are float32
    for n in (2, 3, 4):
        assert 0.6 < n * (push(n).norm() / push(1).norm()).item() < 0.9


# --- the other forms of pruning -------------------------------------------------------------------


def test_the_threshold_form_keeps_advantages_at_or_above_the_threshold_in_size():
    advantages = torch.tensor([[1.0, -1.0, 0.5, -0.25], [0.0, 0.25, -3.0, 2.0]])
    kept = prune_below(advantages, 1.0)
    assert kept.dtype == torch.bool
    assert kept.tolist() == [[True, True, False, False], [False, False, True, True]]
    assert prune_below(advantages, 0.5).sum(dim=1).tolist() == [3, 2]  # not k of every question
    assert prune_below(advantages, 0.0).all()


@pytest.mark.parametrize("n_keep", [0, 1, 7, 100, 240])
def test_pooled_pruning_equals_sorting_the_whole_batch_by_hand(n_keep):
    advantages = torch.randint(-3, 4, (40, 6), generator=seeded(5)).float()
    kept = prune_pooled(advantages, n_keep)
    assert kept.dtype == torch.int64
    assert kept.tolist() == kept_by_hand(advantages.flatten().tolist(), n_keep, "largest_abs")


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.ours
@pytest.mark.parametrize("rate", [-0.1, -1e-6, 1.0, 1, 1.5, math.nan, math.inf, -math.inf])
def test_a_pruning_rate_outside_0_to_1_is_refused(rate):
    with pytest.raises(ValueError, match="pruning rate must lie in"):
        keep_count(16, rate)


@pytest.mark.ours
@pytest.mark.parametrize("group_size, rate", [(4, 0.8), (16, 0.95), (1, 0.01), (64, 0.99)])
def test_a_rate_that_keeps_nothing_is_refused(group_size, rate):
    with pytest.raises(ValueError, match="keeps none"):
        keep_count(group_size, rate)


@pytest.mark.ours
@pytest.mark.parametrize("k", [0, -1, 6])
@pytest.mark.parametrize("rule", ["largest_abs", "random"])
def test_k_outside_1_to_g_is_refused(k, rule):
    with pytest.raises(ValueError, match="k must lie in"):
        prune(torch.randn(3, 5), k, rule=rule)


@pytest.mark.ours
@pytest.mark.parametrize("rule", ["biggest", "", None])
def test_an_unknown_rule_is_refused(rule):
    with pytest.raises(ValueError, match="rule must be"):
        prune(torch.randn(3, 5), 5, rule=rule)
