"""ms-swift 4.6.0 (ModelScope; Apache 2.0): pip install ms_swift==4.6.0 "trl<1.0"

The losses call GRPOTrainer._compute_loss_and_metrics of swift/rlhf_trainers/grpo_trainer.py with a
stand-in for the trainer, which hands it our log-probabilities. The advantages are those of
swift/rl_core/advantage.py, the penalty is SoftOverlong of swift/rewards/orm.py.

It only renames and reshapes: the old and the reference log-probabilities carry no gradient, because
the trainer computes them under no_grad.
Left out: the KL and the clip, which are lines of the loss; the weights of the tokens, one formula
per loss_type; the importance weights, which take a difference that an adapter would have to
compute; the log-probabilities and the entropies, which are TRL's: see trl.py.

The options are those of the papers. Its own defaults for GRPO are the same: loss_type "grpo",
beta 0.04, epsilon 0.2, scale_rewards "group".
"""

from functools import partial
from unittest.mock import MagicMock

import torch
from swift.rewards.orm import SoftOverlong
from swift.rl_core.advantage import compute_advantages
from swift.rlhf_trainers.grpo_trainer import GRPOTrainer

OFF = ("compute_entropy", "overlong_filter", "kl_in_reward", "rollout_importance_sampling_mode",
       "log_rollout_offpolicy_metrics", "_has_teacher", "off_policy_sequence_mask_delta",
       "args.delta", "chord_sft_iterator")


def overlong_penalty(lengths, *, max_length, cache):
    penalty = SoftOverlong(MagicMock(soft_max_length=max_length, soft_cache_length=cache))
    ids = [[0] * int(n) for n in lengths.flatten()]
    penalties = penalty(ids, response_token_ids=ids)
    return torch.tensor(penalties, dtype=torch.float32).view(lengths.shape)


def advantages_of(rewards, weights, scale):
    flat = rewards.detach().flatten(1).T
    weights = torch.ones(len(rewards)) if weights is None else torch.tensor(weights)
    out, _ = compute_advantages(flat, weights, rewards.shape[2], scale_rewards=scale)
    return out.view(rewards.shape[1:])


def group_advantages(rewards, *, divide_by_std=True):
    return advantages_of(rewards[None], None, "group" if divide_by_std else "none")


def decoupled_advantages(rewards, *, weights=None):
    return advantages_of(rewards, weights, "gdpo")


def loss(kind, logp, old_logp, advantages, mask, *, ref_logp=None, beta=0.0, clip_low=0.2,
         clip_high=None, max_tokens=None, level="token"):
    stand_in = MagicMock(**dict.fromkeys(OFF) | {
        "beta": 0.0 if ref_logp is None else beta, "epsilon_low": clip_low, "loss_type": kind,
        "epsilon_high": clip_low if clip_high is None else clip_high, "sdar_loss_coef": 0,
        "max_completion_length": max_tokens, "importance_sampling_level": level,
        "model.training": False, "accelerator.num_processes": 1,
        "accelerator.gather_for_metrics": lambda x: x.reshape(-1)})
    stand_in._get_per_token_logps_and_entropies.return_value = logp, None
    stand_in._undo_gradient_accumulation_scaling = lambda x: x
    batch = MagicMock(
        completion_mask=mask.bool(), advantages=advantages.view(len(mask), -1).expand_as(logp),
        old_per_token_logps=old_logp.detach(),
        ref_per_token_logps=None if ref_logp is None else ref_logp.detach(),
        num_items_in_batch=mask.sum())
    return GRPOTrainer._compute_loss_and_metrics(stand_in, None, {}, batch)[0]


grpo_loss = partial(loss, "grpo", beta=0.04)
dapo_loss = partial(loss, "dapo", clip_high=0.28)
drgrpo_loss = partial(loss, "dr_grpo")
gspo_loss = partial(loss, "grpo", clip_low=3e-4, clip_high=4e-4, level="sequence")
