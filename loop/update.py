"""Step 6 of the algorithm box: μ updates on the kept completions, a few at a time.

A mini-batch gets one optimizer step. It is cut into micro-batches, with one forward and one
backward pass each (batches.py). The weights of the tokens are normalised over the whole mini-batch
of all devices. So gradients only add up, and the update does not depend on how the completions were
cut or shared out.
"""

import math
from dataclasses import dataclass, replace

import torch
from tqdm import tqdm

from engine.base import progress, ranks
from engine.model import shards
from engine.model.device_defaults import DEVICE_DEFAULTS
from family.ppo import value_loss
from grpo import kl_k3
from loop.batches import split_into_micro_batches

LEAST_TOKENS = 256  # of a micro-batch. A device that cannot hold so many tokens is too small
# a norm of a gradient that is 0 but for float32's rounding. AdamW's ε would stop it, too
ROUNDING = 1e-7


@dataclass
class Limits:
    """The limits of an update."""

    # of a micro-batch, prompts and padding included
    micro_batch_tokens: int = DEVICE_DEFAULTS["cpu"].micro_batch_tokens
    max_grad_norm: float = 1.0  # longer gradients are scaled down to it


# metrics that are means over tokens; each token has its weight in the loss
MEANS = ("kl", "approx_kl", "clip_fraction", "ratio_mean", "entropy_trained", "sampler_logp_diff")
LOSSES = ("loss", "value_loss")  # sums that are logged as they are
MAXIMA = ("ratio_max", "sampler_logp_diff_max")
# what the logs hold after a step without an update
NO_UPDATE = dict.fromkeys(("loss", *MEANS, *MAXIMA, "grad_norm")) | {"skipped_updates": 0}


def map_micro_batches(function, minibatch, policy, limits):
    """function(Batch) → (N, T) of a whole mini-batch, computed one micro-batch at a time. policy:
    only says how the mini-batch is cut."""
    whole = torch.zeros(minibatch.tokens.shape, device=minibatch.tokens.device)
    micro_batches = split_into_micro_batches(minibatch, limits.micro_batch_tokens, policy)
    for i, (rows, batch) in enumerate(micro_batches, 1):
        progress.say("log-probabilities", i, len(micro_batches), "micro-batches")
        whole[rows, : batch.tokens.shape[1]] = function(batch)
    return whole


def update(networks, minibatches, algorithm, limits):
    """Go through the mini-batches μ times, with an optimizer step on each.

    Returns (the means over the updates for the logs, a list that says of each update whether it
    was skipped). An update is skipped if its loss or its gradient is not finite.
    """
    history = []
    skipped = []
    for minibatch in minibatches * algorithm.mu:
        stats, norms = forward_backward(networks, minibatch, algorithm, limits)
        history.append(stats)
        if algorithm.target_kl is not None and stats["approx_kl"] > algorithm.target_kl:
            break
        skipped.append(not all(map(math.isfinite, [stats["loss"], *norms])))
        for network, norm in zip(networks.optimized_networks, norms):
            if norm < ROUNDING:
                # the gradient is 0 because of the clip, or because completions cancel. A step
                # would still move the weights, by AdamW's momentum. Without a gradient (None)
                # AdamW leaves them alone
                network.zero_grad()
        if not skipped[-1]:
            networks.step()
    networks.zero_grad()  # frees memory for the sampler
    means = {}
    for name in history[0]:
        values = [stats[name] for stats in history]
        means[name] = max(values) if name in MAXIMA else sum(values) / len(values)
    means["skipped_updates"] = sum(skipped)
    return means, skipped


def forward_backward(networks, minibatch, algorithm, limits):
    """The gradient of a mini-batch over all devices. Returns (statistics, norms before the clip).

    If a device runs out of memory, it tries again. From then on its micro-batches have half as many
    tokens.
    """
    while True:
        networks.zero_grad()
        try:
            sums = accumulate(networks, minibatch, algorithm, limits)
            break
        except torch.OutOfMemoryError:
            # devices with shards compute together, so one of them cannot repeat alone
            if networks.policy.sharded or limits.micro_batch_tokens <= LEAST_TOKENS:
                raise
        limits.micro_batch_tokens = max(LEAST_TOKENS, limits.micro_batch_tokens // 2)
        tqdm.write("out of memory in an update. The update is repeated. From now on "
                   f"--micro_batch_tokens is {limits.micro_batch_tokens}.")
    shards.sum_gradients(networks)
    norms = []
    for network in networks.optimized_networks:
        norms.append(shards.clip_gradients(network, limits.max_grad_norm))
    norms = ranks.all_reduce(networks.model.device, maxima=enumerate(norms))
    return {"grad_norm": norms[0]} | sums.read(), list(norms.values())


def accumulate(networks, minibatch, algorithm, limits):
    """Forward and backward passes over the micro-batches. Returns their MetricSums.

    In the first update of a step π_θ is still π_old. So the first mini-batch comes without
    `old_logp`, and gets the log-probabilities of this update.
    """
    device = minibatch.tokens.device
    sums = MetricSums(device)
    old_logp = torch.zeros(minibatch.tokens.shape, device=device)
    micro_batches = split_into_micro_batches(
        minibatch, limits.micro_batch_tokens, networks.policy)
    for i, (rows, batch) in enumerate(micro_batches, 1):
        progress.say("update", i, len(micro_batches), "micro-batches")
        mask = batch.mask.to(device, non_blocking=True)
        batch = learn_policy(networks.policy, batch, mask, algorithm, sums)
        if networks.critic:
            learn_critic(networks.critic, batch, mask, sums)
        old_logp[rows, : batch.tokens.shape[1]] = batch.old_logp
    minibatch.old_logp = old_logp
    return sums


def learn_policy(policy, batch, mask, algorithm, sums):
    """The policy's forward and backward pass over a micro-batch.

    Returns the micro-batch with the `old_logp`, the `sampled_logp` and the `weights` that counted.
    """
    logp, entropy = policy.logprobs(batch, with_entropy=True)
    old_logp = logp.detach() if batch.old_logp is None else batch.old_logp
    sampled_logp = old_logp if batch.sampled_logp is None else batch.sampled_logp
    # if the sampler did not report a token (NaN), its ratio is 1
    sampled_logp = torch.where(sampled_logp.isnan(), old_logp, sampled_logp)
    weights = batch.weights
    if algorithm.sampler_correction:  # it weighs the KL term and the critic's loss, too
        weights = weights * algorithm.sampler_correction(old_logp, sampled_logp, mask)
    known = {"entropy": entropy, "sampled_logp": sampled_logp}
    wanted = {name: known[name] for name in algorithm.wants}
    loss, stats = algorithm.loss(
        logp, old_logp, batch.advantages, mask, ref_logp=batch.ref_logp, weights=weights, **wanted)
    loss.backward()
    batch = replace(batch, old_logp=old_logp, sampled_logp=sampled_logp, weights=weights)
    measured = update_sums(batch, mask, logp.detach(), entropy.detach(), stats)
    sums.add(measured | {"loss": loss.detach()})
    return batch


def learn_critic(critic, batch, mask, sums):
    """The critic's forward and backward pass over a micro-batch."""
    values = critic(batch)
    loss = value_loss(values, batch.old_values, batch.returns, mask, weights=batch.weights)
    loss.backward()
    sums.add({"value_loss": loss.detach()})


def update_sums(batch, mask, logp, entropy, stats):
    """{name: a sum over the tokens, or a maximum} of a micro-batch.

    mask, logp, entropy: (N, T). stats: of the loss. A loss of your own may return more than ours.
    """
    weights = batch.weights
    total = weights.sum()
    measured = {}
    for name, x in stats.items():  # x is a mean under the weights, or a maximum
        name = name if name in (*MEANS, *MAXIMA) else f"custom/{name}"  # it replaces no metric
        measured[name] = x if name in MAXIMA else x * total
    # kl_k3(p, q) estimates KL(p ‖ q) from samples of p. Here p is π_old, which sampled
    approx_kl = kl_k3(batch.old_logp, logp)
    # after a random prefix (NAT) only the sampler has a log-probability
    gap = (batch.old_logp - batch.sampled_logp).abs().masked_fill(~mask, 0.0)
    measured["approx_kl"] = (weights * approx_kl).sum()
    measured["entropy_trained"] = (weights * entropy).sum()
    measured["sampler_logp_diff"] = (weights * gap).sum()
    measured["weight"] = total
    if gap.numel():
        measured["sampler_logp_diff_max"] = gap.max()
    return measured


class MetricSums:
    """Metric sums of an update, added up on the device over its micro-batches.

    The numbers stay on the device until `read`, so no micro-batch waits for the one before it.
    """

    def __init__(self, device):
        self.zero = torch.zeros((), dtype=torch.float64, device=device)
        self.sums = dict.fromkeys([*MEANS, *LOSSES, "weight"], self.zero)
        self.maxima = dict.fromkeys(MAXIMA, self.zero)

    def add(self, measured):
        for name, x in measured.items():
            if name in MAXIMA:
                self.maxima[name] = torch.maximum(self.maxima[name], x)
            else:
                self.sums[name] = self.sums.get(name, self.zero) + x

    def read(self):
        """{name: number} over all devices."""
        stats = ranks.all_reduce(self.zero.device, self.sums, self.maxima)
        weight = max(stats.pop("weight"), 1e-12)
        for name in stats:
            if name not in (*LOSSES, *MAXIMA):
                stats[name] /= weight
        return stats
