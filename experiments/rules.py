"""Rules for the tables of reproduce.py and real.py: which completions are kept, and how much each
counts.

    torchrun train.py --pruning_rate 0.875 --keep experiments/rules.py:importance
"""

import torch

from algorithms import KEEP


def distinct(rollout, advantages, k):
    """One completion of each different advantage, the largest |A| first, at most k of a question.

    If a reward is 0 or 1, a question with a signal keeps one right and one wrong completion. A
    question without a signal keeps one completion, whose advantage is 0. (An ablation of FastRL,
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


def importance(rollout, advantages, k):
    """k completions of each question, with chances in proportion to |A|."""
    return drawn(rollout, advantages, k, advantages.abs())


def half_of_each_sign(rollout, advantages, k):
    """k/2 of the completions with A > 0, and k/2 of those with A < 0, if there are so many."""
    positive, negative = (advantages > 0).double(), (advantages < 0).double()
    weights = (side / side.sum(1, keepdim=True).clamp(min=1) for side in (positive, negative))
    # those of one sign stand side by side, so that k/2 of them are drawn and not only k/2 on
    # average
    return drawn(rollout, advantages, k, sum(weights), order=advantages.argsort(1))


def drawn(rollout, advantages, k, weights, order=None):
    """(rows, advantages of these rows): k of each question, with a chance p in proportion to the
    weights, 1 at most.

    A kept completion has the advantage A · k/(G p). So the mean over the draws is GRPO's gradient,
    if |o| or a constant divides it. weights: (Q, G).
    """
    G = advantages.shape[1]
    p = chances(weights.double(), k)
    order = torch.arange(G).expand_as(p) if order is None else order
    # systematic sampling: of the points u, u+1, u+2, … each takes the completion in whose interval
    # of width p it falls
    ends = p.gather(1, order).cumsum(1)
    u = torch.rand(
        (len(p), 1), dtype=p.dtype, generator=torch.Generator().manual_seed(rollout.seed)
    )
    hit = (ends - u).ceil() > (ends - p.gather(1, order) - u).ceil()
    rows = torch.zeros_like(hit).scatter(1, order, hit).flatten().nonzero()[:, 0]
    own = advantages * k / (G * p.clamp(min=1e-12).float())
    return rows, own.flatten()[rows]


def chances(weights, k):
    """p = min(1, c · weight) with Σ p = k in each row. If all weights of a row are 0: k/G."""
    weights = torch.where(weights.sum(1, keepdim=True) > 0, weights, torch.ones_like(weights))
    certain = torch.zeros_like(weights, dtype=torch.bool)
    for _ in range(k):
        rest = weights.masked_fill(certain, 0.0)
        c = (k - certain.sum(1, keepdim=True)) / rest.sum(1, keepdim=True).clamp(min=1e-300)
        p = torch.where(certain, 1.0, c * rest)
        certain = certain | (p >= 1)
    return p.clamp(max=1.0)


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


largest_abs_by_group = over_group_length(KEEP["largest_abs"])
pooled_by_group = over_group_length(KEEP["pooled"])
random_by_group = over_group_length(KEEP["random"])
importance_by_group = over_group_length(importance)
half_of_each_sign_by_group = over_group_length(half_of_each_sign)
