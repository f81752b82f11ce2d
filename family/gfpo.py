"""GFPO: Group Filtered Policy Optimization (arXiv 2508.09726).

GFPO samples more completions per question, and trains only on the k that are best by a metric: the
shortest ones, or those with the most reward per token. The rewards do not change. The policy learns
what the filter prefers, for example to answer in few tokens.

    A_i = (r_i − mean_S(r)) / std_S(r)     if i is in S, the set of the k kept completions
    A_i = 0                                otherwise                                (section 3)

So GFPO takes the mean and the std over the kept completions, *after* the filter. CPPO takes the
mean and the std over all completions, before it prunes. GFPO's std is the population's. Any loss
can follow. The paper uses DAPO's token mean.
"""

import torch


def retain(metric, k, *, largest=False):
    """Indices of the k completions of each question with the smallest metric. (Algorithm 1)

    metric: (Q, G), for example the lengths. Returns (Q, k) int64, ascending in each row. If metrics
    are equal, the lower index is kept. `largest=True` keeps the completions with the largest metric
    (for example `token_efficiency`).
    Example: lengths of 30, 10, 20 and 40 with k = 2 give the indices 1 and 2.
    """
    assert metric.dim() == 2 and 1 <= k <= metric.shape[1], "metric: (Q, G), k in 1 … G"
    return metric.argsort(dim=1, descending=largest, stable=True)[:, :k].sort(dim=1).values


def token_efficiency(rewards, lengths):
    """Reward per token: r_i / |o_i|, with |o_i| at least 1. rewards, lengths: (Q, G). (Q, G)"""
    return rewards / lengths.clamp(min=1)


def retained_advantages(rewards, kept, *, eps=1e-4):
    """Advantages over the kept completions of each question, 0 for the others. (section 3)

    rewards: (Q, G). kept: (Q, k) indices. If k differs between questions, kept is a list with one
    tensor of indices for each question. Returns (Q, G). The paper names no eps. We add GRPO's eps,
    so equal rewards of the kept completions give 0.
    """
    rewards = 1.0 * rewards  # whole numbers become floats
    advantages = torch.zeros_like(rewards)
    for row, r, s in zip(advantages, rewards, kept, strict=True):
        r_s = r[s] - r[s[0]]  # equal rewards give exact zeros
        # A_i = (r_i − mean_S(r)) / (std_S(r) + eps)
        row[s] = (r_s - r_s.mean()) / (r_s.std(correction=0) + eps)
    return advantages


def adaptive_k(mean_rewards, history, *, ks=(4, 6, 8, 8)):
    """How many completions of each question are kept: fewer if the question is easy.

    (2508.09726, adaptive difficulty GFPO.) mean_rewards: (Q,), the mean reward of each group.
    history: (H,), the mean rewards of earlier questions. Its quartiles separate easy, medium, hard
    and very hard questions. `ks` holds the numbers to keep, in this order. A question on a quartile
    counts as the easier kind. Returns (Q,) int64. While the history is empty, every question gets
    the largest k.
    The paper keeps a running estimate of the quartiles; here they are exact.
    """
    if history.numel() == 0:
        return torch.full_like(mean_rewards, max(ks), dtype=torch.int64)
    shares = torch.tensor([0.25, 0.5, 0.75], device=history.device)
    quartiles = torch.quantile(history.float(), shares)
    # The number of quartiles that lie at or below the mean reward: 0 (very hard) … 3 (easy)
    passed = torch.bucketize(mean_rewards.float(), quartiles, right=True)
    return torch.tensor(ks, device=passed.device)[3 - passed]
