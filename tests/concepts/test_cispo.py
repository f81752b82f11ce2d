"""What CISPO promises: every token keeps a gradient, however far its ratio has moved.

The order: the gradient by its formula, the statistics, what verl computes, and a known mistake.
"""

import math

import pytest
import torch

from family.cispo import cispo_loss
from grpo import grpo_loss
from tests.helpers.examples import (
    ADVANTAGES,
    F64,
    LOGP,
    MASK,
    NOT_FINITE,
    OLD,
    RANDOM_WEIGHTS,
    REF,
    THREE,
    assert_loss,
)

# --- the definition -------------------------------------------------------------------------------


RATIO, R = (LOGP - OLD).exp().detach(), (REF - LOGP).exp().detach()
BOUNDS = pytest.mark.parametrize("low, high", [(1.0, 0.1), (0.2, 0.4)])


def loss_between(low, high):
    return cispo_loss(
        LOGP, OLD, ADVANTAGES, MASK, clip_low=low, clip_high=high, ref_logp=REF, beta=0.3,
        weights=RANDOM_WEIGHTS)


@BOUNDS
def test_the_gradient_is_the_clipped_weight_times_a_at_every_token(low, high):
    """∂ loss / ∂ log π = −w (clip(ρ, 1 − low, 1 + high) A − β (1 − π_ref/π))."""
    bounded = RATIO.clamp(1 - low, 1 + high)
    expected = -RANDOM_WEIGHTS * (bounded * ADVANTAGES[:, None] - 0.3 * (1 - R))
    torch.testing.assert_close(torch.autograd.grad(loss_between(low, high)[0], LOGP)[0], expected)


@pytest.mark.ours
@BOUNDS
def test_the_statistics_are_those_of_grpo_but_for_the_share_that_is_clipped(low, high):
    _, stats = loss_between(low, high)
    clipped = RATIO.clamp(1 - low, 1 + high) != RATIO
    share = (RANDOM_WEIGHTS * clipped).sum() / RANDOM_WEIGHTS.sum()
    _, others = grpo_loss(
        LOGP, OLD, ADVANTAGES, MASK, ref_logp=REF, weights=RANDOM_WEIGHTS)
    torch.testing.assert_close(stats, others | {"clip_fraction": share})


# What verl 0.9.1 makes of them: compute_policy_loss_cispo(old, logp, A, mask, "token-mean", config)
# of its core_algos.py, with clip_ratio_low 1 and clip_ratio_high 4.
VERL = 0.576871139784722, torch.tensor([
    [-0.833333333, -0.184195153, -0.06131324], [0.368390306, 0.027361666, 0.0],
    [-0.03065662, 0.0, 0.0],
], dtype=F64)  # fmt: skip


@pytest.mark.parametrize("junk", [50.0, *NOT_FINITE])
def test_verl_computes_the_same_loss_and_gradient_whatever_stands_on_the_padding(junk):
    logp = THREE["logp"].masked_fill(~THREE["mask"], junk).requires_grad_()
    loss, _ = cispo_loss(logp, THREE["old_logp"], THREE["advantages"], THREE["mask"])
    assert_loss(loss, VERL, logp)


# --- a known mistake ------------------------------------------------------------------------------


def test_a_rare_good_token_that_has_become_likely_keeps_its_gradient():
    """ρ = e: the gradient of GRPO is 0 because of the clip."""
    one, logp = torch.ones(1, 1), torch.ones(1, 1, requires_grad=True)
    for function, options, slope in (
        (grpo_loss, {}, 0), (cispo_loss, {}, math.e), (cispo_loss, {"clip_high": 0.5}, 1.5)
    ):
        loss, _ = function(logp, 0 * one, one, one, **options)
        assert torch.autograd.grad(loss, logp)[0].item() == pytest.approx(-slope)
