"""gspo.py against eq. 5, 7, 13 and 14 as loops over completions and tokens, gradients by hand."""

import math

import pytest
import torch

from family.gspo import gspo_loss, sequence_ratio, token_ratio
from grpo import sequence_mean_weights
from tests.examples import ADVANTAGES, F64, LENGTHS, example, mask_of

torch.set_num_threads(1)
MASK = mask_of(LENGTHS)


def ratios_by_loop(logp, old_logp):
    return [math.exp(sum(float(logp[i, t] - old_logp[i, t]) for t in range(n)) / max(n, 1)) for i, n in enumerate(LENGTHS)]


def by_loop(logp, old_logp, ref_logp, advantages, beta, low, high):
    """−1/N Σ_i 1/|o_i| Σ_t (min(s_i A_it, clip(s_i) A_it) − β k3) in Python floats, and its gradient by hand."""
    loss, gradient = 0.0, torch.zeros(6, 5, dtype=F64)
    for i, (n, s) in enumerate(zip(LENGTHS, ratios_by_loop(logp, old_logp), strict=True)):
        for t in range(n):
            a, r = advantages[i, t].item(), math.exp(ref_logp[i, t] - logp[i, t])
            open_ = not (a > 0 and s > 1 + high or a < 0 and s < 1 - low)
            bounded = s if open_ else 1 + high if a > 0 else 1 - low
            loss -= (bounded * a - beta * (r - math.log(r) - 1)) / n / 6
            gradient[i, t] = -(open_ * s * a - beta * (1 - r)) / n / 6
    return loss, gradient


def test_the_ratio_of_a_completion_is_the_geometric_mean_of_its_tokens():
    old = torch.zeros(2, 3)
    logp = torch.tensor([[2.0, 8.0, 100.0], [3.0, 100.0, 100.0]]).log()
    assert sequence_ratio(logp, old, torch.tensor([[1, 1, 0], [1, 0, 0]])).tolist() == pytest.approx([4.0, 3.0])


@pytest.mark.parametrize("junk", [0.0, 7.0, math.inf, math.nan])
def test_sequence_ratio_equals_a_loop_and_ignores_the_padding(junk):
    logp, old_logp, _ = example(0.4)
    s = sequence_ratio(logp.detach().masked_fill(~MASK, junk), old_logp.masked_fill(~MASK, -junk), MASK.long())
    assert s.tolist() == pytest.approx(ratios_by_loop(logp.detach(), old_logp), rel=1e-12) and s[2] == 1.0


def test_token_ratio_has_the_value_of_the_sequence_and_the_gradient_of_the_token():
    """Eq. 14: ∂ s_it / ∂ logp_it = s_i, and nothing reaches the other tokens."""
    logp, old_logp, _ = example(0.4)
    ratio = token_ratio(logp, old_logp, MASK)
    assert torch.equal(ratio, sequence_ratio(logp, old_logp, MASK)[:, None].expand(6, 5))
    upstream = torch.rand(6, 5, generator=torch.Generator().manual_seed(1), dtype=F64)
    (gradient,) = torch.autograd.grad(ratio, logp, upstream)
    expected = torch.tensor(ratios_by_loop(logp.detach(), old_logp), dtype=F64)[:, None] * upstream * MASK
    torch.testing.assert_close(gradient, expected)


CLIPS = [(1e-3, 3e-4, 4e-4), (0.4, 0.1, 0.3), (0.4, 0.2, None)]  # spread, clip_low, clip_high


@pytest.mark.parametrize("token_level", [False, True])
@pytest.mark.parametrize("spread, low, high", CLIPS)
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_loss_and_gradient_equal_a_loop(beta, spread, low, high, token_level):
    logp, old_logp, ref_logp = example(spread)
    options = {"beta": beta, "clip_low": low, "clip_high": high, "token_level": token_level}
    loss, stats = gspo_loss(logp, old_logp, ADVANTAGES, MASK, ref_logp=ref_logp, **options)
    loss.backward()
    each = ADVANTAGES[:, None].expand(6, 5)
    expected, gradient = by_loop(logp.detach(), old_logp, ref_logp, each, beta, low, low if high is None else high)
    assert stats["clip_fraction"] > 0
    assert loss.item() == pytest.approx(expected, abs=1e-7)  # the weights are float32
    torch.testing.assert_close(logp.grad, gradient, rtol=1e-6, atol=1e-9)


def test_the_gradient_of_gspo_spreads_over_the_completion_and_that_of_gspo_token_stays_on_the_token():
    """Weight on the first token only: s_i is still the ratio of all three."""
    old_logp, weights = torch.zeros(1, 3, requires_grad=True), torch.tensor([[1.0, 0.0, 0.0]])
    for options, expected in [({}, [-1 / 3] * 3), ({"token_level": True}, [-1.0, 0.0, 0.0])]:
        logp = torch.zeros(1, 3, requires_grad=True)
        gspo_loss(logp, old_logp, torch.ones(1), torch.ones(1, 3), weights=weights, **options)[0].backward()
        assert logp.grad[0].tolist() == pytest.approx(expected) and old_logp.grad is None


@pytest.mark.parametrize("spread, low, high", CLIPS)
def test_gspo_and_gspo_token_are_one_where_a_completion_has_one_advantage(spread, low, high):
    logp, old_logp, _ = example(spread)
    losses = [gspo_loss(logp, old_logp, ADVANTAGES, MASK, clip_low=low, clip_high=high, token_level=x)[0] for x in (False, True)]
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logp)[0] for loss in losses), rtol=1e-9, atol=1e-15)


def test_gspo_token_takes_an_advantage_for_each_token():
    logp, old_logp, ref_logp = example(0.4)
    advantages = torch.randn(6, 5, generator=torch.Generator().manual_seed(2), dtype=F64)
    loss, _ = gspo_loss(logp, old_logp, advantages, MASK, clip_low=0.1, clip_high=0.1, token_level=True)
    loss.backward()
    expected, gradient = by_loop(logp.detach(), old_logp, ref_logp, advantages, 0.0, 0.1, 0.1)
    assert loss.item() == pytest.approx(expected, abs=1e-7)
    torch.testing.assert_close(logp.grad, gradient, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("token_level", [False, True])
@pytest.mark.parametrize(
    "s, advantage, surrogate, clipped",
    [
        (1 + 3.5e-4, 1.0, 1 + 3.5e-4, False),  # above 3e-4 and below 4e-4
        (1 + 5e-4, 1.0, 1 + 4e-4, True),
        (1.1, 1.0, 1 + 4e-4, True),  # a clip of 0.2 would not act here
        (0.9, 1.0, 0.9, False),
        (1.1, -1.0, -1.1, False),
        (1 - 2e-4, -1.0, -(1 - 2e-4), False),
        (1 - 3.5e-4, -1.0, -(1 - 3e-4), True),
        (0.9, -1.0, -(1 - 3e-4), True),
    ],
)
def test_the_default_clip_takes_whole_completions_in_every_quadrant(s, advantage, surrogate, clipped, token_level):
    """Token ratios 2s, s/2 and s: none of them decides, only their geometric mean s."""
    logp = torch.tensor([[2 * s, s / 2, s]], dtype=F64).log().requires_grad_()
    zero, a = torch.zeros(1, 3, dtype=F64), torch.tensor([advantage], dtype=F64)
    loss, stats = gspo_loss(logp, zero, a, torch.ones(1, 3), token_level=token_level)
    loss.backward()
    assert -loss.item() == pytest.approx(surrogate, abs=1e-7)
    assert -logp.grad[0].numpy() == pytest.approx(0.0 if clipped else s * advantage / 3, abs=1e-7)
    assert stats["clip_fraction"] == pytest.approx(float(clipped))


def test_there_is_no_kl_in_the_loss_by_default():
    logp, old_logp, ref_logp = example(1e-3)
    with_reference, stats = gspo_loss(logp, old_logp, ADVANTAGES, MASK, ref_logp=ref_logp - 1)
    assert with_reference == gspo_loss(logp, old_logp, ADVANTAGES, MASK)[0] and stats["kl"] > 0  # it is only reported


@pytest.mark.parametrize("token_level", [False, True])
@pytest.mark.parametrize("cut", [[1] * 6, [2, 4], [3, 2, 1]])
def test_the_parts_of_a_batch_add_up_to_the_whole(cut, token_level):
    logp, old_logp, _ = example(1e-3)
    rows = [x.split(cut) for x in (logp, old_logp, ADVANTAGES, MASK)]
    losses = [gspo_loss(*part, weights=sequence_mean_weights(part[3], num_sequences=6), token_level=token_level)[0] for part in zip(*rows)]
    whole = gspo_loss(logp, old_logp, ADVANTAGES, MASK, token_level=token_level)[0]
    assert sum(losses).item() == pytest.approx(whole.item(), rel=1e-6)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logp)[0] for loss in (sum(losses), whole)))
