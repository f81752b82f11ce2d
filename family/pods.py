"""PODS: Policy Optimization with Down-Sampling (arXiv 2504.13818).

CPPO's rival: of n completions, train on the m whose rewards have the largest variance. One such subset always consists
of the i highest and the m−i lowest rewards, for some i, so sorting and trying every i finds it in O(n log n).
For right-or-wrong rewards it keeps half right and half wrong ones where there are enough of each.

Advantages are normalised after the selection, over the m: `grpo.group_advantages(rewards.gather(1, kept))`.
"""

import torch


def max_variance_subset(rewards, m):
    """Indices of the m completions of each question whose rewards vary the most. (2504.13818, Lemma 3.1 and Algorithm 2)

    rewards: (Q, G). Returns (Q, m) int64, ascending in each row. Ties in variance go to the fewest high ones; of equal rewards
    the low end takes the lower indices, the high end the higher. Raises ValueError for an m outside 1 … G.
    """
    group_size = rewards.shape[1]
    if not 1 <= m <= group_size:
        raise ValueError(f"m must lie in 1 … {group_size}, not {m}")
    order = rewards.argsort(dim=1, stable=True)
    # a shift changes no variance, and keeps the sums below small; those of whole numbers are exact, and so are their ties
    x = rewards.double().gather(1, order)
    x = x - x[:, :1]
    high = torch.arange(m + 1, device=rewards.device)  # every i: the i highest and the m − i lowest

    def sums(y):
        """Σ over these m, for every i: (Q, G) to (Q, m + 1)."""
        lowest = torch.nn.functional.pad(y.cumsum(dim=1), (1, 0))  # Σ of the 0 … G lowest
        return lowest[:, m - high] + lowest[:, -1:] - lowest[:, group_size - high]

    # m² Var = m Σ x² − (Σ x)²
    best = (m * sums(x**2) - sums(x) ** 2).argmax(dim=1, keepdim=True)
    place = torch.arange(group_size, device=rewards.device)
    kept = (place < m - best) | (place >= group_size - best)
    return order[kept].view(-1, m).sort(dim=1).values
