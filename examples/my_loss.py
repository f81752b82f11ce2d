"""A loss of your own: CISPO (MiniMax-M1, 2506.13585), and CISPO with a bonus for entropy.

    torchrun examples/my_loss.py --algorithm cispo --steps 20      all options of train.py

A loss takes, in the order and with the names below:

    logp, old_logp   (N, T) float32, log π(o_t) under π_θ, with a gradient, and under π_old; 0 on
                     padding
    advantages       (N,)
    mask             (N, T) bool, 1 on completion tokens
    ref_logp         (N, T), or None if β is 0
    weights          (N, T), how much each token counts, from the row's token_weights; 0 on padding
    beta, clip_low, clip_high      numbers: those of the row; --beta and the others change them
    entropy          (N, T), the entropy of π_θ at each token, with a gradient; only if the loss
                     names it

It returns (loss, stats): a scalar that is a sum over these completions, because micro-batches and
devices add up; and a dict of detached means under `weights`, for metrics.jsonl.
"""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

import train
from algorithms import ALGORITHMS
from engine.run.options import run_program
from grpo import kl_k3


def cispo_loss(
    logp, old_logp, advantages, mask,
    *, ref_logp=None, weights, beta, clip_low, clip_high,
):
    """−Σ weights · (sg(ρ̂) A log π_θ − β KL). The ratio is a bounded weight, so no token loses its
    gradient.

    The paper has no lower bound (so clip_low is 1 below). It does not give the upper one: 2 is our
    choice.
    """
    # ρ̂ = clip(π_θ / π_old, 1 − ε_low, 1 + ε_high), without a gradient
    ratio = (logp.detach() - old_logp).exp()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    kl = 0 if ref_logp is None else kl_k3(logp, ref_logp)
    loss = -(weights * (bounded * advantages[:, None] * logp - beta * kl)).sum()
    share = (weights * (ratio != bounded)).sum() / weights.sum().clamp(min=1e-12)
    return loss, {"clip_fraction": share}


def cispo_and_entropy(logp, *rest, weights, entropy, **options):
    """CISPO, and 0.001 for each nat of the mean entropy."""
    loss, stats = cispo_loss(logp, *rest, weights=weights, **options)
    return loss - 0.001 * (weights * entropy).sum(), stats


if __name__ == "__main__":
    # a token mean, as in the paper
    cispo = replace(ALGORITHMS["dapo"], loss=cispo_loss, clip_low=1.0, clip_high=2.0)
    ALGORITHMS |= {"cispo": cispo, "cispo_entropy": replace(cispo, loss=cispo_and_entropy)}
    run_program(train.main)
