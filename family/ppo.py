"""PPO for language models (arXiv 1707.06347), with the KL penalty in the reward (2203.02155).

PPO needs a second network, the critic V(s_t). GRPO needs none. Before every token the critic
predicts how much reward will follow. Each token is an action with a reward of its own. The
advantage of a token is the generalised advantage estimate (GAE, arXiv 1506.02438):

    r_t = −β (log π_old − log π_ref)_t, and on the last token the completion's score is added
    δ_t = r_t + γ V(s_t+1) − V(s_t)          A_t = Σ_l (γλ)^l δ_t+l          R_t = A_t + V(s_t)

    loss of the policy = −mean_t min(ρ_t A_t, clip(ρ_t, 1−ε, 1+ε) A_t)
    loss of the critic = ½ mean_t max((V − R)², (clip(V, V_old−ε, V_old+ε) − R)²)

The loss of the critic comes from the published code. The means are over all tokens of the batch.
The returns R are made from the raw advantages. The advantages are whitened afterwards:

    rewards = token_rewards(scores, old_logp, ref_logp, mask, beta=beta)
    advantages, returns = gae(rewards, old_values, mask)
    loss, stats = ppo_loss(logp, old_logp, whiten(advantages, mask), mask)

Shapes: N completions, T tokens. V(s_t) is the critic's value *before* token t.
"""

import torch

from grpo import grpo_loss


def token_rewards(scores, logp, ref_logp, mask, *, beta):
    """r_t = −β k1 with k1 = log π − log π_ref; the last token gets the score on top.

    scores: (N,), one per completion. logp, ref_logp: (N, T), of the policy that sampled and of the
    reference. mask: (N, T) bool or 0/1, the tokens of the policy. Returns (N, T), 0 outside of it.
    The score of an empty row is lost, because there is no token to carry it.
    """
    assert logp.shape == ref_logp.shape == mask.shape and scores.shape == logp.shape[:1], (
        "scores: (N,); logp, ref_logp, mask: (N, T) each")
    mask = mask.bool()
    lengths = mask.sum(1)
    # r_t = −β (log π − log π_ref)
    rewards = (-beta * (logp - ref_logp)).masked_fill(~mask, 0.0)
    # The last token of a row: with it all tokens of the mask are counted
    last = mask & (mask.cumsum(1) == lengths.unsqueeze(1))
    return torch.where(last, rewards + scores.unsqueeze(1), rewards)


def gae(rewards, values, mask, *, gamma=1.0, lam=0.95):
    """Generalised advantage estimation, and the critic's targets R = A + V.

    (1506.02438 eq. 16; 1707.06347 eq. 11.) rewards, values: (N, T). mask: (N, T), the tokens of the
    policy. Padding and the tokens of a tool are passed over. After the last token, V is 0. Returns
    (advantages, returns), both (N, T), 0 outside of the mask. They are targets, so they have no
    gradient. The advantages are not whitened.
    """
    assert rewards.shape == values.shape == mask.shape, "rewards, values, mask: (N, T) each"
    mask = mask.bool()
    rewards = 1.0 * rewards.detach().masked_fill(~mask, 0.0)
    values = values.detach().masked_fill(~mask, 0.0)
    advantages = torch.zeros_like(rewards)
    after = value_after = rewards.new_zeros(len(rewards))  # A_t+1 and V(s_t+1)
    for t in reversed(range(rewards.shape[1])):
        # δ_t = r_t + γ V(s_t+1) − V(s_t)
        delta = rewards[:, t] + gamma * value_after - values[:, t]
        # A_t = δ_t + γλ A_t+1
        after = torch.where(mask[:, t], delta + gamma * lam * after, after)
        value_after = torch.where(mask[:, t], values[:, t], value_after)
        advantages[:, t] = after
    advantages = advantages.masked_fill(~mask, 0.0)
    # R_t = A_t + V(s_t)
    return advantages, advantages + values


def whiten(x, mask, *, mean=None, variance=None, eps=1e-8):
    """(x − mean) / √(variance + eps) over the tokens of the mask, 0 on padding.

    x, mask: (N, T). Returns (N, T). The variance is the population's. `mean` and `variance` are
    those of the whole batch. They are needed if x is only a part of the batch (one micro-batch, one
    device).
    """
    assert x.shape == mask.shape, "x and mask must have one shape, (N, T)"
    mask = mask.bool()
    n = mask.sum().clamp(min=1)
    if mean is None:
        mean = x.masked_fill(~mask, 0.0).sum() / n
    centred = (x - mean).masked_fill(~mask, 0.0)
    if variance is None:
        variance = centred.pow(2).sum() / n
    return centred / (variance + eps) ** 0.5


def ppo_loss(
    logp, old_logp, advantages, mask, *, ref_logp=None, clip_low=0.2, clip_high=None, weights=None
):
    """−mean over tokens of min(ρA, clip(ρ, 1−clip_low, 1+clip_high)A). (1707.06347 eq. 7)

    logp, old_logp: (N, T), of the current and the sampling policy. advantages: (N, T), already
    whitened. mask: (N, T). weights: (N, T); None means 1 / number of tokens on each. Returns (loss,
    stats), as `grpo_loss` does. The KL is in the rewards, so `ref_logp` changes only the stats.
    """
    if weights is None:
        weights = mask.float() / mask.sum().clamp(min=1)
    return grpo_loss(
        logp, old_logp, advantages, mask, ref_logp=ref_logp, beta=0.0, clip_low=clip_low,
        clip_high=clip_high, weights=weights,
    )


def value_loss(values, old_values, returns, mask, *, clip=0.2, weights=None):
    """½ mean over tokens of max((V − R)², (clip(V, V_old−clip, V_old+clip) − R)²).

    (The published code of 1707.06347.) values, old_values, returns, mask: (N, T). Only `values`
    gets a gradient. weights: (N, T); None means 1 / number of tokens on each. Returns a scalar.
    The larger square is the pessimistic one, like the min for the policy. So V gains nothing if it
    moves more than `clip` away from V_old.
    """
    if weights is None:
        weights = mask.float() / mask.sum().clamp(min=1)
    assert values.shape == old_values.shape == returns.shape == mask.shape == weights.shape, (
        "values, old_values, returns, mask, weights: (N, T) each")
    # 0 on padding
    padding = ~mask.bool()
    values = values.masked_fill(padding, 0.0)
    old_values = old_values.detach().masked_fill(padding, 0.0)
    returns = returns.detach().masked_fill(padding, 0.0)
    # clip(V, V_old − clip, V_old + clip)
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    worse = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)
    return 0.5 * (weights * worse).sum()
