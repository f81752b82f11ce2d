"""Solutions to the exercises of 4_training.ipynb."""

import re

from grpo import group_advantages, grpo_loss
from rewards import extract_answer


def completion_tokens(tokens, eos):
    is_eos = (tokens == eos).long()
    before = is_eos.cumsum(dim=1) - is_eos  # how many EOS come before each token
    return before == 0


def dr_grpo_loss_of_a_step(logp, old_logp, rewards, mask, L):
    advantages = group_advantages(rewards, divide_by_std=False).flatten()
    weights = mask / (len(mask) * L)
    return grpo_loss(logp, old_logp, advantages, mask, beta=0, weights=weights)[0]


def reward_for_steps(completions, answer, **columns):
    rewards = []
    for text, gold in zip(completions, answer):
        steps = re.findall(r"(\d+)([+-])(\d+)=(\d+);", text)
        right = [int(a) + int(b) * (1 if sign == "+" else -1) == int(c) for a, sign, b, c in steps]
        rewards.append(float(extract_answer(text) == gold) + float(bool(right) and all(right)))
    return rewards
