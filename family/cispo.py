"""CISPO: Clipped Importance Sampling weight Policy Optimization (MiniMax-M1, arXiv 2506.13585).

If the ratio of a token has left the clip range, the clip of PPO and GRPO makes its gradient 0. Such
tokens are often rare ones, such as "Wait", at which a chain of thought turns. CISPO uses the
clipped ratio only as a weight, and stops its gradient. So every token keeps a gradient:

    J(θ) = E 1/Σ_i|o_i| Σ_i Σ_t sg(ρ̂_it) A_i log π_θ(o_it | q, o_i<t)                     (eq. 4)
    ρ̂_it = clip(ρ_it, 1−ε_low, 1+ε_high)                                                  (eq. 5)

sg stops the gradient. The advantages are GRPO's. There is no KL term. The paper sets no lower bound
(here ε_low is 1, because no ratio is below 0). It does not give ε_high. Here ε_high is 4, so the
largest weight is 5, which ScaleRL recommends (2510.13786, as cited by TRL). The paper also uses
DAPO's dynamic sampling, and its length penalty: --overlong_buffer.
"""

from grpo import importance_ratio, surrogate_loss


def cispo_loss(
    logp, old_logp, advantages, mask, *, ref_logp=None, beta=0.0, clip_low=1.0, clip_high=4.0,
    weights=None,
):
    """−J of CISPO (2506.13585 eq. 4): −Σ weights · (sg(clip(ρ)) A log π_θ − β k3).

    It takes the arguments of `grpo_loss` and returns what `grpo_loss` returns. It is
    `surrogate_loss` with an `importance_ratio` that has no gradient. `clip_fraction` is
    the share of tokens whose weight is clipped. weights: (N, T); None means 1 / number of tokens on
    each. At the first update the loss is not 0, but its gradient is the gradient of GRPO with the
    same weights.
    """
    padding = ~mask.bool()
    if weights is None:
        tokens = (~padding).sum().clamp(min=1)
        weights = (~padding).float() / tokens
    # ρ = π_θ / π_old, without a gradient; on padding ρ is 1
    ratio = importance_ratio(logp.detach(), old_logp, mask)
    # ρ̂ = clip(ρ, 1 − ε_low, 1 + ε_high)
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1)
    # sg(ρ̂) log π A
    surrogate = bounded * logp.masked_fill(padding, 0.0) * advantages
    loss, stats = surrogate_loss(
        ratio, advantages, logp, mask, weights,
        ref_logp=ref_logp, beta=beta, surrogate=surrogate)
    total = weights.sum().clamp(min=1e-12)
    stats["clip_fraction"] = (weights * (ratio != bounded)).sum() / total
    return loss, stats
