"""How completions are cut into micro-batches, so that computing them costs little. The papers do
not say how.

A model reads each different prompt once for all its completions, or it reads prompt + completion of
each row, whatever costs less (prompts.py).
"""

from typing import NamedTuple

import torch

from allocate import micro_batches
from engine.base import ranks
from engine.model.logprobs import computed_lengths
from engine.model.pace import PACES


class Prompt(NamedTuple):
    """What the cost depends on."""

    number: int  # equal prompts have the same number
    tokens: int


def rows_of_micro_batches(batch, max_tokens, policy):
    """[(rows, whether a forward pass computes each different prompt only once)] of each
    micro-batch. rows: on the CPU; a micro-batch that only fills up a device has none."""
    lengths = computed_lengths(batch.mask).tolist()
    second_pass = PACES[batch.tokens.device.type].second_pass
    numbers = {}
    prompts = []
    for prompt in batch.prompts:
        number = numbers.setdefault(tuple(prompt), len(numbers))
        prompts.append(Prompt(number, len(prompt)))
    if policy.shares_prompts:
        cut = micro_batches_by_prompt(prompts, lengths, max_tokens, second_pass)
    else:
        whole = [prompt.tokens + n for prompt, n in zip(prompts, lengths)]
        cut = micro_batches(whole, max_tokens)
    count = max(1, len(cut))
    if policy.sharded:
        # devices gather weights together, so each needs as many micro-batches as the others
        most = ranks.all_reduce(batch.tokens.device, maxima={"count": count})
        count = int(most["count"])
    cut += [[]] * (count - len(cut))
    pairs = []
    for rows in cut:
        if rows and not policy.sharded:
            _, once = forward_cost(prompts, lengths, rows, second_pass)
        else:
            once = policy.sharded  # and as many passes as the others in each
        pairs.append((torch.tensor(rows, dtype=torch.long), once and policy.shares_prompts))
    return pairs


def forward_cost(prompts, lengths, rows, second_pass):
    """What it costs to compute these rows: (tokens, True or False).

    prompts: the Prompt of each completion. lengths: tokens of each completion. rows: indices
    of some completions. second_pass: what a second pass costs in tokens (pace.py). True: two passes
    are cheaper. The first pass computes each different prompt once, the second pass computes the
    completions. False: one pass computes prompt + completion of each row. Padding counts.

    In the second pass each row also holds keys and values, one pair for each token of its prompt
    and of its completion. A pair takes about an eighth of the memory that computing a token takes.
    """
    one_pass = len(rows) * max(prompts[i].tokens + lengths[i] for i in rows)
    different = {prompts[i] for i in rows}
    prompt = max(each.tokens for each in different)
    completion = max(lengths[i] for i in rows)
    keys = len(rows) * (prompt + completion) // 8
    two_passes = len(different) * prompt + len(rows) * completion + keys
    if two_passes + second_pass <= one_pass:
        return two_passes, True
    return one_pass, False


def micro_batches_by_prompt(prompts, lengths, max_tokens, second_pass):
    """The cheaper of two ways to cut completions, for a model that may compute a prompt only once:
    by the lengths of whole rows, or question by question.

    prompts, lengths, second_pass: as for `forward_cost`. A micro-batch of two or more completions
    costs at most `max_tokens`. Returns lists of indices.
    """
    whole = [prompt.tokens + n for prompt, n in zip(prompts, lengths)]
    cuts = [
        question_by_question(prompts, lengths, max_tokens, second_pass),
        micro_batches(whole, max_tokens),
    ]

    def cost(cut):
        total = 0
        for rows in cut:
            tokens, once = forward_cost(prompts, lengths, rows, second_pass)
            total += tokens + once * second_pass
        return total

    return min(cuts, key=cost)


def question_by_question(prompts, lengths, max_tokens, second_pass):
    """First each question's completions are cut into pieces of similar lengths. Then pieces of
    similar lengths share a micro-batch. The longest come first.

    A new piece begins if it saves more tokens than the prompt has, which it repeats. It saves
    padding: the completions that are left are padded to the longest of them.
    """

    def fits(rows):
        tokens, _ = forward_cost(prompts, lengths, rows, second_pass)
        return tokens <= max_tokens

    groups = {}
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    for i in longest_first:
        groups.setdefault(prompts[i], []).append(i)
    pieces = []
    for prompt, group in groups.items():
        pieces.append([group[0]])
        for n, i in enumerate(group[1:], 1):
            longest = lengths[pieces[-1][0]]
            saved = (len(group) - n) * (longest - lengths[i])
            together = [*pieces[-1], i]
            if fits(together) and saved <= prompt.tokens:
                pieces[-1] = together
            else:
                pieces.append([i])
    pieces.sort(key=lambda piece: -lengths[piece[0]])
    batches = pieces[:1]
    for piece in pieces[1:]:
        together = batches[-1] + piece
        if fits(together):
            batches[-1] = together
        else:
            batches.append(piece)
    return batches
