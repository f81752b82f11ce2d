"""What Dr. GRPO promises: no length of a completion and no std of a group in any divisor.

The order: the weights and the advantages by hand, the loss as a loop over tokens, the exact
expected gradient of a tiny policy (it has no bias), properties, known mistakes, and bad input.
"""

import pytest
import torch

from family.drgrpo import constant_weights, drgrpo_loss
from grpo import group_advantages
from tests.examples import (
    ADVANTAGES,
    LENGTHS,
    TinyPolicy,
    by_loop,
    example,
    mask_of,
    numeric_gradient,
)

MASK = mask_of(LENGTHS)

# --- the definition -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.bfloat16])
def test_every_token_weighs_1_over_n_l_however_long_its_completion_is(dtype):
    weights = constant_weights(mask_of([2, 1, 0], width=3).to(dtype), max_tokens=8)
    assert weights.dtype == torch.float32
    expected = torch.tensor([[1 / 24, 1 / 24, 0], [1 / 24, 0, 0], [0, 0, 0]])
    torch.testing.assert_close(weights, expected)


def test_the_advantages_are_the_rewards_minus_their_mean_and_nothing_else():
    rewards = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [2.0, 2.0, 2.0, 2.0]]
    expected = [[0.75, -0.25, -0.25, -0.25], [0.5, 0.5, -0.5, -0.5], [0.0] * 4]
    assert group_advantages(torch.tensor(rewards), divide_by_std=False).tolist() == expected


@pytest.mark.parametrize("max_tokens", [5, 64])
@pytest.mark.parametrize("options", [{}, {"beta": 0.3}, {"clip_low": 0.1, "clip_high": 0.4}])
def test_the_loss_and_its_gradient_equal_a_loop_over_tokens(max_tokens, options):
    """Unless β is given, the loss has no KL term, even with a reference."""
    logp, old_logp, ref_logp = example()
    loss, stats = drgrpo_loss(
        logp, old_logp, ADVANTAGES, MASK, max_tokens=max_tokens, ref_logp=ref_logp, **options
    )
    loss.backward()
    expected, gradient = by_loop(
        logp.detach(), old_logp, ref_logp, weight=1 / max_tokens / 6,
        beta=options.get("beta", 0.0), low=options.get("clip_low", 0.2),
        high=options.get("clip_high", 0.2),
    )
    assert stats["clip_fraction"] > 0.1  # the example does clip
    assert loss.item() == pytest.approx(expected, abs=1e-7)  # the weights are float32
    torch.testing.assert_close(logp.grad, gradient, rtol=1e-6, atol=1e-9)


# --- the exact gradient ---------------------------------------------------------------------------


def test_the_expected_gradient_is_that_of_the_expected_reward():
    """E_π[∇loss] = −∇J / L with J(θ) = Σ_o π(o) r(o): a sum over the 15 completions, L = 8.

    The weights of GRPO do not have this property (test_grpo.py).
    """
    theta, rewards = TinyPolicy.table(14).requires_grad_(), TinyPolicy.REWARDS
    weights = constant_weights(TinyPolicy.MASK, max_tokens=8, num_sequences=1)
    gradient = TinyPolicy.expected_gradient(drgrpo_loss, theta, rewards, weights)
    expected_reward = lambda x: (TinyPolicy.probabilities(x) * rewards).sum()
    expected = numeric_gradient(expected_reward, theta.detach())
    torch.testing.assert_close(gradient, -expected / 8, rtol=0, atol=1e-8)


# --- properties -----------------------------------------------------------------------------------


def test_neither_the_padding_nor_other_completions_change_the_weight_of_a_token():
    narrow = constant_weights(mask_of([2, 3], width=3), max_tokens=100)
    wide = constant_weights(mask_of([2, 3], width=50), max_tokens=100)
    other = constant_weights(mask_of([2, 50]), max_tokens=100)
    assert narrow[0, 0] == wide[0, 0] == other[0, 0] and wide[:, 3:].sum() == 0


@pytest.mark.parametrize("cut", [[1] * 6, [2, 4], [3, 2, 1]])
def test_micro_batches_add_up_to_the_whole(cut):
    logp, old_logp, _ = example()
    weights = constant_weights(MASK, max_tokens=9, num_sequences=6)
    rows = zip(*(x.split(cut) for x in (logp, old_logp, ADVANTAGES, MASK, weights)), strict=True)
    parts = sum(drgrpo_loss(*part, weights=own)[0] for *part, own in rows)
    whole = drgrpo_loss(logp, old_logp, ADVANTAGES, MASK, max_tokens=9)[0]
    assert parts.item() == pytest.approx(whole.item(), rel=1e-6)
    gradients = (torch.autograd.grad(loss, logp)[0] for loss in (parts, whole))
    torch.testing.assert_close(*gradients)


def test_num_sequences_is_the_divisor_if_the_mask_is_only_a_part_of_the_batch():
    parts = [constant_weights(part, max_tokens=9, num_sequences=6) for part in MASK.split([2, 4])]
    assert torch.equal(torch.cat(parts), constant_weights(MASK, max_tokens=9))


# --- known mistakes -------------------------------------------------------------------------------


def test_a_long_wrong_answer_is_punished_as_much_per_token_as_a_short_one():
    """With 1/|o_i|, which some implementations keep, a token of the long one counts a hundredth."""
    logp, advantages = torch.zeros(2, 100, requires_grad=True), torch.tensor([-1.0, -1.0])
    loss, _ = drgrpo_loss(
        logp, torch.zeros(2, 100), advantages, mask_of([1, 100]), max_tokens=100
    )
    loss.backward()
    assert logp.grad[0, 0] == logp.grad[1, 0] == logp.grad[1, 99] == pytest.approx(1 / 200)


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.ours
def test_max_tokens_or_weights_must_be_given():
    logp, old_logp, _ = example()
    with pytest.raises(ValueError, match="max_tokens"):
        drgrpo_loss(logp, old_logp, ADVANTAGES, MASK)


def test_if_both_are_given_the_weights_are_used():
    def loss(**options):
        return drgrpo_loss(*example()[:2], ADVANTAGES, MASK, **options)[0]

    weights = constant_weights(MASK, max_tokens=10)
    assert loss(weights=weights) == loss(weights=weights, max_tokens=99) == loss(max_tokens=10)
