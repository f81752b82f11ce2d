"""tiny-grpo (Open-Thought; Apache 2.0), commit eafedd7 of 23 January 2025:
git clone https://github.com/open-thought/tiny-grpo; then --path tiny-grpo

The loss is GRPOLoss of loss.py, the KL approx_kl_divergence. The advantages and the
log-probabilities (sequences_log_probs, with a model that returns our logits) come from train.py.
`step` runs its main, on a CPU, with a group size of 4 and with batches of 6: the two DataLoaders,
the optimizer and the models are the probe's.

It only renames and reshapes: a token is put before each completion; the old and the reference
log-probabilities carry no gradient, as in its experiences. The code has one setting: one clip
range, an eps of 1e-8, the unbiased std.
Left out: the temperature, because it samples at 1 and no function takes one.

grpo_loss asks GRPOLoss alone, with our mask. Its own mask shows in `step`.
wandb and transformers, which none of these use, get stand-ins.
"""

import copy
import sys
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch
from torch.nn.functional import pad

with patch.dict(sys.modules, wandb=MagicMock(), transformers=MagicMock()):
    from loss import GRPOLoss, approx_kl_divergence

    import train
    from train import group_advantages as one_group
    from train import rollout, sequences_log_probs

BETA = 0.01  # kl_weight of its main

kl_k3 = partial(approx_kl_divergence, action_mask=None)


def token_logprobs(logits, tokens):
    model = MagicMock()
    model.forward.return_value = {"logits": pad(logits, (0, 0, 0, 1))}
    ids = pad(tokens, (1, 0))
    return sequences_log_probs(model, ids, torch.ones_like(ids))


def group_advantages(rewards, *, eps=1e-8):
    return torch.stack([one_group(group.unsqueeze(1), eps).squeeze(1) for group in rewards])


def grpo_loss(logp, old_logp, advantages, mask, *, ref_logp=None, beta=0.01, clip_low=0.2):
    experience = SimpleNamespace(
        action_log_probs=old_logp.detach(), action_mask=mask,
        advantages=advantages.view(len(mask), -1),
        log_probs_ref=logp.detach() if ref_logp is None else ref_logp.detach())
    kl_weight = 0.0 if ref_logp is None else beta
    return GRPOLoss(clip_low, kl_weight)(logp, experience)[0]


def step(policy, questions, sampler, reward):
    right, eos, now = "right", 1, []  # now: the prompt that is answered

    def ids_of(texts, **_):
        now[:] = [int(digit) for digit in texts[0]]
        ids = torch.tensor([now])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return MagicMock(to=lambda _: inputs)

    def texts_of(completions, **_):
        answers = {1.0: f"<answer>{right}</answer>", 0.0: ""}
        return [answers[reward(now, row)] for row in completions.tolist()]

    tokenizer = MagicMock(side_effect=ids_of, eos_token_id=eos, batch_decode=texts_of)
    tokenizer.apply_chat_template = lambda chat, **_: chat[-1]["content"]

    def model_of(table):
        return MagicMock(
            forward=lambda input_ids, **_: {"logits": table(input_ids)},
            generate=lambda input_ids, generation_config, **_: sampler.extend(
                input_ids, generation_config.temperature, pad=generation_config.pad_token_id),
            parameters=table.parameters)

    models = [(model_of(table), tokenizer) for table in (copy.deepcopy(policy), policy)]
    tasks = {"question": ["".join(map(str, prompt)) for prompt in questions],
             "answer": [right] * len(questions)}

    def loader(data, collate_fn=None, **options):
        if collate_fn is None:
            return [tasks]
        return torch.utils.data.DataLoader(data, **options | {
            "collate_fn": collate_fn, "batch_size": 6})

    of_four = lambda *words, num_rollouts, **options: rollout(
        *words, num_rollouts=sampler.group_size, **options)
    with (patch.multiple(
            train, load_model=lambda *_, **__: models.pop(0), read_prompts=MagicMock(),
            DataLoader=loader, rollout=of_four, GenerationConfig=SimpleNamespace),
          patch.object(train.optim, "Adam", lambda *_, **__: policy.optimizer),
          patch.object(train.Experience, "to", lambda self, _: self), redirect_stdout(StringIO())):
        train.main()
