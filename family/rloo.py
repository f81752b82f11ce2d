"""RLOO: REINFORCE Leave-One-Out (arXiv 2402.14740).

RLOO says that language models need none of PPO's machinery: no critic, no clip, no ratio. It is
REINFORCE, with the completion as one action, and with the mean reward of the *other* completions of
the question as its baseline:

    ∇J = E 1/G Σ_i A_i ∇ log π(o_i | q)
    A_i = r_i − 1/(G−1) Σ_{j≠i} r_j = G/(G−1) · (r_i − mean(r))

The baseline does not depend on o_i, so the gradient of the expected reward is exact on average.
With the mean over all G it would be (G−1)/G of it. There is no division by a length or a std.

One update on a batch makes every ratio 1, and the gradient of ρA is then A ∇ log π. So the row of
the table is `grpo_loss` with μ = 1 and one mini-batch, and Dr. GRPO's constant in place of |o_i|,
which only scales. Where it departs from the paper: the paper subtracts β log π/π_ref from the
reward. The row has no KL term (--beta adds k3 to the loss).
"""

from grpo import group_advantages


def leave_one_out_advantages(rewards):
    """A_i = r_i − mean of the other rewards of the question. (2402.14740, RLOO's estimator)

    rewards: (Q, G). Returns (Q, G); equal rewards give 0. Raises ValueError if G is below 2.

        rewards     1     0     0     0
        advantages  1   −⅓    −⅓    −⅓
    """
    G = rewards.shape[-1]
    # A_i = G/(G−1) · (r_i − mean(r))
    return group_advantages(rewards, divide_by_std=False) * G / (G - 1)
