"""GRPO-Zero (policy-gradient; Apache 2.0), commit d41bb48 of 18 April 2025:
git clone https://github.com/policy-gradient/GRPO-Zero; then --path GRPO-Zero

The advantages are normalize_rewards_per_group of grpo.py, the entropies its compute_entropy. The
loss is its update_policy, which gets our log-probabilities in place of the cross entropy. It makes
the update itself, so the loss comes back as its number with the gradient that it computed. `step`
calls its rollout and its update_policy, as its train.py does, with micro-batches of 5.

It only renames and reshapes: rewards and lengths become episodes. The code has one setting: no
ratio, no clip and no KL, because it makes one update for each batch, so the loss takes none of
them; a mean over tokens; the population's std plus 1e-4; a temperature of 1.
Left out: the log-probabilities, a line of update_policy.
"""

from contextlib import redirect_stdout
from io import StringIO
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch
from data_types import Episode, MiniBatch

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


class Model:
    """The probe's policy, and its sampler as a model that is sure of each next token."""

    init_kv_cache = del_kv_cache = lambda *_, **__: None

    def __init__(self, policy, prompts, sampler):
        self.forward, self.parameters = policy, policy.parameters
        drawn = sampler(prompts, 1.0)
        self.rows = [[*prompt, *own, *[0] * 8] for prompt, own in zip(prompts, drawn)]

    def inference(self, tokens, start):
        place = start + tokens.shape[1]
        next_tokens = torch.tensor([row[place] for row in self.rows])
        sure = torch.full((len(tokens), 1, 8), -torch.inf)
        return sure.scatter(2, next_tokens.view(-1, 1, 1), 0.0)


def step(policy, questions, sampler, reward):
    text = lambda tokens: "".join(map(str, tokens))
    G, pad = sampler.group_size, 0
    tokenizer = SimpleNamespace(eos_token="1", eos_token_id=1, pad_token_id=pad, detokenize=text)
    model = Model(policy, [p for p in questions for _ in range(G)], sampler)
    batch = MiniBatch(
        prefix=[*map(text, questions)], prefix_tokens=questions, prefix_token_ids=questions,
        numbers=questions, target=questions)

    def rewarded(response, numbers, **_):
        return {"reward": reward(numbers, response), "reward_info": {}}

    device, dtype = torch.device("cpu"), torch.float32
    with redirect_stdout(StringIO()):
        episodes = zero.rollout(
            model, batch, tokenizer, sampler.longest, G, rewarded, device, dtype)
        zero.update_policy(model, policy.optimizer, episodes, 5, pad, 1.0, device, dtype)
