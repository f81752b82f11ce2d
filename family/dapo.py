"""DAPO: Decoupled Clip and Dynamic sAmpling Policy Optimization (arXiv 2503.14476).

DAPO makes four changes to GRPO:

- Clip-higher (section 3.1): ε_high is 0.28, ε_low stays 0.2. A rare token may then gain more
  probability in one batch.
- Dynamic sampling (3.2): a group that is all right or all wrong is replaced by a further question
  (`has_signal`).
- Token-level loss (3.3): every token counts the same, in a short and in a long completion
  (`token_mean_weights`).
- Overlong reward shaping (3.4): a penalty grows over the last tokens that are allowed
  (`overlong_penalty`).

    J(θ) = E 1/Σ_i|o_i| Σ_i Σ_t min(ρ_it A_i, clip(ρ_it, 1−ε_low, 1+ε_high) A_i)          (eq. 8)

There is no KL term. Eq. 8 divides by the number of tokens in one question's group. This file
divides by the number of tokens in the whole batch, as the published code does.
"""

import torch

from grpo import grpo_loss


def token_mean_weights(mask, *, total_tokens=None):
    """1 / Σ_i |o_i| on every token: the mean over all tokens of the batch. (2503.14476 eq. 8)

    mask: (N, T). Returns (N, T) float32, 0 on padding.
    `total_tokens` is the number of tokens in the whole batch. It is needed if `mask` is only a part
    of the batch (one micro-batch, one device). 0 counts as 1: then no token has a weight anyway.
    """
    mask = mask.float()
    total = mask.sum() if total_tokens is None else torch.as_tensor(total_tokens)
    return mask / total.clamp(min=1)


def has_signal(rewards):
    """Which groups dynamic sampling keeps: those whose rewards differ. (2503.14476 eq. 11)

    rewards: (Q, G). Returns (Q,) bool. If a reward only says right or wrong, these are the groups
    with a right and a wrong answer. Take the rewards before `overlong_penalty` is added. With the
    penalty, a group of right answers of different lengths would look informative.
    """
    return rewards.amax(dim=1) > rewards.amin(dim=1)


def overlong_penalty(lengths, *, max_length, cache):
    """The penalty that is added to the rewards of long completions. (2503.14476 eq. 13)

        0                                       if |o| ≤ L_max − L_cache
        ((L_max − L_cache) − |o|) / L_cache     if |o| ≤ L_max: from 0 down to −1
        −1                                      if |o| > L_max

    lengths: tokens of each completion, any shape. max_length: L_max. cache: L_cache. Both count
    tokens, and L_cache is at most L_max. Returns the shape of `lengths`.
    Example: with L_max 20 and L_cache 4, lengths of 16, 17, 20 and 25 give 0, −0.25, −1 and −1.
    """
    lengths = 1.0 * lengths  # bytes have no negative numbers
    return ((max_length - cache - lengths) / cache).clamp(min=-1.0, max=0.0)


def dapo_loss(
    logp, old_logp, advantages, mask, *,
    ref_logp=None, beta=0.0, clip_low=0.2, clip_high=0.28, weights=None,
):  # fmt: skip
    """−J of DAPO (eq. 8). It takes the arguments of `grpo_loss`, and it returns the same.

    advantages: (N,), GRPO's. weights: (N, T); None means `token_mean_weights`.
    """
    weights = token_mean_weights(mask) if weights is None else weights
    return grpo_loss(
        logp, old_logp, advantages, mask,
        ref_logp=ref_logp, beta=beta, clip_low=clip_low, clip_high=clip_high, weights=weights)
