"""Solutions to the exercises of 2_cppo.ipynb."""

import torch

from cppo import prune


def keep_per_token(advantages, lengths, k):
    return prune(advantages / lengths, k)


def rows_of_the_batch(kept, group_size):
    first = group_size * torch.arange(len(kept))
    return (first.unsqueeze(1) + kept).flatten()


def right_among_the_kept(right, group_size, k):
    wrong = group_size - right
    if right < wrong:  # the right ones have the larger |A|
        return min(right, k)
    return k - min(wrong, k)
