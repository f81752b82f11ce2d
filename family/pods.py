"""PODS: Policy Optimization with Down-Sampling (arXiv 2504.13818).

PODS is CPPO's rival. Of the n completions of a question, it trains on the m whose rewards have the
largest variance. For some i, the i highest and the m−i lowest rewards together have the largest
variance. So it is enough to sort the rewards and to try every i, which takes O(n log n). If a
reward only says right or wrong, and if there are enough of each, half of the kept completions are
right and half are wrong.

The advantages are normalised over the m kept completions, after the selection:
`grpo.group_advantages(rewards.gather(1, kept))`.
"""

import torch


def max_variance_subset(rewards, m):
    """Indices of the m completions of each question whose rewards vary the most.

    (2504.13818, Lemma 3.1 and Algorithm 2.) rewards: (Q, G). Returns (Q, m) int64, ascending in
    each row. If several i give the same variance, the smallest i is taken: the fewest high rewards.
    Among equal rewards, the low end takes the lower indices and the high end the higher ones.
    Example: rewards of 5, 1, 4, 9, 6 and 0 with m = 4 give the indices 1, 3, 4 and 5.
    """
    assert rewards.dim() == 2 and 1 <= m <= rewards.shape[1], "rewards: (Q, G), m in 1 … G"
    group_size = rewards.shape[1]
    order = rewards.argsort(dim=1, stable=True)
    # This shift does not change a variance. It keeps the sums below small. Sums of whole numbers
    # are exact, so the code finds that equal variances are equal.
    x = rewards.double().gather(1, order)
    x = x - x[:, :1]
    high = torch.arange(m + 1, device=rewards.device)  # every i: the i highest, the m − i lowest

    def sums(y):
        """Σ of y over the i highest and the m − i lowest, for every i. (Q, G) → (Q, m + 1)"""
        lowest = torch.nn.functional.pad(y.cumsum(dim=1), (1, 0))  # Σ over the 0 … G lowest
        return lowest[:, m - high] + lowest[:, -1:] - lowest[:, group_size - high]

    # m² Var = m Σ x² − (Σ x)²
    best = (m * sums(x**2) - sums(x) ** 2).argmax(dim=1, keepdim=True)
    place = torch.arange(group_size, device=rewards.device)
    kept = (place < m - best) | (place >= group_size - best)
    return order[kept].view(-1, m).sort(dim=1).values
