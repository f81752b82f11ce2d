"""Lite PPO (arXiv 2508.08221): the mean of the group, the std of the batch, the mean over tokens.

GRPO divides each group by its own std. In a group that is nearly all right or all wrong this std is
small, so a single unusual reward counts much. Lite PPO divides all groups by the same number:

    A_i = (r_i − mean(r of the group)) / std(r of the batch)

Every token counts the same, as in DAPO. The clip is PPO's. There is no KL term. Each batch makes
one update. We read the formula and these settings in TRL 1.16.0 (`scale_rewards="batch"`, and its
index of papers), not in the paper.

REINFORCE++-baseline (arXiv 2501.03262) does nearly the same. It first subtracts the mean of each
group. *Then* it takes the std of the result, over all tokens (verl 0.9.1), and divides by it. So
questions of different difficulty do not make this std larger.
"""

def batch_std_advantages(rewards, *, eps=1e-4):
    """A = (r − mean of the group) / (std of the batch + eps). (2508.08221)

    rewards: (Q, G), with all questions of the batch. Returns (Q, G). The std is the unbiased one of
    all Q·G rewards, as in TRL. A group of equal rewards gets exact zeros.
    """
    assert rewards.dim() == 2, "rewards must be (Q, G), one row per question"
    rewards = 1.0 * rewards  # whole numbers become floats
    shifted = rewards - rewards[:, :1]  # equal rewards give exact zeros
    centred = shifted - shifted.mean(1, keepdim=True)
    # A = (r − mean of the group) / (std of the batch + eps)
    return centred / (rewards.std() + eps)
