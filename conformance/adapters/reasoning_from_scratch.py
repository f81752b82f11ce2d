"""Build a Reasoning Model From Scratch (Sebastian Raschka; Apache 2.0), commit f79c9cd of
21 April 2026: git clone https://github.com/rasbt/reasoning-from-scratch;
then --path reasoning-from-scratch

group_advantages are those of compute_grpo_loss of
ch07/03_rlvr_grpo_scripts_advanced/7_4_plus_clip_ratio.py, whose sampling, rewards and
log-probabilities are ours.

It only renames and reshapes: each group of rewards is one call.
Left out: the losses. Their ratio is that of a whole completion, so no function of ours takes the
same numbers; the clip and the KL are lines of them.
"""

import importlib.util
import sys
from pathlib import Path
from unittest.mock import MagicMock, patch

import torch

book = Path(importlib.util.find_spec("reasoning_from_scratch").origin).parents[1]
SCRIPTS = book.joinpath("ch07/03_rlvr_grpo_scripts_advanced")
UNUSED = ["reasoning_from_scratch"] + [
    f"reasoning_from_scratch.{name}" for name in ("ch02", "ch03", "ch04", "ch06", "qwen3")]
with (patch.dict(sys.modules, {name: MagicMock() for name in UNUSED}),
      patch.object(sys, "path", [str(SCRIPTS), *sys.path])):
    chapter = importlib.import_module("7_4_plus_clip_ratio")


def group_advantages(rewards):
    groups = []
    for row in rewards.tolist():
        logp = torch.zeros((), requires_grad=True), torch.zeros(())
        with (patch.object(chapter, "sample_response", return_value=(torch.zeros(2), 1, "")),
              patch.object(chapter, "reward_rlvr", side_effect=row),
              patch.object(chapter, "sequence_logprob_and_entropy", return_value=logp)):
            out = chapter.compute_grpo_loss(
                MagicMock(), None, None, MagicMock(), "cpu", num_rollouts=len(row))
        groups.append(out["advantages"])
    return torch.tensor(groups, dtype=rewards.dtype)
