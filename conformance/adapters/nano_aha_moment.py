"""nano-aha-moment (McGill NLP; MIT), commit 6cd0306 of 7 July 2025:
git clone https://github.com/McGill-NLP/nano-aha-moment; then --path nano-aha-moment

The loss is compute_pg_loss of nano_r1_script.py, the advantages are those of its
create_training_episodes, the log-probabilities compute_token_log_probs of utils.py, with a model
that returns our logits.

It only renames and reshapes: a prompt of one token is put before each completion. The code has one
setting: no ratio and no clip, because it makes one update for each batch, so the loss takes no clip
range; a mean over tokens; the population's std plus 1e-4. beta is its kl_coeff.
Left out: the KL, a line of the loss; logits in bfloat16, because it computes in their dtype.
close_to_zero, a statistic in line 623 whose two shapes differ by one, gets a stand-in, and so do
the packages that none of these use and torch.compile.
"""

import sys
from unittest.mock import MagicMock, patch

import torch
from torch.nn.functional import pad

UNUSED = ("wandb", "datasets", "deepspeed", "deepspeed.runtime.utils", "transformers", "vllm")
with (patch.dict(sys.modules, {name: MagicMock() for name in UNUSED}),
      patch("torch.compile", lambda **_: lambda function: function)):
    import nano_r1_script as nano
    import utils


def after_prompt(x):
    return pad(x, (1, 0))


def token_logprobs(logits, tokens, *, temperature=1.0):
    if logits.dtype == torch.bfloat16:
        raise NotImplementedError("it computes in the dtype of the logits")
    model = MagicMock(return_value=MagicMock(logits=pad(logits, (0, 0, 0, 1))))
    labels = after_prompt(tokens)
    inputs = {"input_ids": labels, "attention_mask": None, "labels": labels,
              "labels_mask": torch.ones_like(labels)}
    return utils.compute_token_log_probs(model, inputs, temperature)


def group_advantages(rewards):
    numbers = rewards.flatten().tolist()
    tokenizer = MagicMock(batch_decode=lambda ids, **_: [numbers[i] for (i,) in ids])
    options = {"tokenizer": tokenizer, "EOS_TOKEN": "", "GENERATIONS_PER_SAMPLE": rewards.shape[1]}
    with patch.object(nano, "compute_reward", lambda reward, *_: (reward, {})):
        episodes, _ = nano.create_training_episodes(
            samples=[{"input_ids": [0]}] * len(rewards), all_finish_reasons=["stop"] * len(numbers),
            all_generations=[[i] for i in range(len(numbers))], **options)
    return torch.tensor(episodes["all_advantages"], dtype=rewards.dtype).view(rewards.shape)


def grpo_loss(logp, old_logp, advantages, mask, *, ref_logp=None, beta=0.04):
    spread = advantages.view(len(mask), -1).expand_as(logp)
    batch = dict.fromkeys(("input_ids", "attention_mask", "labels")) | {
        "advantages": after_prompt(spread), "labels_mask": after_prompt(mask),
        "ref_log_probs": (logp if ref_logp is None else ref_logp).detach()}
    kl_coefficient = 0.0 if ref_logp is None else beta
    with (patch.object(nano, "compute_token_log_probs", lambda *_: logp),
          patch.object(nano, "close_to_zero", lambda *_: torch.zeros(()))):
        return nano.compute_pg_loss(None, batch, mask.sum(), 1.0, kl_coefficient)[0]
