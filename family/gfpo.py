"""GFPO: Group Filtered Policy Optimization (arXiv 2508.09726).

Sample more completions per question and train only on the k best ones by a metric: the shortest, or those with the most
reward per token. The rewards stay what they were; what is filtered for is learnt on the way, here short completions.

    A_i = (r_i − mean_S(r)) / std_S(r) for i in S, the k that are kept; 0 for the others       (section 3)

So mean and std are taken over the kept ones, *after* the filter, unlike CPPO's. std is the population's. The loss is the
algorithm's underneath: DAPO's token mean in the paper.
"""

import torch


def retain(metric, k, *, largest=False):
    """Indices of the k completions with the smallest metric of each question; `largest` turns it round. (Algorithm 1)

    metric: (Q, G), for example lengths, or `token_efficiency` with largest=True. Returns (Q, k) int64, ascending in each
    row; ties go to the lower index. Raises ValueError for a k outside 1 … G.
    """
    if not 1 <= k <= metric.shape[1]:
        raise ValueError(f"k must lie in 1 … {metric.shape[1]}, not {k}")
    return metric.argsort(dim=1, descending=largest, stable=True)[:, :k].sort(dim=1).values


def token_efficiency(rewards, lengths):
    """Reward per token: r_i / |o_i|. (Q, G) and (Q, G) to (Q, G)."""
    return rewards / lengths


def retained_advantages(rewards, kept, *, eps=1e-4):
    """Advantages over the kept completions of each question, 0 for the others. (2508.09726, section 3)

    rewards: (Q, G). kept: (Q, k) indices, or one tensor of indices for each question where k differs. Returns (Q, G).
    The paper names no eps: this one is GRPO's, so that equal rewards among the kept give 0.
    """
    advantages = torch.zeros_like(rewards)
    for row, r, s in zip(advantages, rewards, kept):
        own = r[s] - r[s][0]  # a shift changes nothing, and makes equal rewards exact zeros
        row[s] = (own - own.mean()) / (own.std(correction=0) + eps)
    return advantages


def adaptive_k(mean_rewards, history, *, ks=(4, 6, 8, 8)):
    """How many to keep of each question, by its difficulty: easy ones less. (2508.09726, adaptive difficulty GFPO)

    mean_rewards: (Q,), the mean reward of each group. history: (H,), those of earlier questions, whose quartiles divide
    easy, medium, hard and very hard; `ks` in that order. A mean reward on a quartile counts as the easier of the two.
    Returns (Q,) int64; before there is a history, the largest k. (The paper keeps a running estimate of the quartiles.)
    """
    if history.numel() == 0:
        return torch.full_like(mean_rewards, max(ks), dtype=torch.int64)
    quartiles = torch.quantile(history.float(), torch.tensor([0.25, 0.5, 0.75], device=history.device))
    # the higher the mean reward, the easier: at or above the upper quartile is easy
    easier_than = torch.bucketize(mean_rewards.float(), quartiles, right=True)  # 0 … 3 quartiles are at or below it
    return torch.tensor(ks, device=easier_than.device)[3 - easier_than]
