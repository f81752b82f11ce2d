"""What CISPO promises: every token keeps a gradient, however far its ratio has moved.

The order: the gradient by hand, what verl computes, the first update, known mistakes, and padding.
"""

import math

import pytest
import torch

from family.cispo import cispo_loss
from grpo import grpo_loss, kl_k3
from tests.examples import (
    ADVANTAGES,
    F64,
    LENGTHS,
    NOT_FINITE,
    THREE,
    TinyPolicy,
    example,
    mask_of,
    seeded,
)

MASK = mask_of(LENGTHS)
WEIGHTS = torch.rand(6, 5, generator=seeded(3), dtype=F64) * MASK


def gradient(x, *args, **options):
    loss, stats = cispo_loss(x, *args, **options)
    return torch.autograd.grad(loss, x)[0], stats


# --- the definition -------------------------------------------------------------------------------


@pytest.mark.parametrize("low, high", [(1.0, 4.0), (1.0, 0.1), (0.2, 0.1)])
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_the_gradient_is_the_clipped_weight_times_a_at_every_token(beta, low, high):
    """∂ loss / ∂ log π = −w (clip(ρ, 1 − low, 1 + high) A − β (1 − π_ref/π)), as a loop."""
    logp, old, ref = example()
    options = {"ref_logp": ref, "beta": beta, "weights": WEIGHTS}
    found, stats = gradient(
        logp, old, ADVANTAGES, MASK, clip_low=low, clip_high=high, **options)
    logp = logp.detach()
    expected, clipped = torch.zeros(6, 5, dtype=F64), 0.0
    for i, length in enumerate(LENGTHS):
        for t in range(length):
            ratio = math.exp(logp[i, t] - old[i, t])
            bounded = min(max(ratio, 1 - low), 1 + high)
            kl = beta * (1 - math.exp(ref[i, t] - logp[i, t]))
            expected[i, t] = -WEIGHTS[i, t] * (bounded * ADVANTAGES[i] - kl)
            clipped += WEIGHTS[i, t].item() * (bounded != ratio)
    torch.testing.assert_close(found, expected)
    assert stats["clip_fraction"].item() == pytest.approx(clipped / WEIGHTS.sum().item())
    kl = (WEIGHTS * kl_k3(logp, ref)).sum() / WEIGHTS.sum()
    assert stats["kl"].item() == pytest.approx(kl.item())


LOGP, OTHERS = THREE["logp"], (THREE["old_logp"], THREE["advantages"], THREE["mask"])
# What verl 0.9.1 makes of them: compute_policy_loss_cispo(old, logp, A, mask, "token-mean", config)
# of its core_algos.py, with clip_ratio_low 1 and clip_ratio_high 4.
VERL = 0.576871139784722, torch.tensor([
    [-0.833333333, -0.184195153, -0.06131324], [0.368390306, 0.027361666, 0.0],
    [-0.03065662, 0.0, 0.0],
], dtype=F64)  # fmt: skip


def test_verl_computes_the_same_loss_and_gradient():
    x = LOGP.clone().requires_grad_()
    assert cispo_loss(x, *OTHERS)[0].item() == pytest.approx(VERL[0], abs=1e-6)
    found, stats = gradient(x, *OTHERS)
    torch.testing.assert_close(found, VERL[1], rtol=0, atol=1e-6)
    assert stats["ratio_max"].item() == pytest.approx(math.exp(2))
    assert stats["clip_fraction"].item() == pytest.approx(1 / 6)


# --- properties -----------------------------------------------------------------------------------


def test_at_the_first_update_the_gradient_is_that_of_grpo():
    """Over all 15 completions of a tiny policy: the ratio is 1."""
    theta = TinyPolicy.table(1).requires_grad_()
    weights = TinyPolicy.MASK / 3.0
    both = [
        TinyPolicy.expected_gradient(loss, theta, TinyPolicy.REWARDS, weights, beta=0.0)
        for loss in (cispo_loss, grpo_loss)
    ]
    torch.testing.assert_close(both[0], both[1])
    assert both[0].abs().max() > 0.01


def test_a_rare_good_token_that_has_become_likely_keeps_its_gradient():
    """ρ = e: GRPO's clip has taken all of it."""
    logp, old = torch.tensor([[-2.0]], requires_grad=True), torch.tensor([[-3.0]])
    one, mask = torch.ones(1), torch.ones(1, 1)
    assert torch.autograd.grad(grpo_loss(logp, old, one, mask)[0], logp)[0].item() == 0
    assert gradient(logp, old, one, mask)[0].item() == pytest.approx(-math.e)
    assert gradient(logp, old, one, mask, clip_high=0.5)[0].item() == -1.5


@pytest.mark.parametrize("junk", [50.0, *NOT_FINITE])
def test_padding_counts_for_nothing_whatever_stands_there(junk):
    dirty = LOGP.masked_fill(~THREE["mask"], junk).requires_grad_()
    assert cispo_loss(dirty, *OTHERS)[0].item() == pytest.approx(VERL[0], abs=1e-6)
    found, stats = gradient(dirty, *OTHERS)
    torch.testing.assert_close(found, VERL[1], rtol=0, atol=1e-6)
    assert all(value.isfinite() for value in stats.values())
