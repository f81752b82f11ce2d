"""Truncated importance sampling: corrects for a sampler that computes differently from the trainer.

Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".

The sampler may use other kernels or a lower precision. Then it draws from π_sampler, not quite from π_old. A factor on the
weight of each token corrects for that:

    w_t = min(π_old(o_t) / π_sampler(o_t), C)
"""


def truncated_importance_weights(old_logp, sampled_logp, mask, *, cap):
    """w = min(π_old(o_t) / π_sampler(o_t), C): a factor of the loss weights.

    old_logp: (N, T), log π_old(o_t) as the trainer computes it. sampled_logp: (N, T), as the sampler did when it drew o_t, from
    the same weights. mask: (N, T), 1 on completion tokens. cap: C, above 0. Returns (N, T), 1 on padding, without a gradient.

    Each token is corrected, given the tokens before it: Σ_o π_sampler(o) w(o) f(o) = Σ_o π_old(o) f(o), if the cap is not
    reached. That the sampler also drew the tokens before it is not corrected. The ratio π_θ / π_old of the loss remains, for
    the updates since. The cap bounds the variance, and biases the tokens above it.
    """
    weights = (old_logp - sampled_logp).exp().clamp(max=cap)
    return weights.masked_fill(~mask.bool(), 1.0).detach()
