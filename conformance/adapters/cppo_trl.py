"""CPPO, the paper's own code (lzhxmu; Apache 2.0), commit 52faeb3 of 19 September 2025:
git clone https://github.com/lzhxmu/CPPO; then --path CPPO/src. It needs transformers==4.49.0,
accelerate==1.4.0, datasets, math-verify==0.5.2 and TRL at its commit 69ad852.

The loss is GRPOTrainer.compute_loss of src/open_r1/grpo_trainer_gsm.py; advantages and pruning are
lines of its _generate_and_score_completions. Both get a trainer without a model, with the metric
"smallest" (it names what is pruned), as its scripts, and no allocation, which needs vLLM.

It only renames and reshapes: the old and the reference log-probabilities carry no gradient, because
the trainer computes them under no_grad.
Left out: the KL and the clip, which are lines of the loss; which completions are kept, because the
lines that prune take rewards, and an adapter would have to compute rewards that give our
advantages; logits in bfloat16, because it computes in the dtype of the logits; cppo_verl, whose
pruning is a line of a Ray trainer's fit.
"""

from collections import defaultdict
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
from open_r1.grpo_trainer_gsm import GRPOTrainer


def trainer(**options):
    known = object.__new__(GRPOTrainer)
    known.__dict__ = {
        "control": SimpleNamespace(should_evaluate=False), "model": None, "max_prompt_length": None,
        "_metrics": defaultdict(lambda: defaultdict(list)), "num_iterations": 1, "beta": 0.0,
        "accelerator": MagicMock(device="cpu", process_index=0, gather_for_metrics=lambda x: x),
        "args": MagicMock(use_vllm=False, allocation=False, pruning=0.0, metric="smallest",
                          past_index=-1, device="cpu"),
        "is_deepspeed_enabled": False, "log_completions": False, "generation_config": None,
        "reward_processing_classes": [None], "reward_weights": torch.ones(1), **options}
    known.accelerator.state.deepspeed_plugin = None
    return known


def token_logprobs(logits, tokens, *, temperature=1.0):
    if logits.dtype == torch.bfloat16:
        raise NotImplementedError("it computes in the dtype of the logits")
    after = torch.nn.functional.pad(logits, (0, 0, 0, 1))
    model = MagicMock(return_value=SimpleNamespace(logits=after))
    stand_in = trainer(temperature=temperature)
    return stand_in._get_per_token_logps(model, tokens, None, tokens.shape[1])


def cppo_loss(logp, old_logp, advantages, mask, *, ref_logp=None, beta=0.04, clip_low=0.2):
    column = torch.ones(len(mask), 1, dtype=torch.long)
    stand_in = trainer(num_iterations=2, beta=0.0 if ref_logp is None else beta, epsilon=clip_low)
    stand_in._get_per_token_logps = lambda *_: logp
    return stand_in.compute_loss(None, {
        "advantages": advantages, "prompt_ids": column, "prompt_mask": column,
        "completion_ids": mask.long(), "completion_mask": mask.long(),
        "old_per_token_logps": old_logp.detach(),
        "ref_per_token_logps": None if ref_logp is None else ref_logp.detach()})


grpo_loss = cppo_loss


def generate(rewards, group_size, pruning=0.0):
    """(advantages of the kept completions, their rows) for completions with these rewards."""
    n, given = len(rewards), [{"prompt": "?"}] * len(rewards)
    ids = torch.ones(n, 1, dtype=torch.long)
    stand_in = trainer(
        num_generations=group_size, reward_funcs=[lambda **_: rewards.tolist()],
        processing_class=MagicMock(return_value={"input_ids": ids, "attention_mask": ids}))
    stand_in.args.pruning = pruning
    completions = torch.cat([ids, torch.arange(n).unsqueeze(1)], dim=1)
    stand_in.accelerator.unwrap_model.return_value.generate.return_value = completions
    stand_in.processing_class.eos_token_id = -1
    out = stand_in._generate_and_score_completions(given)
    return out["advantages"], out["completion_ids"].squeeze(1)


def group_advantages(rewards):
    advantages, _ = generate(rewards.flatten(), rewards.shape[1])
    return advantages.view(rewards.shape)


def keep_count(group_size, pruning_rate):
    return len(generate(torch.arange(group_size), group_size, pruning_rate)[1])
