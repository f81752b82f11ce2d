"""CPPO: Completion Pruning Policy Optimization (arXiv 2503.22342).

GRPO trains on all G completions of a question. CPPO observes that the contribution of a
completion to the gradient grows with |A_i| (section 3.2: the gradient is in `grpo.grpo_loss`). So
it trains only on the k completions with the largest |A_i|:

    J(θ) = E 1/k Σ_{i ∈ I} 1/|o_i| Σ_t { min(ρ_it A_i, clip(ρ_it, 1−ε, 1+ε) A_i) − β D_KL_it }

    I = the k completions of the question with the largest |A_i|          k = ⌊G (1−P)⌋

P is the pruning rate. The advantages are GRPO's, over all G completions, *before* pruning. The
current, the old and the reference policy make forward passes for the kept completions only. The
time that this saves is used for more questions (allocate.py).

CPPO has no loss of its own: `cppo_loss` is `grpo.grpo_loss` of the kept rows. The default weights
1/(N |o_i|), with N = Q·k, are the paper's divisor k for each question. In code:

    advantages = group_advantages(rewards)                    (Q, G), all completions
    rows = batch_rows(prune(advantages, k), G)                (Q·k,), rows of the batch
    loss, stats = cppo_loss(logp, old_logp, advantages.flatten()[rows], mask[rows])

where `logp` and `old_logp` were computed for `rows` only.

We depart from the published code. That code takes the mean over all tokens, and it keeps the
largest |A| of the whole device batch (`prune_pooled`). It may keep 15 completions of one question
and 1 of another. The paper's formula, and `prune`, keep k completions of every question.
"""

import math

import torch

from grpo import grpo_loss

cppo_loss = grpo_loss


def keep_count(group_size, pruning_rate):
    """How many completions of a group are kept: k = ⌊G(1−P)⌋. (2503.22342, section 3.3)

    group_size: G. pruning_rate: P in [0, 1). Exact in spite of floats: G=10, P=0.9 keeps 1.
    """
    # in floats 10·(1−0.9) is 0.9999999999999998: the 1e-9 lifts such a k to its whole number
    k = math.floor(group_size * (1 - pruning_rate) + 1e-9)
    assert 1 <= k <= group_size, f"P = {pruning_rate} keeps {k} of {group_size} completions"
    return k


def prune(advantages, k, *, allowed=None):
    """Indices of the k completions kept of each question: the largest |A|. (2503.22342, 3.3)

    advantages: (Q, G), over all G completions. Returns (Q, k) int64, ascending in each row.
    allowed: (Q, G) bool or 0/1, which completions may be kept (None: all); the others are kept only
    if a question has fewer than k allowed ones.
    If |A| are equal, the lower index is kept. (Rewards such as 0.1 and 0.3 are rounded, so
    equal |A| may differ in the last digit.) Not checked: a NaN counts as the largest.

        advantages  −1.5  0.3  0.2  1.0          k = 2 keeps [0, 3]
    """
    assert advantages.dim() == 2 and 1 <= k <= advantages.shape[1], "A: (Q, G), and k in 1 … G"
    size = advantages.abs()
    if allowed is not None:
        size[~allowed.bool().reshape(size.shape)] = -torch.inf
    # I = top-k of |A| in each row; a stable sort leaves equal ones in order
    order = size.argsort(dim=1, descending=True, stable=True)
    return order[:, :k].sort(dim=1).values


def batch_rows(kept, group_size):
    """The kept completions as rows of the batch: completion i of question q is row q·G + i.

    kept: (Q, k), from `prune`. Returns (Q·k,) int64, ascending.
    """
    first = group_size * torch.arange(len(kept), device=kept.device)  # row of completion 0
    return (kept + first.unsqueeze(1)).flatten()


def prune_below(advantages, threshold):
    """The paper's first form: keep if |A| ≥ γ. (Q, G) → (Q, G) bool; their number is not fixed."""
    return advantages.abs() >= threshold


def prune_pooled(advantages, n_keep, *, allowed=None):
    """What the published code keeps: the n_keep largest |A| of all questions together.

    advantages: (Q, G). allowed: as for `prune`. Returns (n_keep,) rows of the batch, q·G + i,
    ascending. If |A| are equal, the lower row is kept.
    """
    assert advantages.dim() == 2 and 0 <= n_keep <= advantages.numel(), "(Q, G), n_keep in 0 … Q·G"
    size = advantages.abs()
    if allowed is not None:
        size[~allowed.bool().reshape(size.shape)] = -torch.inf
    order = size.flatten().argsort(descending=True, stable=True)
    return order[:n_keep].sort().values
