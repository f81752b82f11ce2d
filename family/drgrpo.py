"""Dr. GRPO: GRPO Done Right (arXiv 2503.20783, section 3.2).

Two divisions of GRPO bias the gradient, and Dr. GRPO leaves both out:

- by the length |o_i| of each completion: a wrong answer is punished less per token the longer it is, so wrong answers grow;
- by the std of each group: questions that are nearly always or nearly never solved count more.

    J(θ) = E 1/G Σ_i 1/L Σ_t min(ρ_it A_i, clip(ρ_it, 1−ε, 1+ε) A_i)          A_i = r_i − mean(r)

L is one constant for every completion; here the longest length that may be sampled, as in the published code (the paper's
formula leaves 1/L out: it only scales the loss). There is no KL term. Advantages: `grpo.group_advantages(rewards, divide_by_std=False)`.
"""

from grpo import grpo_loss


def constant_weights(mask, *, max_tokens, num_sequences=None):
    """1 / (N L) on every token, however long its completion is. (2503.20783, section 3.2)

    mask: (N, T). max_tokens: L. Returns (N, T) float32, 0 on padding. `num_sequences` is N of the whole batch where `mask`
    is only a part of it (one micro-batch, one device).
    """
    n = mask.shape[0] if num_sequences is None else num_sequences
    return mask.float() / (n * max_tokens)


def drgrpo_loss(logp, old_logp, advantages, mask, *, max_tokens=None, beta=0.0, weights=None, **options):
    """−J of Dr. GRPO. Takes what `grpo_loss` takes and returns what it returns.

    advantages: (N,), without the std. One of max_tokens (L) and weights must be given; where both are, weights count.
    Raises ValueError where neither is.
    """
    if weights is None:
        if max_tokens is None:
            raise ValueError("drgrpo_loss needs max_tokens, its constant divisor, or weights")
        weights = constant_weights(mask, max_tokens=max_tokens)
    return grpo_loss(logp, old_logp, advantages, mask, beta=beta, weights=weights, **options)
