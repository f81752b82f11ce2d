"""drgrpo.py against the formula as a loop over tokens; and no length of a completion in any divisor."""

import pytest
import torch

from family.drgrpo import constant_weights, drgrpo_loss
from grpo import group_advantages
from tests.examples import ADVANTAGES, LENGTHS, by_loop, example, mask_of

torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.bfloat16])
def test_every_token_weighs_1_over_n_l_however_long_its_completion(dtype):
    weights = constant_weights(mask_of([2, 1, 0], width=3).to(dtype), max_tokens=8)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, torch.tensor([[1 / 24, 1 / 24, 0], [1 / 24, 0, 0], [0, 0, 0]]))


def test_neither_the_padding_nor_the_other_completions_change_the_weight_of_a_token():
    narrow, wide = (constant_weights(mask_of([2, 3], width=width), max_tokens=100) for width in (3, 50))
    other = constant_weights(mask_of([2, 50]), max_tokens=100)
    assert narrow[0, 0] == wide[0, 0] == other[0, 0] and wide[:, 3:].sum() == 0


@pytest.mark.parametrize("max_tokens", [5, 64])
@pytest.mark.parametrize("options", [{}, {"beta": 0.3}, {"clip_low": 0.1, "clip_high": 0.4}])
def test_loss_and_gradient_equal_a_loop_over_tokens(max_tokens, options):
    """No KL in the loss unless β is given, though a reference is handed over."""
    logp, old_logp, ref_logp = example()
    loss, stats = drgrpo_loss(logp, old_logp, ADVANTAGES, mask_of(LENGTHS), max_tokens=max_tokens, ref_logp=ref_logp, **options)
    loss.backward()
    clip = {"low": options.get("clip_low", 0.2), "high": options.get("clip_high", 0.2)}
    expected, gradient = by_loop(logp.detach(), old_logp, ref_logp, weight=1 / max_tokens / 6, beta=options.get("beta", 0.0), **clip)
    assert stats["clip_fraction"] > 0.1  # the example does clip
    assert loss.item() == pytest.approx(expected, abs=1e-7)  # the weights are float32
    torch.testing.assert_close(logp.grad, gradient, rtol=1e-6, atol=1e-9)


def test_a_long_wrong_answer_is_punished_as_much_per_token_as_a_short_one():
    """The point of the paper. With 1/|o_i| a token of the long one would count a hundredth."""
    logp = torch.zeros(2, 100, requires_grad=True)
    drgrpo_loss(logp, torch.zeros(2, 100), torch.tensor([-1.0, -1.0]), mask_of([1, 100]), max_tokens=100)[0].backward()
    assert logp.grad[0, 0] == logp.grad[1, 0] == logp.grad[1, 99] == pytest.approx(1 / 200)


def test_advantages_are_rewards_minus_the_mean_and_nothing_else():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    expected = [[0.75, -0.25, -0.25, -0.25], [0.5, 0.5, -0.5, -0.5], [0.0] * 4]
    assert group_advantages(rewards, divide_by_std=False).tolist() == expected


def test_max_tokens_or_weights_must_be_given_and_weights_count():
    logp, old_logp, _ = example()
    with pytest.raises(ValueError, match="max_tokens"):
        drgrpo_loss(logp, old_logp, ADVANTAGES, mask_of(LENGTHS))
    weights = constant_weights(mask_of(LENGTHS), max_tokens=10)
    given = [drgrpo_loss(logp, old_logp, ADVANTAGES, mask_of(LENGTHS), weights=weights, **more)[0] for more in ({}, {"max_tokens": 99})]
    assert given[0] == given[1] == drgrpo_loss(logp, old_logp, ADVANTAGES, mask_of(LENGTHS), max_tokens=10)[0]


@pytest.mark.parametrize("cut", [[1] * 6, [2, 4], [3, 2, 1]])
def test_the_parts_of_a_batch_add_up_to_the_whole(cut):
    logp, old_logp, _ = example()
    rows = [x.split(cut) for x in (logp, old_logp, ADVANTAGES, mask_of(LENGTHS))]
    parts = [drgrpo_loss(*part, weights=constant_weights(part[3], max_tokens=9, num_sequences=6))[0] for part in zip(*rows, strict=True)]
    whole = drgrpo_loss(logp, old_logp, ADVANTAGES, mask_of(LENGTHS), max_tokens=9)[0]
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-6)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logp)[0] for loss in (sum(parts), whole)))
