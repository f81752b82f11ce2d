"""GRPO-Zero (policy-gradient; Apache 2.0), commit d41bb48 of 18 April 2025:
git clone https://github.com/policy-gradient/GRPO-Zero; then --path GRPO-Zero

The advantages are normalize_rewards_per_group of grpo.py, the entropies its compute_entropy. The
loss is its update_policy, which gets our log-probabilities in place of the cross entropy. It makes
the update itself, so the loss comes back as its number with the gradient that it computed.

It only renames and reshapes: rewards and lengths become episodes. The code has one setting: no
ratio, no clip and no KL, because it makes one update for each batch, so the loss takes none of
them; a mean over tokens; the population's std plus 1e-4; a temperature of 1.
Left out: the log-probabilities, a line of update_policy.
"""

from contextlib import redirect_stdout
from io import StringIO
from unittest.mock import MagicMock, patch

import torch
from data_types import Episode

import grpo as zero


def episode(prefix, tokens, reward):
    return Episode(prefix=str(prefix), text="", prefix_token_ids=[prefix], prefix_tokens=[],
                   generated_token_ids=tokens, is_finished=True, reward=reward, reward_info={})


token_entropies = zero.compute_entropy


def group_advantages(rewards):
    given = [episode(q, [], r) for q, row in enumerate(rewards.tolist()) for r in row]
    out = [e.reward for e in zero.normalize_rewards_per_group(given)]
    return torch.tensor(out, dtype=rewards.dtype).view(rewards.shape)


def grpo_loss(logp, old_logp, advantages, mask):
    if advantages.dim() == 2:
        raise NotImplementedError("it takes one advantage for each completion")
    leaf = logp.detach().clone().requires_grad_()
    # it sorts the rows by length; the prompt is the number of the row
    model = MagicMock(forward=lambda ids: torch.zeros(*ids.shape, 2) + ids[:, :1, None])

    def minus_logp(logits, targets, *, ignore_index, **_):
        rows = logits[:, 0].view(len(mask), -1)[:, 0].long()
        nll = -leaf[rows, :len(targets) // len(mask)].flatten()
        return nll.masked_fill(targets == ignore_index, 0.0)

    lengths, rewards = mask.sum(1).long().tolist(), advantages.tolist()
    given = [episode(i, [-1] * n, r) for i, (n, r) in enumerate(zip(lengths, rewards))]
    with (patch.object(zero, "normalize_rewards_per_group", return_value=given),
          patch.object(zero.torch.nn.functional, "cross_entropy", minus_logp),
          patch.object(zero.torch.nn.utils, "clip_grad_norm_"), redirect_stdout(StringIO())):
        out = zero.update_policy(
            model, MagicMock(), given, len(mask), -2, 1.0, leaf.device, torch.bfloat16)
    return out["loss"] + (leaf.grad * (logp - logp.detach())).sum()
