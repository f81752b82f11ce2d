"""How completions are cut into micro-batches, so that computing them costs little. The papers do
not say how.

A model reads each different prompt once for all its completions, or it reads prompt + completion of
each row, whatever costs less (prompts.py).
"""

import math
from typing import NamedTuple

import torch

from allocate import micro_batches
from engine.base import ranks
from engine.model.logprobs import computed_lengths
from engine.model.pace import PACES


class Row(NamedTuple):
    """A completion, as far as the cost depends on it."""

    number: int  # of the completion
    prompt: int  # equal prompts have the same number
    prompt_tokens: int
    tokens: int  # of the completion


def rows_of_micro_batches(batch, max_tokens, policy):
    """[(rows, whether a forward pass computes each different prompt only once)] of each
    micro-batch. rows: on the CPU; a micro-batch that only fills up a device has none."""
    second_pass = PACES[batch.tokens.device.type].second_pass
    lengths = computed_lengths(batch.mask).tolist()
    known = {}
    rows = []
    for i, prompt in enumerate(batch.prompts):
        same = known.setdefault(tuple(prompt), len(known))
        rows.append(Row(i, same, len(prompt), lengths[i]))
    if policy.shares_prompts:
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
        pairs.append((numbers, once and policy.shares_prompts))
    return pairs


def forward_cost(rows, second_pass):
    """What it costs to compute these Rows: (tokens, True or False).

    second_pass: what a second pass costs in tokens (pace.py). True: two passes are cheaper. The
    first pass computes each different prompt once, the second pass computes the completions. False:
    one pass computes prompt + completion of each row. Padding counts.

    In the second pass each row also holds keys and values, one pair for each token of its prompt
    and of its completion. A pair takes about an eighth of the memory that computing a token takes.
    """
    one_pass = len(rows) * max(row.prompt_tokens + row.tokens for row in rows)
    different = {row.prompt for row in rows}
    prompt = max(row.prompt_tokens for row in rows)
    completion = max(row.tokens for row in rows)
    keys = len(rows) * (prompt + completion) // 8
    two_passes = len(different) * prompt + len(rows) * completion + keys
    if two_passes + second_pass <= one_pass:
        return two_passes, True
    return one_pass, False


def cheaper_cut(rows, max_tokens, second_pass):
    """The cheaper of two ways to cut Rows, for a model that may compute a prompt only once: by the
    lengths of whole rows, or question by question. Returns lists of Rows.

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
