"""Solution to the exercise of 7_advantage.ipynb."""

import torch


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
