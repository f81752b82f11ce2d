"""OpenRLHF 0.11.2 (Apache 2.0): pip install --no-deps openrlhf==0.11.2

The losses are PolicyLoss and ValueLoss of openrlhf/models/loss.py, the KL estimators and
token_rewards those of openrlhf/models/utils.py, the log-probabilities and the entropies those of
Actor.forward, with a model that returns our logits; gae and the advantages ("group_norm",
"dr_grpo") those of RemoteExperienceMaker; the penalty is apply_overlong_penalty.

It only renames and reshapes: the number of completions is handed over, so an empty one counts; the
old log-probabilities, the old values and the returns carry no gradient, as in its experiences; a
token is put before each completion; 0 is filled in on padding in token_rewards, because its GAE
does not read it.
Left out: the KL inside a loss, which the Ray trainer adds; the weights of the tokens; whiten, a
line of the experience maker. torch.compile and packages that none of these use get stand-ins.

The options are those of the papers: group_norm, and loss_agg_mode "seq-mean-token-mean" for GRPO.
OpenRLHF's own default is PPO with GAE and a mean over tokens: that is ppo_loss.
"""

import sys
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch

UNUSED = ("deepspeed", "ray", "peft", "peft.tuners.lora", "transformers",
          "transformers.integrations.deepspeed", "openrlhf.models.ring_attn_utils",
          "openrlhf.models.model",
          "openrlhf.trainer.ray", "openrlhf.trainer.ray.launcher", "openrlhf.utils.logging_utils",
          "openrlhf.trainer.ppo_utils.replay_buffer", "openrlhf.utils.seqlen_balancing",
          "openrlhf.utils", "openrlhf.utils.utils")
with (patch.dict(sys.modules, {name: MagicMock() for name in UNUSED}),
      patch("torch.compile", lambda function: function)):
    from openrlhf.models import Actor, PolicyLoss, ValueLoss, utils
    from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
    from openrlhf.trainer.ppo_utils.length_penalty import apply_overlong_penalty


kl_k1, kl_k2, kl_k3 = (
    partial(utils.compute_approx_kl, kl_estimator=name) for name in ("k1", "k2", "k3"))


class Output(dict):
    """What a model returns: {"logits": …}, which Actor.forward gives an entropy."""


def forward(logits, tokens, temperature):
    """(log-probabilities, output with the entropies) of a completion behind one token."""
    pad = torch.nn.functional.pad
    ids, output = pad(tokens, (1, 0)), Output(logits=pad(logits.clone(), (0, 0, 0, 1)))
    actor = MagicMock(packing_samples=False, is_vlm=False, temperature=temperature)
    actor.model.return_value = output
    return Actor.forward(actor, ids, attention_mask=torch.ones_like(ids), return_output=True,
                         return_logprobs=True, return_entropy=True)


def token_logprobs(logits, tokens, *, temperature=1.0):
    return forward(logits, tokens, temperature)[0]


def token_entropies(logits, *, temperature=1.0):
    tokens = torch.zeros(logits.shape[:-1], dtype=torch.long)
    return forward(logits, tokens, temperature)[1].entropy


def token_rewards(scores, logp, ref_logp, mask, *, beta):
    rewards = utils.compute_reward(scores, beta, kl_k1(logp, ref_logp), mask)
    return rewards.masked_fill(~mask.bool(), 0.0)


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
    return ValueLoss(clip)(values, old_values.detach(), returns.detach(), mask)
