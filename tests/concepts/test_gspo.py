"""What GSPO promises: one ratio per completion, the geometric mean of its tokens' ratios.

The clip acts on this ratio, so on the completion as a whole. The order: the ratio by hand and as a
loop (eq. 7, 14), the loss as a loop (eq. 5, 13), the gradients of GSPO and GSPO-token, and known
mistakes.
"""

import math

import pytest
import torch

from family.gspo import gspo_loss, sequence_ratio, token_ratio
from tests.examples import (
    ADVANTAGES,
    F64,
    LENGTHS,
    LOGP,
    MASK,
    NOT_FINITE,
    OLD,
    PER_COMPLETION,
    REF,
    assert_loss,
    by_loop,
    example,
    seeded,
)

BOTH = pytest.mark.parametrize("token_level", [False, True], ids=["gspo", "gspo_token"])

# --- the ratio ------------------------------------------------------------------------------------


def test_the_ratio_of_a_completion_is_the_geometric_mean_of_those_of_its_tokens():
    """√(2 · 8) = 4. The 100s stand on padding."""
    logp = torch.tensor([[2.0, 8.0, 100.0], [3.0, 100.0, 100.0]]).log()
    ratio = sequence_ratio(logp, torch.zeros(2, 3), torch.tensor([[1, 1, 0], [1, 0, 0]]))
    assert ratio.tolist() == pytest.approx([4.0, 3.0])


def ratios_by_loop(logp, old_logp):
    """s_i on each token, in Python floats. An empty completion has 1."""
    change = [row[:n].sum().item() for row, n in zip(logp.detach() - old_logp, LENGTHS)]
    ratios = [math.exp(x / max(n, 1)) for x, n in zip(change, LENGTHS)]
    return torch.tensor(ratios, dtype=F64)[:, None].expand(6, 5)


RATIOS = ratios_by_loop(LOGP, OLD)


@pytest.mark.parametrize("junk", [7.0, *NOT_FINITE])
def test_the_ratios_equal_a_loop_and_ignore_the_padding(junk):
    dirty = LOGP.masked_fill(~MASK, junk), OLD.masked_fill(~MASK, -junk), MASK.long()
    torch.testing.assert_close(sequence_ratio(*dirty), RATIOS[:, 0])
    torch.testing.assert_close(token_ratio(*dirty), RATIOS)


def test_the_token_ratio_has_the_tokens_gradient():
    """Eq. 14: ∂ s_it / ∂ logp_it = s_i, and the other tokens get no gradient."""
    upstream = torch.rand(6, 5, generator=seeded(1), dtype=F64)
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
    logp, old_logp, _ = example(spread)
    level = {"token_level": True} if token_level else {}
    loss, stats = gspo_loss(logp, old_logp, ADVANTAGES, MASK, **options, **level)
    known = {"logps": (logp, old_logp), "clip_low": 3e-4, "clip_high": 4e-4} | options
    ratios = ratios_by_loop(logp, old_logp)
    assert_loss(loss, by_loop(PER_COMPLETION, ratios=ratios, **known), logp)
    assert stats["clip_fraction"] > 0 and (stats["kl"] > 0) == ("ref_logp" in options)


def test_gspo_token_takes_an_advantage_for_each_token():
    advantages = torch.randn(6, 5, generator=seeded(2), dtype=F64)
    clip = {"clip_low": 0.1, "clip_high": 0.1}
    loss, _ = gspo_loss(LOGP, OLD, advantages, MASK, token_level=True, **clip)
    assert_loss(loss, by_loop(PER_COMPLETION, advantages=advantages, ratios=RATIOS, **clip))


@pytest.mark.parametrize(
    "options, expected", [({}, [-1 / 3, -1 / 3, -1 / 3]), ({"token_level": True}, [-1.0, 0.0, 0.0])]
)
def test_with_weight_on_one_token_only_gspo_trains_all_and_gspo_token_that_one(options, expected):
    """In GSPO, s_i is the ratio of all three tokens, whatever their weights are."""
    logp, zero = torch.zeros(1, 3, requires_grad=True), torch.zeros(1, 3)
    weights = torch.tensor([[1.0, 0.0, 0.0]])
    gspo_loss(logp, zero, torch.ones(1), torch.ones(1, 3), weights=weights, **options)[0].backward()
    assert logp.grad[0].tolist() == pytest.approx(expected)


@pytest.mark.ours
@BOTH
def test_no_gradient_flows_into_the_policy_that_sampled(token_level):
    logp, old_logp = (x.detach().requires_grad_() for x in (LOGP, OLD))
    gspo_loss(logp, old_logp, ADVANTAGES, MASK, token_level=token_level)[0].backward()
    assert logp.grad is not None and old_logp.grad is None


# --- known mistakes -------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    "s, advantage, surrogate, clipped",
    [
        (1 + 3.5e-4, 1.0, 1 + 3.5e-4, False),  # above 3e-4 and below 4e-4
        (1.1, 1.0, 1 + 4e-4, True),  # the clip range of 0.2 would not act here
        (0.9, 1.0, 0.9, False),
        (1.1, -1.0, -1.1, False),
        (1 - 2e-4, -1.0, -(1 - 2e-4), False),
        (1 - 3.5e-4, -1.0, -(1 - 3e-4), True),
    ],
)
def test_the_clip_range_is_not_that_of_grpo_and_takes_whole_completions(
    s, advantage, surrogate, clipped, token_level
):
    """The ratios of the tokens are 2s, s/2 and s. Only their geometric mean s decides."""
    logp = torch.tensor([[2 * s, s / 2, s]], dtype=F64).log().requires_grad_()
    zero, a = torch.zeros(1, 3, dtype=F64), torch.tensor([advantage], dtype=F64)
    loss, stats = gspo_loss(logp, zero, a, torch.ones(1, 3), token_level=token_level)
    slope = 0.0 if clipped else s * advantage / 3
    assert_loss(loss, (-surrogate, torch.full((1, 3), -slope, dtype=F64)), logp)
    assert stats["clip_fraction"] == pytest.approx(float(clipped))
