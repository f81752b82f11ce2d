"""cppo.py against brute force and the paper's formula written out as a loop."""

import math
import shutil
import subprocess
import sys
from fractions import Fraction
from itertools import combinations
from pathlib import Path

import pytest
import torch

import cppo
import grpo
from cppo import cppo_loss, keep_count, prune, prune_below, prune_pooled
from grpo import group_advantages, grpo_loss

torch.set_num_threads(1)
F64 = torch.float64


def seeded(seed):
    return torch.Generator().manual_seed(seed)


# --- keep_count -------------------------------------------------------------------------------------------------------


def test_pruning_i_of_g_keeps_exactly_g_minus_i():
    for group_size in range(1, 65):
        for i in range(group_size):
            assert keep_count(group_size, i / group_size) == group_size - i, (group_size, i)


def test_a_pruning_rate_of_two_decimals_means_the_decimal_number():
    """⌊G(1 − P)⌋ in exact fractions: the float 0.9 is not nine tenths, and 10·(1 − 0.9) is below 1 in floats."""
    for group_size in range(1, 65):
        for hundredths in range(100):
            k = math.floor(group_size * (1 - Fraction(hundredths, 100)))
            if k >= 1:
                assert keep_count(group_size, hundredths / 100) == k, (group_size, hundredths)
            else:
                with pytest.raises(ValueError):
                    keep_count(group_size, hundredths / 100)


@pytest.mark.parametrize("rate, k", [(0.9, 1), (0.8, 2), (0.7, 3), (0.1, 9), (0.0, 10), (0, 10)])
def test_keep_count_of_ten(rate, k):
    assert keep_count(10, rate) == k


@pytest.mark.parametrize("rate, k", [(0.0, 16), (0.5, 8), (0.75, 4), (0.875, 2), (0.9375, 1)])
def test_keep_count_of_the_paper(rate, k):
    assert keep_count(16, rate) == k and type(keep_count(16, rate)) is int


def test_keep_count_rounds_down():
    assert keep_count(16, 0.8) == 3  # 3.2
    assert keep_count(16, 0.9) == 1  # 1.6


@pytest.mark.parametrize("rate", [-0.1, -1e-6, 1.0, 1, 1.5, math.nan, math.inf, -math.inf])
def test_a_pruning_rate_outside_0_to_1_is_refused(rate):
    with pytest.raises(ValueError, match="pruning rate must lie in"):
        keep_count(16, rate)


@pytest.mark.parametrize("group_size, rate", [(4, 0.8), (16, 0.95), (1, 0.01)])
def test_a_rate_that_keeps_nothing_is_refused(group_size, rate):
    with pytest.raises(ValueError, match="keeps none"):
        keep_count(group_size, rate)


# --- prune ------------------------------------------------------------------------------------------------------------


SCORES = {"largest_abs": abs, "smallest_abs": lambda a: -abs(a), "largest": lambda a: a}


@pytest.mark.parametrize("rule", SCORES)
@pytest.mark.parametrize("k", range(1, 7))
def test_prune_equals_sorting_each_question_by_hand(rule, k):
    """Best score first and, among equals, the lower index: 40 questions of integer advantages, full of ties."""
    advantages = torch.randint(-2, 3, (40, 6), generator=seeded(k)).float()
    kept = prune(advantages, k, rule=rule)
    assert kept.dtype == torch.int64 and kept.shape == (40, k)
    for row, indices in zip(advantages.tolist(), kept.tolist(), strict=True):
        assert indices == sorted(sorted(range(6), key=lambda i: (-SCORES[rule](row[i]), i))[:k])


@pytest.mark.parametrize("rule", SCORES)
def test_prune_equals_sorting_in_wide_groups(rule):
    """Wide enough that an unstable sort would show."""
    advantages = torch.randint(-1, 2, (5, 300), generator=seeded(0)).float()
    for row, indices in zip(advantages.tolist(), prune(advantages, 150, rule=rule).tolist(), strict=True):
        assert indices == sorted(sorted(range(300), key=lambda i: (-SCORES[rule](row[i]), i))[:150])


def test_prune_keeps_the_largest_absolute_advantages_by_default():
    """The paper's choice: a very bad completion teaches as much as a very good one."""
    assert prune(torch.tensor([[0.1, -2.0, 0.5, 1.0]]), 2).tolist() == [[1, 3]]


def test_equal_advantages_keep_the_first():
    assert prune(torch.zeros(2, 5), 3).tolist() == [[0, 1, 2], [0, 1, 2]]


def test_prune_treats_each_question_alone():
    """A question of small advantages keeps as many as one of large ones, and the same ones as without the other."""
    small = torch.tensor([[0.01, -0.03, 0.02, 0.0]])
    kept = prune(torch.cat([small, 100 * torch.ones(1, 4)]), 2)
    assert kept.shape == (2, 2)
    assert kept[0].tolist() == prune(small, 2)[0].tolist() == [1, 2]


@pytest.mark.parametrize("rule", ["largest_abs", "smallest_abs", "largest", "random"])
def test_k_equal_to_g_keeps_everything(rule):
    advantages = torch.randn(3, 5, generator=seeded(1))
    assert prune(advantages, 5, rule=rule).tolist() == [[0, 1, 2, 3, 4]] * 3


@pytest.mark.parametrize("k", [0, -1, 6])
@pytest.mark.parametrize("rule", ["largest_abs", "random"])
def test_k_outside_1_to_g_is_refused(k, rule):
    with pytest.raises(ValueError, match="k must lie in"):
        prune(torch.randn(3, 5), k, rule=rule)


@pytest.mark.parametrize("rule", ["biggest", "", None])
def test_an_unknown_rule_is_refused(rule):
    with pytest.raises(ValueError, match="rule must be"):
        prune(torch.randn(3, 5), 5, rule=rule)


def test_random_reaches_every_subset_about_equally_often():
    """C(4, 2) = 6 subsets, 6,000 questions: 1,000 each, give or take. The advantages have no say."""
    advantages = torch.tensor([[9.0, 0.0, -9.0, 1.0]]).expand(6000, 4)
    counts = dict.fromkeys(combinations(range(4), 2), 0)
    for indices in prune(advantages, 2, rule="random", generator=seeded(2)).tolist():
        counts[tuple(indices)] += 1  # KeyError where two are equal or not ascending
    assert min(counts.values()) > 850 and max(counts.values()) < 1150


def test_random_draws_from_the_generator_and_from_nothing_else():
    advantages = torch.zeros(50, 8)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = prune(advantages, 4, rule="random", generator=seeded(3))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert torch.equal(prune(advantages, 4, rule="random", generator=seeded(3)), first)
    assert not torch.equal(prune(advantages, 4, rule="random", generator=seeded(4)), first)


# --- the other forms --------------------------------------------------------------------------------------------------


def test_prune_below_keeps_advantages_at_or_above_the_threshold_in_size():
    advantages = torch.tensor([[1.0, -1.0, 0.5, -0.25], [0.0, 0.25, -3.0, 2.0]])
    kept = prune_below(advantages, 1.0)
    assert kept.dtype == torch.bool
    assert kept.tolist() == [[True, True, False, False], [False, False, True, True]]
    assert prune_below(advantages, 0.5).sum(dim=1).tolist() == [3, 2]  # how many differs between questions
    assert prune_below(advantages, 0.0).all()


@pytest.mark.parametrize("n_keep", [0, 1, 7, 100, 240])
def test_prune_pooled_equals_sorting_the_whole_batch_by_hand(n_keep):
    advantages = torch.randint(-3, 4, (40, 6), generator=seeded(5)).float()
    flat = advantages.flatten().tolist()
    kept = prune_pooled(advantages, n_keep)
    assert kept.dtype == torch.int64
    assert kept.tolist() == sorted(sorted(range(240), key=lambda i: (-abs(flat[i]), i))[:n_keep])


def test_pooled_pruning_can_keep_15_of_one_question_and_1_of_another():
    """8 of 16 right: every |A| is 0.97. 1 of 16 right: one |A| of 3.75 and fifteen of 0.25. The paper keeps 8 of each."""
    rewards = torch.tensor([[1.0, 0.0] * 8, [1.0] + [0.0] * 15])
    advantages = group_advantages(rewards)
    pooled = prune_pooled(advantages, 16)
    assert ((pooled < 16).sum().item(), (pooled >= 16).sum().item()) == (15, 1)
    assert prune(advantages, keep_count(16, 0.5)).shape == (2, 8)


# --- the loss ---------------------------------------------------------------------------------------------------------


def problem(seed, questions=3, group_size=4, longest=5):
    """Random rewards (Q, G), lengths (Q, G) with some empty and some of one token, logps (Q, G, T) in float64."""
    g = seeded(seed)
    rewards = torch.randint(0, 3, (questions, group_size), generator=g).double() + torch.rand(questions, group_size, generator=g)
    rewards[0] = 1.0  # a question without signal
    lengths = torch.randint(0, longest + 1, (questions, group_size), generator=g)
    logp = -1 - torch.rand(questions, group_size, longest, generator=g, dtype=F64)
    old, ref = (logp + 0.4 * torch.randn(logp.shape, generator=g, dtype=F64) for _ in range(2))
    return rewards, lengths, logp, old, ref


def cppo_by_loop(rewards, lengths, logp, old, ref, k, beta, clip_low, clip_high):
    """−J of 2503.22342 in Python floats, and ∂loss/∂logp by hand: for each question 1/k over the k largest |A|."""
    loss, gradient = 0.0, torch.zeros_like(logp)
    questions, group_size = rewards.shape
    for q in range(questions):
        group = rewards[q].tolist()
        mean = sum(group) / group_size
        std = math.sqrt(sum((r - mean) ** 2 for r in group) / (group_size - 1))
        advantages = [(r - mean) / (std + 1e-4) for r in group]  # over all G, before pruning
        for i in sorted(range(group_size), key=lambda i: (-abs(advantages[i]), i))[:k]:
            a, length = advantages[i], int(lengths[q, i])
            for t in range(length):
                weight = 1 / (questions * k * length)
                ratio, r = math.exp(logp[q, i, t] - old[q, i, t]), math.exp(ref[q, i, t] - logp[q, i, t])
                clipped = ratio > 1 + clip_high if a > 0 else ratio < 1 - clip_low
                bound = 1 + clip_high if a > 0 else 1 - clip_low
                loss -= weight * ((bound if clipped else ratio) * a - beta * (r - math.log(r) - 1))
                gradient[q, i, t] = -weight * ((0 if clipped else ratio) * a - beta * (1 - r))
    return loss, gradient


def train_rows(rewards, lengths, logp, old, ref, k):
    """What a trainer hands to the loss: advantages of all, then only the kept rows."""
    advantages = group_advantages(rewards)
    kept = prune(advantages, k)
    rows = torch.arange(len(rewards))[:, None], kept
    mask = torch.arange(logp.shape[2]) < lengths[rows].flatten()[:, None]
    return logp[rows].flatten(0, 1), old[rows].flatten(0, 1), advantages[rows].flatten(), mask, ref[rows].flatten(0, 1)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("options", [{"beta": 0.0}, {"beta": 0.04}, {"beta": 1.0, "clip_low": 0.1, "clip_high": 0.3}])
def test_loss_and_gradient_equal_the_papers_formula_with_divisor_k(k, options):
    rewards, lengths, logp, old, ref = problem(6)
    logp.requires_grad_()
    *rows, kept_ref = train_rows(rewards, lengths, logp, old, ref, k)
    loss, _ = cppo_loss(*rows, ref_logp=kept_ref, **options)
    loss.backward()
    clip_low = options.get("clip_low", 0.2)
    expected, gradient = cppo_by_loop(
        rewards, lengths, logp.detach(), old, ref, k, options["beta"], clip_low, options.get("clip_high", clip_low)
    )
    assert loss.item() == pytest.approx(expected, abs=1e-7)  # the weights are float32
    torch.testing.assert_close(logp.grad, gradient, rtol=1e-6, atol=1e-9)


def test_without_pruning_cppo_is_grpo():
    """k = G: the same rows in the same order, the same loss, gradient and stats."""
    rewards, lengths, logp, old, ref = problem(7)
    mask = torch.arange(5) < lengths.flatten()[:, None]
    all_rows = logp.flatten(0, 1), old.flatten(0, 1), group_advantages(rewards).flatten(), mask
    *rows, kept_ref = train_rows(rewards, lengths, logp, old, ref, keep_count(4, 0.0))
    results = []
    for function, (current, *others), reference in ((grpo_loss, all_rows, ref.flatten(0, 1)), (cppo_loss, rows, kept_ref)):
        current = current.clone().requires_grad_()
        loss, stats = function(current, *others, ref_logp=reference, beta=0.1)
        loss.backward()
        results.append((loss.item(), stats, current.grad.tolist()))
    assert results[0] == results[1]


def test_cppo_loss_passes_weights_on():
    """The weights of a larger batch halve the loss, as for grpo_loss."""
    *rows, _ = train_rows(*problem(6), 2)
    whole, half = (cppo_loss(*rows, weights=grpo.sequence_mean_weights(rows[3], num_sequences=n))[0].item() for n in (6, 12))
    assert half == pytest.approx(whole / 2, rel=1e-6) and whole != 0


def test_pruned_completions_still_shape_the_advantages_of_the_kept():
    """Two groups that keep the same two rewards, 0 and 4, and prune different ones: the kept advantages differ."""
    rewards = torch.tensor([[0.0, 2.0, 2.0, 4.0], [0.0, 2.5, 2.5, 4.0]], dtype=F64)
    advantages = group_advantages(rewards)
    kept = prune(advantages, 2)
    assert rewards.gather(1, kept).tolist() == [[0.0, 4.0], [0.0, 4.0]]
    # group 0: mean 2, std √(8/3). group 1: mean 2.25, std √(8.25/3). Taken after pruning, all four would be ±2/√8
    expected = [[-2 / math.sqrt(8 / 3), 2 / math.sqrt(8 / 3)], [-2.25 / math.sqrt(2.75), 1.75 / math.sqrt(2.75)]]
    torch.testing.assert_close(advantages.gather(1, kept), torch.tensor(expected, dtype=F64), rtol=1e-3, atol=0)


def test_grpo_and_cppo_work_alone_in_an_empty_folder(tmp_path):
    """The two files copied elsewhere import nothing of this project but each other, and run."""
    for module in (grpo, cppo):
        shutil.copy(module.__file__, tmp_path / Path(module.__file__).name)
    code = f"""
import math, sys
import torch
before = set(sys.modules)
sys.path.insert(0, {str(tmp_path)!r})
import cppo
print(sorted(set(sys.modules) - before))
assert "transformers" not in sys.modules and "engine" not in sys.modules
x = torch.zeros(2, 3)
print(cppo.cppo_loss(x, x, torch.tensor([1.0, 2.0]), torch.ones(2, 3))[0].item())
"""
    done = subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    modules, loss = done.stdout.splitlines()
    assert modules == "['cppo', 'grpo']"
    assert float(loss) == pytest.approx(-1.5)
