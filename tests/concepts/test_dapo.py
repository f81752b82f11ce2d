"""What DAPO promises: a higher clip above, every token counts the same, dynamic sampling, and a
penalty for completions that are too long.

The order: the weights by hand, the loss (eq. 8) as a loop over tokens, known mistakes, dynamic
sampling, and the penalty (eq. 13) at its corners.
"""

import pytest
import torch

from family.dapo import dapo_loss, has_signal, overlong_penalty, token_mean_weights
from tests.helpers.examples import MASK, RANDOM_WEIGHTS, REF, check_loss, mask_of

# --- the definition -------------------------------------------------------------------------------


def test_every_token_weighs_the_same():
    mask = mask_of([2, 1])
    torch.testing.assert_close(token_mean_weights(mask), mask / 3)


@pytest.mark.parametrize("options", [
    {}, {"clip_low": 0.1, "clip_high": 0.4}, {"ref_logp": REF}, {"ref_logp": REF, "beta": 0.3},
    {"weights": RANDOM_WEIGHTS},
])
def test_the_loss_and_its_gradient_equal_a_loop_over_tokens(options):
    """The clip range is larger above than below. Unless β is given, the loss has no KL term: the KL
    is only reported."""
    check_loss(dapo_loss, options, weights=MASK / 14, clip_low=0.2, clip_high=0.28)


# --- known mistakes -------------------------------------------------------------------------------


def test_the_mean_over_tokens_is_not_a_mean_of_means():
    """10 tokens with A = 1 and 990 with A = −1: (10 − 990) / 1000 = −0.98."""
    mask, zero = mask_of([10, 990]), torch.zeros(2, 990)
    loss, _ = dapo_loss(zero, zero, torch.tensor([1.0, -1.0]), mask)
    assert -loss.item() == pytest.approx(-0.98, abs=1e-5)


# --- dynamic sampling -----------------------------------------------------------------------------


def test_groups_whose_rewards_are_all_equal_have_no_signal():
    """All wrong, all right, one right, one wrong, all 0.7, one worse than the others."""
    rewards = [[0.0, 0, 0], [1, 1, 1], [1, 0, 0], [1, 1, 0], [0.7, 0.7, 0.7], [-1, -1, -2]]
    signal = has_signal(torch.tensor(rewards))
    assert signal.dtype == torch.bool and signal.tolist() == [False, False, True, True, False, True]


# --- the penalty for long completions -------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_the_penalty_at_the_corners_of_eq_13(dtype):
    """The paper's 16384 + 4096 tokens: 0 up to 16384, a line down to −1 at 20480, then −1."""
    lengths = [0, 16383, 16384, 16385, 18432, 20479, 20480, 20481, 40960]
    expected = [0, 0, 0, -1 / 4096, -0.5, -4095 / 4096, -1, -1, -1]
    penalty = overlong_penalty(torch.tensor([lengths], dtype=dtype), max_length=20480, cache=4096)
    torch.testing.assert_close(penalty, torch.tensor([expected]))
