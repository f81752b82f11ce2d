"""MaxRL: Maximum Likelihood Reinforcement Learning (arXiv 2602.02710).

If a reward is 1 or 0, a question has a probability p that an answer is right. GRPO and REINFORCE
raise p. Maximum likelihood raises log p, so it works more on hard questions:

    log p = −Σ_{k=1}^∞ (1−p)^k / k          ∇ log p = E[∇ log π(o) | o is right]           (thm. 1)

Take N samples, of which K are right. The mean of ∇ log π over the right ones (0 if K = 0) has the
expectation ∇J_N. Here J_N is this series up to k = N (thm. 2). MaxRL subtracts the mean of ∇ log π
over all N, which is 0 on average. This is a policy gradient with the advantages (algorithm 1)

    A_i = (r_i − mean(r)) / mean(r)          and 0 if no answer is right

So ∇J_N = w(p) ∇p with w = (1 − (1−p)^N) / p. This w lies between 1 (REINFORCE) and 1/p (maximum
likelihood). The paper leaves out groups with K = 0, also in the subtraction. On average these would
have added (1−p)^(N−1) ∇p. So the gradient is ∇J_(N−1) (test_maxrl shows it by enumeration).

The row has the loss of the authors' code (github.com/tajwarfahim/maxrl): a mean over tokens, no KL
term, one update on each batch.
"""

import torch


def mean_normalized_advantages(rewards):
    """A = (r − mean) / mean in each group, 0 in a group without a reward. (2602.02710, alg. 1)

    rewards: (Q, G), meant to be 0 or 1. If a penalty makes the mean of a group 0 or less, the
    advantages of the group are 0. Returns (Q, G). The authors' code adds 1e-6 to the mean; the
    paper does not.

        rewards     1   0   0   0         mean ¼
        advantages  3  −1  −1  −1
    """
    assert rewards.dim() == 2, "rewards must be (Q, G), one row per question"
    rewards = 1.0 * rewards  # whole numbers become floats
    mean = rewards.mean(dim=1, keepdim=True)
    shifted = rewards - rewards[:, :1]  # equal rewards give exact zeros
    centred = shifted - shifted.mean(dim=1, keepdim=True)
    # A_i = (r_i − mean(r)) / mean(r)
    return torch.where(mean <= 0, 0.0, centred / mean)
