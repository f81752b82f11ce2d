"""Unbiased pruning: a completion is kept with a chance p, and then counts 1/p.

CPPO always drops the completions with a small |A|. So the mean of its gradient is not GRPO's
gradient. Now draw the kept completions, and let each count the inverse of its chance. Then the mean
is right for every f_i (Horvitz and Thompson, 1952):

    E Σ_{i kept} A_i f_i / p_i = Σ_i p_i A_i f_i / p_i = Σ_i A_i f_i

The price is variance. The variance is least if p_i is in proportion to |A_i f_i|. Here p_i is in
proportion to |A_i|, 1 at most, and Σ p_i = k. So each question keeps k completions, as in CPPO.

Each question must keep exactly k, because the loss divides by the number of all kept completions.
If a question has fewer than k completions with A ≠ 0, others with A = 0 are kept
too. Without these, the question would count less than it does in GRPO, and the other questions
would count more.

The mean is right for losses that divide by the number of completions (1/(N |o_i|), Dr. GRPO's
constant). DAPO divides by the number of kept tokens. This number is drawn too, so for DAPO the mean
is only nearly right.

This is the idea of DPPO, CPPO's successor (Unbiased Dynamic Pruning, arXiv 2603.04135). We could
read only its abstract and summaries of it. DPPO also prunes questions, by their history, and packs
prompts. Its chances may differ from ours.
"""

import torch


def keep_probabilities(scores, k, *, allowed=None):
    """p = min(1, c · score) with Σ p = k in each row: the chance of each completion to be kept.

    scores: (Q, G), at least 0, for example |A|. Returns (Q, G). If a row has fewer than k positive
    scores, these get the chance 1, and the other completions of the row share the rest
    equally. allowed: (Q, G) bool or 0/1, which completions may be kept (None: all). The others
    get a chance only if a row has fewer than k allowed ones.
    Example: scores of 3, 1, 1 and 1 with k = 2 give 1, ⅓, ⅓ and ⅓; 5, 0, 0 and 0 give the same.
    """
    allowed = (torch.ones_like(scores) if allowed is None else allowed).bool()
    assert scores.shape == allowed.shape and 1 <= k <= scores.shape[1], (
        "scores and allowed must be (Q, G), and k in 1 … G")
    scores = 1.0 * scores  # whole numbers become floats
    positive = allowed & (scores > 0)
    scores = scores.masked_fill(~positive, 0.0)
    certain = torch.zeros_like(positive)
    for _ in range(k):
        rest = scores.masked_fill(certain, 0.0)
        # c = (k − those that are certain) / Σ of the other scores
        shares = rest / rest.sum(1, keepdim=True).clamp(min=torch.finfo(rest.dtype).tiny)
        p = torch.where(certain, 1.0, (k - certain.sum(1, keepdim=True)) * shares)
        certain = certain | (p >= 1)
    p = p.clamp(max=1.0)

    left = (k - positive.sum(1, keepdim=True)).to(p.dtype)  # 0 or less: nothing is left
    for others in (allowed & ~positive, ~allowed):
        number = others.sum(1, keepdim=True)
        p = torch.where(others, (left / number.clamp(min=1)).clamp(0, 1), p)
        left = left - number
    return p


def draw(p, u):
    """Systematic sampling: each completion with its chance, and k of each row if Σ p = k.

    p: (Q, G) chances. u: (Q, 1), uniform in [0, 1). Returns (Q, G) bool. Intervals of width p lie
    side by side. Each of the points u, u + 1, u + 2, … keeps the completion on whose interval it
    falls.
    """
    assert u.shape == (len(p), 1), "p must be (Q, G) and u (Q, 1)"
    ends = p.cumsum(1)
    return (ends - u).ceil() > (ends - p - u).ceil()


def reweighted(advantages, p):
    """A k/(G p): in the mean over the k kept, they count on average as A in the mean over all G.

    advantages, p: (Q, G), with Σ p = k in each row. Returns (Q, G), 0 if p is 0. The KL term of a
    loss keeps its weight.
    """
    assert advantages.shape == p.shape and p.dim() == 2, "advantages and p must be (Q, G)"
    advantages = 1.0 * advantages  # whole numbers become floats
    k = p.sum(1, keepdim=True)
    counted = advantages * k / (advantages.shape[1] * p)
    return counted.masked_fill(p == 0, 0.0).to(advantages.dtype)
