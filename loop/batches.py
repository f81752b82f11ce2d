"""How the kept completions of a step are cut: into mini-batches, and these into micro-batches.

A mini-batch gets one optimizer step. The weights of its tokens are those of the loss. A micro-batch
is what a device computes at a time.
"""

from dataclasses import replace

import torch

from engine.base import ranks
from engine.model.cutting import rows_of_micro_batches
from loop.records import Batch, Cut


def cut_into_minibatches(rollout, advantages, rows, algorithm, max_new_tokens):
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
    numbers = rollout.question_numbers[rows // G] * G + rows % G
    all_numbers = ranks.gather(numbers.tolist())
    all_numbers = torch.tensor(sorted(all_numbers), dtype=torch.long)
    minibatches = []
    for chosen in all_numbers.tensor_split(algorithm.minibatches):
        rows_here = rows[torch.isin(numbers, chosen)]
        minibatch = with_token_weights(everything.rows(rows_here), algorithm, max_new_tokens)
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
    return cut.rows(range(len(batch.prompts)))


def cut_into_micro_batches(batch, max_tokens, policy):
    """Cut a batch. Returns [(rows, Batch of these rows)], at least one pair. For each pair a model
    computes at most `max_tokens` tokens, padding included; a completion that is longer is alone in
    its pair. rows: on the device.

    The batch keeps its cut. So the reference, π_old and all μ passes share one cut, until
    `max_tokens` changes.
    """
    if batch.cut is None or batch.cut.max_tokens != max_tokens:
        batch.cut = Cut(max_tokens, rows_of_micro_batches(batch, max_tokens, policy))
    pairs = []
    for rows, reads_prompts_once in batch.cut.micro_batches:
        micro_batch = batch.rows(rows) if len(rows) else without_tokens(batch)
        micro_batch.reads_prompts_once = reads_prompts_once
        pairs.append((rows.to(batch.tokens.device, non_blocking=True), micro_batch))
    return pairs


def without_tokens(batch):
    """A batch with the same fields, of one completion without tokens. It adds 0 to every sum."""
    empty = {}
    for name, tensor in batch.tensors.items():
        shape = (1, 0)[: tensor.dim()]
        empty[name] = tensor.new_zeros(shape)
    mask = batch.mask.new_zeros((1, 0))
    return Batch([[0]], mask=mask, **empty)
