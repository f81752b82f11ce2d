"""Six completions for the tests of the losses, and what a loss of them is, token by token; and functions as rewards."""

import math

import torch

from engine.scoring.score import Reward

F64 = torch.float64
LENGTHS = [5, 1, 0, 3, 1, 4]  # ragged, two of one token, one empty; 14 tokens
ADVANTAGES = torch.tensor([1.5, -0.7, 2.0, -1.2, 0.9, 0.0], dtype=F64)  # both signs, and a completion without signal


def mask_of(lengths, width=None):
    return torch.arange(width or max(lengths)) < torch.tensor(lengths)[:, None]


def example(spread=0.4):
    """logp, old_logp, ref_logp (6, 5) float64: 0.4 apart, the clip acts on both sides."""
    generator = torch.Generator().manual_seed(11)
    base = -1 - torch.rand(6, 5, generator=generator, dtype=F64)
    return base.requires_grad_(), *(base.detach() + spread * torch.randn(6, 5, generator=generator, dtype=F64) for _ in range(2))


def by_loop(logp, old_logp, ref_logp, *, weight, low, high, beta=0.0):
    """−Σ_i Σ_t weight · (min(ρA, clip(ρ)A) − β k3) in Python floats, and its gradient by hand."""
    loss, gradient = 0.0, torch.zeros(6, 5, dtype=F64)
    for i, (length, a) in enumerate(zip(LENGTHS, ADVANTAGES.tolist(), strict=True)):
        for t in range(length):
            ratio, r = math.exp(logp[i, t] - old_logp[i, t]), math.exp(ref_logp[i, t] - logp[i, t])
            open_ = not (a > 0 and ratio > 1 + high or a < 0 and ratio < 1 - low)
            bounded = ratio if open_ else 1 + high if a > 0 else 1 - low
            loss -= weight * (bounded * a - beta * (r - math.log(r) - 1))
            gradient[i, t] = -weight * (open_ * ratio * a - beta * (1 - r))
    return loss, gradient


def named(*functions):
    return [Reward(function.__name__, function) for function in functions]
