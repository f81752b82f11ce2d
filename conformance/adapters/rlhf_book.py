"""RLHF Book (Nathan Lambert; its code MIT, the policy gradients by Zafir Stojanovski, Apache 2.0),
commit a66b0bf of 21 August 2026:
git clone https://github.com/natolambert/rlhf-book; then --path rlhf-book/code

The losses and the KL estimators are those of policy_gradients/loss.py, the others those of
policy_gradients/utils.py.

It only renames and reshapes: a token is put before each completion; the old and the reference
log-probabilities carry no gradient, because they are computed under no_grad. kl_estimator is "kl3",
its default; vf_coef is 0, so that PPO's loss is that of the policy. `drgrpo_loss` is what its
loss: drgrpo chooses; it takes no constant divisor. Its configurations have beta 0.
Left out: the value loss, which is added to the policy's; GAE, which takes one reward for each
completion; the temperature, because its configurations sample at 0.6 and no function that scores
takes one. Packages that none of these use get stand-ins.
"""

import sys
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch

UNUSED = ("tensordict", "reasoning_gym", "reasoning_gym.composite", "reasoning_gym.dataset",
          "reasoning_gym.utils", "transformers", "rich", "rich.console", "rich.panel",
          "rich.progress", "rich.table", "policy_gradients.config")
with patch.dict(sys.modules, {name: MagicMock() for name in UNUSED}):
    from policy_gradients import loss, utils

kl_k1, kl_k2, kl_k3 = (
    partial(kl, action_mask=None) for kl in (loss.approx_kl1, loss.approx_kl2, loss.approx_kl3))


def token_logprobs(logits, tokens):
    after = torch.nn.functional.pad(logits, (0, 0, 0, 1))
    model = MagicMock(return_value=SimpleNamespace(logits=after), device=logits.device)
    ids = torch.nn.functional.pad(tokens, (1, 0))
    return utils.compute_log_probs(model, ids, torch.ones_like(ids))


def group_advantages(rewards, *, divide_by_std=True):
    standardized = utils.compute_standardized_advantages
    of = standardized if divide_by_std else utils.compute_nonstandardized_advantages
    return of(rewards.T).T


def overlong_penalty(lengths, *, max_length, cache):
    cfg = SimpleNamespace(loss="dapo", l_cache=cache, l_max=max_length)
    penalties = utils._response_penalties(lengths.flatten().tolist(), cfg)
    return torch.tensor(penalties).view(lengths.shape)


def call(name, logp, old_logp, advantages, mask, *, ref_logp=None, beta=0.0, clip_low=0.2,
         clip_high=None):
    zero = torch.zeros_like(logp)
    experience = SimpleNamespace(
        log_probs_old=old_logp.detach(), action_mask=mask,
        values_old=zero,
        log_probs_ref=None if ref_logp is None else ref_logp.detach(),
        advantages=advantages.view(len(mask), -1))
    objective = utils.get_loss_objective(
        name, clip_eps_lo=clip_low, clip_eps_hi=clip_low if clip_high is None else clip_high,
        beta=0.0 if ref_logp is None else beta, kl_estimator="kl3", vf_coef=0.0,
        clip_eps_val=0.2)
    return objective(log_probs=logp, experience=experience, values=zero)


grpo_loss = partial(call, "grpo", beta=0.04)
gspo_loss = partial(call, "gspo", clip_low=3e-4, clip_high=4e-4)


def drgrpo_loss(
    logp, old_logp, advantages, mask, *, max_tokens, ref_logp=None, beta=0.0, clip_low=0.2,
    clip_high=None,
):
    return call("drgrpo", logp, old_logp, advantages, mask, ref_logp=ref_logp, beta=beta,
                clip_low=clip_low, clip_high=clip_high)


def dapo_loss(logp, old_logp, advantages, mask, *, clip_low=0.2, clip_high=0.28):
    return call("dapo", logp, old_logp, advantages, mask, clip_low=clip_low, clip_high=clip_high)


def ppo_loss(logp, old_logp, advantages, mask, *, clip_low=0.2, clip_high=None):
    return call("ppo", logp, old_logp, advantages, mask, clip_low=clip_low, clip_high=clip_high)
