"""What SAPO promises: the gradient of a token fades softly as its ratio moves away from 1."""

import math

import pytest
import torch

from family.sapo import sapo_loss
from grpo import grpo_loss
from tests.examples import (
    ADVANTAGES,
    F64,
    LOGP,
    MASK,
    NOT_FINITE,
    OLD,
    PER_COMPLETION,
    RANDOM_WEIGHTS,
    REF,
    THREE,
    TinyPolicy,
    assert_loss,
)


@pytest.mark.parametrize("options", [
    {}, {"ref_logp": REF, "beta": 0.3}, {"ref_logp": REF}, {"weights": RANDOM_WEIGHTS}])
def test_the_gradient_is_that_of_grpo_without_a_clip_times_sech_squared(options):
    """∂ loss / ∂ log π = −w (ρ A / cosh²(τ (ρ − 1) / 2) − β (1 − π_ref/π))."""
    taus = {"tau_positive": 3.0, "tau_negative": 5.0}
    loss, stats = sapo_loss(LOGP, OLD, ADVANTAGES, MASK, **options, **taus)
    ratio, r = (LOGP - OLD).exp().detach(), (REF - LOGP).exp().detach()
    A = ADVANTAGES[:, None]
    fades = ratio / (torch.where(A > 0, 3.0, 5.0) * (ratio - 1) / 2).cosh() ** 2
    weights = options.get("weights", PER_COMPLETION)
    expected = -weights * (fades * A - options.get("beta", 0.0) * (1 - r))
    torch.testing.assert_close(
        torch.autograd.grad(loss, LOGP)[0], expected, rtol=1e-6, atol=1e-9)
    mean = (weights * ratio).sum() / weights.sum()
    assert stats["ratio_mean"].item() == pytest.approx(mean.item())


@pytest.mark.parametrize("junk", [50.0, *NOT_FINITE])
def test_verl_computes_the_same_loss_and_gradient_whatever_stands_on_the_padding(junk):
    """verl 0.9.1: compute_policy_loss_sapo(old, logp, A, mask, config=config) of its core_algos.py,
    with tau_pos 1 and tau_neg 1.05."""
    verl = torch.tensor([
        [-0.005498152, -0.122457832, -0.03704957], [0.367269484, 0.02187575, 0.0],
        [-0.055574354, 0.0, 0.0],
    ], dtype=F64)  # fmt: skip
    logp = THREE["logp"].masked_fill(~THREE["mask"], junk).requires_grad_()
    loss, stats = sapo_loss(logp, THREE["old_logp"], THREE["advantages"], THREE["mask"])
    assert_loss(loss, (-0.042619607993566754, verl), logp)
    assert stats["ratio_max"].item() == pytest.approx(math.exp(2))
    assert stats["clip_fraction"] == 0 and all(value.isfinite() for value in stats.values())


def test_at_the_first_update_the_gradient_is_that_of_grpo():
    theta, weights = TinyPolicy.table(1).requires_grad_(), TinyPolicy.MASK / 3.0
    both = [
        TinyPolicy.expected_gradient(loss, theta, TinyPolicy.REWARDS, weights, beta=0.0)
        for loss in (sapo_loss, grpo_loss)
    ]
    torch.testing.assert_close(both[0], both[1])


@pytest.mark.parametrize("ratio, least, most", [(1, 1, 1), (2, 0.7, 0.99), (20, 0, 1e-3 / 20)])
def test_a_good_token_far_away_still_has_a_little_gradient_and_a_very_far_one_hardly_any(
    ratio, least, most
):
    """The gradient, relative to that without a clip."""
    logp = torch.tensor([[math.log(ratio)]], dtype=F64, requires_grad=True)
    one, zero = torch.ones(1, 1, dtype=F64), torch.zeros(1, 1, dtype=F64)
    sapo_loss(logp, zero, one[0], one)[0].backward()
    assert least <= -logp.grad.item() / ratio <= most
