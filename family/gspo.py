"""GSPO: Group Sequence Policy Optimization (arXiv 2507.18071).

A reward judges a whole completion. So GSPO gives each completion one importance ratio, the
geometric mean of the ratios of its tokens. The clip acts on the completion as a whole:

    J(θ) = E 1/G Σ_i min(s_i A_i, clip(s_i, 1−ε_low, 1+ε_high) A_i)                       (eq. 5)
    s_i = (π_θ(o_i | q) / π_old(o_i | q))^(1/|o_i|) = exp(1/|o_i| Σ_t log π_θ/π_old)      (eq. 7)

A mean of many log-ratios stays close to 0. So the clip range is 3e-4 below and 4e-4 above, not 0.2.
There is no KL term. The ratio is 1 until the first update. So GSPO needs several updates on each
batch of completions: several mini-batches, or μ > 1.

GSPO-token (eq. 13, 14) allows A to differ from token to token. If A is one number per completion
and all tokens of a completion weigh the same, GSPO-token has the value and the gradient of GSPO.
"""

import torch

from grpo import sequence_mean_weights, surrogate_loss


def sequence_ratio(logp, old_logp, mask):
    """s_i = exp(1/|o_i| Σ_t (log π_θ − log π_old)). (2507.18071 eq. 7)

    logp, old_logp: (N, T). mask: (N, T) bool or 0/1. Returns (N,). An empty row gets 1. The mean of
    the log-ratios is at most 20, as in `grpo.importance_ratio`.
    Example: a completion of two tokens with the ratios 2 and 8 gets √(2·8) = 4.
    """
    assert logp.shape == old_logp.shape == mask.shape and logp.dtype != torch.float16, (
        "logp, old_logp, mask: (N, T) each, and not float16")
    mask = mask.bool()
    log_ratio = (logp - old_logp.detach()).masked_fill(~mask, 0.0)
    # s_i = exp(1/|o_i| Σ_t log π_θ/π_old)
    mean = log_ratio.sum(dim=1) / mask.sum(dim=1).clamp(min=1)
    return mean.clamp(max=20.0).exp()


def token_ratio(logp, old_logp, mask):
    """s_it = sg[s_i] · π_θ(o_it) / sg[π_θ(o_it)], where sg stops the gradient. (eq. 14)

    Each token has the value of s_i (`sequence_ratio`) and a gradient of its own. The arguments are
    those of `sequence_ratio`. Returns (N, T). Padding has the value of s_i too, and no gradient.
    """
    s = sequence_ratio(logp, old_logp, mask).detach()
    own = logp.masked_fill(~mask.bool(), 0.0)
    return s.unsqueeze(1) * (own - own.detach()).exp()


def gspo_loss(
    logp, old_logp, advantages, mask, *, ref_logp=None, beta=0.0, clip_low=3e-4, clip_high=4e-4,
    weights=None, token_level=False,
):
    """−J of GSPO (eq. 5). With `token_level=True`: −J of GSPO-token (eq. 13).

    It takes the arguments of `grpo_loss`, and it returns the same. It is `surrogate_loss` with the
    `sequence_ratio`, or the `token_ratio`, and with `sequence_mean_weights`. advantages: (N,);
    GSPO-token also takes (N, T). Every token of a completion carries the surrogate of the whole
    completion. The weights 1/(N |o_i|) of these tokens add up to 1/N.
    """
    if weights is None:
        weights = sequence_mean_weights(mask)
    if token_level:
        ratio = token_ratio(logp, old_logp, mask)
    else:
        ratio = sequence_ratio(logp, old_logp, mask).unsqueeze(1).expand_as(logp)
    return surrogate_loss(
        ratio, advantages, logp, mask, weights, ref_logp=ref_logp, beta=beta, clip_low=clip_low,
        clip_high=clip_high,
    )
