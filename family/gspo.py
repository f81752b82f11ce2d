"""GSPO: Group Sequence Policy Optimization (arXiv 2507.18071).

A reward judges a whole completion, so the importance ratio should be the completion's too. GSPO's is the geometric mean of
the token ratios, and the clip acts on it as a whole:

    J(θ) = E 1/G Σ_i min(s_i A_i, clip(s_i, 1−ε_low, 1+ε_high) A_i)                            (eq. 5)
    s_i = (π_θ(o_i | q) / π_old(o_i | q))^(1/|o_i|) = exp(1/|o_i| Σ_t log π_θ/π_old)           (eq. 7)

A mean of many log-ratios stays close to 1: the clip range is 3e-4 and 4e-4, not 0.2. There is no KL term. The ratio differs
from 1 only after an update, so GSPO wants several mini-batches, or μ > 1, per batch of completions.

GSPO-token (eq. 13, 14) has the same value, and the same gradient where A is one number per completion; it lets A differ
from token to token.
"""

from grpo import sequence_mean_weights, surrogate_loss


def sequence_ratio(logp, old_logp, mask):
    """s_i = exp(1/|o_i| Σ_t (log π_θ − log π_old)). (2507.18071 eq. 7)

    logp, old_logp: (N, T). mask: (N, T) bool or 0/1. Returns (N,); 1 for an empty row.
    """
    mask = mask.bool()
    log_ratio = (logp - old_logp.detach()).masked_fill(~mask, 0.0)
    return (log_ratio.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).exp()


def token_ratio(logp, old_logp, mask):
    """GSPO-token: s_it = sg[s_i] · π_θ(o_it) / sg[π_θ(o_it)]: the value of s_i, the gradient of each token. (eq. 14)

    sg is stop-gradient. Shapes as in `sequence_ratio`. Returns (N, T); on padding the value of s_i without a gradient.
    """
    own = logp.masked_fill(~mask.bool(), 0.0)
    return sequence_ratio(logp, old_logp, mask).detach().unsqueeze(1) * (own - own.detach()).exp()


def gspo_loss(logp, old_logp, advantages, mask, *, ref_logp=None, beta=0.0, clip_low=3e-4, clip_high=4e-4, weights=None, token_level=False):
    """−J of GSPO (eq. 5), or of GSPO-token (eq. 13) with `token_level`.

    Takes what `grpo_loss` takes and returns what it returns. advantages: (N,); GSPO-token also takes (N, T).
    The clipped surrogate of a completion stands on each of its tokens, so that the weights 1/(N |o_i|) add it up to 1/N.
    """
    if weights is None:
        weights = sequence_mean_weights(mask)
    if token_level:
        ratio = token_ratio(logp, old_logp, mask)
    else:
        ratio = sequence_ratio(logp, old_logp, mask).unsqueeze(1).expand_as(logp)
    return surrogate_loss(ratio, advantages, logp, mask, weights, ref_logp=ref_logp, beta=beta, clip_low=clip_low, clip_high=clip_high)
