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
OLD_P = OLD_ROW.softmax(0)
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


JUNK = pytest.mark.parametrize("junk", [None, *NOT_FINITE])
THRESHOLDS = pytest.mark.parametrize("threshold", [0.05, 9.0])


def check_by_hand(threshold, junk):
    """−Σ w (M min(ρA, clip(ρ)A) − β ρ k3), and its gradient, as Python floats. Returns (which
    completions have M = 0, the statistics)."""
    gone = ~off_policy_mask(ADVANTAGES, LOGP, OLD, MASK, threshold=threshold).flatten()
    assert gone.any() == (threshold < 1)

    def loss(logp, old_logp, advantages, mask, **options):
        return deepseek_v32_loss(logp, old_logp, ADVANTAGES, mask, threshold=threshold, **options)

    return gone, check_loss(
        loss, {"ref_logp": REF, "beta": 0.3}, advantages=ADVANTAGES * ~gone, junk=junk,
        kl=lambda ratio, r: ratio * k3(ratio, r))


@JUNK
@THRESHOLDS
def test_the_loss_by_hand(threshold, junk):
    check_by_hand(threshold, junk)


@pytest.mark.ours
@JUNK
@THRESHOLDS
def test_the_share_of_the_tokens_that_are_masked_is_reported(threshold, junk):
    gone, stats = check_by_hand(threshold, junk)
    share = PER_COMPLETION[gone].sum() / PER_COMPLETION.sum()
    assert stats["masked_fraction"].item() == pytest.approx(share.item())


@pytest.mark.ours
def test_the_other_statistics_are_those_of_grpo_but_for_the_kl():
    _, stats = deepseek_v32_loss(LOGP, OLD, ADVANTAGES, MASK, beta=0.0, threshold=9.0)
    _, others = grpo_loss(LOGP, OLD, ADVANTAGES, MASK, beta=0.0)
    torch.testing.assert_close({name: stats[name] for name in others}, others)
    loss, stats = deepseek_v32_loss(
        LOGP, OLD, 0 * ADVANTAGES, MASK, ref_logp=REF, beta=1.0, weights=0.5 * PER_COMPLETION)
    assert 0.5 * stats["kl"].item() == pytest.approx(loss.item(), rel=1e-9)


# --- the sampling mask ----------------------------------------------------------------------------


def nucleus(p, top_p):
    """The fewest tokens that hold top_p of the probability. p: (V,)."""
    order = p.argsort(descending=True)
    before = p[order].cumsum(0) - p[order]
    kept = torch.zeros(len(p), dtype=torch.bool)
    kept[order[before < top_p]] = True
    return kept


@pytest.mark.parametrize("top_p", [0.5, 1.0])
def test_without_the_sampling_mask_every_ratio_is_short_by_the_share_of_the_nucleus(top_p):
    """The sampler draws from the nucleus of π. The trainer computes the same π, so every ratio
    should be 1. Over the whole vocabulary it is S, the probability of the nucleus."""
    kept = nucleus(OLD_P, top_p)
    S = OLD_P[kept].sum().item()
    assert (S < 0.99) == (top_p < 1)
    drawn = (OLD_P[kept] / S).log()  # the sampler's distribution
    tokens = kept.nonzero().T  # (1, n): each token that can be drawn
    logits, inside = (x.expand(1, tokens.shape[1], 8) for x in (OLD_ROW, kept))
    for logp, ratio in (
        (token_logprobs(logits, tokens), S), (kept_logprobs(logits, tokens, inside), 1.0)
    ):
        found = (logp[0] - drawn).exp()
        torch.testing.assert_close(found, torch.full_like(found, ratio), rtol=1e-5, atol=0)


def test_with_the_sampling_mask_the_ratio_carries_draws_to_the_new_policy_on_the_same_nucleus():
    """Σ_o drawn(o) ρ(o) f(o) = Σ_o π_θ(o | nucleus) f(o), and the mean ratio is 1."""
    kept = nucleus(OLD_P, 0.8)
    tokens = torch.arange(8)[None]
    both = kept.expand(1, 8, 8)
    logp, old = (
        kept_logprobs(x.expand(1, 8, 8), tokens, both, temperature=0.7)[0] for x in
        (THETA, OLD_ROW))
    f = torch.arange(8.0)
    ratio = (logp - old).exp()[kept]
    target = (THETA[kept] / 0.7).softmax(0).float()
    torch.testing.assert_close((old.exp()[kept] * ratio * f[kept]).sum(), (target * f[kept]).sum())
    assert old.exp()[~kept].sum() == 0
