"""Dr. GRPO: GRPO Done Right (arXiv 2503.20783, section 3.2).

Two divisions in GRPO bias the gradient. Dr. GRPO leaves both out:

- The division by the length |o_i| of each completion. It punishes each token of a long wrong answer
  less than each token of a short one, so wrong answers grow.
- The division by the std of each group. It makes questions that are solved nearly always or nearly
  never count more than the others.

    J(θ) = E 1/G Σ_i 1/L Σ_t min(ρ_it A_i, clip(ρ_it, 1−ε, 1+ε) A_i)          A_i = r_i − mean(r)

L is one constant for all completions. Here it is the largest length that may be sampled, as in the
published code. The formula of the paper leaves 1/L out, which only scales the loss. There is no KL
term. The advantages are `grpo.group_advantages(rewards, divide_by_std=False)`.
"""

from grpo import grpo_loss


def constant_weights(mask, *, max_tokens, num_sequences=None):
    """1 / (N L) on every token, however long its completion is. (2503.20783, section 3.2)

    mask: (N, T). max_tokens: L. Returns (N, T) float32, 0 on padding.
    `num_sequences` is N of the whole batch. It is needed if `mask` is only a part of the batch (one
    micro-batch, one device).
    """
    n = mask.shape[0] if num_sequences is None else num_sequences
    return mask.float() / (n * max_tokens)


def drgrpo_loss(
    logp, old_logp, advantages, mask, *,
    max_tokens=None, ref_logp=None, beta=0.0, clip_low=0.2, clip_high=None, weights=None,
):  # fmt: skip
    """−J of Dr. GRPO. It takes the arguments of `grpo_loss`, and it returns the same.

    advantages: (N,), without the division by the std. max_tokens: L, for `constant_weights`.
    Either max_tokens or weights must be given. If both are given, weights is used.
    """
    if weights is None:
        weights = constant_weights(mask, max_tokens=max_tokens)
    return grpo_loss(
        logp, old_logp, advantages, mask,
        ref_logp=ref_logp, beta=beta, clip_low=clip_low, clip_high=clip_high, weights=weights)
