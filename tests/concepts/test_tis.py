"""What truncated importance sampling promises: the sampler's draws count as if π_old had made them.

The order: the factor by hand, also IcePop's, its expectation as a sum over eight outcomes, the
gradient over all completions of a tiny policy, the level of the sequence, and what stands on
padding.
"""

import math

import pytest
import torch

from family.tis import sequence_importance_weights, truncated_importance_weights
from grpo import grpo_loss
from tests.helpers.examples import F64, NOT_FINITE, TinyPolicy, mask_of, ours, seeded

PADDING = pytest.mark.parametrize("padding", [-1.0, *ours(math.nan)])

# --- the definition -------------------------------------------------------------------------------

# π_old and π_sampler of two completions: the ratios are 1.5, 0.25, 9; ⅓, 1
OLD_P = torch.tensor([[0.6, 0.1, 0.9], [0.3, 0.5, 0.2]])
SAMPLED_P = torch.tensor([[0.4, 0.4, 0.1], [0.9, 0.5, 0.05]])
OWN = mask_of([3, 2])


@pytest.mark.parametrize("options, expected", [
    ({"cap": 2.0}, [1.5, 0.25, 2.0, 1 / 3, 1.0]),
    ({"cap": 5.0, "low": 0.5}, [1.5, 0.0, 0.0, 0.0, 1.0]),
], ids=["TIS", "IcePop"])  # fmt: skip
def test_icepop_leaves_out_what_truncation_only_bounds(options, expected):
    """A token that the sampler draws too rarely counts more. The weights have no gradient.

    verl 0.9.1 (compute_rollout_correction_weights in rollout_corr_helper.py, token level, with
    the thresholds 2.0 and "0.5_5.0") gives the same. In TRL 1.16.0 it is the mode token_mask, the
    ends are vllm_importance_sampling_clip_min and …_clip_max."""
    old = OLD_P.log().requires_grad_()
    weights = truncated_importance_weights(old, SAMPLED_P.log(), OWN, **options)
    torch.testing.assert_close(weights[OWN], torch.tensor(expected))
    assert not weights.requires_grad


# --- the expectation over eight outcomes ----------------------------------------------------------



def test_the_expectation_is_that_of_the_old_policy():
    """Σ_o π_sampler(o) w(o) f(o) = Σ_o π_old(o) f(o), if the cap is not reached."""
    old, sampled = (torch.randn(8, generator=seeded(seed)).log_softmax(-1) for seed in (1, 2))
    f = torch.arange(8.0) ** 2  # any function of the outcome
    weights = truncated_importance_weights(old[None], sampled[None], torch.ones(1, 8), cap=1e9)
    torch.testing.assert_close((sampled.exp() * weights[0] * f).sum(), (old.exp() * f).sum())


# --- the gradient, over all completions of a tiny policy ------------------------------------------

SAMPLER = TinyPolicy.table(1) + torch.randn(7, 3, generator=seeded(5), dtype=F64)


def corrected(function, theta, padding):
    """The gradient on average over the sampler's completions, with the weights of a function."""
    P, mask = TinyPolicy.probabilities(SAMPLER)[:, None], TinyPolicy.MASK
    logp = TinyPolicy.logp(theta, padding)
    weights = function(logp, TinyPolicy.logp(SAMPLER, padding), mask, cap=1e9) * P * mask
    loss, _ = grpo_loss(logp, logp.detach(), TinyPolicy.REWARDS, mask, beta=0.0, weights=weights)
    return torch.autograd.grad(-loss, theta)[0]


@PADDING
def test_the_corrected_gradient_is_that_of_a_policy_that_takes_one_token_between_the_samplers(
    padding
):
    """The sampler draws the tokens before, π_old takes one, and the sampler goes on. The weights
    correct no more than this one token. So without a cap the gradient is that of
    Σ_prefix P_sampler(prefix) Σ_o π(o | prefix) E_sampler[R | prefix, o]."""
    theta = TinyPolicy.table(1).requires_grad_()
    P, pi, drawn = TinyPolicy.probabilities(SAMPLER), theta.softmax(1), SAMPLER.softmax(1)
    expected = 0.0
    for row, prefix in enumerate(TinyPolicy.PREFIXES):
        for o in range(3):
            begins = [x[: len(prefix) + 1] == (*prefix, o) for x in TinyPolicy.COMPLETIONS]
            # P_sampler(prefix) E[R | prefix, o] = Σ P_sampler R / π_sampler(o | prefix)
            expected += pi[row, o] * (P * TinyPolicy.REWARDS)[begins].sum() / drawn[row, o]
    (gradient,) = torch.autograd.grad(expected, theta)
    torch.testing.assert_close(corrected(truncated_importance_weights, theta, padding), gradient)


# --- at the level of the sequence -----------------------------------------------------------------


@pytest.mark.parametrize("options, expected", [
    ({"cap": 9.0}, [27 / 8, 1 / 3]),
    ({"cap": 2.0, "low": 0.5}, [2.0, 0.5]),
    ({"cap": 2.0, "masked": True}, [0.0, 1 / 3]),
    ({"cap": 9.0, "low": 0.5, "masked": True}, [27 / 8, 0.0]),
], ids=["whole", "truncated", "masked", "masked below"])  # fmt: skip
def test_a_completion_has_the_product_of_its_ratios_on_each_token(options, expected):
    """The products are 1.5 · 0.25 · 9 = 27/8 and ⅓ · 1.

    verl 0.9.1 (compute_rollout_correction_weights, level "sequence") gives the last row with the
    threshold "0.5_9.0". test_family_in_trl.py compares with TRL's trainer."""
    old = OLD_P.log().requires_grad_()
    weights = sequence_importance_weights(old, SAMPLED_P.log(), OWN, **options)
    first, second = expected
    torch.testing.assert_close(weights[OWN], torch.tensor([first] * 3 + [second] * 2))
    assert not weights.requires_grad


@PADDING
def test_the_product_makes_the_whole_gradient_right_and_a_factor_of_each_token_does_not(padding):
    """Without an end, E_sampler[w R ∇ log π] is ∇ E_π[R]."""
    theta = TinyPolicy.table(1).requires_grad_()
    (whole,) = torch.autograd.grad(TinyPolicy.probabilities(theta) @ TinyPolicy.REWARDS, theta)
    product, factor = (
        corrected(function, theta, padding)
        for function in (sequence_importance_weights, truncated_importance_weights))
    torch.testing.assert_close(product, whole)
    assert (factor - whole).norm() > 0.1 * whole.norm()


# --- input at the edge ----------------------------------------------------------------------------


@pytest.mark.ours
@pytest.mark.parametrize("junk", [50.0, *NOT_FINITE])
@pytest.mark.parametrize("function", [truncated_importance_weights, sequence_importance_weights])
def test_the_weight_on_padding_is_1_whatever_stands_there(function, junk):
    """In verl it is 0."""
    old, mask = torch.tensor([[-1.0, junk]]), mask_of([1], width=2)
    weights = function(old, torch.zeros(1, 2), mask, cap=2.0, low=0.1)
    torch.testing.assert_close(weights, torch.tensor([[-1.0, 0.0]]).exp())
