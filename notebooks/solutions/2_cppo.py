"""Solutions to the exercises of 2_cppo.ipynb."""

import torch


def my_retain(metric, k, *, largest=False):
    return metric.topk(k, largest=largest).indices


def my_batch_rows(kept, group_size):
    first = group_size * torch.arange(len(kept))
    return (first.unsqueeze(1) + kept).flatten()


def my_max_variance_subset(rewards, m):
    kept = []
    for order in rewards.argsort(dim=1).tolist():
        r = rewards[len(kept)].double()
        choices = [order[: m - i] + order[len(order) - i :] for i in range(m + 1)]
        kept.append(max(choices, key=lambda rows: r[rows].var(correction=0)))
    return torch.tensor(kept)
