"""verl 0.9.1 (ByteDance; Apache 2.0): pip install verl==0.9.1

The losses are ppo_loss of verl/workers/utils/losses.py. The others are functions of
verl/trainer/ppo/core_algos.py, verl/trainer/ppo/rollout_corr_helper.py and
verl/utils/torch_functional.py, and the temperature is put on the logits by
verl/workers/engine/fsdp/transformer_impl.py.

It only renames and reshapes: our padded rows go in where verl pads its own (no_padding_2_padding
and to_padded_tensor); the number of completions is handed over, as verl's trainer does, so an empty
one counts; the old and the reference log-probabilities and the returns carry no gradient, as in
verl's batches. What is on padding is set to ours in gae, whiten and the importance weights,
because no loss reads it.
Left out: the whitening at the end of verl's GAE, which gets a stand-in that changes nothing; the
weights of the tokens, a mode of agg_loss; the overlong penalty, part of a reward manager;
token_rewards, a line of the Ray trainer; logits in bfloat16, because it computes in the dtype of
the logits.

The options are those of the papers: loss_agg_mode, the KL in the loss, and clip_ratio_c, the dual
clip, too large to act. DEFAULTS=1 in front of the command takes verl's own: its loss is then a mean
over tokens with a dual clip of 3 and without a KL.
"""

import os
from functools import partial
from unittest.mock import patch

import numpy as np
import torch
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.utils import torch_functional
from verl.workers.config import ActorConfig, PolicyLossConfig
from verl.workers.engine.fsdp.transformer_impl import _scale_logits_by_temperature
from verl.workers.utils import losses

kl_k1, kl_k2, kl_k3 = (
    partial(core_algos.kl_penalty, kl_penalty=name) for name in ("k1", "k2", "k3"))


def scaled(logits, temperature):
    if logits.dtype == torch.bfloat16:
        raise NotImplementedError("it computes in the dtype of the logits")
    return _scale_logits_by_temperature(
        logits, torch.tensor(temperature), is_unit_temperature=temperature == 1.0)


def token_logprobs(logits, tokens, *, temperature=1.0):
    return torch_functional.logprobs_from_logits(scaled(logits, temperature), tokens)


def token_entropies(logits, *, temperature=1.0):
    return torch_functional.entropy_from_logits(scaled(logits, temperature))


def group_advantages(rewards, *, divide_by_std=True, eps=1e-6):
    n, group_size = rewards.numel(), rewards.shape[1]
    advantages, _ = core_algos.compute_grpo_outcome_advantage(
        rewards.detach().reshape(n, 1), torch.ones(n, 1), np.arange(n) // group_size, epsilon=eps,
        norm_adv_by_std_in_grpo=divide_by_std)
    return advantages.view(rewards.shape)


def decoupled_advantages(rewards, *, weights=None, eps=1e-6):
    n, group_size, one = rewards[0].numel(), rewards.shape[2], torch.ones(rewards[0].numel(), 1)
    names = [str(i) for i in range(len(rewards))]
    advantages, _ = core_algos.compute_gdpo_outcome_advantage(
        one, one, np.arange(n) // group_size, epsilon=eps,
        config={"gdpo_reward_keys": names, "gdpo_reward_weights": weights},
        non_tensor_batch=dict(zip(names, rewards.detach().flatten(1).numpy())),
        batch={"prompts": one[:, :0], "attention_mask": one.long()})
    return advantages.view(rewards.shape[1:])


class Batch(dict):
    """What ppo_loss reads of its TensorDict. The tensors are padded already."""

    def select(self, *names):
        return self

    def to_padded_tensor(self):
        return self


def loss(mode, how, logp, old_logp, advantages, mask, *, ref_logp=None, beta=0.0, clip_low=0.2,
         clip_high=None, max_tokens=None, dual_clip=1e9):
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, loss_agg_mode=how,
        policy_loss=PolicyLossConfig(loss_mode=mode), loss_scale_factor=max_tokens,
        clip_ratio_low=clip_low, clip_ratio_high=clip_low if clip_high is None else clip_high,
        clip_ratio_c=dual_clip, use_kl_loss=ref_logp is not None, kl_loss_coef=beta)
    batch = Batch(
        dp_size=1, batch_num_tokens=mask.sum(), global_batch_size=len(mask), response_mask=mask,
        old_log_probs=old_logp.detach(), advantages=advantages.view(len(mask), -1).expand_as(logp),
        ref_log_prob=None if ref_logp is None else ref_logp.detach())
    with patch.object(losses, "no_padding_2_padding", lambda logp, batch: logp):
        return losses.ppo_loss(config, {"log_probs": logp}, batch)[0]


grpo_loss = partial(loss, "vanilla", "seq-mean-token-mean", beta=0.04)
gspo_loss = partial(loss, "gspo", "seq-mean-token-mean", clip_low=3e-4, clip_high=4e-4)
dapo_loss = partial(loss, "vanilla", "token-mean", clip_high=0.28)
drgrpo_loss = partial(loss, "vanilla", "seq-mean-token-sum-norm")
ppo_loss = partial(loss, "vanilla", "token-mean")


def default_loss(logp, old_logp, advantages, mask, *, clip_low=0.2, clip_high=None):
    return ppo_loss(logp, old_logp, advantages, mask, clip_low=clip_low, clip_high=clip_high,
                    dual_clip=3.0)


if "DEFAULTS" in os.environ:
    grpo_loss = default_loss


def value_loss(values, old_values, returns, mask, *, clip=0.2):
    total, _ = core_algos.compute_value_loss(
        values, returns.detach(), old_values.detach(), mask.to(values.dtype), cliprange_value=clip)
    return total


def gae(rewards, values, mask, *, gamma=1.0, lam=0.95):
    padding, mask = ~mask.bool(), mask.to(rewards.dtype)
    with patch.object(core_algos.verl_F, "masked_whiten", lambda advantages, _: advantages):
        advantages, returns = core_algos.compute_gae_advantage_return(
            rewards, values.detach(), mask, gamma, lam)
    return advantages.masked_fill(padding, 0.0), returns.masked_fill(padding, 0.0)


def whiten(x, mask):
    white = torch_functional.masked_whiten(x, mask.to(x.dtype))
    return white.masked_fill(~mask.bool(), 0.0)


def truncated_importance_weights(old_logp, sampled_logp, mask, *, cap):
    out, _, _ = compute_rollout_correction_and_rejection_mask(
        old_logp, sampled_logp, mask.to(old_logp.dtype), "token", cap)
    return out.batch["rollout_is_weights"].masked_fill(~mask.bool(), 1.0)
