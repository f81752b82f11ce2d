"""What SAPO promises: the gradient of a token fades softly as its ratio moves away from 1."""

import math
from functools import partial

import pytest
import torch

from family.sapo import sapo_loss
from grpo import grpo_loss
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
def test_the_statistics_are_those_of_grpo_but_no_token_is_clipped(weights):
    options = {"ref_logp": REF, "weights": weights}
    _, stats = sapo_loss(LOGP, OLD, ADVANTAGES, MASK, **options)
    _, others = grpo_loss(LOGP, OLD, ADVANTAGES, MASK, **options)
    assert stats == others | {"clip_fraction": 0}
