"""What GSPO promises: one ratio per completion, the geometric mean of its tokens' ratios.

The clip acts on this ratio, so on the completion as a whole. The order: the ratio by hand and as a
loop (eq. 7, 14), the loss as a loop (eq. 5, 13), the gradients of GSPO and GSPO-token, and known
mistakes.
"""

import math
from functools import partial

import pytest
import torch

from family.gspo import gspo_loss, sequence_ratio, token_ratio
from tests.helpers.examples import (
    F64,
    LOGP,
    MASK,
    NOT_FINITE,
    OLD,
    ONE_EMPTY,
    PER_COMPLETION,
    REF,
    assert_loss,
    check_loss,
    example,
    ours,
    seeded,
)

BOTH = pytest.mark.parametrize("token_level", [False, True], ids=["gspo", "gspo_token"])

# --- the ratio ------------------------------------------------------------------------------------


def test_the_ratio_of_a_completion_is_the_geometric_mean_of_those_of_its_tokens():
    """√(2 · 8) = 4. The 100s stand on padding."""
    logp = torch.tensor([[2.0, 8.0, 100.0], [3.0, 100.0, 100.0]]).log()
    ratio = sequence_ratio(logp, torch.zeros(2, 3), torch.tensor([[1, 1, 0], [1, 0, 0]]))
    assert ratio.tolist() == pytest.approx([4.0, 3.0])


def ratios_by_loop(logp, old_logp, mask=MASK):
    """s_i on each token, in Python floats. An empty completion has 1."""
    changes = [row[own].tolist() for row, own in zip(logp - old_logp, mask)]
    ratios = [math.exp(sum(change) / max(len(change), 1)) for change in changes]
    return torch.tensor(ratios, dtype=F64)[:, None].expand(6, 5)


RATIOS = ratios_by_loop(LOGP.detach(), OLD)


@pytest.mark.parametrize("junk", [7.0, *NOT_FINITE])
@pytest.mark.parametrize("mask, compared", [
    (MASK, MASK), pytest.param(ONE_EMPTY, torch.ones(6, 5).bool(), marks=pytest.mark.ours)])
def test_the_ratios_equal_a_loop_and_ignore_the_padding(mask, compared, junk):
    """An empty completion has the ratio 1, and padding that of its completion."""
    ratios = ratios_by_loop(LOGP.detach(), OLD, mask)
    dirty = LOGP.masked_fill(~mask, junk), OLD.masked_fill(~mask, -junk), mask.long()
    torch.testing.assert_close(sequence_ratio(*dirty), ratios[:, 0])
    torch.testing.assert_close(token_ratio(*dirty)[compared], ratios[compared])


@pytest.mark.parametrize("tokens", [MASK, *ours(torch.ones(6, 5))])
def test_the_token_ratio_has_the_tokens_gradient(tokens):
    """Eq. 14: ∂ s_it / ∂ logp_it = s_i, and the other tokens get no gradient."""
    upstream = tokens * torch.rand(6, 5, generator=seeded(1), dtype=F64)
    (gradient,) = torch.autograd.grad(token_ratio(LOGP, OLD, MASK), LOGP, upstream)
    torch.testing.assert_close(gradient, RATIOS * upstream * MASK)


# --- the loss -------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("spread, options", [
    (1e-3, {}), (1e-3, {"ref_logp": REF}), (0.4, {"clip_low": 0.1, "clip_high": 0.3}),
    (0.4, {"clip_low": 0.2, "clip_high": None}),
    (0.4, {"clip_low": 0.1, "clip_high": 0.3, "ref_logp": REF, "beta": 0.3}),
])
def test_the_loss_and_its_gradient_equal_a_loop(spread, options, token_level):
    """Unless β is given, the loss has no KL term. With one advantage per completion, GSPO and
    GSPO-token agree."""
    loss = partial(gspo_loss, token_level=True) if token_level else gspo_loss
    check_loss(
        loss, options, logps=example(spread)[:2], ratios=ratios_by_loop, clip_low=3e-4,
        clip_high=4e-4)


def test_gspo_token_takes_an_advantage_for_each_token():
    """The gradient of a token is that of its own ratio: w s_i A_it, if no clip acts."""
    advantages = torch.randn(6, 5, generator=seeded(2), dtype=F64)
    loss, _ = gspo_loss(LOGP, OLD, advantages, MASK, token_level=True, clip_low=9, clip_high=9)
    each = -PER_COMPLETION * RATIOS * advantages
    assert_loss(loss, (each.sum().item(), each))


@pytest.mark.parametrize(
    "options, expected", [({}, [-1 / 3, -1 / 3, -1 / 3]), ({"token_level": True}, [-1.0, 0.0, 0.0])]
)
def test_with_weight_on_one_token_only_gspo_trains_all_and_gspo_token_that_one(options, expected):
    """In GSPO, s_i is the ratio of all three tokens, whatever their weights are."""
    logp, zero = torch.zeros(1, 3, requires_grad=True), torch.zeros(1, 3)
    weights = torch.tensor([[1.0, 0.0, 0.0]])
    gspo_loss(logp, zero, torch.ones(1), torch.ones(1, 3), weights=weights, **options)[0].backward()
    assert logp.grad[0].tolist() == pytest.approx(expected)


# --- known mistakes -------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("s, A, surrogate, slope", [
    (1 + 3.5e-4, 1.0, 1 + 3.5e-4, 1 + 3.5e-4),  # above 3e-4 and below 4e-4
    (1.1, 1.0, 1 + 4e-4, 0.0),  # the clip range of 0.2 would not act here
    (1.1, -1.0, -1.1, -1.1),
    (1 - 3.5e-4, -1.0, -(1 - 3e-4), 0.0),
])
def test_the_clip_range_is_not_that_of_grpo_and_takes_whole_completions(
    s, A, surrogate, slope, token_level
):
    """The ratios of the tokens are 2s, s/2 and s. Only their geometric mean s decides."""
    one = torch.ones(1, 3, dtype=F64)
    logp = torch.tensor([[2 * s, s / 2, s]], dtype=F64).log().requires_grad_()
    loss, _ = gspo_loss(logp, 0 * one, torch.tensor([A]), one, token_level=token_level)
    assert_loss(loss, (-surrogate, -slope * one / 3), logp)
