"""GDPO: Group reward-Decoupled normalization Policy Optimization (arXiv 2601.05242).

GRPO adds several rewards up and then normalises the sum. Different groups then look the same: for
two completions, the summed rewards (0, 1) and (0, 2) both give the advantages (−0.71, 0.71). GDPO
normalises each reward by itself:

    A_n = (r_n − mean(r_n)) / std(r_n)          in each group, for each reward n
    A = Σ_n w_n A_n
    Â = (A − mean(A)) / std(A)                  over the whole batch

In the example, (0, 1) is one reward of 1 and gives A = (−0.71, 0.71). (0, 2) is two rewards of 1
and gives A = (−1.41, 1.41). The last line keeps the scale of the advantages the same, however many
rewards there are.

A note for CPPO: the way in which rewards are merged decides which completions have a large |A|, and
so which completions are pruned. Take 16 completions. 9 of them are right (2 points each). 14 are
well formatted (1 point each). The two badly formatted ones are right. Each of these two earns 2
points, which is the mean of the sums. So GRPO gives them the advantage 0, and CPPO prunes them
first. GDPO gives them −1.71, and no other |A| is as large.
"""

def decoupled_advantages(rewards, *, weights=None, normalize_batch=True, eps=1e-4):
    """Each reward is normalised in its group, then all are summed, then the batch is normalised.

    rewards: (R, Q, G), with all questions of the batch. weights: R numbers; None means 1 for each.
    Returns (Q, G). `normalize_batch=False` leaves out the last step. The std is the unbiased one
    plus eps.
    """
    assert rewards.dim() == 3, "rewards must be (R, Q, G): R rewards of G completions per question"
    weights = [1.0] * len(rewards) if weights is None else weights
    rewards = 1.0 * rewards  # whole numbers become floats
    rewards = rewards - rewards[:, :, :1]  # equal rewards give exact zeros
    # A_n = (r_n − mean(r_n)) / (std(r_n) + eps)
    centred = rewards - rewards.mean(2, keepdim=True)
    each = centred / (rewards.std(2, keepdim=True) + eps)
    # A = Σ_n w_n A_n
    advantages = sum(w * A for w, A in zip(weights, each, strict=True))
    if normalize_batch:
        # Â = A / std(A). mean(A) is 0, because it is 0 in every group. In floats it is a rounding
        # error. If we subtracted it, groups of equal rewards would lose their exact zeros
        advantages = advantages / (advantages.std() + eps)
    return advantages
