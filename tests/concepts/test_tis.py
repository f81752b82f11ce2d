"""What truncated importance sampling promises: the sampler's draws count as if π_old had made them.

The order: the factor by hand and as a loop, also IcePop's, its expectation as a sum over eight
outcomes, and what stands on padding.
"""

import math

import pytest
import torch

from family.tis import truncated_importance_weights
from grpo import grpo_loss
from tests.examples import NOT_FINITE, TinyPolicy, mask_of, seeded

# --- the definition -------------------------------------------------------------------------------


def test_a_token_that_the_sampler_draws_too_rarely_counts_more():
    """π_old = 0.6, 0.2, 0.9 and π_sampler = 0.4, 0.4, 0.1: the ratios are 1.5, 0.5 and 9."""
    old, sampled = torch.tensor([[0.6, 0.2, 0.9]]).log(), torch.tensor([[0.4, 0.4, 0.1]]).log()
    weights = truncated_importance_weights(old, sampled, torch.ones(1, 3), cap=2.0)
    assert weights[0].tolist() == pytest.approx([1.5, 0.5, 2.0])


# π_old and π_sampler of two completions: the ratios are 1.5, 0.25, 9; ⅓, 1
OLD_P = torch.tensor([[0.6, 0.1, 0.9], [0.3, 0.5, 0.2]])
SAMPLED_P = torch.tensor([[0.4, 0.4, 0.1], [0.9, 0.5, 0.05]])


@pytest.mark.parametrize("options, expected", [
    ({"cap": 2.0}, [[1.5, 0.25, 2.0], [1 / 3, 1.0, 1.0]]),
    ({"cap": 5.0, "low": 0.5}, [[1.5, 0.0, 0.0], [0.0, 1.0, 1.0]]),
], ids=["TIS", "IcePop"])  # fmt: skip
def test_icepop_leaves_out_what_truncation_only_bounds(options, expected):
    """verl 0.9.1 (compute_rollout_correction_weights in rollout_corr_helper.py, token level, with
    the thresholds 2.0 and "0.5_5.0") gives the same, but 0 on padding. In TRL 1.16.0 it is the mode
    token_mask, the ends are vllm_importance_sampling_clip_min and …_clip_max."""
    weights = truncated_importance_weights(
        OLD_P.log(), SAMPLED_P.log(), mask_of([3, 2]), **options)
    torch.testing.assert_close(weights, torch.tensor(expected))


def test_the_ends_of_icepop_are_inside():
    ratios = torch.tensor([[0.49, 0.5, 5.0, 5.01]], dtype=torch.float64)
    found = truncated_importance_weights(
        ratios.log(), torch.zeros(1, 4), torch.ones(1, 4), cap=5.0 + 1e-9, low=0.5 - 1e-9)
    torch.testing.assert_close(found, torch.tensor([[0.0, 0.5, 5.0, 0.0]]).double())


def logps(*shape, seed):
    return torch.log_softmax(torch.randn(*shape, generator=seeded(seed)), -1)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_the_weights_equal_a_loop_and_have_no_gradient(dtype):
    old, sampled = logps(3, 5, seed=1).requires_grad_(), logps(3, 5, seed=2)
    lengths = [5, 1, 3]
    weights = truncated_importance_weights(old, sampled, mask_of(lengths).to(dtype), cap=1.5)
    expected = torch.ones(3, 5)
    for i, length in enumerate(lengths):
        for t in range(length):
            expected[i, t] = min(math.exp(old[i, t].item() - sampled[i, t].item()), 1.5)
    torch.testing.assert_close(weights, expected)
    assert (weights == 1.5).any() and (weights < 1).any() and not weights.requires_grad


# --- the expectation over eight outcomes ----------------------------------------------------------

OLD, SAMPLED = logps(8, seed=1), logps(8, seed=2)
F = torch.arange(8.0) ** 2  # any function of the outcome
RIGHT = (OLD.exp() * F).sum()  # its expectation under π_old


def expectation(cap, low=None):
    """Σ_o π_sampler(o) w(o) f(o)."""
    options = {"cap": cap, "low": low}
    weights = truncated_importance_weights(OLD[None], SAMPLED[None], torch.ones(1, 8), **options)
    return (SAMPLED.exp() * weights[0] * F).sum()


def test_below_the_cap_the_expectation_is_that_of_the_old_policy():
    assert (SAMPLED.exp() * F).sum() != pytest.approx(RIGHT.item(), rel=0.01)  # without weights
    highest = (OLD - SAMPLED).exp().max().item()
    torch.testing.assert_close(expectation(cap=1.01 * highest), RIGHT)


def test_above_the_cap_each_outcome_counts_as_c_times_the_samplers():
    ratio = (OLD - SAMPLED).exp()
    cap = ratio.median().item()
    lost = ((OLD.exp() - cap * SAMPLED.exp()) * F)[ratio > cap].sum()
    assert lost > 0
    torch.testing.assert_close(expectation(cap), RIGHT - lost)


def test_icepop_loses_the_whole_of_what_it_leaves_out():
    ratio = (OLD - SAMPLED).exp()
    low, cap = ratio.quantile(0.3).item(), ratio.quantile(0.8).item()
    trusted = (low <= ratio) & (ratio <= cap)
    assert 0 < trusted.sum() < 8
    torch.testing.assert_close(expectation(cap, low), (OLD.exp() * F)[trusted].sum())


# --- the gradient, over all completions of a tiny policy ------------------------------------------


def test_the_corrected_gradient_is_that_of_a_policy_that_takes_one_token_between_the_samplers():
    """The sampler draws the tokens before, π_old takes one, and the sampler goes on. The weights
    correct no more than this one token. So without a cap the gradient is that of
    Σ_prefix P_sampler(prefix) Σ_o π(o | prefix) E_sampler[R | prefix, o]."""
    theta = TinyPolicy.table(1).requires_grad_()
    sampler = theta.detach() + torch.randn(7, 3, generator=seeded(5), dtype=torch.float64)
    P, pi = TinyPolicy.probabilities(sampler), theta.softmax(1)
    logp, drawn, mask = TinyPolicy.logp(theta), TinyPolicy.logp(sampler), TinyPolicy.MASK

    weights = truncated_importance_weights(logp, drawn, mask, cap=1e9) * P[:, None] * mask
    loss, _ = grpo_loss(logp, logp.detach(), TinyPolicy.REWARDS, mask, beta=0.0, weights=weights)
    (corrected,) = torch.autograd.grad(-loss, theta, retain_graph=True)

    expected = 0.0
    for row, prefix in enumerate(TinyPolicy.PREFIXES):
        for o in range(3):
            after = [TinyPolicy.COMPLETIONS[i][: len(prefix) + 1] == (*prefix, o)
                     for i in range(15)]
            chance = P[after].sum() / sampler[row].softmax(0)[o]  # of the prefix
            expected += chance * pi[row, o] * (P * TinyPolicy.REWARDS)[after].sum() / P[after].sum()
    torch.testing.assert_close(corrected, torch.autograd.grad(expected, theta)[0])


# --- input at the edge ----------------------------------------------------------------------------


@pytest.mark.parametrize("junk", [50.0, *NOT_FINITE])
def test_the_weight_on_padding_is_1_whatever_stands_there(junk):
    old = torch.tensor([[-1.0, junk]])
    for low in (None, 0.1):
        weights = truncated_importance_weights(
            old, torch.zeros(1, 2), mask_of([1], width=2), cap=2.0, low=low)
        assert weights[0].tolist() == pytest.approx([math.exp(-1), 1.0])
