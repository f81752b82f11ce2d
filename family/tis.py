"""Truncated importance sampling: a correction for a sampler that computes unlike the trainer.

(Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training".)

The sampler may use other kernels or a lower precision than the trainer. Then it draws from a policy
π_sampler that differs a little from π_old. A factor on the weight of each token corrects for this:

    w_t = min(π_old(o_t) / π_sampler(o_t), C)
"""


def truncated_importance_weights(old_logp, sampled_logp, mask, *, cap):
    """w = min(π_old(o_t) / π_sampler(o_t), C): a factor of the loss weights.

    old_logp: (N, T), log π_old(o_t) as the trainer computes it. sampled_logp: (N, T), as the
    sampler computed it when it drew o_t, from the same weights of the model. mask: (N, T), 1 on
    completion tokens. cap: C, above 0. Returns (N, T), 1 on padding, without a gradient.

    If the cap is not reached, each token is corrected, given the tokens before it:
    Σ_o π_sampler(o) w(o) f(o) = Σ_o π_old(o) f(o). The sampler also drew the tokens before it; this
    is not corrected. The cap bounds the variance, and biases the tokens above it. The loss keeps
    its ratio π_θ / π_old, because of the updates since the sampling.
    """
    # w = π_old / π_sampler, at most C
    weights = (old_logp - sampled_logp).exp().clamp(max=cap)
    return weights.masked_fill(~mask.bool(), 1.0).detach()
