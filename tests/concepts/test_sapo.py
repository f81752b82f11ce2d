"""What SAPO promises: the gradient of a token fades softly as its ratio moves away from 1."""

import math
from functools import partial

import pytest
import torch

from family.sapo import sapo_loss
from tests.helpers.examples import (
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
    assert_loss,
    check_loss,
)


def soft(ratio, A):
    """f(ρ)A, whose slope is A / cosh²(τ (ρ − 1) / 2), with τ = 3 if A > 0, else 5."""
    tau = 3 if A > 0 else 5
    return 2 / tau * (1 + math.tanh(tau * (ratio - 1) / 2)) * A


@pytest.mark.parametrize("options", [
    {}, {"ref_logp": REF}, {"ref_logp": REF, "beta": 0.3}, {"weights": RANDOM_WEIGHTS}])
def test_the_loss_and_its_gradient_equal_a_loop_over_tokens(options):
    loss = partial(sapo_loss, tau_positive=3.0, tau_negative=5.0)
    check_loss(loss, options, surrogate=soft)


@pytest.mark.parametrize("junk", [50.0, *NOT_FINITE])
def test_verl_computes_the_same_loss_and_gradient_whatever_stands_on_the_padding(junk):
    """verl 0.9.1: compute_policy_loss_sapo(old, logp, A, mask, config=config) of its core_algos.py,
    with tau_pos 1 and tau_neg 1.05."""
    verl = torch.tensor([
        [-0.005498152, -0.122457832, -0.03704957], [0.367269484, 0.02187575, 0.0],
        [-0.055574354, 0.0, 0.0],
    ], dtype=F64)  # fmt: skip
    logp = THREE["logp"].masked_fill(~THREE["mask"], junk).requires_grad_()
    loss, _ = sapo_loss(logp, THREE["old_logp"], THREE["advantages"], THREE["mask"])
    assert_loss(loss, (-0.042619607993566754, verl), logp)


@pytest.mark.ours
@pytest.mark.parametrize("weights", [PER_COMPLETION, RANDOM_WEIGHTS])
def test_the_statistics_are_those_of_the_ratio(weights):
    _, stats = sapo_loss(LOGP, OLD, ADVANTAGES, MASK, weights=weights)
    ratio = (LOGP - OLD).exp()
    mean = (weights * ratio).sum() / weights.sum()
    assert stats["ratio_mean"].item() == pytest.approx(mean.item())
    assert stats["ratio_max"].item() == pytest.approx(ratio[MASK].max().item())
    assert stats["clip_fraction"] == 0


@pytest.mark.parametrize("ratio, least, most", [(1, 1, 1), (2, 0.7, 0.99), (20, 0, 1e-3 / 20)])
def test_a_good_token_far_away_still_has_a_little_gradient_and_a_very_far_one_hardly_any(
    ratio, least, most
):
    """The gradient, relative to that without a clip."""
    one = torch.ones(1, 1, dtype=F64)
    logp = (ratio * one).log().requires_grad_()
    (gradient,) = torch.autograd.grad(sapo_loss(logp, 0 * one, one, one)[0], logp)
    assert least <= -gradient.item() / ratio <= most
