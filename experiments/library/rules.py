"""Rules for the tables of reproduce.py: which completions are kept, and how much each counts.

    torchrun train.py --pruning_rate 0.875 --keep experiments/library/rules.py:importance
"""

import torch

from algorithms import KEEP
from family.unbiased import draw, keep_probabilities, reweighted


def distinct(rollout, advantages, k):
    """One completion of each different advantage, the largest |A| first, at most k of a question.

    If a reward is 0 or 1, a question keeps one right and one wrong completion. If all its rewards
    are equal, it keeps one completion, whose advantage is 0. (An ablation of FastRL,
    2609.36932)
    """
    rows = []
    for q, group in enumerate(advantages.tolist()):
        # of equal |A| the lower index comes first
        order = sorted(range(len(group)), key=lambda i: -abs(group[i]))
        firsts = {}  # rounded advantage → the first completion that has it
        for i in order:
            firsts.setdefault(round(group[i], 4), i)
        rows += [q * len(group) + i for i in list(firsts.values())[:k]]
    return torch.tensor(sorted(rows))


# --- rules that are right on average: each completion is drawn with a chance p, and counts 1/p
# (Horvitz and Thompson) ---


importance = KEEP["unbiased"].function  # with chances in proportion to |A|


def half_of_each_sign(rollout, advantages, k):
    """k/2 of the completions with A > 0, and k/2 of those with A < 0, if there are so many."""
    trainable, weights = rollout.trainable, 0.0
    for side in (advantages > 0, advantages < 0):
        side = (side & trainable).double()
        weights = weights + side / side.sum(1, keepdim=True).clamp(min=1)
    # those of one sign are side by side, so that k/2 of them are drawn and not only k/2 on
    # average
    order = advantages.argsort(1)
    p = keep_probabilities(weights, k, allowed=trainable)
    u = torch.rand(
        (len(p), 1), dtype=p.dtype, generator=torch.Generator().manual_seed(rollout.seed))
    kept = draw(p.gather(1, order), u)
    rows = torch.zeros_like(kept).scatter(1, order, kept).flatten().nonzero()[:, 0]
    return rows, reweighted(advantages, p).flatten()[rows]


# --- the mean length of the group's G completions in place of |o_i| ---


def over_group_length(rule):
    """A rule whose completions have the advantage A · |o| / mean |o|. 1/|o| in the loss then
    cancels |o|."""

    def keep(rollout, advantages, k):
        chosen = rule(rollout, advantages, k)
        rows, own = chosen if isinstance(chosen, tuple) else (chosen, advantages.flatten()[chosen])
        lengths = rollout.lengths.float()
        return rows, own * (lengths / lengths.mean(1, keepdim=True)).flatten()[rows]

    return keep


largest_abs_by_group = over_group_length(KEEP["largest_abs"].function)
pooled_by_group = over_group_length(KEEP["pooled"].function)
random_by_group = over_group_length(KEEP["random"].function)
importance_by_group = over_group_length(importance)
half_of_each_sign_by_group = over_group_length(half_of_each_sign)
