"""NeMo RL (NVIDIA; Apache 2.0), commit 7ea279a of 22 August 2026:
git clone https://github.com/NVIDIA-NeMo/RL; then --path RL

The losses are ClippedPGLossFn of nemo_rl/algorithms/loss/loss_functions.py, the KL estimators
calculate_kl, the advantages GRPOAdvantageEstimator.

It only renames and reshapes: a token is put before each completion; rewards and masks get the dtype
that it takes; the old and the reference log-probabilities are data, without a gradient.
Left out: the weights of the tokens, a masked mean of the loss; GAE, which takes a batch of its own;
the log-probabilities. Packages that none of these use get stand-ins.

The options are those of the papers: token_level_loss off for GRPO and GSPO, and no leave-one-out
baseline. DEFAULTS=1 in front of the command takes NeMo RL's own: the mean and the std of the other
completions of the group, and a mean over tokens.
"""

import os
import sys
from functools import partial
from unittest.mock import MagicMock, patch

import torch

UNUSED = ("transformers", "nemo_rl.data", "nemo_rl.data.chat_templates", "nemo_rl.models",
          "nemo_rl.models.policy", "nemo_rl.models.dtensor", "nemo_rl.models.dtensor.parallelize",
          "nemo_rl.utils", "nemo_rl.utils.fastokens", "nemo_rl.utils.logger",
          "nemo_rl.algorithms.x_token", "nemo_rl.algorithms.x_token.loss_utils",
          "nemo_rl.distributed", "nemo_rl.distributed.batched_data_dict",
          "nemo_rl.distributed.model_utils", "nemo_rl.algorithms.loss.utils",
          "nemo_rl.algorithms.loss.wrapper")
with patch.dict(sys.modules, {name: MagicMock() for name in UNUSED}):
    from nemo_rl.algorithms.advantage_estimator import AdvEstimatorConfig, GRPOAdvantageEstimator
    from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn
    from nemo_rl.algorithms.utils import calculate_kl


kl_k1, kl_k2, kl_k3 = (partial(calculate_kl, kl_type=name) for name in ("k1", "k2", "k3"))


def group_advantages(rewards, *, divide_by_std=True, leave_one_out=False):
    config = AdvEstimatorConfig(
        use_leave_one_out_baseline=leave_one_out, normalize_rewards=divide_by_std)
    flat = rewards.detach().flatten().float()
    prompts = torch.arange(len(flat)).div(rewards.shape[1], rounding_mode="floor").unsqueeze(1)
    estimator = GRPOAdvantageEstimator(config, None)
    return estimator.compute_advantage(prompts, flat, torch.ones(len(flat), 1)).view(rewards.shape)


def loss(logp, old_logp, advantages, mask, *, ref_logp=None, beta=0.0, clip_low=0.2, clip_high=None,
         token_level_loss=True, sequence_level_importance_ratios=False):
    def after_prompt(x):
        return torch.nn.functional.pad(x.detach(), (1, 0))

    objective = ClippedPGLossFn(ClippedPGLossConfig(
        ratio_clip_min=clip_low, ratio_clip_max=clip_low if clip_high is None else clip_high,
        reference_policy_kl_penalty=0.0 if ref_logp is None else beta,
        token_level_loss=token_level_loss,
        sequence_level_importance_ratios=sequence_level_importance_ratios))
    old = after_prompt(old_logp)
    total, _ = objective(logp, {
        "token_mask": after_prompt(mask.to(logp.dtype)), "prev_logprobs": old,
        "advantages": after_prompt(advantages.view(len(mask), -1).expand_as(logp)),
        "generation_logprobs": old, "sample_mask": torch.ones(len(mask)),
        "reference_policy_logprobs": after_prompt(logp if ref_logp is None else ref_logp),
    }, torch.tensor(len(mask)), mask.sum())
    return total


grpo_loss = partial(loss, beta=0.04, token_level_loss=False)
dapo_loss = partial(loss, clip_high=0.28)
gspo_loss = partial(loss, clip_low=3e-4, clip_high=4e-4, token_level_loss=False,
                    sequence_level_importance_ratios=True)
if "DEFAULTS" in os.environ:
    grpo_loss = partial(loss, beta=0.01)
    group_advantages = partial(group_advantages, leave_one_out=True)
