"""Mini-batches and token-budget micro-batches: how the kept completions of a step are cut.

A mini-batch gets one optimizer step. The weights of its tokens are those of the loss. A micro-batch
is what a device computes at a time. The papers do not say how to cut. Here the cut costs few tokens
(allocate.py, engine/model/prefix_sharing.py).
"""

import math
from dataclasses import replace

import torch

from allocate import micro_batches
from engine.base import ranks
from engine.model.device_defaults import DEVICE_DEFAULTS
from engine.model.logprobs import computed_lengths
from engine.model.prefix_sharing import SequenceCost, forward_cost
from loop.records import Batch, MicroBatchPlan

# --- mini-batches ---


def split_into_mini_batches(rollout, advantages, kept, algorithm, max_new_tokens):
    """The kept completions of all devices, cut into mini-batches. Returns this device's Batch of
    each, with the weights of its tokens.

    The cut follows the order of the step's questions. So a mini-batch does not depend on how the
    questions were shared out.
    """
    G = advantages.shape[1]
    device = rollout.tokens.device
    prompts = []
    for question in rollout.questions:
        prompts += [question["prompt"]] * G
    everything = Batch(
        prompts=prompts,
        tokens=rollout.tokens,
        mask=rollout.mask,
        advantages=advantages.flatten().to(device, non_blocking=True),
        scores=rollout.total.flatten().to(device, non_blocking=True),
        sampled_logp=rollout.logp,
        prefix_weights=rollout.prefix_weights,
    )
    # the numbers of the kept completions among those of all devices
    numbers = rollout.question_numbers[kept // G] * G + kept % G
    all_numbers = ranks.gather(numbers.tolist())
    all_numbers = torch.tensor(sorted(all_numbers), dtype=torch.long)
    minibatches = []
    for chosen in all_numbers.tensor_split(algorithm.minibatches):
        kept_here = kept[torch.isin(numbers, chosen)]
        minibatch = with_token_weights(
            everything.select(kept_here), algorithm, max_new_tokens)
        if minibatch is not None:
            minibatches.append(minibatch)
    return minibatches


def with_token_weights(batch, algorithm, max_new_tokens):
    """The mini-batch with the weights of its tokens, or None if nothing is learned from it.

    If every advantage is 0, on all devices, the mini-batch is left out, unless a critic learns from
    it. If β > 0, leaving it out is our choice, because the KL term has a gradient then
    (docs/questions.md). If β is 0, the gradient is 0, but AdamW would still move the weights,
    because AdamW remembers earlier gradients.
    """
    device = batch.tokens.device
    counts = ranks.all_reduce(device, {
        "completions": len(batch.prompts),
        "tokens": batch.mask.sum(),
        "signals": (batch.advantages != 0).sum(),
    })
    n = int(counts["completions"])
    tokens = int(counts["tokens"])
    if counts["signals"] or (algorithm.critic and n):
        mask = batch.mask.to(device, non_blocking=True)
        batch.weights = algorithm.token_weights(mask, n, tokens, max_new_tokens)
        return batch if batch.prefix_weights is None else prefixes(batch)
    return None


def prefixes(batch):
    """NAT: the batch without the tokens after the random prefixes, so nobody computes them."""
    mask = batch.prefix_weights.cpu() > 0
    weights = batch.weights * batch.prefix_weights
    cut = replace(batch, mask=mask, weights=weights, prefix_weights=None)
    return cut.select(range(len(batch.prompts)))


# --- micro-batches ---


def split_into_micro_batches(batch, max_tokens, policy):
    """Cut a batch. Returns [(rows, Batch of these rows)], at least one pair. For each pair a model
    computes at most `max_tokens` tokens, padding included; a completion that is longer is alone in
    its pair. rows: on the device.

    The batch keeps its cut. So the reference, π_old and all μ passes share one cut, until
    `max_tokens` changes.
    """
    plan = batch.micro_batch_plan
    if plan is None or plan.max_tokens != max_tokens:
        plan = MicroBatchPlan(max_tokens, plan_micro_batches(batch, max_tokens, policy))
        batch.micro_batch_plan = plan
    pairs = []
    for rows, shares_prefix in plan.micro_batches:
        micro_batch = batch.select(rows) if len(rows) else without_tokens(batch)
        micro_batch.shares_prefix = shares_prefix
        pairs.append((rows.to(batch.tokens.device, non_blocking=True), micro_batch))
    return pairs


def plan_micro_batches(batch, max_tokens, policy):
    """[(rows, whether a forward pass computes each different prompt only once)] of each
    micro-batch. rows: on the CPU; a micro-batch that only fills up a device has none."""
    second_pass = DEVICE_DEFAULTS[batch.tokens.device.type].second_pass
    lengths = computed_lengths(batch.mask).tolist()
    known = {}
    rows = []
    for i, prompt in enumerate(batch.prompts):
        same = known.setdefault(tuple(prompt), len(known))
        rows.append(SequenceCost(i, same, len(prompt), lengths[i]))
    if policy.can_share_prefix:
        cut = cheaper_cut(rows, max_tokens, second_pass)
    else:
        cut = by_length(rows, max_tokens)
    count = max(1, len(cut))
    if policy.sharded:
        # devices gather weights together, so each needs as many micro-batches as the others
        most = ranks.all_reduce(batch.tokens.device, maxima={"count": count})
        count = int(most["count"])
    cut += [[]] * (count - len(cut))
    pairs = []
    for together in cut:
        once = policy.sharded  # and as many passes as the others in each
        if together and not policy.sharded:
            _, once = forward_cost(together, second_pass)
        numbers = torch.tensor([row.number for row in together], dtype=torch.long)
        pairs.append((numbers, once and policy.can_share_prefix))
    return pairs


def without_tokens(batch):
    """A batch with the same fields, of one completion without tokens. It adds 0 to every sum."""
    empty = {}
    for name, tensor in batch.tensors.items():
        shape = (1, 0)[: tensor.dim()]
        empty[name] = tensor.new_zeros(shape)
    mask = batch.mask.new_zeros((1, 0))
    return Batch([[0]], mask=mask, **empty)


# --- ways to cut SequenceCosts ---


def cheaper_cut(rows, max_tokens, second_pass):
    """The cheaper of two ways to cut completions, for a model that may compute a prompt only once:
    by the lengths of whole rows, or question by question. rows: SequenceCosts. Returns lists of
    them.

    A micro-batch of two or more completions costs at most `max_tokens`. second_pass: as for
    `forward_cost`.
    """
    cheapest, least = None, math.inf
    for cut in (question_by_question(rows, max_tokens, second_pass), by_length(rows, max_tokens)):
        cost = 0
        for together in cut:
            tokens, once = forward_cost(together, second_pass)
            cost += tokens + once * second_pass
        if cost < least:
            cheapest, least = cut, cost
    return cheapest


def by_length(rows, max_tokens):
    """Rows of similar lengths share a micro-batch (allocate.py)."""
    lengths = [row.prompt_tokens + row.tokens for row in rows]
    return [[rows[i] for i in numbers] for numbers in micro_batches(lengths, max_tokens)]


def question_by_question(rows, max_tokens, second_pass):
    """First each question's completions are cut into pieces of similar lengths. Then pieces of
    similar lengths share a micro-batch. The longest come first.

    A new piece begins if it saves more tokens than the prompt has, which it repeats. It saves
    padding: the completions that are left are padded to the longest of them.
    """
    groups = {}
    for row in sorted(rows, key=lambda row: -row.tokens):
        groups.setdefault(row.prompt, []).append(row)
    pieces = []
    for group in groups.values():
        pieces.append(group[:1])
        for n, row in enumerate(group[1:], 1):
            saved = (len(group) - n) * (pieces[-1][0].tokens - row.tokens)
            together = [*pieces[-1], row]
            tokens, _ = forward_cost(together, second_pass)
            if tokens <= max_tokens and saved <= row.prompt_tokens:
                pieces[-1] = together
            else:
                pieces.append([row])
    pieces.sort(key=lambda piece: -piece[0].tokens)
    batches = pieces[:1]
    for piece in pieces[1:]:
        together = batches[-1] + piece
        tokens, _ = forward_cost(together, second_pass)
        if tokens <= max_tokens:
            batches[-1] = together
        else:
            batches.append(piece)
    return batches
