"""CPPO: Completion Pruning Policy Optimization (arXiv 2503.22342).

GRPO trains on all G completions of a question. CPPO's observation is that how much a completion contributes to the
gradient grows with |A_i|, so it trains on the k completions with the largest |A_i| only:

    J(θ) = E 1/k Σ_{i ∈ I} 1/|o_i| Σ_t { min(ρ_it A_i, clip(ρ_it, 1−ε, 1+ε) A_i) − β D_KL[π_θ ‖ π_ref]_it }

    I = the k completions of the question with the largest |A_i|          k = ⌊G (1−P)⌋

P is the pruning rate. The advantages are GRPO's, taken over all G completions *before* pruning. The forward passes of
the current, the old and the reference policy are made for the kept completions only. The freed places are filled with
completions of more questions (allocate.py).

CPPO has no loss of its own: it is `grpo.grpo_loss` of the kept rows, whose default weights 1/(N |o_i|), with N = Q·k,
are the paper's divisor k for each question.

Where we depart from the published code: it keeps the largest |A| of the whole device batch (`prune_pooled`), which can
keep 15 completions of one question and 1 of another; the paper's formula, and `prune`, keep k of every question.
"""

import math

import torch


def keep_count(group_size, pruning_rate):
    """How many completions of a group are kept: k = ⌊G(1−P)⌋. (2503.22342, section 3.3)

    group_size: G. pruning_rate: P in [0, 1). Exact in spite of floats: G=10, P=0.9 keeps 1.
    Raises ValueError where P lies outside [0, 1) or nothing would be kept.
    """
    if not 0 <= pruning_rate < 1:
        raise ValueError(f"the pruning rate must lie in [0, 1), not {pruning_rate}")
    # 10·(1−0.9) is 0.9999999999999998 in floats: the 1e-9 lifts such a k back over its whole number
    k = math.floor(group_size * (1 - pruning_rate) + 1e-9)
    if k < 1:
        raise ValueError(f"the pruning rate {pruning_rate} keeps none of {group_size} completions")
    return k


def prune(advantages, k, *, rule="largest_abs", generator=None):
    """Indices of the k completions kept of each question. (2503.22342, section 3.3)

    advantages: (Q, G), over all G completions. Returns (Q, k) int64, ascending in each row. Ties go to the lower index; that
    is so for rewards like 0, 1, 2, whereas the rounding of rewards like 0.1 and 0.3 may break a tie.
    rule: `largest_abs` is the paper's; `smallest_abs`, `largest` (signed) and `random` are its ablation.
    generator: of `random`'s draw. Raises ValueError for another rule or a k outside 1 … G.
    """
    if not 1 <= k <= advantages.shape[1]:
        raise ValueError(f"k must lie in 1 … {advantages.shape[1]}, not {k}")
    if rule == "largest_abs":
        score = advantages.abs()
    elif rule == "smallest_abs":
        score = -advantages.abs()
    elif rule == "largest":
        score = advantages
    elif rule == "random":
        score = torch.rand(advantages.shape, generator=generator, device=advantages.device)
    else:
        raise ValueError(f"rule must be largest_abs, smallest_abs, largest or random, not {rule!r}")
    # I = top-k of the score within each row; a stable sort leaves ties in order
    order = score.argsort(dim=1, descending=True, stable=True)
    return order[:, :k].sort(dim=1).values


def prune_below(advantages, threshold):
    """The paper's first form: keep where |A| ≥ γ. (Q, G) bool; how many are kept differs between questions."""
    return advantages.abs() >= threshold


def prune_pooled(advantages, n_keep):
    """What the published code keeps: the n_keep largest |A| of all questions together, as (n_keep,) flat indices q·G + i.

    advantages: (Q, G). Ascending; ties go to the lower index. Kept here so that the difference to `prune` can be shown.
    """
    order = advantages.flatten().abs().argsort(descending=True, stable=True)
    return order[:n_keep].sort().values


def batch_rows(kept, group_size):
    """The kept completions as rows of the batch, in which completion i of question q stands in row q·G + i.

    kept: (Q, k), as `prune` returns it. Returns (Q·k,) int64, ascending: `tokens[batch_rows(kept, G)]` are the kept.
    """
    first = group_size * torch.arange(len(kept), device=kept.device)  # row of each question's first completion
    return (kept + first.unsqueeze(1)).flatten()
