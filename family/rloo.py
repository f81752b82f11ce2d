"""RLOO: REINFORCE Leave-One-Out (arXiv 2402.14740).

The paper says that language models do not need PPO's critic, its clip or its ratio. RLOO is
REINFORCE: the whole completion is one action, and the baseline is the mean reward of the *other*
completions of the question:

    ∇J = E 1/G Σ_i A_i ∇ log π(o_i | q)
    A_i = r_i − 1/(G−1) Σ_{j≠i} r_j = G/(G−1) · (r_i − mean(r))

The baseline does not depend on o_i, so on average this is the gradient of the expected reward. If
the baseline were the mean over all G, it would be (G−1)/G of that gradient. There is no division by
a length or a std.

With one update on a batch every ratio is 1, and the gradient of ρA is A ∇ log π. So the row of the
table is `grpo_loss` with μ = 1 and one mini-batch. Dr. GRPO's constant replaces |o_i|. It
only scales the loss. The row departs from the paper in the KL. The paper subtracts β log π/π_ref
from the reward. The row has no KL term (--beta adds k3 to the loss).
"""

def leave_one_out_advantages(rewards):
    """A_i = r_i − mean of the other rewards of the question. (2402.14740, RLOO's estimator)

    rewards: (Q, G). Returns (Q, G); equal rewards give 0.

        rewards     1     0     0     0
        advantages  1   −⅓    −⅓    −⅓
    """
    assert rewards.dim() == 2, "rewards must be (Q, G), one row per question"
    G = rewards.shape[1]
    rewards = 1.0 * rewards  # whole numbers become floats
    rewards = rewards - rewards[:, :1]  # equal rewards give exact zeros
    # A_i = G/(G−1) · (r_i − mean(r))
    return (rewards - rewards.mean(1, keepdim=True)) * G / (G - 1)
