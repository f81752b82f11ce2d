"""The records of a step: a Rollout, what was sampled, and a Batch, what is trained on.

A step trains on mini-batches, with one optimizer step each. A mini-batch is cut into micro-batches,
with one forward and one backward pass each. A Step is what is known of a step at its end.

The functions of an algorithm take the rollout: `advantages(rollout)` and
`keep(rollout, advantages, k)`. So a rule may look at lengths, at log-probabilities or at several
rewards. This file needs only torch, so a rule and its Rollout can be copied together.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F


class Parts(NamedTuple):
    """What a run hands to each of its steps."""

    networks: object  # Networks of engine/model/networks.py
    algorithm: object  # Algorithm of algorithms.py
    reward_functions: list  # Rewards of engine/scoring/score.py
    sampling: object  # Sampling of engine/model/sampler_interface.py
    limits: object  # Limits of loop/update.py


class TrainingProgress(NamedTuple):
    """How far a run is when a step begins."""

    step: int = 1  # its number, from 1
    progress: float = 0.0  # the share of the run that is over before it, 0 … 1
    history: list[float] = ()  # the mean reward of each earlier question of the run


FIRST_STEP = TrainingProgress()


@dataclass
class Rollout:
    """What was sampled for Q questions: G completions of each, R rewards of each completion.

    Completion i of question q is row q·G + i of `tokens`, `logp` and `texts`.
    `tokens`, `logp` and `prefix_weights` are on the device, all else is on the CPU.
    """

    questions: list[dict]  # Q rows of the data set
    question_numbers: torch.Tensor  # (Q,) int64, of each question among those of all devices
    tokens: torch.Tensor  # (Q·G, T) int64, as sampled, padded on the right
    # (Q·G, T) float32, log π_old of each token, as the sampler computed it; NaN: it did not say
    logp: torch.Tensor
    mask: torch.Tensor  # (Q·G, T) bool, tokens to train on, as the sampler says
    texts: list[str]  # Q·G, what the completions say
    lengths: torch.Tensor  # (Q, G) int64, tokens to train on of each completion, EOS included
    truncated: torch.Tensor  # (Q, G) bool, cut off before an EOS
    trainable: torch.Tensor  # (Q, G) bool, what may be trained on
    rewards: torch.Tensor  # (R, Q, G) float32; NaN: the reward does not apply
    reward_names: list[str]  # R
    reward_weights: list[float]  # R
    step: int = 1  # the number of the step, from 1
    progress: float = 0.0  # the share of the run that was over before the step, 0 … 1
    history: list[float] = ()  # the mean reward of each earlier question of the run
    seed: int = 0  # for a rule that draws
    prefix_weights: torch.Tensor | None = None  # NAT: (Q·G, T), 0 outside of the random prefixes
    failures: int = 0  # calls of a reward function that failed
    timeouts: int = 0  # verdicts of math_accuracy that ran out of time
    rollouts: int = 1  # how often the step has sampled

    @property
    def total(self):
        """Σ_n w_n r_n: the weighted sum of the rewards, (Q, G). One that does not apply adds 0."""
        total = torch.zeros(self.rewards.shape[1:])
        for weight, rewards in zip(self.reward_weights, self.rewards):
            total = total + weight * rewards.nan_to_num()
        return total


def join(rollouts):
    """Several rollouts as one. Shorter completions are padded."""
    longest = max(rollout.tokens.shape[1] for rollout in rollouts)
    questions = []
    texts = []
    for rollout in rollouts:
        questions += rollout.questions
        texts += rollout.texts

    def padded(name):
        tensors = []
        for rollout in rollouts:
            tensor = getattr(rollout, name)
            missing = longest - tensor.shape[1]
            tensors.append(F.pad(tensor, (0, missing)))
        return torch.cat(tensors)

    def joined(name, dim=0):
        tensors = [getattr(rollout, name) for rollout in rollouts]
        return torch.cat(tensors, dim)

    return replace(
        rollouts[0],
        questions=questions,
        texts=texts,
        question_numbers=joined("question_numbers"),
        tokens=padded("tokens"),
        logp=padded("logp"),
        mask=padded("mask"),
        lengths=joined("lengths"),
        truncated=joined("truncated"),
        trainable=joined("trainable"),
        rewards=joined("rewards", dim=1),
        failures=sum(rollout.failures for rollout in rollouts),
        timeouts=sum(rollout.timeouts for rollout in rollouts),
        rollouts=len(rollouts),
    )


TENSORS = (  # of a Batch, all but the mask
    "tokens", "advantages", "weights", "prefix_weights", "scores", "sampled_logp", "old_logp",
    "ref_logp", "old_values", "returns",
)


class MicroBatchPlan(NamedTuple):
    """How a mini-batch is cut into micro-batches."""

    max_tokens: int  # the limit of a micro-batch
    micro_batches: list  # of each: (its rows, whether it reads each prompt only once)


@dataclass
class Batch:
    """N completions with all that a loss needs: a mini-batch of this device, or one micro-batch."""

    prompts: list[list[int]]
    tokens: torch.Tensor  # (N, T), T the longest of these completions
    mask: torch.Tensor  # (N, T) bool, tokens to train on; on the CPU: reading it waits for no GPU
    advantages: torch.Tensor  # (N,); PPO: (N, T), which the critic makes of the scores
    weights: torch.Tensor | None = None  # (N, T), how much each token counts in the loss
    prefix_weights: torch.Tensor | None = None  # NAT: (N, T), 0: it is not computed
    scores: torch.Tensor | None = None  # (N,), the weighted sums of the rewards
    sampled_logp: torch.Tensor | None = None  # (N, T), as the sampler computed it
    old_logp: torch.Tensor | None = None  # (N, T), of the same policy, as the trainer computes it
    ref_logp: torch.Tensor | None = None  # (N, T)
    old_values: torch.Tensor | None = None  # PPO: (N, T), the critic's at the time of sampling
    returns: torch.Tensor | None = None  # PPO: (N, T), what the critic should have said
    micro_batch_plan: MicroBatchPlan | None = None  # of a mini-batch: its newest one
    # of a micro-batch: a forward pass computes each different prompt once, then the completions
    shares_prefix: bool = False

    @property
    def tensors(self):
        """{name: tensor} of those TENSORS that it has."""
        tensors = {name: getattr(self, name) for name in TENSORS}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def select(self, indices):
        """The completions with these indices, as a batch of their own."""
        indices = torch.as_tensor(indices, dtype=torch.long)
        on_device = indices.to(self.tokens.device, non_blocking=True)
        mask = self.mask[indices]
        columns = mask.any(0).nonzero().flatten()
        longest = 1 + max(columns.tolist(), default=-1)
        chosen = {}
        for name, value in self.tensors.items():
            part = on_device if value.dim() == 1 else (on_device, slice(longest))
            chosen[name] = value[part]
        prompts = [self.prompts[i] for i in indices]
        return Batch(prompts, mask=mask[:, :longest], **chosen)


class Step(NamedTuple):
    """What is known of a step at its end."""

    metrics: dict  # a line of metrics.jsonl
    rollout: Rollout  # of this device
    advantages: torch.Tensor  # (Q, G)
    kept: torch.Tensor  # (n,), the kept completions among the Q·G of the rollout
    skipped: list[bool]  # of each update: was it skipped, because it was not finite?
