"""tiny-grpo (Open-Thought; Apache 2.0), commit eafedd7 of 23 January 2025:
git clone https://github.com/open-thought/tiny-grpo; then --path tiny-grpo

The loss is GRPOLoss of loss.py, the KL approx_kl_divergence. The advantages and the
log-probabilities come from train.py. It has one clip range, an eps of 1e-8 and the unbiased std.
Left out: the temperature, because its settings sample at 1.0, so no function takes one.
wandb and transformers, which none of these use, get stand-ins.
"""

import sys
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch

with patch.dict(sys.modules, wandb=MagicMock(), transformers=MagicMock()):
    from loss import GRPOLoss, approx_kl_divergence

    from train import group_advantages as one_group
    from train import sequence_log_probs_from_logits


kl_k3 = partial(approx_kl_divergence, action_mask=None)


def token_logprobs(logits, tokens):
    return sequence_log_probs_from_logits(logits.to(torch.float32), tokens)


def group_advantages(rewards, *, eps=1e-8):
    return torch.stack([one_group(group.unsqueeze(1), eps).squeeze(1) for group in rewards])


def grpo_loss(logp, old_logp, advantages, mask, *, ref_logp=None, beta=0.01, clip_low=0.2):
    experience = SimpleNamespace(
        action_log_probs=old_logp.detach(), action_mask=mask,
        advantages=advantages.view(len(mask), -1),
        log_probs_ref=logp.detach() if ref_logp is None else ref_logp.detach())
    kl_weight = 0.0 if ref_logp is None else beta
    return GRPOLoss(clip_low, kl_weight)(logp, experience)[0]
