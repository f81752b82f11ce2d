"""What Lite PPO promises: the mean of the group, and one std for the whole batch."""

import statistics

import torch

from family.lite_ppo import batch_std_advantages
from tests.helpers.examples import F64, seeded


def test_the_advantages_equal_a_loop():
    """The std is the unbiased one of all rewards, before any mean is subtracted, plus 1e-4 (TRL
    1.16.0, scale_rewards="batch": see test_family_in_trl)."""
    r = torch.randn(4, 5, generator=seeded(1), dtype=F64) + torch.arange(4)[:, None]
    std = statistics.stdev(r.flatten().tolist()) + 1e-4
    expected = [[(x - statistics.fmean(group)) / std for x in group] for group in r.tolist()]
    torch.testing.assert_close(batch_std_advantages(r), torch.tensor(expected, dtype=F64))
