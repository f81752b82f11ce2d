"""What Dr. GRPO promises: no length of a completion and no std of a group in any divisor.

The order: the weights by hand, the loss as a loop over tokens, the exact expected gradient of a
tiny policy (it has no bias), and a known mistake. test_grpo_advantages.py has the advantages.
"""

from functools import partial

import pytest
import torch

from family.drgrpo import constant_weights, drgrpo_loss
from tests.helpers.examples import (
    MASK,
    RANDOM_WEIGHTS,
    REF,
    TinyPolicy,
    check_loss,
    mask_of,
    numeric_gradient,
)

# --- the definition -------------------------------------------------------------------------------


def test_every_token_weighs_1_over_n_l_however_long_its_completion_is():
    mask = mask_of([2, 1, 3])
    torch.testing.assert_close(constant_weights(mask, max_tokens=8), mask / 24)


@pytest.mark.parametrize("options", [
    {}, {"clip_low": 0.1, "clip_high": 0.4}, {"ref_logp": REF}, {"ref_logp": REF, "beta": 0.3},
    {"weights": RANDOM_WEIGHTS},
])
def test_the_loss_and_its_gradient_equal_a_loop_over_tokens(options):
    """Unless β is given, the loss has no KL term, even with a reference. Weights that are given are
    used."""
    check_loss(partial(drgrpo_loss, max_tokens=9), options, weights=MASK / 54)


# --- the exact gradient ---------------------------------------------------------------------------


def test_the_expected_gradient_is_that_of_the_expected_reward():
    """E_π[∇loss] = −∇J / L with J(θ) = Σ_o π(o) r(o): a sum over the 15 completions, L = 8.

    The weights of GRPO do not have this property (test_grpo.py).
    """
    theta, rewards = TinyPolicy.table(14).requires_grad_(), TinyPolicy.REWARDS
    weights = 15 * constant_weights(TinyPolicy.MASK, max_tokens=8)
    gradient = TinyPolicy.expected_gradient(drgrpo_loss, theta, rewards, weights)
    expected_reward = lambda x: (TinyPolicy.probabilities(x) * rewards).sum()
    expected = numeric_gradient(expected_reward, theta.detach())
    torch.testing.assert_close(gradient, -expected / 8, rtol=0, atol=1e-8)


# --- known mistakes -------------------------------------------------------------------------------


def test_a_long_wrong_answer_is_punished_as_much_per_token_as_a_short_one():
    """With 1/|o_i|, which some implementations keep, a token of the long one counts a hundredth."""
    logp, mask = torch.zeros(2, 100, requires_grad=True), mask_of([1, 100])
    loss, _ = drgrpo_loss(logp, logp.detach(), -torch.ones(2), mask, max_tokens=100)
    (gradient,) = torch.autograd.grad(loss, logp)
    torch.testing.assert_close(gradient, mask / 200)
