"""Lite PPO (arXiv 2508.08221): the mean of the group, the std of the batch, the mean over tokens.

GRPO divides each group by its own std. In a group that is nearly all right or all wrong this std is
small, so a single unusual reward counts much. Lite PPO divides all groups by the same number:

    A_i = (r_i − mean(r of the group)) / std(r of the batch)

and lets every token count the same, as DAPO does. The clip is PPO's. There is no KL term, and one
update on each batch. The formula and these numbers were read in TRL 1.16.0
(`scale_rewards="batch"`, and its index of papers), not in the paper.

REINFORCE++-baseline (arXiv 2501.03262) nearly does the same. It divides by the std of the rewards
*after* the mean of their group is subtracted, over all tokens (verl 0.9.1). So questions of unlike
difficulty do not make its std larger.
"""

from grpo import group_advantages


def batch_std_advantages(rewards, *, eps=1e-4):
    """A = (r − mean of the group) / (std of the batch + eps). (2508.08221)

    rewards: (Q, G), with all questions of the batch. Returns (Q, G). The std is the unbiased one of
    all Q·G rewards, as in TRL. A group of equal rewards gets exact zeros.
    Raises ValueError if G is below 2.
    """
    return group_advantages(rewards, divide_by_std=False) / (rewards.std() + eps)
