"""TRL 1.16.0 (Hugging Face; Apache 2.0): pip install trl==1.16.0

The losses call GRPOTrainer._compute_loss. The advantages and the importance weights call
GRPOTrainer._generate_and_score_completions. Both get a stand-in for the trainer. Log-probabilities
and entropies are those of its fused head, as in the trainer: our logits are its hidden states, and
its weight is the identity. Autocast would round that product, and −∞ · 0 is NaN, so it is not
asked there.

It only renames and reshapes: the old and the reference log-probabilities carry no gradient, because
the trainer computes them under no_grad; what is on padding is set to 1 in the importance
weights, because no loss reads it.
Left out: the KL and the clip, which are lines of the loss; the weights of the tokens, one formula
per loss_type; GAE and the critic, because TRL 1.16 has no PPO.

The options are those of the papers. DEFAULTS=1 in front of the command takes TRL's own: its loss
is then "dapo", with a clip range of 0.2 on both sides and no KL.
"""

import os
from collections import defaultdict
from functools import partial
from unittest.mock import MagicMock

import torch
from trl import GRPOTrainer
from trl.rewards import get_soft_overlong_punishment
from trl.trainer.utils import _ChunkedLogProbFunction

OFF = ("tools", "environments", "environment_factories", "off_policy_mask_threshold", "use_vllm",
       "pad_to_multiple_of", "mask_truncated_completions", "_entropy_bonus_enabled", "args.delta",
       "aux_loss_enabled", "vllm_importance_sampling_clip_min", "args.use_bias_correction_kl",
       "model.is_gradient_checkpointing", "args.per_device_train_batch_size", "log_multimodal")
ZERO = ("beta", "accelerator.process_index", "_tokenizer.pad_token_id")
ONE = ("args.steps_per_generation", "args.gradient_accumulation_steps", "num_generations",
       "num_iterations", "accelerator.num_processes", "current_gradient_accumulation_steps",
       "top_entropy_quantile")


def fused_head(logits, tokens, temperature):
    """(log-probabilities, entropies, …), with the other arguments as add_fused_lm_head has them."""
    if torch.is_autocast_enabled("cpu") or logits.isinf().any():
        raise NotImplementedError("the product with the identity would be rounded, or NaN")
    vocabulary = logits.shape[-1]
    identity = torch.eye(vocabulary, dtype=logits.dtype)
    return _ChunkedLogProbFunction.apply(
        logits.reshape(-1, vocabulary), identity, None, tokens.flatten(), temperature, 32768, None,
        1.0, ("log_probs", "entropy"))


def token_logprobs(logits, tokens, *, temperature=1.0):
    return fused_head(logits, tokens, temperature)[0].view(tokens.shape)


def token_entropies(logits, *, temperature=1.0):
    tokens = torch.zeros(logits.shape[:-1], dtype=torch.long)
    return fused_head(logits, tokens, temperature)[1].view(tokens.shape)


def overlong_penalty(lengths, *, max_length, cache):
    penalty = get_soft_overlong_punishment(max_length, cache)
    penalties = penalty([range(int(n)) for n in lengths.flatten()])
    return torch.tensor(penalties, dtype=torch.float32).view(lengths.shape)


def trainer(**options):
    """One process, no gradient accumulation, no vLLM, no tools."""
    known = dict.fromkeys(OFF) | dict.fromkeys(ZERO, 0) | dict.fromkeys(ONE, 1)
    known |= {"_metrics": defaultdict(lambda: defaultdict(list)), "reward_func_names": [],
              "_pending_extra_logs": {}, "_pending_metrics": {}, "accelerator.device": "cpu",
              "accelerator.gather": lambda x: x, "accelerator.reduce": lambda x, **_: x}
    return MagicMock(**known | options)


def loss(kind, logp, old_logp, advantages, mask, *, ref_logp=None, beta=0.0, clip_low=0.2,
         clip_high=None, max_tokens=None, level="token"):
    column = torch.ones(len(mask), 1, dtype=torch.long)
    stand_in = trainer(
        beta=0.0 if ref_logp is None else beta, epsilon_low=clip_low, loss_type=kind,
        epsilon_high=clip_low if clip_high is None else clip_high, max_completion_length=max_tokens,
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, torch.zeros_like(logp), None),
        importance_sampling_level=level,
    )
    return GRPOTrainer._compute_loss(stand_in, None, {
        "prompt_ids": column, "prompt_mask": column, "completion_ids": mask.long(),
        "completion_mask": mask.long(), "advantages": advantages, "num_items_in_batch": mask.sum(),
        "old_per_token_logps": old_logp.detach(),
        "ref_per_token_logps": None if ref_logp is None else ref_logp.detach(),
    })


grpo_loss = partial(loss, "grpo", beta=0.04)
dapo_loss = partial(loss, "dapo", clip_high=0.28)
drgrpo_loss = partial(loss, "dr_grpo")
gspo_loss = partial(loss, "grpo", clip_low=3e-4, clip_high=4e-4, level="sequence")
if "DEFAULTS" in os.environ:
    grpo_loss = partial(loss, "dapo")


def generate(lengths, rewards, sampled_logp=None, *, weights=(1.0,), **options):
    """What _generate_and_score_completions makes of completions of these lengths and rewards."""
    n, tokens = len(lengths), [[1] * length for length in lengths]
    out = [[1]] * n, tokens, None, ["text"] * n, sampled_logp, {}, None, None
    stand_in = trainer(
        _generate=lambda _: out, _calculate_rewards=lambda *_: rewards, reward_funcs=weights,
        reward_weights=torch.tensor(weights), **options)
    return GRPOTrainer._generate_and_score_completions(stand_in, [{"prompt": "?"}] * n)


def group_advantages(rewards, *, divide_by_std=True):
    scale = {"scale_rewards": "group" if divide_by_std else "none"}
    column, group_size = rewards.detach().reshape(-1, 1), rewards.shape[1]
    out = generate([1] * len(column), column, num_generations=group_size,
                   multi_objective_aggregation="sum_then_normalize", **scale)
    return out["advantages"].view(rewards.shape)


def decoupled_advantages(rewards, *, weights=None):
    weights = [1.0] * len(rewards) if weights is None else weights
    out = generate([1] * rewards[0].numel(), rewards.detach().flatten(1).T, weights=weights,
                   num_generations=rewards.shape[2],
                   multi_objective_aggregation="normalize_then_sum")
    return out["advantages"].view(rewards.shape[1:])


def truncated_importance_weights(old_logp, sampled_logp, mask, *, cap):
    lengths = mask.sum(1).long().tolist()
    rows = [row[:length].tolist() for row, length in zip(sampled_logp, lengths)]
    old = old_logp[:, :max(lengths)].detach()
    out = generate(
        lengths, torch.zeros(len(mask), 1), rows, use_vllm=True, scale_rewards="group",
        multi_objective_aggregation="sum_then_normalize", vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_max=cap,
        _get_per_token_logps_and_entropies=lambda *_, **__: (old, None, None))
    padding = mask.shape[1] - max(lengths)
    return torch.nn.functional.pad(out["importance_sampling_ratio"], (0, padding), value=1.0)
