"""Solutions to the exercises of 3_allocation.ipynb."""

import math

import torch


def my_keep_count(group_size, pruning_rate):
    # rounded first: 15 · (1 − 0.8) is 2.9999999999999996 in floats
    return max(math.floor(round(group_size * (1 - pruning_rate), 6)), 1)


def my_adaptive_k(mean_rewards, history, *, ks=(4, 6, 8, 8)):
    if len(history) == 0:
        return torch.full((len(mean_rewards),), max(ks))
    quartiles = history.float().quantile(torch.tensor([0.25, 0.5, 0.75]))
    passed = torch.bucketize(mean_rewards, quartiles, right=True)
    return torch.tensor(ks).flip(0)[passed]
