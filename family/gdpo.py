"""GDPO: Group reward-Decoupled normalization Policy Optimization (arXiv 2601.05242).

GRPO adds several rewards up and then normalises the sum, which makes different things look the same: of two completions,
rewards that add up to (0, 1) and to (0, 2) both get advantages (−0.71, 0.71). GDPO normalises each reward by itself:

    A_n = (r_n − mean(r_n)) / std(r_n)          in each group, for each reward n
    A = Σ_n w_n A_n                             (0, 1): (−0.71, 0.71)   (0, 2), two rewards of 1: (−1.41, 1.41)
    Â = (A − mean(A)) / std(A)                  over the whole batch: keeps its scale, whatever the number of rewards

Note for CPPO: which completions have a large |A| depends on how the rewards were merged. Of 16 completions let 9 be
right (2 points each) and 14 well formatted (1 each), and the other two be right. These two earn 2, the mean: under the
sum their advantage is 0, and they are pruned first. Here theirs is the largest |A| of all: A = −1.71.
"""

from grpo import group_advantages


def decoupled_advantages(rewards, *, weights=None, normalize_batch=True, eps=1e-4):
    """Advantages from several rewards, each normalised in its group, then summed, then normalised over the batch.

    rewards: (R, Q, G), one (Q, G) for each reward, and Q all questions of the batch. weights: R numbers; None: 1 each.
    Returns (Q, G). `normalize_batch=False` leaves out the last step. std is the unbiased one plus eps.
    Raises ValueError where there is not one weight for each reward.
    """
    weights = [1.0] * len(rewards) if weights is None else weights
    if len(weights) != len(rewards):
        raise ValueError(f"{len(weights)} weights for {len(rewards)} rewards")
    advantages = sum(w * group_advantages(r, eps=eps) for w, r in zip(weights, rewards))
    if normalize_batch:
        # mean(A) is 0, for it is 0 in every group. Its rounding is not subtracted: a group of equal rewards keeps advantages of exactly 0
        advantages = advantages / (advantages.std() + eps)
    return advantages
