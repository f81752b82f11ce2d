"""The records of a step: a Rollout, what was sampled, and a Batch, what is trained on.

A step trains on mini-batches, with one optimizer step each. A mini-batch is cut into micro-batches,
with one forward and one backward pass each. A Step is what is known of a step at its end.

The functions of an algorithm take the rollout: `advantages(rollout)` and
`keep(rollout, advantages, k)`. So a rule may look at lengths, at log-probabilities or at several
rewards.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from engine.base import ranks
from engine.model import shards
from engine.model.logprobs import extents
from micro_batches import micro_batches as cut_by_length
from micro_batches import micro_batches_by_prompt as cut_by_prompt


@dataclass
class Rollout:
    """What was sampled for Q questions: G completions of each, R rewards of each completion.

    Completion i of question q is row q·G + i of `tokens`, `logp` and `texts`.
    `tokens` and `logp` are on the device, all else is on the CPU.
    """

    questions: list[dict]  # Q rows of the data set
    places: torch.Tensor  # (Q,) int64, the order of the questions of all devices
    tokens: torch.Tensor  # (Q·G, T) int64, as sampled, padded on the right
    logp: torch.Tensor  # (Q·G, T) float32, log π_old of each token, as the sampler computed it
    mask: torch.Tensor  # (Q·G, T) bool, tokens to train on, as the sampler says
    texts: list[str]  # Q·G, what the completions say
    lengths: torch.Tensor  # (Q, G) int64, tokens to train on of each completion, EOS included
    truncated: torch.Tensor  # (Q, G) bool, cut off before an EOS
    trainable: torch.Tensor  # (Q, G) bool, what may be trained on
    rewards: torch.Tensor  # (R, Q, G) float32
    reward_names: list[str]  # R
    reward_weights: list[float]  # R
    history: list[float] = ()  # the mean reward of each earlier question of the run
    seed: int = 0  # for a rule that draws
    failures: int = 0  # calls of a reward function that failed
    rollouts: int = 1  # how often the step has sampled

    @property
    def total(self):
        """Σ_n w_n r_n: the weighted sum of the rewards, (Q, G)."""
        zeros = torch.zeros(self.rewards.shape[1:])
        return sum((w * r for w, r in zip(self.reward_weights, self.rewards)), zeros)

    def over_all_devices(self, advantages):
        """(Q, G): advantages(rewards of the groups of all devices, (R, …, G)), of this device."""
        return ranks.over_all_groups(advantages, self.rewards)


def join(rollouts):
    """Several rollouts as one. Shorter completions are padded."""
    longest = max(rollout.tokens.shape[1] for rollout in rollouts)

    def together(name, dim=0):
        values = [getattr(rollout, name) for rollout in rollouts]
        if name in ("tokens", "logp", "mask"):
            values = [F.pad(x, (0, longest - x.shape[1])) for x in values]
        return torch.cat(values, dim)

    return replace(
        rollouts[0], rollouts=len(rollouts), failures=sum(r.failures for r in rollouts),
        questions=[q for r in rollouts for q in r.questions],
        texts=[text for r in rollouts for text in r.texts],
        **{name: together(name) for name in (
            "places", "tokens", "logp", "mask", "lengths", "truncated", "trainable")},
        rewards=together("rewards", dim=1),
    )


@dataclass
class Batch:
    """N completions with all that a loss needs: a mini-batch of this device, or one micro-batch."""

    prompts: list[list[int]]
    tokens: torch.Tensor  # (N, T), T the longest of these completions
    mask: torch.Tensor  # (N, T) bool, tokens to train on; on the CPU: reading it waits for no GPU
    advantages: torch.Tensor  # (N,); PPO: (N, T), which the critic makes of the scores
    weights: torch.Tensor | None = None  # (N, T), how much each token counts in the loss
    scores: torch.Tensor | None = None  # (N,), the weighted sums of the rewards
    sampled_logp: torch.Tensor | None = None  # (N, T), as the sampler computed it
    old_logp: torch.Tensor | None = None  # (N, T), of the same policy, as the trainer computes it
    ref_logp: torch.Tensor | None = None  # (N, T)
    old_values: torch.Tensor | None = None  # PPO: (N, T), the critic's at the time of sampling
    returns: torch.Tensor | None = None  # PPO: (N, T), what the critic should have said

    @property
    def tensors(self):
        """{name: tensor} of all but the mask."""
        return {
            name: value for name, value in vars(self).items()
            if torch.is_tensor(value) and name != "mask"
        }

    def rows(self, indices):
        """The completions with these indices, as a batch of their own."""
        indices = torch.as_tensor(indices, dtype=torch.long)
        on_device = indices.to(self.tokens.device)
        mask = self.mask[indices]
        longest = max(extents(mask).tolist(), default=0)
        chosen = {}
        for name, tensor in self.tensors.items():
            own = on_device if tensor.dim() == 1 else (on_device, slice(longest))
            chosen[name] = tensor[own]
        return Batch([self.prompts[i] for i in indices], mask=mask[:, :longest], **chosen)


def without_tokens(batch):
    """A batch like this one, of one completion without a token. It adds nothing to any sum."""
    empty = {name: x.new_zeros((1, 0)[: x.dim()]) for name, x in batch.tensors.items()}
    return Batch([[0]], mask=batch.mask.new_zeros((1, 0)), **empty)


def micro_batches(batch, max_tokens, policy):
    """[(rows, Batch of these rows)]: a model computes at most `max_tokens` tokens for each,
    padding included. There is at least one."""
    lengths = extents(batch.mask).tolist()
    if policy.shares_prompts:
        cut = cut_by_prompt(batch.prompts, lengths, max_tokens)
    else:
        cut = cut_by_length([len(p) + n for p, n in zip(batch.prompts, lengths)], max_tokens)
    found = [(rows, batch.rows(rows)) for rows in cut]
    count = max(1, len(found))
    if shards.is_sharded(policy.model):
        # devices gather weights together, so each needs as many micro-batches as the others
        most = ranks.all_sum({"count": count}, batch.tokens.device, op="max")
        count = int(most["count"])
    fill = [([], without_tokens(batch))] * (count - len(found))
    return found + fill


def into_minibatches(rollout, advantages, rows, algorithm, max_new_tokens):
    """The kept completions of all devices, cut into mini-batches. Returns this device's Batch of
    each, with the weights of its tokens.

    They are cut in the order of the step's questions. So a mini-batch does not depend on how the
    questions were shared out.

    A mini-batch in which every advantage is 0, on all devices, is left out, unless a critic learns
    from it. Its policy gradient is 0, but AdamW would still move the weights, because it remembers
    earlier gradients. With β > 0 the gradient of its loss is not 0: the KL term still pulls towards
    the reference. That this pull is left out is our choice. How much is left out depends on how
    mini-batches are cut: beside a group with a signal, the KL term of a group without one counts.
    """
    G, device = advantages.shape[1], rollout.tokens.device
    everything = Batch(
        [question["prompt"] for question in rollout.questions for _ in range(G)], rollout.tokens,
        rollout.mask, advantages.flatten().to(device), scores=rollout.total.flatten().to(device),
        sampled_logp=rollout.logp)
    places = rollout.places[rows // G] * G + rows % G
    of_all_devices = torch.tensor(sorted(ranks.gather(places.tolist())), dtype=torch.long)
    batches = []
    for some in of_all_devices.tensor_split(algorithm.minibatches):
        own = rows[torch.isin(places, some)]
        batches.append(everything.rows(own))

    counts = {}
    for m, batch in enumerate(batches):  # tensors: they are read off the device together
        counts[m, "completions"] = len(batch.prompts)
        counts[m, "tokens"] = batch.mask.sum()
        counts[m, "signals"] = (batch.advantages != 0).sum()
    counts = ranks.all_sum(counts, device)
    learned = []
    for m, batch in enumerate(batches):
        n, tokens = int(counts[m, "completions"]), int(counts[m, "tokens"])
        if counts[m, "signals"] or (algorithm.critic and n):
            mask = batch.mask.to(device)
            batch.weights = algorithm.token_weights(mask, n, tokens, max_new_tokens)
            learned.append(batch)
    return learned


class Step(NamedTuple):
    """What is known of a step at its end."""

    metrics: dict  # a line of metrics.jsonl
    sample: dict  # a line of samples.jsonl: the first group
    mean_rewards: list[float]  # of each question of this device
    skipped: list[bool]  # of each update: was it skipped, because it was not finite?
