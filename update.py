"""Step 6 of the algorithm box: μ updates on the kept completions, a few at a time.

A batch is cut into mini-batches, with one optimizer step each. A mini-batch is cut into
micro-batches, with one forward and one backward pass each. The weights of the tokens are
normalised over the whole mini-batch of all devices. So gradients only add up, and the update does
not depend on how the completions were cut or shared out.
"""

import math
from dataclasses import dataclass, replace

import torch
from tqdm import tqdm

from engine.base import progress, ranks
from engine.model import shards
from family.ppo import value_loss
from family.tis import truncated_importance_weights
from grpo import kl_k3

LEAST_TOKENS = 256  # of a micro-batch: a device that cannot hold these is too small


@dataclass
class Limits:
    """How much an update may take."""

    micro_batch_tokens: int = 2048  # of a micro-batch, prompts and padding included
    max_grad_norm: float = 1.0  # longer gradients are scaled down to it


# metrics that are means over tokens; each token has its weight in the loss
MEANS = ("kl", "kl_old", "clip_fraction", "ratio_mean", "entropy_trained", "sampler_gap")
LOSSES = ("loss", "value_loss")  # sums as they are
OF_UPDATES = ("loss", *MEANS, "ratio_max", "sampler_gap_max", "grad_norm")
# what the logs hold after a step without an update
NO_UPDATE = dict.fromkeys(OF_UPDATES) | {"skipped_updates": 0}


def update(networks, minibatches, algorithm, sampling, limits):
    """μ times through the mini-batches, with an optimizer step on each.

    Returns (the means over the updates for the logs, for each update whether it was skipped,
    because it was not finite).
    """
    history, skipped = [], []
    minibatches = list(minibatches)
    for m in [*range(len(minibatches))] * algorithm.mu:
        minibatches[m], stats, norms = gradient(
            networks, minibatches[m], algorithm, sampling, limits)
        history.append(stats)
        if algorithm.target_kl is not None and stats["kl_old"] > algorithm.target_kl:
            break
        skipped.append(not all(map(math.isfinite, [stats["loss"], *norms])))
        for network, norm in zip(networks.learners, norms):
            if norm == 0:  # the clip has taken all of it, but AdamW would still move the weights
                network.zero_grad()
        if not skipped[-1]:
            networks.optimizer.step()
    networks.optimizer.zero_grad()  # frees memory for the sampler
    stats = {name: sum(h[name] for h in history) / len(history) for name in history[0]}
    stats |= {name: max(h[name] for h in history) for name in ("ratio_max", "sampler_gap_max")}
    return stats | {"skipped_updates": sum(skipped)}, skipped


def gradient(networks, minibatch, algorithm, sampling, limits):
    """The gradient of a mini-batch over all devices.

    Returns (the mini-batch, statistics, norms before the clip). A device that runs out of memory
    cuts the mini-batch into smaller micro-batches and tries again.
    """
    while True:
        networks.optimizer.zero_grad()
        try:
            sums, maxima = accumulate(networks, minibatch, algorithm, sampling)
            break
        except torch.OutOfMemoryError:
            # devices with shards compute in step: one of them cannot repeat alone
            if shards.is_sharded(networks.model) or minibatch.max_tokens <= LEAST_TOKENS:
                raise
        minibatch = in_halves(minibatch, limits, networks.policy.shares_prompts)
    for network in networks.learners:
        shards.sum_gradients(network)
    sums = ranks.all_sum(sums, networks.model.device)
    longest = limits.max_grad_norm
    norms = [shards.clip_gradients(network, longest) for network in networks.learners]
    weight = max(sums.pop("weight"), 1e-12)
    stats = {name: x if name in LOSSES else x / weight for name, x in sums.items()}
    maxima = ranks.all_sum(maxima, networks.model.device, op="max")
    return minibatch, stats | {"grad_norm": norms[0]} | maxima, norms


def accumulate(networks, minibatch, algorithm, sampling):
    """Forward and backward passes over the micro-batches. Returns (sums, maxima) for the logs.

    They stay on the device, so that no micro-batch waits for the one before it.
    """
    zero = torch.zeros((), dtype=torch.float64, device=networks.model.device)
    sums = dict.fromkeys([*MEANS, *LOSSES, "weight"], zero)
    maxima = dict.fromkeys(["ratio_max", "sampler_gap_max"], zero)
    for i, batch in enumerate(minibatch.micro_batches, 1):
        progress.say("update", i, len(minibatch.micro_batches), "micro-batches")
        logp, entropy = batch.logprobs(networks.policy, sampling.temperature, with_entropy=True)
        if batch.old_logp is None:
            batch.old_logp = logp.detach()  # the first update: π_θ is still π_old
        sampled_logp = batch.old_logp if batch.sampled_logp is None else batch.sampled_logp
        weights = algorithm.token_weights(
            batch.mask, minibatch.completions, minibatch.tokens, sampling.max_new_tokens)
        if algorithm.importance_cap:
            weights = weights * truncated_importance_weights(
                batch.old_logp, sampled_logp, batch.mask, cap=algorithm.importance_cap,
                low=algorithm.importance_low)
        options = {"entropy": entropy} if algorithm.wants_entropy else {}
        loss, stats = algorithm.loss(
            logp, batch.old_logp, batch.advantages, batch.mask,
            ref_logp=batch.ref_logp, weights=weights, **options)
        loss.backward()
        gap = (batch.old_logp - sampled_logp).abs()
        largest = {"ratio_max": stats.get("ratio_max", zero),
                   "sampler_gap_max": gap.max() if gap.numel() else zero}
        more = {
            # means under the weights; a loss of your own may return more of them
            **{name: x * weights.sum() for name, x in stats.items() if name not in largest},
            # kl_k3(p, q) estimates KL(p ‖ q) from samples of p. Here p is π_old, which sampled
            "kl_old": (weights * kl_k3(batch.old_logp, logp.detach())).sum(),
            "entropy_trained": (weights * entropy.detach()).sum(),
            "sampler_gap": (weights * gap).sum(),
            "loss": loss.detach(), "weight": weights.sum(),
        }
        if networks.critic:
            values = networks.critic(batch)
            loss = value_loss(values, batch.old_values, batch.returns, batch.mask, weights=weights)
            loss.backward()
            more["value_loss"] = loss.detach()
        sums |= {name: sums.get(name, zero) + x for name, x in more.items()}
        maxima = {name: torch.maximum(x, largest[name]) for name, x in maxima.items()}
    return sums, maxima


def in_halves(minibatch, limits, once):
    """The mini-batch in micro-batches of half as many tokens. This limit holds from now on.

    once: as for `Batch.micro_batches`.
    """
    limit = max(LEAST_TOKENS, minibatch.max_tokens // 2)
    if limit < limits.micro_batch_tokens:  # otherwise an earlier mini-batch has told
        limits.micro_batch_tokens = limit
        tqdm.write(
            f"out of memory in an update: it is repeated, and --micro_batch_tokens is {limit} "
            "from now on.")
    smaller = [small for batch in minibatch.micro_batches
               for small in batch.micro_batches(limits.micro_batch_tokens, once)]
    return replace(minibatch, micro_batches=smaller, max_tokens=limits.micro_batch_tokens)
