"""The records of a step: a Rollout, what was sampled, and a Batch, what is trained on.

A MiniBatch is the part of a batch that one optimizer step trains on. A Step is what is known of a
step at its end. Each is made once.

The functions of an algorithm take the rollout: `advantages(rollout)` and
`keep(rollout, advantages, k)`. So a rule may look at lengths, at log-probabilities or at several
rewards.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from engine.base import ranks
from engine.model import shards
from engine.model.logprobs import completion_mask
from micro_batches import micro_batches, micro_batches_by_prompt


@dataclass
class Rollout:
    """What was sampled for Q questions: G completions of each, R rewards of each completion.

    Completion i of question q is row q·G + i of `tokens`, `logp` and `texts`.
    `tokens`, `logp` and `mask` are on the device, all else is on the CPU.
    """

    questions: list[dict]  # Q rows of the data set
    places: torch.Tensor  # (Q,) int64, the order of the questions of all devices
    tokens: torch.Tensor  # (Q·G, T) int64, as sampled, padded on the right
    logp: torch.Tensor  # (Q·G, T) float32, log π_old of each token, as the sampler computed it
    mask: torch.Tensor  # (Q·G, T) bool, tokens to train on: all but padding
    texts: list[str]  # Q·G, what the completions say
    lengths: torch.Tensor  # (Q, G) int64, tokens of each completion, EOS included
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
    """N completions with all that a loss needs: a step's on this device, or one micro-batch."""

    prompts: list[list[int]]
    tokens: torch.Tensor  # (N, T), T the longest of these completions
    lengths: torch.Tensor  # (N,), on the CPU, so that reading it does not wait for a GPU
    advantages: torch.Tensor  # (N,); PPO: (N, T), which the critic makes of the scores
    mask: torch.Tensor | None = None  # (N, T) bool, tokens to train on; None: all but padding
    scores: torch.Tensor | None = None  # (N,), the weighted sums of the rewards
    sampled_logp: torch.Tensor | None = None  # (N, T), as the sampler computed it
    old_logp: torch.Tensor | None = None  # (N, T), of the same policy, as the trainer computes it
    ref_logp: torch.Tensor | None = None  # (N, T)
    old_values: torch.Tensor | None = None  # PPO: (N, T), the critic's at the time of sampling
    returns: torch.Tensor | None = None  # PPO: (N, T), what the critic should have said

    def __post_init__(self):
        self.lengths = self.lengths.cpu()
        if self.mask is None:
            self.mask = completion_mask(self.tokens, self.lengths)

    def rows(self, indices):
        """The completions with these indices, as a batch of their own."""
        indices = torch.as_tensor(indices, dtype=torch.long)
        on_device = indices.to(self.tokens.device, non_blocking=True)
        lengths = self.lengths[indices]
        longest = int(lengths.max()) if len(lengths) else 0
        rows = {
            name: x[on_device] if x.dim() == 1 else x[on_device, :longest]
            for name, x in vars(self).items()
            if name not in ("prompts", "lengths") and x is not None
        }
        return Batch([self.prompts[i] for i in indices], lengths=lengths, **rows)

    def micro_batches(self, max_tokens, once=True):
        """Batches for which a model computes at most `max_tokens` tokens, padding included.

        once: whether the model can compute a prompt once for all its completions.
        """
        lengths = self.lengths.tolist()
        if once:
            batches = micro_batches_by_prompt(self.prompts, lengths, max_tokens)
        else:
            batches = micro_batches(
                [len(p) + n for p, n in zip(self.prompts, lengths)], max_tokens)
        return [self.rows(indices) for indices in batches]

    def logprobs(self, policy, temperature, **options):
        """`completion_logprobs` of these completions under a Policy: (N, T)."""
        # lengths as a list: FSDP would move a tensor to the device, and reading it there waits
        return policy.logprobs(
            self.prompts, self.tokens, self.lengths.tolist(), temperature=temperature, **options)


def without_tokens(device):
    """A batch of one completion without a token. It adds nothing to any sum."""
    no_token, zero = torch.zeros((1, 0), device=device), torch.zeros(1, device=device)
    return Batch(
        [[0]], no_token.long(), zero.long(), zero, no_token.bool(), scores=zero,
        sampled_logp=no_token)


@dataclass
class MiniBatch:
    """What one optimizer step trains on: this device's share, and the counts of all devices."""

    micro_batches: list[Batch]
    completions: int  # N
    tokens: int  # Σ|o_i|, without those that the mask leaves out
    max_tokens: int  # that a micro-batch was cut to


def into_minibatches(rollout, advantages, rows, count, max_tokens, networks):
    """The kept completions of all devices, cut into at most `count` mini-batches.

    They are cut in the order of the step's questions. So a mini-batch does not depend on how the
    questions were shared out.
    """
    G, device = advantages.shape[1], rollout.tokens.device
    whole = Batch(
        [question["prompt"] for question in rollout.questions for _ in range(G)], rollout.tokens,
        rollout.lengths.flatten(), advantages.flatten().to(device), rollout.mask,
        rollout.total.flatten().to(device), rollout.logp)
    places = rollout.places[rows // G] * G + rows % G
    everyone = torch.tensor(sorted(ranks.gather(places.tolist())), dtype=torch.long)
    own = [rows[torch.isin(places, some)] for some in everyone.tensor_split(count)]
    return of_shares([whole.rows(rows) for rows in own], max_tokens, networks)


def of_shares(shares, max_tokens, networks):
    """A list of MiniBatch. shares: this device's Batch of each mini-batch.

    A mini-batch in which every advantage is 0, on all devices, is left out, unless a critic learns
    from it. Its policy gradient is 0, but AdamW would still move the weights, because it remembers
    earlier gradients. With β > 0 the gradient of its loss is not 0: the KL term still pulls towards
    the reference. That this pull is left out is our choice. How much is left out depends on how
    mini-batches are cut: beside a group with a signal, the KL term of a group without one counts.
    """
    device, once, counts = networks.model.device, networks.policy.shares_prompts, {}
    for m, batch in enumerate(shares):  # tensors: they are read off the device together
        counts |= {
            (m, "completions"): torch.full((), len(batch.prompts), device=device),
            (m, "tokens"): batch.mask.sum(), (m, "signals"): (batch.advantages != 0).sum(),
        }
    counts, cut = ranks.all_sum(counts, device), []
    for m, batch in enumerate(shares):
        n, tokens, signals = (int(counts[m, x]) for x in ("completions", "tokens", "signals"))
        if signals or (networks.critic and n):
            empty = partial(without_tokens, device)
            micro_batches = batch.micro_batches(max_tokens, once) or [empty()]
            if shards.is_sharded(networks.model):
                # devices gather weights together, so each needs as many micro-batches as the others
                micro_batches = ranks.even_out(micro_batches, empty, device)
            cut.append(MiniBatch(micro_batches, n, tokens, max_tokens))
    return cut


class Step(NamedTuple):
    """What is known of a step at its end."""

    metrics: dict  # a line of metrics.jsonl
    sample: dict  # a line of samples.jsonl: the first group
    mean_rewards: list[float]  # of each question of this device
    skipped: list[bool]  # of each update: was it skipped, because it was not finite?


def micro_batches_of(minibatches):
    return [micro_batch for minibatch in minibatches for micro_batch in minibatch.micro_batches]
