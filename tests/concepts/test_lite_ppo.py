"""What Lite PPO promises: the mean of the group, and one std for the whole batch."""

import statistics

import pytest
import torch

from family.lite_ppo import batch_std_advantages
from tests.helpers.examples import F64, seeded

REWARDS = torch.tensor([[1.0, 0, 0, 0], [2, 1, 1, 0]], dtype=F64)


def test_the_advantages_equal_a_loop():
    """The std is the unbiased one of all rewards, before any mean is subtracted, plus 1e-4 (TRL
    1.16.0, scale_rewards="batch": see test_family_in_trl)."""
    r = torch.randn(4, 5, generator=seeded(1), dtype=F64) + torch.arange(4)[:, None]
    std = statistics.stdev(r.flatten().tolist()) + 1e-4
    expected = [[(x - statistics.fmean(group)) / std for x in group] for group in r.tolist()]
    torch.testing.assert_close(batch_std_advantages(r), torch.tensor(expected, dtype=F64))


def test_reinforce_plus_plus_divides_by_another_std():
    """verl 0.9.1, compute_reinforce_plus_plus_baseline_outcome_advantage, for completions of two
    tokens: the std is over the tokens, after the mean of the group is subtracted."""
    verl = [1.2385842192644287, -0.41286140642147623, 1.651445625685905, -1.651445625685905]
    ours = batch_std_advantages(REWARDS).flatten()[[0, 1, 4, 7]]
    centred = (REWARDS - REWARDS.mean(1, keepdim=True)).repeat_interleave(2, 1)
    scale = (REWARDS.std() + 1e-4) / centred.std()
    assert (ours * scale).tolist() == pytest.approx(verl, rel=1e-6) and scale > 1.05
