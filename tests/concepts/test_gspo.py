"""What GSPO promises: one ratio per completion, the geometric mean of its tokens' ratios.

The clip acts on this ratio, so on the completion as a whole. The order: the ratio by hand and as a
loop (eq. 7, 14), the loss as a loop (eq. 5, 13), what GSPO and GSPO-token have in common, known
mistakes, and micro-batches.
"""

import math

import pytest
import torch

from family.gspo import gspo_loss, sequence_ratio, token_ratio
from grpo import sequence_mean_weights
from tests.examples import ADVANTAGES, F64, LENGTHS, NOT_FINITE, example, mask_of, seeded

MASK = mask_of(LENGTHS)
BOTH = pytest.mark.parametrize("token_level", [False, True], ids=["gspo", "gspo_token"])
CLIPS = pytest.mark.parametrize(
    "spread, low, high", [(1e-3, 3e-4, 4e-4), (0.4, 0.1, 0.3), (0.4, 0.2, None)]
)

# --- the ratio ------------------------------------------------------------------------------------


def test_the_ratio_of_a_completion_is_the_geometric_mean_of_those_of_its_tokens():
    """√(2 · 8) = 4. The 100s stand on padding."""
    logp = torch.tensor([[2.0, 8.0, 100.0], [3.0, 100.0, 100.0]]).log()
    ratio = sequence_ratio(logp, torch.zeros(2, 3), torch.tensor([[1, 1, 0], [1, 0, 0]]))
    assert ratio.tolist() == pytest.approx([4.0, 3.0])


def ratios_by_loop(logp, old_logp):
    """s_i of each completion, in Python floats. An empty one has 1."""
    ratios = []
    for i, length in enumerate(LENGTHS):
        log_ratios = [float(logp[i, t] - old_logp[i, t]) for t in range(length)]
        ratios.append(math.exp(sum(log_ratios) / max(length, 1)))
    return ratios


@pytest.mark.parametrize("junk", [0.0, 7.0, *NOT_FINITE])
def test_the_ratio_equals_a_loop_and_ignores_the_padding(junk):
    logp, old_logp, _ = example()
    dirty = logp.detach().masked_fill(~MASK, junk), old_logp.masked_fill(~MASK, -junk)
    ratio = sequence_ratio(*dirty, MASK.long())
    assert ratio.tolist() == pytest.approx(ratios_by_loop(logp.detach(), old_logp), rel=1e-12)
    assert ratio[2] == 1.0  # the empty one


def test_the_token_ratio_has_the_completions_value_and_the_tokens_gradient():
    """Eq. 14: ∂ s_it / ∂ logp_it = s_i, and the other tokens get no gradient."""
    logp, old_logp, _ = example()
    ratio = token_ratio(logp, old_logp, MASK)
    assert torch.equal(ratio, sequence_ratio(logp, old_logp, MASK)[:, None].expand(6, 5))
    upstream = torch.rand(6, 5, generator=seeded(1), dtype=F64)
    (gradient,) = torch.autograd.grad(ratio, logp, upstream)
    s = torch.tensor(ratios_by_loop(logp.detach(), old_logp), dtype=F64)
    torch.testing.assert_close(gradient, s[:, None] * upstream * MASK)


@pytest.mark.parametrize("junk", [7.0, *NOT_FINITE])
def test_the_token_ratio_ignores_the_padding(junk):
    logp, old_logp, _ = example()
    dirty = logp.detach().masked_fill(~MASK, junk), old_logp.masked_fill(~MASK, junk)
    assert torch.equal(token_ratio(*dirty, MASK.long()), token_ratio(logp, old_logp, MASK))


# --- the loss -------------------------------------------------------------------------------------


def by_loop(logp, old_logp, ref_logp, advantages, *, beta, low, high):
    """−1/N Σ_i 1/|o_i| Σ_t (min(s_i A_it, clip(s_i) A_it) − β k3), and its gradient by hand."""
    loss, gradient = 0.0, torch.zeros(6, 5, dtype=F64)
    for i, (length, s) in enumerate(zip(LENGTHS, ratios_by_loop(logp, old_logp), strict=True)):
        for t in range(length):
            a, r = advantages[i, t].item(), math.exp(ref_logp[i, t] - logp[i, t])
            open_ = not (a > 0 and s > 1 + high or a < 0 and s < 1 - low)
            bounded = s if open_ else 1 + high if a > 0 else 1 - low
            loss -= (bounded * a - beta * (r - math.log(r) - 1)) / length / 6
            gradient[i, t] = -(open_ * s * a - beta * (1 - r)) / length / 6
    return loss, gradient


@BOTH
@CLIPS
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_the_loss_and_its_gradient_equal_a_loop(beta, spread, low, high, token_level):
    logp, old_logp, ref_logp = example(spread)
    loss, stats = gspo_loss(
        logp, old_logp, ADVANTAGES, MASK, ref_logp=ref_logp, beta=beta, clip_low=low,
        clip_high=high, token_level=token_level,
    )
    loss.backward()
    expected, gradient = by_loop(
        logp.detach(), old_logp, ref_logp, ADVANTAGES[:, None].expand(6, 5), beta=beta, low=low,
        high=low if high is None else high,
    )
    assert stats["clip_fraction"] > 0
    assert loss.item() == pytest.approx(expected, abs=1e-7)  # the weights are float32
    torch.testing.assert_close(logp.grad, gradient, rtol=1e-6, atol=1e-9)


def test_gspo_token_takes_an_advantage_for_each_token():
    logp, old_logp, ref_logp = example()
    advantages = torch.randn(6, 5, generator=seeded(2), dtype=F64)
    clip = {"clip_low": 0.1, "clip_high": 0.1}
    loss, _ = gspo_loss(logp, old_logp, advantages, MASK, token_level=True, **clip)
    loss.backward()
    expected, gradient = by_loop(
        logp.detach(), old_logp, ref_logp, advantages, beta=0.0, low=0.1, high=0.1
    )
    assert loss.item() == pytest.approx(expected, abs=1e-7)
    torch.testing.assert_close(logp.grad, gradient, rtol=1e-6, atol=1e-9)


# --- GSPO and GSPO-token --------------------------------------------------------------------------


@CLIPS
def test_with_one_advantage_per_completion_gspo_and_gspo_token_agree(spread, low, high):
    logp, old_logp, _ = example(spread)
    clip = {"clip_low": low, "clip_high": high}
    losses = [
        gspo_loss(logp, old_logp, ADVANTAGES, MASK, token_level=token_level, **clip)[0]
        for token_level in (False, True)
    ]
    torch.testing.assert_close(*losses)
    gradients = (torch.autograd.grad(loss, logp)[0] for loss in losses)
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize(
    "options, expected", [({}, [-1 / 3, -1 / 3, -1 / 3]), ({"token_level": True}, [-1.0, 0.0, 0.0])]
)
def test_with_weight_on_one_token_only_gspo_trains_all_and_gspo_token_that_one(options, expected):
    """In GSPO, s_i is the ratio of all three tokens, whatever their weights are."""
    logp = torch.zeros(1, 3, requires_grad=True)
    weights = torch.tensor([[1.0, 0.0, 0.0]])
    batch = logp, torch.zeros(1, 3), torch.ones(1), torch.ones(1, 3)
    gspo_loss(*batch, weights=weights, **options)[0].backward()
    assert logp.grad[0].tolist() == pytest.approx(expected)


@pytest.mark.ours
@pytest.mark.parametrize("token_level", [False, True])
def test_no_gradient_flows_into_the_policy_that_sampled(token_level):
    logp, old_logp = (torch.zeros(1, 3, requires_grad=True) for _ in range(2))
    batch = logp, old_logp, torch.ones(1), torch.ones(1, 3)
    gspo_loss(*batch, token_level=token_level)[0].backward()
    assert logp.grad.any() and old_logp.grad is None


# --- known mistakes -------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    "s, advantage, surrogate, clipped",
    [
        (1 + 3.5e-4, 1.0, 1 + 3.5e-4, False),  # above 3e-4 and below 4e-4
        (1 + 5e-4, 1.0, 1 + 4e-4, True),
        (1.1, 1.0, 1 + 4e-4, True),  # the clip range of 0.2 would not act here
        (0.9, 1.0, 0.9, False),
        (1.1, -1.0, -1.1, False),
        (1 - 2e-4, -1.0, -(1 - 2e-4), False),
        (1 - 3.5e-4, -1.0, -(1 - 3e-4), True),
        (0.9, -1.0, -(1 - 3e-4), True),
    ],
)
def test_the_clip_range_is_not_that_of_grpo_and_takes_whole_completions(
    s, advantage, surrogate, clipped, token_level
):
    """The ratios of the tokens are 2s, s/2 and s. Only their geometric mean s decides."""
    logp = torch.tensor([[2 * s, s / 2, s]], dtype=F64).log().requires_grad_()
    zero, a = torch.zeros(1, 3, dtype=F64), torch.tensor([advantage], dtype=F64)
    loss, stats = gspo_loss(logp, zero, a, torch.ones(1, 3), token_level=token_level)
    loss.backward()
    slope = 0.0 if clipped else s * advantage / 3
    assert -loss.item() == pytest.approx(surrogate, abs=1e-7)
    assert -logp.grad[0].numpy() == pytest.approx(slope, abs=1e-7)
    assert stats["clip_fraction"] == pytest.approx(float(clipped))


@BOTH
def test_there_is_no_kl_in_the_loss_by_default(token_level):
    logp, old_logp, ref_logp = example(1e-3)
    batch, options = (logp, old_logp, ADVANTAGES, MASK), {"token_level": token_level}
    loss, stats = gspo_loss(*batch, ref_logp=ref_logp - 1, **options)
    assert loss == gspo_loss(*batch, **options)[0] and stats["kl"] > 0  # it is only reported


@BOTH
@pytest.mark.parametrize("cut", [[1] * 6, [2, 4], [3, 2, 1]])
def test_micro_batches_add_up_to_the_whole(cut, token_level):
    logp, old_logp, _ = example(1e-3)
    weights = sequence_mean_weights(MASK)
    rows = zip(*(x.split(cut) for x in (logp, old_logp, ADVANTAGES, MASK, weights)), strict=True)
    parts = sum(gspo_loss(*x, weights=own, token_level=token_level)[0] for *x, own in rows)
    whole = gspo_loss(logp, old_logp, ADVANTAGES, MASK, token_level=token_level)[0]
    assert parts.item() == pytest.approx(whole.item(), rel=1e-6)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logp)[0] for loss in (parts, whole)))
