"""verl 0.9.1 (ByteDance; Apache 2.0): pip install verl==0.9.1

All functions are those of verl/trainer/ppo/core_algos.py, verl/trainer/ppo/rollout_corr_helper.py
and verl/utils/torch_functional.py; overlong_penalty is DAPORewardManager's. The options are those
of the papers where verl's defaults differ: clip_ratio_c, the dual clip, is too large to act, and
loss_agg_mode is the paper's. The number of completions is handed over, as verl's trainer does, so
an empty one counts. The KL is added to the loss as verl/workers/utils/losses.py does. `gae` returns
the advantages before verl whitens them: its returns minus the values. On padding, `gae`, `whiten`
and the importance weights are set to our values, which no loss reads.
Left out: the weights of the tokens, a mode of agg_loss; token_rewards, a line of the Ray trainer.
The logits are cast to float32.
"""

from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import torch
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.utils import torch_functional
from verl.workers.config import ActorConfig
from verl.workers.reward_manager.dapo import DAPORewardManager

kl_k1, kl_k2, kl_k3 = (
    partial(core_algos.kl_penalty, kl_penalty=name) for name in ("k1", "k2", "k3"))


def token_logprobs(logits, tokens, *, temperature=1.0):
    return torch_functional.logprobs_from_logits(logits.float() / temperature, tokens)


def token_entropies(logits, *, temperature=1.0):
    return torch_functional.entropy_from_logits(logits.float() / temperature)


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


def loss(mode, how, logp, old_logp, advantages, mask, *, ref_logp=None, beta=0.0, clip_low=0.2,
         clip_high=None, max_tokens=None):
    mask, spread = mask.to(logp.dtype), torch.ones_like(logp)
    info = {"dp_size": 1, "batch_num_tokens": mask.sum(), "global_batch_size": len(mask),
            "loss_scale_factor": max_tokens}
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, global_batch_info=info,
        clip_ratio_low=clip_low, clip_ratio_high=clip_low if clip_high is None else clip_high,
        clip_ratio_c=1e9)
    advantages = advantages.view(len(mask), -1) * spread
    total, _ = core_algos.get_policy_loss_fn(mode)(
        old_logp.detach(), logp, advantages, mask, loss_agg_mode=how, config=config)
    if ref_logp is None:
        return total
    kl = core_algos.kl_penalty(logp, ref_logp.detach(), "k3")
    return total + beta * core_algos.agg_loss(kl, mask, how, **info)


grpo_loss = partial(loss, "vanilla", "seq-mean-token-mean", beta=0.04)
gspo_loss = partial(loss, "gspo", "seq-mean-token-mean", clip_low=3e-4, clip_high=4e-4)
dapo_loss = partial(loss, "vanilla", "token-mean", clip_high=0.28)
drgrpo_loss = partial(loss, "vanilla", "seq-mean-token-sum-norm")
ppo_loss = partial(loss, "vanilla", "token-mean")


def value_loss(values, old_values, returns, mask, *, clip=0.2):
    total, _ = core_algos.compute_value_loss(
        values, returns, old_values, mask.to(values.dtype), cliprange_value=clip)
    return total


def gae(rewards, values, mask, *, gamma=1.0, lam=0.95):
    mask, values = mask.to(rewards.dtype), values.detach()
    _, returns = core_algos.compute_gae_advantage_return(rewards, values, mask, gamma, lam)
    return (returns - values) * mask, returns * mask


def whiten(x, mask):
    return torch_functional.masked_whiten(x, mask.to(x.dtype)) * mask


def truncated_importance_weights(old_logp, sampled_logp, mask, *, cap):
    weights, _ = compute_rollout_correction_weights(
        old_logp - sampled_logp, mask.to(old_logp.dtype), "token", cap)
    return weights.masked_fill(~mask.bool(), 1.0)


def overlong_penalty(lengths, *, max_length, cache):
    buffer = SimpleNamespace(enable=True, len=cache, penalty_factor=1.0, log=False)
    manager = DAPORewardManager(
        MagicMock(**{"decode.return_value": "", "eos_token": "eos"}), 0, lambda **_: 0.0,
        max_resp_len=max_length, overlong_buffer_cfg=buffer)
    manager._extract_reward_from_rm_scores = lambda *_: None
    flat = lengths.flatten().long()
    responses = torch.ones(len(flat), int(flat.max()) + 1, dtype=torch.long)
    mask = torch.arange(responses.shape[1]) < flat.unsqueeze(1)
    prompt = torch.ones(1, dtype=torch.long)
    rows = [MagicMock(batch={"prompts": prompt, "responses": r,
                             "attention_mask": torch.cat([prompt, m])})
            for r, m in zip(responses, mask.long())]
    data = MagicMock(batch={"responses": responses})
    data.__len__.return_value, data.__getitem__.side_effect = len(rows), rows.__getitem__
    return manager(data).sum(1).view(lengths.shape)
