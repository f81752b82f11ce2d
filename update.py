"""Step 6 of the algorithm box: μ updates on the kept completions, a few at a time.

A batch is cut into mini-batches (an optimizer step each) and these into micro-batches (a forward and a backward pass each).
The weights of the tokens are normalised over the whole mini-batch of all devices. So gradients only add up, and the update
does not depend on how the completions were cut or shared out.
"""

import math
from dataclasses import dataclass, fields
from functools import partial

import torch
from tqdm import tqdm

from allocate import micro_batches
from engine.model import shards
from engine.model.logprobs import completion_logprobs, completion_mask
from engine.model.precision import autocast
from engine.run import ranks
from family.ppo import value_loss
from family.tis import truncated_importance_weights
from grpo import kl_k3


@dataclass
class Limits:
    """What an update may take: tokens of one forward pass (prompts and padding included), length of a gradient."""

    micro_batch_tokens: int = 2048
    max_grad_norm: float = 1.0


@dataclass
class Batch:
    """N completions with all that a loss needs: those of a step on this device, or one micro-batch of them."""

    prompts: list[list[int]]
    tokens: torch.Tensor  # (N, T), T the longest of these completions
    lengths: torch.Tensor  # (N,), always on the CPU: shapes follow from it, and nobody waits for a GPU to tell them
    advantages: torch.Tensor  # (N,); PPO: the scores (N,) at first, then (N, T)
    sampled_logp: torch.Tensor | None = None  # (N, T), as the sampler's arithmetic has it
    old_logp: torch.Tensor | None = None  # (N, T), of the same policy as the update's arithmetic has it
    ref_logp: torch.Tensor | None = None  # (N, T)
    old_values: torch.Tensor | None = None  # PPO: (N, T), the critic's when the batch was sampled
    returns: torch.Tensor | None = None  # PPO: (N, T), what it should have said

    def __post_init__(self):
        self.lengths = self.lengths.cpu()

    @classmethod
    def of(cls, rollout, advantages, rows):
        """The completions `rows` of a Rollout, with their advantages (Q, G)."""
        prompts = [question["prompt"] for question in rollout.questions for _ in range(advantages.shape[1])]
        advantages = advantages.flatten().to(rollout.tokens.device)
        return cls(prompts, rollout.tokens, rollout.lengths.flatten(), advantages, rollout.logp).rows(rows)

    @property
    def mask(self):
        return completion_mask(self.tokens, self.lengths)

    def rows(self, indices):
        indices = torch.as_tensor(indices, dtype=torch.long)
        lengths, on_device = self.lengths[indices], indices.to(self.tokens.device, non_blocking=True)
        longest = int(lengths.max()) if len(lengths) else 0
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("prompts", "lengths")}
        rows = {
            name: x[on_device] if x.dim() == 1 else x[on_device, :longest]
            for name, x in tensors.items() if x is not None
        }
        return Batch([self.prompts[i] for i in indices], lengths=lengths, **rows)

    def micro_batches(self, max_tokens):
        """Cut into batches of at most `max_tokens` prompt and completion tokens, padding included."""
        lengths = [len(p) + n for p, n in zip(self.prompts, self.lengths.tolist())]
        return [self.rows(indices) for indices in micro_batches(lengths, max_tokens)]

    def minibatches(self, count, max_tokens, model):
        """`count` mini-batches, each as a list of micro-batches."""
        rows = torch.arange(len(self.prompts)).tensor_split(count)
        minibatches = [self.rows(own).micro_batches(max_tokens) for own in rows]
        if shards.is_sharded(model):  # devices gather weights together, so each needs as many micro-batches as the others
            empty = partial(without_tokens, model.device)
            minibatches = [ranks.even_out(own, empty, model.device) for own in minibatches]
        return minibatches

    def logprobs(self, model, temperature, **options):
        """`completion_logprobs` of these completions under `model`, or under what has a function of that name."""
        score = getattr(model, "completion_logprobs", partial(completion_logprobs, model))
        with autocast(self.tokens.device):
            return score(self.prompts, self.tokens, self.lengths, temperature=temperature, **options)


def without_tokens(device):
    """A batch of one completion without a token, which adds nothing to any sum."""
    zero = torch.zeros((1, 0), device=device)
    return Batch([[0]], zero.long(), torch.zeros(1, dtype=torch.long), zero.sum(1), zero)


OF_WEIGHTS = ("kl", "kl_old", "clip_fraction", "ratio_mean", "entropy_trained", "sampler_gap")  # means over tokens, as they weigh
OF_UPDATES = ("loss", *OF_WEIGHTS, "ratio_max", "sampler_gap_max", "grad_norm")  # None in a step without an update

NO_UPDATE = dict.fromkeys(OF_UPDATES) | {"skipped_updates": 0, "skipped": []}  # what a step without an update says


def accumulate(networks, minibatch, n, tokens, algorithm, sampling):
    """Forward and backward over the micro-batches of a mini-batch of n completions: gradients add up.

    Returns (sums, maxima). Both stay on the device, so that no micro-batch waits until another one is computed.
    """
    model, critic = networks.model, networks.critic
    zero = torch.zeros((), dtype=torch.float64, device=model.device)
    sums = dict.fromkeys([*OF_WEIGHTS, "loss", "weight", "value_loss"], zero)
    maxima = dict.fromkeys(["ratio_max", "sampler_gap_max"], zero)
    for batch in minibatch:
        logp, entropy = batch.logprobs(model, sampling.temperature, with_entropy=True)
        if batch.old_logp is None:
            batch.old_logp = logp.detach()  # the first update: π_θ is still π_old
        sampled_logp = batch.old_logp if batch.sampled_logp is None else batch.sampled_logp
        weights = algorithm.token_weights(batch.mask, n, tokens, sampling.max_new_tokens)
        if algorithm.importance_cap:
            weights = weights * truncated_importance_weights(
                batch.old_logp, sampled_logp, batch.mask, cap=algorithm.importance_cap)
        loss, stats = algorithm.loss(
            logp, batch.old_logp, batch.advantages, batch.mask, ref_logp=batch.ref_logp, weights=weights,
            **algorithm.loss_options,
        )
        loss.backward()
        weight = weights.sum()
        more = {"loss": loss.detach(), "weight": weight}
        # KL(π_old ‖ π_θ): the samples are π_old's, so the two change places
        kl_old, gap = kl_k3(batch.old_logp, logp.detach()), (batch.old_logp - sampled_logp).abs()
        more |= {name: (weights * x).sum() for name, x in [("kl_old", kl_old), ("entropy_trained", entropy), ("sampler_gap", gap)]}
        more |= {name: weight * stats[name] for name in ("kl", "clip_fraction", "ratio_mean")}
        if critic:
            loss = value_loss(critic.values(batch), batch.old_values, batch.returns, batch.mask, weights=weights)
            loss.backward()
            more["value_loss"] = loss.detach()
        sums |= {name: sums[name] + x for name, x in more.items()}
        largest = {"ratio_max": stats["ratio_max"], "sampler_gap_max": gap.max() if gap.numel() else zero}
        maxima = {name: torch.maximum(x, largest[name]) for name, x in maxima.items()}
    return sums, maxima


def one_update(networks, minibatch, n, tokens, algorithm, sampling, limits):
    """The gradient of a mini-batch over all devices, clipped. Returns what the logs say of it, and the gradients' norms."""
    for last_try in (False, True):
        networks.optimizer.zero_grad()
        try:
            if last_try:
                minibatch[:] = halve(minibatch, limits)
            sums, maxima = accumulate(networks, minibatch, n, tokens, algorithm, sampling)
            break
        except torch.OutOfMemoryError:
            # shards are computed in step: one device cannot repeat alone
            if last_try or shards.is_sharded(networks.model):
                raise
    for network in networks.learners:
        shards.sum_gradients(network)
    device = networks.model.device
    sums = ranks.all_sum(sums, device)
    norms = [shards.clip_gradients(network, limits.max_grad_norm) for network in networks.learners]
    weight = max(sums.pop("weight"), 1e-12)
    means = {name: value if "loss" in name else value / weight for name, value in sums.items()}
    return means | {"grad_norm": norms[0]} | ranks.all_sum(maxima, device, op="max"), norms


def halve(minibatch, limits):
    """Micro-batches of half as many tokens, from now on."""
    limits.micro_batch_tokens //= 2
    tqdm.write(f"out of memory in an update: it is repeated, and --micro_batch_tokens is {limits.micro_batch_tokens} from now on.")
    return [smaller for batch in minibatch for smaller in batch.micro_batches(limits.micro_batch_tokens)]


def update(networks, minibatches, algorithm, sampling, limits):
    """μ times through the mini-batches, an optimizer step on each. A mini-batch is this device's list of micro-batches.

    A mini-batch from which no device has anything to learn is left out: its gradient is 0, and AdamW would still move the
    weights, by what it remembers of earlier gradients. If a device runs out of memory, it cuts its micro-batches smaller and
    tries again, once. Returns the means over the updates (None if there are none), and which were skipped as not finite.
    """
    counts = {}
    for m, minibatch in enumerate(minibatches):
        counts[f"n {m}"] = sum(len(batch.prompts) for batch in minibatch if batch.tokens.shape[1])
        counts[f"tokens {m}"] = sum(batch.lengths.sum().item() for batch in minibatch)
        counts[f"nonzero {m}"] = int(sum((batch.advantages != 0).sum() for batch in minibatch))
    counts = ranks.all_sum(counts, networks.model.device)
    # a critic learns from every completion, and so does the KL term
    always = networks.critic or algorithm.beta
    useful = [m for m in range(len(minibatches)) if counts[f"n {m}"] and (always or counts[f"nonzero {m}"])]
    history, skipped = [], []
    for m in useful * algorithm.mu:
        stats, norms = one_update(
            networks, minibatches[m], counts[f"n {m}"], counts[f"tokens {m}"], algorithm, sampling, limits)
        history.append(stats)
        if algorithm.target_kl is not None and stats["kl_old"] > algorithm.target_kl:
            break
        skipped.append(not all(map(math.isfinite, [stats["loss"], *norms])))
        if not skipped[-1] and any(norms):  # nor if the clip has taken the whole gradient: AdamW would still move the weights
            networks.optimizer.step()
    networks.optimizer.zero_grad()  # frees the gradients' memory for the sampler
    if not history:
        return dict(NO_UPDATE)
    means = {name: sum(h[name] for h in history) / len(history) for name in history[0]}
    largest = {name: max(h[name] for h in history) for name in ("ratio_max", "sampler_gap_max")}
    return means | largest | {"skipped_updates": sum(skipped), "skipped": skipped}
