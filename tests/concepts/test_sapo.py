"""What SAPO promises: the gradient of a token fades softly as its ratio moves away from 1."""

import math

import pytest
import torch

from family.sapo import sapo_loss
from grpo import grpo_loss
from tests.examples import ADVANTAGES, F64, LENGTHS, NOT_FINITE, THREE, TinyPolicy, example, mask_of

MASK = mask_of(LENGTHS)
LOGP, OTHERS = THREE["logp"], (THREE["old_logp"], THREE["advantages"], THREE["mask"])


def gradient(x, *args, **options):
    loss, stats = sapo_loss(x, *args, **options)
    return torch.autograd.grad(loss, x)[0], stats


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_the_gradient_is_that_of_grpo_without_a_clip_times_sech_squared(beta):
    """∂ loss / ∂ log π = −w (ρ A / cosh²(τ (ρ − 1) / 2) − β (1 − π_ref/π)), as a loop."""
    logp, old, ref = example()
    taus = {"tau_positive": 3.0, "tau_negative": 5.0}
    found, _ = gradient(logp, old, ADVANTAGES, MASK, ref_logp=ref, beta=beta, **taus)
    logp = logp.detach()
    expected = torch.zeros(6, 5, dtype=F64)
    for i, length in enumerate(LENGTHS):
        tau = 3.0 if ADVANTAGES[i] > 0 else 5.0
        for t in range(length):
            ratio = math.exp(logp[i, t] - old[i, t])
            fades = ratio / math.cosh(tau * (ratio - 1) / 2) ** 2
            kl = beta * (1 - math.exp(ref[i, t] - logp[i, t]))
            expected[i, t] = -(fades * ADVANTAGES[i] - kl) / (6 * length)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_verl_computes_the_same_loss_and_gradient():
    """verl 0.9.1: compute_policy_loss_sapo(old, logp, A, mask, config=config) of its core_algos.py,
    with tau_pos 1 and tau_neg 1.05."""
    x = LOGP.clone().requires_grad_()
    assert sapo_loss(x, *OTHERS)[0].item() == pytest.approx(-0.042619607993566754, abs=1e-6)
    found, stats = gradient(x, *OTHERS)
    verl = [
        [-0.005498152, -0.122457832, -0.03704957], [0.367269484, 0.02187575, 0.0],
        [-0.055574354, 0.0, 0.0],
    ]
    torch.testing.assert_close(found, torch.tensor(verl, dtype=F64), rtol=0, atol=1e-6)
    assert stats["ratio_max"].item() == pytest.approx(math.exp(2))
    assert stats["clip_fraction"] == 0


def test_at_the_first_update_the_gradient_is_that_of_grpo():
    theta = TinyPolicy.table(1).requires_grad_()
    both = [
        TinyPolicy.expected_gradient(
            loss, theta, TinyPolicy.REWARDS, TinyPolicy.MASK / 3.0, beta=0.0)
        for loss in (sapo_loss, grpo_loss)
    ]
    torch.testing.assert_close(both[0], both[1])


def test_a_good_token_far_away_still_has_a_little_gradient_and_a_very_far_one_hardly_any():
    def at(ratio):
        logp = torch.tensor([[math.log(ratio)]], dtype=F64, requires_grad=True)
        one = torch.ones(1, dtype=F64)
        return gradient(logp, torch.zeros(1, 1, dtype=F64), one, torch.ones(1, 1))[0].item()

    assert at(1) == pytest.approx(-1) and -0.99 < at(2) / 2 < -0.7 and -1e-3 < at(20) < 0


@pytest.mark.parametrize("junk", [50.0, *NOT_FINITE])
def test_padding_counts_for_nothing_whatever_stands_there(junk):
    clean = gradient(LOGP.clone().requires_grad_(), *OTHERS)[0]
    found, stats = gradient(LOGP.masked_fill(~THREE["mask"], junk).requires_grad_(), *OTHERS)
    torch.testing.assert_close(found, clean)
    assert all(value.isfinite() for value in stats.values())
