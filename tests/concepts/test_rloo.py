"""What RLOO promises: REINFORCE with the mean of the others as its baseline, unbiased."""

import pytest
import torch

from family.rloo import leave_one_out_advantages
from grpo import group_advantages, grpo_loss
from tests.helpers.examples import F64, TinyPolicy

REWARDS = torch.tensor([[1.0, 0, 0, 0], [2, 1, 1, 0]], dtype=F64)


def test_each_is_compared_with_the_mean_of_the_others():
    """As verl 0.9.1 computes it (compute_rloo_outcome_advantage, and ..._vectorized_...), and TRL
    1.16.0's RLOOTrainer (see test_family_in_trl)."""
    thirds = torch.tensor([[3.0, -1, -1, -1], [4, 0, 0, -4]], dtype=F64)
    torch.testing.assert_close(3 * leave_one_out_advantages(REWARDS), thirds)


@pytest.mark.parametrize("advantages, factor", [
    (leave_one_out_advantages, 1.0), (lambda r: group_advantages(r, divide_by_std=False), 0.5),
], ids=["others", "all"])  # fmt: skip
def test_the_gradient_of_the_expected_reward_is_exact_on_average(advantages, factor):
    """Over all pairs of the 15 completions of a tiny policy, G = 2. With the mean over all G it is
    (G−1)/G of it. The loss is grpo_loss in its first update, summed over a completion's tokens."""
    theta = TinyPolicy.table(2).requires_grad_()
    R, p = TinyPolicy.REWARDS, TinyPolicy.probabilities(theta)
    (exact,) = torch.autograd.grad((p * R).sum(), theta, retain_graph=True)
    pairs = torch.cartesian_prod(torch.arange(15), torch.arange(15))
    # how much each completion counts, over all pairs in which it is: probability · A / G
    shares = p[pairs].prod(1, keepdim=True).detach() * advantages(R[pairs]) / 2
    counts = torch.zeros(15, dtype=F64).index_add(0, pairs.flatten(), shares.flatten())
    logp = TinyPolicy.logp(theta)
    loss, _ = grpo_loss(
        logp, logp.detach(), counts, TinyPolicy.MASK, beta=0.0, weights=TinyPolicy.MASK.double())
    torch.testing.assert_close(torch.autograd.grad(-loss, theta)[0], factor * exact)
