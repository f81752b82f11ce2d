"""What DeepSeek-V3.2's three changes promise: a KL that is unbiased off-policy, no push by negative
completions that the policy has left, and one support for sampler and trainer.

The order: the KL's value and its gradient over all tokens and over all completions, the mask by
hand, the loss by hand, the sampling mask over eight tokens, and input at the edge.
"""

import math

import pytest
import torch

from family.deepseek_v32 import deepseek_v32_loss, kept_logprobs, off_policy_mask, unbiased_kl
from grpo import grpo_loss, kl_k3, token_logprobs
from tests.examples import (
    ADVANTAGES,
    F64,
    LOGP,
    MASK,
    NOT_FINITE,
    OLD,
    PER_COMPLETION,
    REF,
    TinyPolicy,
    by_loop,
    kl_of,
    mask_of,
    numeric_gradient,
    seeded,
)

# --- the KL, over all eight tokens ----------------------------------------------------------------

THETA, OLD_ROW, REF_ROW = (torch.randn(8, generator=seeded(i), dtype=F64) for i in (1, 2, 3))
OLD_P = OLD_ROW.softmax(0)


def mean_over_tokens(estimator, theta):
    """Σ_o π_old(o) estimate(o): (value, gradient)."""
    theta = theta.clone().requires_grad_()
    logps = (x.log_softmax(0) for x in (theta, OLD_ROW, REF_ROW))
    value = (OLD_P * estimator(*logps)).sum()
    return value.item(), torch.autograd.grad(value, theta)[0]


def test_the_mean_over_the_tokens_of_the_old_policy_is_the_kl_of_the_new_one():
    value, gradient = mean_over_tokens(unbiased_kl, THETA)
    assert value == pytest.approx(kl_of(THETA, REF_ROW), rel=1e-12)
    expected = numeric_gradient(lambda x: kl_of(x, REF_ROW), THETA)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-8)


def test_plain_k3_has_neither():
    value, gradient = mean_over_tokens(lambda logp, _, ref: kl_k3(logp, ref), THETA)
    expected = numeric_gradient(lambda x: kl_of(x, REF_ROW), THETA)
    assert abs(value - kl_of(THETA, REF_ROW)) > 0.1
    assert (gradient - expected).norm() > 0.3 * expected.norm()


def test_on_policy_the_value_of_k3_is_right_and_its_gradient_is_not():
    """In the first update ρ is 1, and yet it changes the gradient."""
    theta, old = THETA.clone().requires_grad_(), THETA.log_softmax(0)
    p, logp, ref = THETA.softmax(0), theta.log_softmax(0), REF_ROW.log_softmax(0)
    expected = numeric_gradient(lambda x: kl_of(x, REF_ROW), THETA)
    means = [(p * k).sum() for k in (unbiased_kl(logp, old, ref), kl_k3(logp, ref))]
    ours, k3s = (torch.autograd.grad(mean, theta, retain_graph=True)[0] for mean in means)
    assert means[0].item() == pytest.approx(means[1].item(), rel=1e-12)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-8)
    assert (k3s - expected).norm() > 0.3 * expected.norm()


def test_the_gradient_of_the_loss_over_all_completions_is_that_of_the_kl_after_each_prefix():
    """Σ_o π_old(o) ∇ loss = Σ_prefix π_old(prefix) ∇ KL(π_θ(·|prefix) ‖ π_ref(·|prefix))."""
    tables = [TinyPolicy.table(i) for i in (1, 2, 3)]
    theta, old, ref = tables[0].requires_grad_(), *tables[1:]
    weights = TinyPolicy.probabilities(old)[:, None] * TinyPolicy.MASK
    logps = [TinyPolicy.logp(x) for x in (theta, old, ref)]
    loss, stats = deepseek_v32_loss(
        logps[0], logps[1], torch.zeros(15, dtype=F64), TinyPolicy.MASK, ref_logp=logps[2],
        beta=1.0, weights=weights)
    P, expected, value = TinyPolicy.probabilities(old), torch.zeros_like(old), 0.0
    for row, prefix in enumerate(TinyPolicy.PREFIXES):
        with_prefix = [o[: len(prefix)] == prefix and len(o) > len(prefix)
                       for o in TinyPolicy.COMPLETIONS]
        chance = P[with_prefix].sum()
        value += chance * kl_of(theta[row].detach(), ref[row])
        expected[row] = chance * numeric_gradient(
            lambda x, row=row: kl_of(x, ref[row]), theta[row].detach())
    assert loss.item() == pytest.approx(value.item(), rel=1e-9)
    assert (stats["kl"] * weights.sum()).item() == pytest.approx(value.item(), rel=1e-9)
    torch.testing.assert_close(
        torch.autograd.grad(loss, theta)[0], expected, rtol=1e-6, atol=1e-8)


# --- the mask -------------------------------------------------------------------------------------


def test_only_negative_completions_that_the_policy_has_left_are_masked():
    """log π_old/π_θ per token: 1, 1, 0.4, −2. The third completion has 0.9 on padding."""
    sampled = torch.zeros(4, 2)
    moved = torch.tensor([[1.5, 0.5], [1.5, 0.5], [0.4, 9.0], [-2.0, -2.0]])
    A, mask = torch.tensor([-1.0, 1.0, -1.0, -1.0]), mask_of([2, 2, 1, 2])
    found = off_policy_mask(A, sampled - moved, sampled, mask, threshold=0.5)
    assert found.flatten().tolist() == [False, True, True, True]
    at_the_threshold = off_policy_mask(A, sampled - moved, sampled, mask, threshold=1.0)
    assert at_the_threshold.all()
    each_token = off_policy_mask(
        torch.tensor([[-1.0, 1.0]]), sampled[:1] - moved[:1], sampled[:1], mask[:1])
    assert each_token.tolist() == [[False, True]]


def test_a_sampler_that_computes_otherwise_counts():
    """π_θ = π_old as the trainer computes them, but the sampler drew with other probabilities."""
    logp, sampled = torch.full((1, 3), -2.0), torch.full((1, 3), -1.0)
    options = {"beta": 0.0, "weights": torch.full((1, 3), 1 / 3)}
    same, _ = deepseek_v32_loss(logp, logp, torch.tensor([-1.0]), torch.ones(1, 3), **options)
    other, stats = deepseek_v32_loss(
        logp, logp, torch.tensor([-1.0]), torch.ones(1, 3), sampled_logp=sampled, **options)
    assert same.item() == pytest.approx(1.0) and other.item() == 0
    assert stats["masked_fraction"].item() == pytest.approx(1.0)


# --- the loss -------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [0.05, 9.0])
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_the_loss_by_hand(beta, threshold):
    """−Σ w (M min(ρA, clip(ρ)A) − β ρ k3), and its gradient, as Python floats."""
    options = {"ref_logp": REF, "beta": beta, "threshold": threshold}
    loss, stats = deepseek_v32_loss(LOGP, OLD, ADVANTAGES, MASK, **options)
    gone = off_policy_mask(ADVANTAGES, LOGP, OLD, MASK, threshold=threshold).logical_not()
    A = ADVANTAGES * ~gone.flatten()
    value, gradient = by_loop(PER_COMPLETION, advantages=A)
    for at in map(tuple, PER_COMPLETION.nonzero().tolist()):
        p, old, ref = (x[at].item() for x in (LOGP, OLD, REF))
        r, rho = math.exp(ref - p), math.exp(p - old)
        k3 = r - math.log(r) - 1
        value += beta * PER_COMPLETION[at].item() * rho * k3
        # d(ρ k3)/dlogp = ρ k3 + ρ (1 − r) = −ρ log r
        gradient[at] += beta * PER_COMPLETION[at].item() * -rho * math.log(r)
    assert loss.item() == pytest.approx(value, abs=1e-7)
    torch.testing.assert_close(
        torch.autograd.grad(loss, LOGP)[0], gradient, rtol=1e-6, atol=1e-9)
    assert gone.any() == (threshold < 1)
    share = (PER_COMPLETION * gone).sum() / PER_COMPLETION.sum()
    assert stats["masked_fraction"].item() == pytest.approx(share.item(), rel=1e-6)


def test_without_a_kl_and_without_a_mask_it_is_grpos():
    ours = deepseek_v32_loss(LOGP, OLD, ADVANTAGES, MASK, beta=0.0, threshold=9.0)
    theirs = grpo_loss(LOGP, OLD, ADVANTAGES, MASK, beta=0.0)
    torch.testing.assert_close(ours[0], theirs[0])
    for name in ("clip_fraction", "ratio_mean", "ratio_max", "kl"):
        torch.testing.assert_close(ours[1][name], theirs[1][name])


# --- the sampling mask ----------------------------------------------------------------------------


def nucleus(p, top_p):
    """The fewest tokens that hold top_p of the probability. p: (V,)."""
    order = p.argsort(descending=True)
    before = p[order].cumsum(0) - p[order]
    kept = torch.zeros(len(p), dtype=torch.bool)
    kept[order[before < top_p]] = True
    return kept


@pytest.mark.parametrize("top_p", [0.5, 0.8, 1.0])
def test_without_the_sampling_mask_every_ratio_is_short_by_the_share_of_the_nucleus(top_p):
    """The sampler draws from the nucleus of π. The trainer computes the same π, so every ratio
    should be 1. Over the whole vocabulary it is S, the probability of the nucleus."""
    kept = nucleus(OLD_P, top_p)
    S = OLD_P[kept].sum().item()
    drawn = torch.where(kept, OLD_P / S, 0.0)  # the sampler's distribution
    tokens = kept.nonzero().T  # (1, n): each token that can be drawn
    logits = OLD_ROW.expand(1, tokens.shape[1], 8)
    whole = (token_logprobs(logits, tokens) - drawn[tokens].log()).exp()
    torch.testing.assert_close(whole, torch.full_like(whole, S), rtol=1e-5, atol=0)
    same = kept.expand(1, tokens.shape[1], 8)
    inside = (kept_logprobs(logits, tokens, same) - drawn[tokens].log()).exp()
    torch.testing.assert_close(inside, torch.ones_like(inside), rtol=1e-5, atol=0)
    assert (S < 0.99) == (top_p < 1)


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


# --- input at the edge ----------------------------------------------------------------------------


@pytest.mark.parametrize("junk", NOT_FINITE)
def test_what_stands_on_padding_does_not_matter(junk):
    clean = [x.detach().clone() for x in (LOGP, OLD, REF)]
    dirty = [x.masked_fill(~MASK, junk).requires_grad_() for x in clean]
    losses = []
    for logp, old, ref in (clean, dirty):
        loss, stats = deepseek_v32_loss(logp, old, ADVANTAGES, MASK, ref_logp=ref)
        losses.append(loss)
        assert all(value.isfinite() for value in stats.values())
    torch.testing.assert_close(*losses)
    losses[1].backward()
    assert dirty[0].grad.isfinite().all()
