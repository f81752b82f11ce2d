"""Step 6 of the algorithm box: the updates on the kept completions."""

import math

import torch

from engine.model.policy import halve
from engine.model.rollout import truncated_importance_weights
from engine.run import distributed
from family.ppo import value_loss
from grpo import kl_k3

OF_WEIGHTS = ("kl", "kl_old", "clip_fraction", "ratio_mean", "entropy_trained", "sampler_gap")  # means over tokens, as they weigh
OF_UPDATES = ("loss", *OF_WEIGHTS, "ratio_max", "sampler_gap_max", "grad_norm")  # None in a step without an update

NO_UPDATE = dict.fromkeys(OF_UPDATES) | {"skipped_updates": 0, "skipped": []}  # what a step without an update says


def accumulate(model, parts, n, tokens, algorithm, config, critic):
    """Forward and backward over the micro-batches of a mini-batch of n completions: gradients add up. Returns (sums, maxima).

    Both stay on the device, so that no micro-batch waits until another one is computed.
    """
    zero = torch.zeros((), dtype=torch.float64, device=model.device)
    sums, maxima = dict.fromkeys([*OF_WEIGHTS, "loss", "weight", "value_loss"], zero), dict.fromkeys(["ratio_max", "sampler_gap_max"], zero)
    for part in parts:
        logp, entropy = part.logprobs(model, config.temperature, with_entropy=True)
        if part.old_logp is None:
            part.old_logp = logp.detach()  # the first update: π_θ is still π_old
        weights = algorithm.weights(part.mask, n, tokens, config.max_new_tokens)
        sampled_logp = part.old_logp if part.sampled_logp is None else part.sampled_logp
        if config.importance_cap:
            weights = weights * truncated_importance_weights(part.old_logp, sampled_logp, part.mask, cap=config.importance_cap)
        loss, stats = algorithm.loss(
            logp, part.old_logp, part.advantages, part.mask, ref_logp=part.ref_logp, beta=config.beta,
            clip_low=config.clip_low, clip_high=config.clip_high, weights=weights,
        )
        loss.backward()
        weight = weights.sum()
        of_part = {"loss": loss.detach(), "weight": weight}
        # KL(π_old ‖ π_θ): the samples are π_old's, so the two change places
        gap = (part.old_logp - sampled_logp).abs()
        for name, x in {"kl_old": kl_k3(part.old_logp, logp.detach()), "entropy_trained": entropy, "sampler_gap": gap}.items():
            of_part[name] = (weights * x).sum()
        for name in ("kl", "clip_fraction", "ratio_mean"):
            of_part[name] = weight * stats[name]
        largest = {"ratio_max": stats["ratio_max"], "sampler_gap_max": gap.max() if gap.numel() else zero}
        maxima = {name: torch.maximum(x, largest[name]) for name, x in maxima.items()}
        if critic:
            loss = value_loss(critic.values(part), part.old_values, part.returns, part.mask, weights=weights)
            loss.backward()
            of_part["value_loss"] = loss.detach()
        sums |= {name: sums[name] + x for name, x in of_part.items()}
    return sums, maxima


def update(model, optimizer, minibatches, algorithm, config, critic=None):
    """μ times through the mini-batches, an optimizer step on each. A mini-batch is this device's list of micro-batches.

    The weights are normalised over the whole mini-batch, so gradients add up over micro-batches and devices, however the
    completions were cut: where a device runs out of memory, it cuts them smaller and tries again, once.

    A mini-batch from which no device has anything to learn is left out: its gradient is 0, and AdamW would still move the weights,
    by what it remembers of earlier gradients. Returns the means over the other updates (None if there are no others), and which of
    them were skipped as not finite.
    """
    device, networks = model.device, [model, critic] if critic else [model]
    counts = {}
    for m, parts in enumerate(minibatches):
        counts[f"n {m}"] = sum(len(part.prompts) for part in parts if part.tokens.shape[1])
        counts[f"tokens {m}"] = sum(part.lengths.sum().item() for part in parts)
        counts[f"pushed {m}"] = int(sum((part.advantages != 0).sum() for part in parts))
    counts = distributed.all_sum(counts, device)
    # a critic learns from every completion, and so does the KL term
    teaches = [counts[f"n {m}"] and (critic or config.beta or counts[f"pushed {m}"]) for m in range(len(minibatches))]
    history, skipped = [], []
    for m in [m for m in range(len(minibatches)) if teaches[m]] * config.mu:
        for cut_smaller in (False, True):
            optimizer.zero_grad()
            try:
                if cut_smaller:
                    minibatches[m] = halve(minibatches[m], config)
                sums, maxima = accumulate(model, minibatches[m], counts[f"n {m}"], counts[f"tokens {m}"], algorithm, config, critic)
                break
            except torch.OutOfMemoryError:
                if cut_smaller or distributed.is_sharded(model):  # there the devices compute in step, and one cannot repeat alone
                    raise
        for network in networks:
            distributed.sum_gradients(network)
        sums = distributed.all_sum(sums, device)
        norms = [distributed.clip_gradients(network, config.max_grad_norm) for network in networks]
        weight = max(sums.pop("weight"), 1e-12)
        history.append({name: value if "loss" in name else value / weight for name, value in sums.items()} | {"grad_norm": norms[0]})
        history[-1] |= distributed.all_sum(maxima, device, op="max")
        if config.target_kl is not None and history[-1]["kl_old"] > config.target_kl:
            break
        skipped.append(not all(map(math.isfinite, [sums["loss"], *norms])))
        if not skipped[-1] and any(norms):  # nor where the clip has taken the whole gradient: AdamW would still move the weights
            optimizer.step()
    optimizer.zero_grad()  # frees the gradients' memory for the sampler
    if not history:
        return dict(NO_UPDATE)
    means = {name: sum(h[name] for h in history) / len(history) for name in history[0]}
    return means | {name: max(h[name] for h in history) for name in maxima} | {"skipped_updates": sum(skipped), "skipped": skipped}
