"""Unbiased pruning: a completion is kept with a chance p, and then counts 1/p.

CPPO always drops the completions with a small |A|. So the mean of its gradient is not GRPO's. If
the kept are drawn instead, and each counts the inverse of its chance, the mean is right, whatever
f_i is (Horvitz and Thompson, 1952):

    E Σ_{i kept} A_i f_i / p_i = Σ_i p_i A_i f_i / p_i = Σ_i A_i f_i

The price is variance: it is least if p_i is in proportion to |A_i f_i|. Here p_i is in proportion
to |A_i|, 1 at most, and Σ p_i = k. So each question keeps k completions, as in CPPO.

This is the idea of DPPO, CPPO's successor (Unbiased Dynamic Pruning, arXiv 2603.04135). Only its
abstract and summaries of it could be read: it also prunes questions, by their history, and packs
prompts. Its chances may be others than these.
"""

import torch


def chances(scores, k):
    """p = min(1, c · score) with Σ p = k in each row: the chance of each completion to be kept.

    scores: (Q, G), at least 0, for example |A|. Returns (Q, G). If all scores of a row are 0, each
    chance is k/G. A row with fewer than k positive scores keeps only these.
    Example: scores of 3, 1, 1 and 1 with k = 2 give 1, ⅓, ⅓ and ⅓.
    """
    scores = torch.where(scores.sum(1, keepdim=True) > 0, scores, torch.ones_like(scores))
    certain = torch.zeros_like(scores, dtype=torch.bool)
    for _ in range(k):
        rest = scores.masked_fill(certain, 0.0)
        # c = (k − those that are certain) / Σ of the other scores
        c = (k - certain.sum(1, keepdim=True)) / rest.sum(1, keepdim=True).clamp(min=1e-300)
        p = torch.where(certain, 1.0, c * rest)
        certain = certain | (p >= 1)
    return p.clamp(max=1.0)


def draw(p, u):
    """Systematic sampling: each completion with its chance, and k of each row if Σ p = k.

    p: (Q, G) chances. u: (Q, 1), uniform in [0, 1). Returns (Q, G) bool. The intervals of width p
    lie side by side; the points u, u + 1, u + 2, … each take the completion they fall on.
    """
    ends = p.cumsum(1)
    return (ends - u).ceil() > (ends - p - u).ceil()


def weighed(advantages, p):
    """A k/(G p): in a mean over the k kept they count as A does in the mean over all G.

    advantages, p: (Q, G). Returns (Q, G). The KL term of a loss is not weighed.
    """
    k = p.sum(1, keepdim=True)
    return (advantages * k / (advantages.shape[1] * p.clamp(min=1e-12))).to(advantages.dtype)
