"""SAPO: Soft Adaptive Policy Optimization (arXiv 2511.20347).

A hard clip sets the gradient of a token to 0 at once. SAPO uses a soft gate, so it fades:

    J(θ) = E 1/G Σ_i 1/|o_i| Σ_t f(ρ_it) A_i      f(ρ) = 4/τ · sigmoid(τ (ρ − 1))

    f'(ρ) = sech²(τ (ρ − 1) / 2)       1 at ρ = 1, as without a clip; towards 0 on both sides

τ is 1 if A > 0, and 1.05 otherwise. An update that pushes one token down also pushes many others
up, so its gradient fades sooner. We read the formula in TRL 1.16.0 and verl 0.9.1, not in the
paper.
"""

import torch

from grpo import importance_ratio, sequence_mean_weights, surrogate_loss


def sapo_loss(
    logp, old_logp, advantages, mask, *, ref_logp=None, beta=0.0, weights=None, tau_positive=1.0,
    tau_negative=1.05, clip_low=None, clip_high=None,
):
    """−J of SAPO: −Σ weights · (f(ρ) A − β k3).

    It takes the arguments of `grpo_loss`, and it returns the same. It is `surrogate_loss` with the
    `importance_ratio`, with a gate, and with `sequence_mean_weights`. It has no clip, so clip_low
    and clip_high are not used. tau_positive, tau_negative: τ of tokens with A > 0, and of others.
    """
    if weights is None:
        weights = sequence_mean_weights(mask)
    # ρ = π_θ / π_old; on padding ρ is 1
    ratio = importance_ratio(logp, old_logp, mask)
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1)
    tau = torch.where(advantages > 0, tau_positive, tau_negative)
    # f(ρ) = 4/τ · sigmoid(τ (ρ − 1))
    gate = 4 / tau * torch.sigmoid(tau * (ratio - 1))
    loss, stats = surrogate_loss(
        ratio, advantages, logp, mask, weights,
        ref_logp=ref_logp, beta=beta, surrogate=gate * advantages)
    stats["clip_fraction"] = torch.zeros_like(loss)
    return loss, stats
