"""A loss of your own: dual clip (1912.09729, verl's clip_ratio_c), and a bonus for entropy.

    torchrun examples/my_loss.py --algorithm dual_clip --steps 20      all options of train.py

A loss takes, in the order and with the names below:

    logp, old_logp   (N, T) float32, log π(o_t) under π_θ, with a gradient, and under π_old; 0 on
                     padding
    advantages       (N,)
    mask             (N, T) bool, 1 on completion tokens
    ref_logp         (N, T), or None if β is 0
    weights          (N, T), how much each token counts, from the row's token_weights; 0 on padding
    beta, clip_low, clip_high      numbers: those of the row; --beta and the others change them
    entropy          (N, T), the entropy of π_θ at each token, with a gradient; only if the row
                     wants it: wants=("entropy",)
    sampled_logp     (N, T), log π_old as the sampler computed it; only if the row wants it

It returns (loss, stats): a scalar that is a sum over these completions, because micro-batches and
devices add up; and a dict of detached means under `weights`, for metrics.jsonl. There a name that
no loss of the project uses becomes custom/NAME.
"""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

import torch

import train
from algorithms import ALGORITHMS
from engine.base.program import run_program
from grpo import clipped_surrogate, importance_ratio, kl_k3


def dual_clip_loss(
    logp, old_logp, advantages, mask,
    *, ref_logp=None, weights, beta, clip_low, clip_high,
):
    """GRPO's loss, with a bound for a bad token that has become likely: at A < 0 the ratio counts
    as 3 at most.

    GRPO's clip does not act there, so such a token alone can decide an update.
    """
    A = advantages[:, None]
    ratio = importance_ratio(logp, old_logp, mask)
    surrogate = clipped_surrogate(ratio, A, clip_low=clip_low, clip_high=clip_high)
    # max(min(ρA, clip(ρ)A), 3A) if A < 0
    bounded = torch.where(A < 0, torch.maximum(surrogate, 3 * A), surrogate)
    kl = 0 if ref_logp is None else kl_k3(logp, ref_logp)
    loss = -(weights * (bounded - beta * kl)).sum()
    share = (weights * (bounded != surrogate)).sum() / weights.sum().clamp(min=1e-12)
    return loss, {"clip_fraction": share.detach()}


def with_entropy(logp, *rest, weights, entropy, **options):
    """The same, and 0.001 for each nat of the mean entropy."""
    loss, stats = dual_clip_loss(logp, *rest, weights=weights, **options)
    return loss - 0.001 * (weights * entropy).sum(), stats


if __name__ == "__main__":
    dual_clip = replace(ALGORITHMS["grpo"], loss=dual_clip_loss)
    bonus = replace(dual_clip, loss=with_entropy, wants=("entropy",))
    ALGORITHMS |= {"dual_clip": dual_clip, "with_entropy": bonus}
    run_program(train.main)
