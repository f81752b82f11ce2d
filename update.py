"""Step 6 of the algorithm box: μ updates on the kept completions, a few at a time.

A batch is cut into mini-batches, with one optimizer step each. A mini-batch is cut into
micro-batches, with one forward and one backward pass each. The weights of the tokens are
normalised over the whole mini-batch of all devices. So gradients only add up, and the update does
not depend on how the completions were cut or shared out.
"""

import math
from dataclasses import dataclass

import torch
from tqdm import tqdm

from engine.model import shards
from engine.model.prompts import prompts_once
from engine.run import progress, ranks
from family.ppo import value_loss
from family.tis import truncated_importance_weights
from grpo import kl_k3


@dataclass
class Limits:
    """How much an update may take."""

    micro_batch_tokens: int = 2048  # of a micro-batch, prompts and padding included
    max_grad_norm: float = 1.0  # longer gradients are scaled down to it


# metrics that are means over tokens; each token has its weight in the loss
MEANS = ("kl", "kl_old", "clip_fraction", "ratio_mean", "entropy_trained", "sampler_gap")
OF_UPDATES = ("loss", *MEANS, "ratio_max", "sampler_gap_max", "grad_norm")
# what the logs hold after a step without an update
NO_UPDATE = dict.fromkeys(OF_UPDATES) | {"skipped_updates": 0, "skipped": []}


def update(networks, minibatches, algorithm, sampling, limits):
    """μ times through the mini-batches, with an optimizer step on each.

    minibatches: lists of micro-batches, this device's part. Returns the means over the updates
    for the logs (None if there was no update), and which updates were skipped as not finite.

    A mini-batch from which no device has anything to learn is left out. Its gradient is 0, but
    AdamW would still move the weights, because it remembers earlier gradients.
    """
    counts = {}
    for m, minibatch in enumerate(minibatches):
        counts[f"n {m}"] = sum(len(part.prompts) for part in minibatch if part.tokens.shape[1])
        counts[f"tokens {m}"] = sum(part.lengths.sum().item() for part in minibatch)
        counts[f"nonzero {m}"] = int(sum((part.advantages != 0).sum() for part in minibatch))
    counts = ranks.all_sum(counts, networks.model.device)
    n, tokens, nonzero = (
        [counts[f"{name} {m}"] for m in range(len(minibatches))]
        for name in ("n", "tokens", "nonzero")
    )
    # without an advantage only the KL term and a critic have something to learn
    always = networks.critic or algorithm.beta
    useful = [m for m in range(len(minibatches)) if n[m] and (always or nonzero[m])]
    history, skipped = [], []
    for m in useful * algorithm.mu:
        stats, norms = gradient(
            networks, minibatches[m], n[m], tokens[m], algorithm, sampling, limits)
        history.append(stats)
        if algorithm.target_kl is not None and stats["kl_old"] > algorithm.target_kl:
            break
        skipped.append(not all(map(math.isfinite, [stats["loss"], *norms])))
        # if the clip has taken the whole gradient, AdamW would still move the weights
        if not skipped[-1] and any(norms):
            networks.optimizer.step()
    networks.optimizer.zero_grad()  # frees memory for the sampler
    if not history:
        return dict(NO_UPDATE)
    stats = {name: sum(h[name] for h in history) / len(history) for name in history[0]}
    stats |= {name: max(h[name] for h in history) for name in ("ratio_max", "sampler_gap_max")}
    return stats | {"skipped_updates": sum(skipped), "skipped": skipped}


def gradient(networks, minibatch, n, tokens, algorithm, sampling, limits):
    """The gradient of a mini-batch over all devices. Returns (statistics, norms before the clip).

    n, tokens: completions and tokens of the mini-batch on all devices. A device that runs out of
    memory cuts its micro-batches smaller and tries again, once.
    """
    for last_try in (False, True):
        networks.optimizer.zero_grad()
        try:
            if last_try:
                once = prompts_once(networks.model.base_model)
                minibatch[:] = halve(minibatch, limits, once)
            sums, maxima = accumulate(networks, minibatch, n, tokens, algorithm, sampling)
            break
        except torch.OutOfMemoryError:
            # devices with shards compute in step: one of them cannot repeat alone
            if last_try or shards.is_sharded(networks.model):
                raise
    for network in networks.learners:
        shards.sum_gradients(network)
    sums = ranks.all_sum(sums, networks.model.device)
    longest = limits.max_grad_norm
    norms = [shards.clip_gradients(network, longest) for network in networks.learners]
    weight = max(sums.pop("weight"), 1e-12)
    stats = {name: x if "loss" in name else x / weight for name, x in sums.items()}
    maxima = ranks.all_sum(maxima, networks.model.device, op="max")
    return stats | {"grad_norm": norms[0]} | maxima, norms


def accumulate(networks, minibatch, n, tokens, algorithm, sampling):
    """Forward and backward passes over the micro-batches. Returns (sums, maxima) for the logs.

    They stay on the device, so that no micro-batch waits for the one before it.
    """
    critic, device = networks.critic, networks.model.device
    zero = torch.zeros((), dtype=torch.float64, device=device)
    sums = dict.fromkeys([*MEANS, "loss", "weight", "value_loss"], zero)
    maxima = dict.fromkeys(["ratio_max", "sampler_gap_max"], zero)
    for i, part in enumerate(minibatch, 1):
        progress.say("update", i, len(minibatch), "micro-batches")
        logp, entropy = part.logprobs(networks.model, sampling.temperature, with_entropy=True)
        if part.old_logp is None:
            part.old_logp = logp.detach()  # the first update: π_θ is still π_old
        sampled_logp = part.old_logp if part.sampled_logp is None else part.sampled_logp
        weights = algorithm.token_weights(part.mask, n, tokens, sampling.max_new_tokens)
        if algorithm.importance_cap:
            weights = weights * truncated_importance_weights(
                part.old_logp, sampled_logp, part.mask, cap=algorithm.importance_cap)
        loss, stats = algorithm.loss(
            logp, part.old_logp, part.advantages, part.mask,
            ref_logp=part.ref_logp, weights=weights, **algorithm.loss_options)
        loss.backward()

        gap = (part.old_logp - sampled_logp).abs()
        means = {
            **{name: stats[name] * weights.sum() for name in ("kl", "clip_fraction", "ratio_mean")},
            # KL(π_old ‖ π_θ): the samples are π_old's, so the two change places
            "kl_old": (weights * kl_k3(part.old_logp, logp.detach())).sum(),
            "entropy_trained": (weights * entropy).sum(), "sampler_gap": (weights * gap).sum(),
        }
        more = means | {"loss": loss.detach(), "weight": weights.sum()}
        if critic:
            loss = value_loss(
                critic.values(part), part.old_values, part.returns, part.mask, weights=weights)
            loss.backward()
            more["value_loss"] = loss.detach()
        sums |= {name: sums[name] + x for name, x in more.items()}
        largest = {"ratio_max": stats["ratio_max"]}
        largest["sampler_gap_max"] = gap.max() if gap.numel() else zero
        maxima = {name: torch.maximum(x, largest[name]) for name, x in maxima.items()}
    return sums, maxima


def halve(minibatch, limits, once):
    """The same completions in micro-batches of half as many tokens, from now on."""
    limits.micro_batch_tokens //= 2
    tqdm.write(
        f"out of memory in an update: it is repeated, and --micro_batch_tokens is "
        f"{limits.micro_batch_tokens} from now on.")
    max_tokens = limits.micro_batch_tokens
    return [half for part in minibatch for half in part.micro_batches(max_tokens, once)]
