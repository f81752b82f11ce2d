"""dapo.py against eq. 8 as a loop over tokens, eq. 13 at its corners, and counts by hand."""

import math

import pytest
import torch

from family.dapo import dapo_loss, has_signal, overlong_penalty, token_mean_weights
from tests.examples import ADVANTAGES, F64, LENGTHS, by_loop, example, mask_of

torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.bfloat16])
def test_every_token_weighs_the_same(dtype):
    weights = token_mean_weights(mask_of([2, 1, 0], width=4).to(dtype))
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, mask_of([2, 1, 0], width=4) / 3)
    assert token_mean_weights(torch.zeros(2, 3)).tolist() == [[0.0] * 3] * 2  # an empty batch: 0, not NaN


@pytest.mark.parametrize("options", [{}, {"beta": 0.3}, {"clip_low": 0.1, "clip_high": 0.4}])
def test_loss_and_gradient_equal_a_loop_over_tokens(options):
    """No KL in the loss unless β is given: that to the reference is only reported."""
    logp, old_logp, ref_logp = example()
    loss, stats = dapo_loss(logp, old_logp, ADVANTAGES, mask_of(LENGTHS), ref_logp=ref_logp, **options)
    loss.backward()
    clip = {"low": options.get("clip_low", 0.2), "high": options.get("clip_high", 0.28)}
    expected, gradient = by_loop(logp.detach(), old_logp, ref_logp, weight=1 / 14, beta=options.get("beta", 0.0), **clip)
    assert stats["clip_fraction"] > 0.1 and stats["kl"] > 0
    assert loss.item() == pytest.approx(expected, abs=1e-7)  # the weights are float32
    torch.testing.assert_close(logp.grad, gradient, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "ratio, advantage, surrogate, slope",
    [
        (1.25, 1.0, 1.25, 1.25),  # between 1 + ε_low and 1 + ε_high: still open
        (1.30, 1.0, 1.28, 0.0),
        (0.70, 1.0, 0.70, 0.70),
        (0.75, -1.0, -0.80, 0.0),  # below, the range is 0.2 and not 0.28
        (1.30, -1.0, -1.30, -1.30),
    ],
)
def test_the_clip_is_higher_above_than_below(ratio, advantage, surrogate, slope):
    logp = torch.tensor([[math.log(ratio)]], dtype=F64, requires_grad=True)
    loss, _ = dapo_loss(logp, torch.zeros(1, 1, dtype=F64), torch.tensor([advantage], dtype=F64), torch.ones(1, 1))
    loss.backward()
    assert (-loss.item(), -logp.grad.item()) == pytest.approx((surrogate, slope))


def test_a_mean_over_tokens_is_not_a_mean_of_means():
    """10 tokens with A = 1, 990 with A = −1: (10 − 990) / 1000 = −0.98. The mean of the two means is 0."""
    mask, advantages, zero = mask_of([10, 990]), torch.tensor([1.0, -1.0]), torch.zeros(2, 990)
    assert -dapo_loss(zero, zero, advantages, mask)[0].item() == pytest.approx(-0.98, abs=1e-5)
    weights = [token_mean_weights(mask[[i]], total_tokens=1000) for i in range(2)]
    parts = [-dapo_loss(zero[[i]], zero[[i]], advantages[[i]], mask[[i]], weights=weights[i])[0].item() for i in range(2)]
    assert parts == pytest.approx([0.01, -0.99], abs=1e-5)
    means = [-dapo_loss(zero[[i]], zero[[i]], advantages[[i]], mask[[i]])[0].item() for i in range(2)]
    assert sum(means) / 2 == pytest.approx(0.0, abs=1e-5)  # what it would be with each part's own number of tokens


@pytest.mark.parametrize("cut", [[1] * 6, [2, 4], [3, 2, 1]])
def test_the_parts_of_a_batch_add_up_to_the_whole(cut):
    logp, old_logp, _ = example()
    rows = [x.split(cut) for x in (logp, old_logp, ADVANTAGES, mask_of(LENGTHS))]
    parts = [dapo_loss(*part, weights=token_mean_weights(part[3], total_tokens=14))[0] for part in zip(*rows, strict=True)]
    whole = dapo_loss(logp, old_logp, ADVANTAGES, mask_of(LENGTHS))[0]
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-6)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logp)[0] for loss in (sum(parts), whole)))


def test_groups_that_are_all_right_or_all_wrong_have_no_signal():
    rewards = torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.7, 0.7, 0.7], [-1.0, -1.0, -2.0]])
    assert has_signal(rewards).dtype == torch.bool
    assert has_signal(rewards).tolist() == [False, False, True, True, False, True]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_overlong_penalty_at_the_corners_of_eq_13(dtype):
    """The paper's 16384 + 4096 tokens: nothing up to 16384, then a line down to −1 at 20480, and no further."""
    lengths = torch.tensor([[0, 1, 16383, 16384], [16385, 18432, 20479, 20480], [20481, 24576, 40960, 16384 + 1024]], dtype=dtype)
    expected = [[0, 0, 0, 0], [-1 / 4096, -0.5, -4095 / 4096, -1], [-1, -1, -1, -0.25]]
    torch.testing.assert_close(overlong_penalty(lengths, max_length=20480, cache=4096), torch.tensor(expected))


def test_the_cache_may_be_as_long_as_everything_but_not_longer():
    assert overlong_penalty(torch.tensor([0, 5, 10]), max_length=10, cache=10).tolist() == [0.0, -0.5, -1.0]
    for cache in (0, -1, 11):
        with pytest.raises(ValueError, match="cache"):
            overlong_penalty(torch.tensor([5]), max_length=10, cache=cache)
