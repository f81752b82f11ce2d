"""Build a Reasoning Model From Scratch (Sebastian Raschka; Apache 2.0), commit f79c9cd of
21 April 2026: git clone https://github.com/rasbt/reasoning-from-scratch;
then --path reasoning-from-scratch

All come from compute_grpo_loss of ch07/03_rlvr_grpo_scripts_advanced/7_4_plus_clip_ratio.py, whose
sampling, rewards and log-probabilities are ours. clipped_surrogate asks it about two completions:
one with the ratio in question, one with the ratio 1 and the opposite advantage.
Left out: the losses. Their ratio is that of a whole completion, not divided by its length, which
is neither GRPO's nor GSPO's; so no function of ours takes the same numbers.
"""

import importlib.util
import sys
from pathlib import Path
from unittest.mock import MagicMock, patch

import torch

book = Path(importlib.util.find_spec("reasoning_from_scratch").origin).parents[1]
SCRIPTS = book / "ch07/03_rlvr_grpo_scripts_advanced"
UNUSED = ["reasoning_from_scratch"] + [
    f"reasoning_from_scratch.{name}" for name in ("ch02", "ch03", "ch04", "ch06", "qwen3")]
with (patch.dict(sys.modules, {name: MagicMock() for name in UNUSED}),
      patch.object(sys, "path", [str(SCRIPTS), *sys.path])):
    chapter = importlib.import_module("7_4_plus_clip_ratio")


def of_group(logps, rewards, **options):
    """compute_grpo_loss of completions with these log-probabilities and rewards; the old are 0."""
    old = [(torch.zeros_like(logp), torch.zeros(())) for logp in logps]
    new = [(logp, torch.zeros(())) for logp in logps]
    with (patch.object(chapter, "sample_response", return_value=(torch.zeros(2), 1, "")),
          patch.object(chapter, "reward_rlvr", side_effect=rewards),
          patch.object(chapter, "sequence_logprob_and_entropy", side_effect=old + new)):
        return chapter.compute_grpo_loss(
            MagicMock(), None, None, MagicMock(), "cpu", num_rollouts=len(rewards), **options)


def group_advantages(rewards):
    groups = [of_group(torch.zeros(len(row)), row)["advantages"] for row in rewards.tolist()]
    return torch.tensor(groups, dtype=rewards.dtype)


def clipped_surrogate(ratio, advantages, *, clip_low=0.2):
    if advantages.dim() < ratio.dim():
        advantages = advantages.unsqueeze(-1)
    out = []
    for one, advantage in zip(ratio.flatten(), advantages.expand_as(ratio).flatten()):
        size = advantage.item()
        given = of_group([one.log(), torch.zeros_like(one)], [size, -size], clip_eps=clip_low)
        own, other = given["advantages"]
        # loss = −½ (ours + the other's); its ratio is 1, so the other's is its advantage
        surrogate = -2 * given["loss_tensor"] - other
        out.append(surrogate * (size / own) if own else surrogate)
    return torch.stack(out).view(ratio.shape)
