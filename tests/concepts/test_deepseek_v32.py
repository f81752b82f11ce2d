"""What DeepSeek-V3.2's three changes promise: a KL that is unbiased off-policy, no push by negative
completions that the policy has left, and one support for sampler and trainer.

The order: the KL's value and its gradient over all tokens and over all completions, the mask by
hand, the loss by hand, and the sampling mask over eight tokens.
"""

import math

import pytest
import torch

from family.deepseek_v32 import deepseek_v32_loss, kept_logprobs, off_policy_mask, unbiased_kl
from grpo import grpo_loss, kl_k3, token_logprobs
from tests.helpers.examples import (
    ADVANTAGES,
    F64,
    LOGP,
    MASK,
    NOT_FINITE,
    OLD,
    PER_COMPLETION,
    REF,
    TinyPolicy,
    check_loss,
    k3,
    kl_of,
    mask_of,
    numeric_gradient,
    ours,
    seeded,
)

# --- the KL, over all eight tokens ----------------------------------------------------------------

THETA, OLD_ROW, REF_ROW = (torch.randn(8, generator=seeded(i), dtype=F64) for i in (1, 2, 3))
KL = kl_of(THETA, REF_ROW)
KL_GRADIENT = numeric_gradient(lambda x: kl_of(x, REF_ROW), THETA)


def mean_over_tokens(estimator, old):
    """Σ_o π_old(o) estimate(o): (value, gradient)."""
    theta = THETA.clone().requires_grad_()
    logps = (x.log_softmax(0) for x in (theta, old, REF_ROW))
    value = (old.softmax(0) * estimator(*logps)).sum()
    return value.item(), torch.autograd.grad(value, theta)[0]


@pytest.mark.parametrize("old", [OLD_ROW, THETA], ids=["later", "first update"])
def test_the_mean_over_the_tokens_of_the_old_policy_is_the_kl_of_the_new_one(old):
    """In the first update ρ is 1, and yet it changes the gradient."""
    value, gradient = mean_over_tokens(unbiased_kl, old)
    assert value == pytest.approx(KL, rel=1e-12)
    torch.testing.assert_close(gradient, KL_GRADIENT, rtol=1e-6, atol=1e-8)


def test_plain_k3_has_neither():
    value, gradient = mean_over_tokens(lambda logp, _, ref: kl_k3(logp, ref), OLD_ROW)
    assert abs(value - KL) > 0.1
    assert (gradient - KL_GRADIENT).norm() > 0.3 * KL_GRADIENT.norm()


@pytest.mark.parametrize("padding", [-1.0, *ours(math.nan)])
def test_the_gradient_of_the_loss_over_all_completions_is_that_of_the_kl_after_each_prefix(padding):
    """Σ_o π_old(o) ∇ loss = Σ_prefix π_old(prefix) ∇ KL(π_θ(·|prefix) ‖ π_ref(·|prefix))."""
    theta, old, ref = tables = [TinyPolicy.table(i) for i in (1, 2, 3)]
    theta.requires_grad_()
    P = TinyPolicy.probabilities(old)
    logp, old_logp, ref_logp = (TinyPolicy.logp(table, padding) for table in tables)
    loss, _ = deepseek_v32_loss(
        logp, old_logp, torch.zeros(15, dtype=F64), TinyPolicy.MASK, ref_logp=ref_logp, beta=1.0,
        weights=P[:, None] * TinyPolicy.MASK)

    def expected(theta):
        return sum(
            P[TinyPolicy.after(prefix)].sum() * kl_of(theta[row], ref[row])
            for row, prefix in enumerate(TinyPolicy.PREFIXES))

    assert loss.item() == pytest.approx(expected(theta.detach()).item(), rel=1e-9)
    torch.testing.assert_close(
        torch.autograd.grad(loss, theta)[0], numeric_gradient(expected, theta.detach()),
        rtol=1e-6, atol=1e-8)


# --- the mask -------------------------------------------------------------------------------------


def test_only_negative_completions_that_the_policy_has_left_are_masked():
    """log π_old/π_θ per token: 1, 1, 0.4, −2. The third completion has 9 on padding."""
    sampled = torch.zeros(4, 2)
    logp = -torch.tensor([[1.5, 0.5], [1.5, 0.5], [0.4, 9.0], [-2.0, -2.0]])
    A, mask = torch.tensor([-1.0, 0.5, -1.0, -1.0]), mask_of([2, 2, 1, 2])
    for threshold, first in ((0.5, False), (1.0, True)):  # at the threshold it stays
        found = off_policy_mask(A, logp, sampled, mask, threshold=threshold)
        assert found.flatten().tolist() == [first, True, True, True]
    each_token = off_policy_mask(torch.tensor([[-1.0, 1.0]]), logp[:1], sampled[:1], mask[:1])
    assert each_token.tolist() == [[False, True]]


@pytest.mark.parametrize("sampled, expected", [(None, 1.0), (torch.full((1, 3), -1.0), 0.0)])
def test_a_sampler_that_computes_otherwise_counts(sampled, expected):
    """π_θ = π_old as the trainer computes them, but the sampler drew with other probabilities."""
    logp = torch.full((1, 3), -2.0)
    loss, _ = deepseek_v32_loss(
        logp, logp, -torch.ones(1), torch.ones(1, 3), sampled_logp=sampled, beta=0.0)
    assert loss.item() == pytest.approx(expected)


# --- the loss -------------------------------------------------------------------------------------


@pytest.mark.parametrize("junk", [None, *NOT_FINITE])
@pytest.mark.parametrize("threshold", [0.05, 9.0])
def test_the_loss_by_hand(threshold, junk):
    """−Σ w (M min(ρA, clip(ρ)A) − β ρ k3), and its gradient, as Python floats."""
    gone = ~off_policy_mask(ADVANTAGES, LOGP, OLD, MASK, threshold=threshold).flatten()
    assert gone.any() == (threshold < 1)

    def loss(logp, old_logp, advantages, mask, **options):
        return deepseek_v32_loss(logp, old_logp, ADVANTAGES, mask, threshold=threshold, **options)

    check_loss(
        loss, {"ref_logp": REF, "beta": 0.3}, advantages=ADVANTAGES * ~gone, junk=junk,
        kl=lambda ratio, r: ratio * k3(ratio, r))


@pytest.mark.ours
def test_the_statistics_are_those_of_grpo_but_for_the_kl_and_the_share_that_is_masked():
    _, stats = deepseek_v32_loss(LOGP, OLD, ADVANTAGES, MASK, beta=0.0, threshold=9.0)
    _, others = grpo_loss(LOGP, OLD, ADVANTAGES, MASK, beta=0.0)
    torch.testing.assert_close({name: stats[name] for name in others}, others)
    half = 0.5 * PER_COMPLETION
    loss, stats = deepseek_v32_loss(
        LOGP, OLD, 0 * ADVANTAGES, MASK, ref_logp=REF, beta=1.0, weights=half)
    assert 0.5 * stats["kl"].item() == pytest.approx(loss.item(), rel=1e-9)
    _, stats = deepseek_v32_loss(LOGP, OLD, ADVANTAGES, MASK, weights=half, threshold=0.05)
    kept = off_policy_mask(ADVANTAGES, LOGP, OLD, MASK, threshold=0.05)
    share = (half * ~kept).sum() / half.sum()
    assert stats["masked_fraction"].item() == pytest.approx(share.item())


# --- the sampling mask ----------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [3, 8])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_without_the_sampling_mask_every_ratio_is_short_by_the_share_of_the_nucleus(
    temperature, top_k
):
    """The sampler draws from the nucleus of π, here the k likeliest tokens. The trainer computes
    the same π, so every ratio should be 1. Over the whole vocabulary it is S, the probability of
    the nucleus."""
    p = (OLD_ROW / temperature).softmax(0)
    tokens = p.topk(top_k).indices[None]  # (1, k): each token that can be drawn
    kept = torch.zeros(8).bool().scatter(0, tokens[0], True)
    S = p[kept].sum().item()
    assert (S < 0.99) == (top_k < 8)
    drawn = (p[tokens] / S).log()  # the sampler's distribution
    logits, inside = (x.expand(1, top_k, 8) for x in (OLD_ROW, kept))
    whole = token_logprobs(logits, tokens, temperature=temperature)
    restricted = kept_logprobs(logits, tokens, inside, temperature=temperature)
    for logp, ratio in ((whole, S), (restricted, 1.0)):
        found = (logp - drawn).exp()
        torch.testing.assert_close(found, torch.full_like(found, ratio), rtol=1e-5, atol=0)
