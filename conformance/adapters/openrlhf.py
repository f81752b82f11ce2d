"""OpenRLHF 0.11.2 (Apache 2.0): pip install --no-deps openrlhf==0.11.2

The losses are PolicyLoss and ValueLoss of openrlhf/models/loss.py: GRPO with token_level_loss off,
DAPO and PPO with it on. The number of completions is handed over, so an empty one counts. The KL
estimators, token_rewards, the log-probabilities and the entropies are those of
openrlhf/models/utils.py; gae and the advantages ("group_norm", "dr_grpo") those of
RemoteExperienceMaker; the penalty is apply_overlong_penalty. The mask is put on token_rewards, as
its get_advantages_and_returns does.
Left out: the KL inside a loss, which the Ray trainer adds; the weights of the tokens; whiten, a
line of the experience maker. The logits are cast to float32. torch.compile and packages that none
of these use get stand-ins.
"""

import sys
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch

UNUSED = ("deepspeed", "ray", "openrlhf.models.actor", "openrlhf.models.model",
          "openrlhf.trainer.ray", "openrlhf.trainer.ray.launcher", "openrlhf.utils.logging_utils",
          "openrlhf.trainer.ppo_utils.replay_buffer", "openrlhf.utils.seqlen_balancing",
          "openrlhf.utils", "openrlhf.utils.utils")
with (patch.dict(sys.modules, {name: MagicMock() for name in UNUSED}),
      patch("torch.compile", lambda function: function)):
    from openrlhf.models import PolicyLoss, ValueLoss, utils
    from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
    from openrlhf.trainer.ppo_utils.length_penalty import apply_overlong_penalty


kl_k1, kl_k2, kl_k3 = (
    partial(utils.compute_approx_kl, kl_estimator=name) for name in ("k1", "k2", "k3"))


def token_logprobs(logits, tokens, *, temperature=1.0):
    return utils.log_probs_from_logits(logits.float().clone(), tokens, temperature)


def token_entropies(logits, *, temperature=1.0):
    return utils.compute_entropy(logits.float() / temperature)


def token_rewards(scores, logp, ref_logp, mask, *, beta):
    return utils.compute_reward(scores, beta, kl_k1(logp, ref_logp) * mask, mask) * mask


def overlong_penalty(lengths, *, max_length, cache):
    flat = lengths.flatten()
    experience = SimpleNamespace(response_length=flat, rewards=torch.zeros(len(flat)))
    apply_overlong_penalty([experience], max_length, cache)
    return experience.rewards.view(lengths.shape)


def group_advantages(rewards, *, divide_by_std=True):
    n = rewards.numel()
    one = SimpleNamespace(
        rewards=rewards.detach().reshape(-1), index=list(range(n)), info={}, kl=torch.zeros(n, 1),
        action_mask=torch.ones(n, 1))
    maker, name = MagicMock(), "group_norm" if divide_by_std else "dr_grpo"
    maker.get_cumulative_returns = lambda *args: (
        RemoteExperienceMaker.get_cumulative_returns(maker, *args))
    maker.kl_ctl.value, maker.advantage_estimator, args = 0.0, name, maker.strategy.args
    args.reward.overlong_buffer_len = args.reward.stop_properly_penalty_coef = None
    args.rollout.n_samples_per_prompt, args.algo.advantage.estimator = rewards.shape[1], name
    args.reward.clip_range, args.algo.advantage.gamma = None, 1.0
    RemoteExperienceMaker.compute_advantages_and_returns(maker, [one])
    return one.advantages.view(rewards.shape)


def gae(rewards, values, mask, *, gamma=1.0, lam=0.95):
    return RemoteExperienceMaker.get_advantages_and_returns(None, values, rewards, mask, gamma, lam)


def policy(
    logp, old_logp, advantages, mask, *, clip_low=0.2, clip_high=None, level=True, kind="ppo"
):
    objective = PolicyLoss(clip_low, clip_low if clip_high is None else clip_high,
                           token_level_loss=level, policy_loss_type=kind)
    return objective(logp, old_logp.detach(), advantages.view(len(mask), -1), mask,
                     global_batch_size=len(mask))[0]


grpo_loss = partial(policy, level=False)
gspo_loss = partial(policy, clip_low=3e-4, clip_high=4e-4, kind="gspo")
dapo_loss = partial(policy, clip_high=0.28)
ppo_loss = policy


def value_loss(values, old_values, returns, mask, *, clip=0.2):
    return ValueLoss(clip)(values, old_values, returns, mask)
