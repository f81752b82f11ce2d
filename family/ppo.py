"""PPO for language models (arXiv 1707.06347; with the KL penalty in the reward as in 2203.02155).

What GRPO did away with: a critic V(s_t) that says at every token how well it will go. Each token is an action, with a
reward of its own, and its advantage is the generalised advantage estimate (GAE, arXiv 1506.02438):

    r_t = −β (log π_old − log π_ref)_t, and the completion's score on its last token
    δ_t = r_t + γ V(s_t+1) − V(s_t)          A_t = Σ_l (γλ)^l δ_t+l          R_t = A_t + V(s_t)

    loss of the policy = −mean_t min(ρ_t A_t, clip(ρ_t, 1−ε, 1+ε) A_t)
    loss of the critic = ½ mean_t max((V − R)², (clip(V, V_old−ε, V_old+ε) − R)²)          (from the published code)

The mean is over all tokens of the batch. The returns R are made from the raw advantages; only then are these whitened:

    advantages, returns = gae(token_rewards(scores, old_logp, ref_logp, mask, beta=beta), old_values, mask)
    loss, stats = ppo_loss(logp, old_logp, whiten(advantages, mask), mask)

Shapes: N completions, T tokens; V(s_t) is the critic's value *before* token t.
"""

import torch

from grpo import grpo_loss


def token_rewards(scores, logp, ref_logp, mask, *, beta):
    """r_t = −β k1 on every token, k1 = log π − log π_ref, and the score of the completion on its last token.

    scores: (N,). logp, ref_logp: (N, T), under the policy that sampled and the reference. mask: (N, T) bool or 0/1, padded
    on the right. Returns (N, T), 0 on padding. An empty row has no token to hold its score.
    """
    mask = mask.bool()
    rewards = (-beta * (logp - ref_logp)).masked_fill(~mask, 0.0)
    # the last token of a row: the mask ends there
    last = mask & ~torch.nn.functional.pad(mask[:, 1:], (0, 1))
    return torch.where(last, rewards + scores.unsqueeze(1), rewards)


def gae(rewards, values, mask, *, gamma=1.0, lam=0.95):
    """Generalised advantage estimation, and the critic's targets. (1506.02438 eq. 16; 1707.06347 eq. 11)

    rewards, values: (N, T). mask: (N, T), padded on the right; what follows the last token is worth 0.
    Returns (advantages, returns), both (N, T), 0 on padding and without a gradient: they are targets.
    returns = advantages + values, before any whitening.
    """
    mask = mask.bool()
    rewards, values = rewards.detach().masked_fill(~mask, 0.0), values.detach().masked_fill(~mask, 0.0)
    advantages = torch.zeros_like(rewards)
    after = rewards.new_zeros(len(rewards))  # A_t+1
    for t in reversed(range(rewards.shape[1])):
        value_after = values[:, t + 1] if t + 1 < rewards.shape[1] else 0.0  # V(s_t+1), 0 after the last token
        # δ_t = r_t + γ V(s_t+1) − V(s_t)
        delta = rewards[:, t] + gamma * value_after - values[:, t]
        # A_t = δ_t + γλ A_t+1
        after = delta + gamma * lam * after  # on the padding all are 0
        advantages[:, t] = after
    return advantages, advantages + values


def whiten(x, mask, *, mean=None, variance=None, eps=1e-8):
    """(x − mean) / √(variance + eps) over the tokens of the mask, 0 on padding. (N, T) to (N, T)

    The variance is the population's. `mean` and `variance` are the whole batch's where x is only a part of it (one
    micro-batch, one device).
    """
    mask = mask.bool()
    n = mask.sum().clamp(min=1)
    if mean is None:
        mean = x.masked_fill(~mask, 0.0).sum() / n
    centred = (x - mean).masked_fill(~mask, 0.0)
    if variance is None:
        variance = centred.pow(2).sum() / n
    return centred / (variance + eps) ** 0.5


def ppo_loss(logp, old_logp, advantages, mask, *, ref_logp=None, clip_low=0.2, clip_high=None, weights=None):
    """−mean over tokens of min(ρA, clip(ρ, 1−clip_low, 1+clip_high)A). (1707.06347 eq. 7)

    logp, old_logp: (N, T), under the current and the sampling policy. advantages: (N, T), already whitened. mask: (N, T).
    weights: (N, T); None: 1 / number of tokens. Returns (loss, stats), as `grpo_loss` does. The KL is in the rewards: with
    ref_logp it is reported, no more.
    """
    if weights is None:
        weights = mask.float() / mask.sum().clamp(min=1)
    return grpo_loss(
        logp, old_logp, advantages, mask, ref_logp=ref_logp, beta=0.0, clip_low=clip_low, clip_high=clip_high, weights=weights
    )


def value_loss(values, old_values, returns, mask, *, clip=0.2, weights=None):
    """½ mean over tokens of the larger of (V − R)² and (clip(V, V_old ± clip) − R)². (1707.06347's published code)

    values, old_values, returns, mask: (N, T); only `values` gets a gradient. weights: (N, T); None: 1 / number of tokens.
    The larger square is the pessimistic one, as the min is for the policy: moving V further than `clip` earns nothing.
    """
    if weights is None:
        weights = mask.float() / mask.sum().clamp(min=1)
    # on padding 0, whatever stands there
    values, old_values, returns = (x.masked_fill(~mask.bool(), 0.0) for x in (values, old_values.detach(), returns.detach()))
    # clip(V, V_old − ε, V_old + ε)
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    worse = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)
    return 0.5 * (weights * worse).sum()
