"""Solutions to the exercises of 5_family.ipynb."""

import torch

from grpo import token_logprobs


def my_kept_logprobs(logits, tokens, kept, *, temperature=1.0):
    inside = logits.masked_fill(~kept, -torch.inf)
    return token_logprobs(inside, tokens, temperature=temperature)


def my_prune_pooled(advantages, n_keep, *, allowed=None):
    size = advantages.abs().flatten()
    if allowed is not None:
        size = size.masked_fill(~allowed.flatten(), -torch.inf)
    return size.topk(n_keep).indices


def my_gae(rewards, values, mask, *, gamma=1.0, lam=0.95):
    rewards, values = rewards.detach(), values.detach()
    advantages, mask = torch.zeros_like(values), mask.bool()
    after = value_after = torch.zeros(len(values), dtype=values.dtype)
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * value_after - values[:, t]
        advantages[:, t] = torch.where(mask[:, t], delta + gamma * lam * after, 0.0)
        value_after = torch.where(mask[:, t], values[:, t], 0.0)
        after = advantages[:, t]
    return advantages, torch.where(mask, advantages + values, 0.0)
