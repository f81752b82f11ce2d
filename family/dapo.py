"""DAPO: Decoupled Clip and Dynamic sAmpling Policy Optimization (arXiv 2503.14476).

Four changes to GRPO:

- clip-higher (section 3.1): ε_high 0.28 beside ε_low 0.2, so that a rare token may gain more probability in one batch;
- dynamic sampling (3.2): groups that are all right or all wrong are replaced by further questions (`has_signal`);
- token-level loss (3.3): every token counts the same, whichever completion it is in (`token_mean_weights`);
- overlong reward shaping (3.4): a penalty that grows over the last tokens that are allowed (`overlong_penalty`).

    J(θ) = E 1/Σ_i|o_i| Σ_i Σ_t min(ρ_it A_i, clip(ρ_it, 1−ε_low, 1+ε_high) A_i)          (eq. 8; no KL term)

Eq. 8 divides by the tokens of one question's group; here, as in the published code, by those of the whole batch.
"""

from grpo import grpo_loss


def token_mean_weights(mask, *, total_tokens=None):
    """1 / Σ_i |o_i| on every token: the mean over all tokens of the batch. (2503.14476 eq. 8)

    mask: (N, T). Returns (N, T) float32, 0 on padding. `total_tokens` is that of the whole batch where `mask` is only a
    part of it (one micro-batch, one device).
    """
    mask = mask.float()
    return mask / (mask.sum().clamp(min=1) if total_tokens is None else total_tokens)


def has_signal(rewards):
    """Which groups dynamic sampling keeps: those whose rewards differ. (2503.14476 eq. 11)

    rewards: (Q, G); for right-or-wrong rewards, "neither all right nor all wrong". Returns (Q,) bool.
    Give it the accuracy before `overlong_penalty` is added: with it a group of right answers may differ in length alone.
    """
    return rewards.amax(dim=1) > rewards.amin(dim=1)


def overlong_penalty(lengths, *, max_length, cache):
    """What is added to the reward of long completions. (2503.14476 eq. 13)

        0                                       |o| ≤ L_max − L_cache
        ((L_max − L_cache) − |o|) / L_cache     up to L_max: from 0 down to −1
        −1                                      |o| > L_max

    lengths: tokens of each completion, any shape. max_length: L_max, cache: L_cache, both in tokens. The shape of lengths.
    Raises ValueError outside 0 < cache ≤ max_length.
    """
    if not 0 < cache <= max_length:
        raise ValueError(f"cache must lie in 1 … max_length, not {cache} with max_length {max_length}")
    return ((max_length - cache - lengths) / cache).clamp(min=-1.0, max=0.0)


def dapo_loss(logp, old_logp, advantages, mask, *, beta=0.0, clip_low=0.2, clip_high=0.28, weights=None, **options):
    """−J of DAPO (eq. 8). Takes what `grpo_loss` takes and returns what it returns. advantages: (N,), GRPO's."""
    weights = token_mean_weights(mask) if weights is None else weights
    return grpo_loss(logp, old_logp, advantages, mask, beta=beta, clip_low=clip_low, clip_high=clip_high, weights=weights, **options)
