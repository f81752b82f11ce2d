"""What Dr. GRPO promises: no length of a completion and no std of a group in any divisor.

The order: the weights and the advantages by hand, the loss as a loop over tokens, the exact
expected gradient of a tiny policy (it has no bias), known mistakes, and bad input.
"""

from functools import partial

import pytest
import torch

from family.drgrpo import constant_weights, drgrpo_loss
from grpo import group_advantages
from tests.examples import (
    MASK,
    ONE_EMPTY,
    RANDOM_WEIGHTS,
    REF,
    TinyPolicy,
    check_loss,
    mask_of,
    numeric_gradient,
    ours,
)

# --- the definition -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bool, *ours(torch.bfloat16)])
@pytest.mark.parametrize("lengths", [[2, 1, 3], *ours([2, 1, 0])])
def test_every_token_weighs_1_over_n_l_however_long_its_completion_is(lengths, dtype):
    mask = mask_of(lengths, width=3)
    weights = constant_weights(mask.to(dtype), max_tokens=8)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, mask / 24)


@pytest.mark.ours
def test_num_sequences_is_the_divisor_if_the_mask_is_only_a_part_of_the_batch():
    parts = [constant_weights(part, max_tokens=9, num_sequences=6) for part in ONE_EMPTY.split(3)]
    assert torch.equal(torch.cat(parts), constant_weights(ONE_EMPTY, max_tokens=9))


def test_the_advantages_are_the_rewards_minus_their_mean_and_nothing_else():
    rewards = [[1.0, 0.0, 0.0, 0.0], [2.0, 2.0, 2.0, 2.0]]
    expected = [[0.75, -0.25, -0.25, -0.25], [0.0] * 4]
    assert group_advantages(torch.tensor(rewards), divide_by_std=False).tolist() == expected


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
