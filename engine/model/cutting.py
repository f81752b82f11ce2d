"""How completions are cut into micro-batches, so that computing them costs little. The
papers do not say how.

A model reads each different prompt once for all its completions, or it reads prompt + completion of
each row, whatever costs less (prompts.py).
"""

import torch

from allocate import micro_batches
from engine.base import ranks
from engine.model.logprobs import computed_lengths
from engine.model.pace import PACES


def rows_of_micro_batches(batch, max_tokens, policy):
    """[(rows, whether a forward pass computes each different prompt only once)] of each
    micro-batch. rows: on the CPU; a micro-batch that only fills up a device has none."""
    lengths = computed_lengths(batch.mask).tolist()
    second_pass = PACES[batch.tokens.device.type].second_pass
    if policy.shares_prompts:
        cut = micro_batches_by_prompt(batch.prompts, lengths, max_tokens, second_pass)
    else:
        whole = [len(prompt) + n for prompt, n in zip(batch.prompts, lengths)]
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
            _, once = forward_cost(batch.prompts, lengths, rows, second_pass)
        else:
            once = policy.sharded  # and as many passes as the others in each
        pairs.append((torch.tensor(rows, dtype=torch.long), once and policy.shares_prompts))
    return pairs


def forward_cost(prompts, lengths, rows, second_pass):
    """What it costs to compute these rows: (tokens, True or False).

    prompts: of each completion, a list of tokens. lengths: tokens of each completion. rows: indices
    of some completions. second_pass: what a second pass costs in tokens (pace.py). True: two passes
    are cheaper. The first pass computes each different prompt once, the second pass computes the
    completions. False: one pass computes prompt + completion of each row. Padding counts.
    """
    one_pass = len(rows) * max(len(prompts[i]) + lengths[i] for i in rows)
    different = {tuple(prompts[i]) for i in rows}
    prompt = max(map(len, different))
    completion = max(lengths[i] for i in rows)
    two_passes = two_pass_cost(len(different), prompt, len(rows), completion)
    if two_passes + second_pass <= one_pass:
        return two_passes, True
    return one_pass, False


def two_pass_cost(questions, prompt, completions, length):
    """What two passes cost in tokens. prompt, length: tokens of the longest prompt and completion.

    In the second pass each row also holds keys and values, one pair for each token of its prompt
    and of its completion. A pair takes about an eighth of the memory that computing a token takes.
    """
    keys = completions * (prompt + length) // 8
    return questions * prompt + completions * length + keys


def micro_batches_by_prompt(prompts, lengths, max_tokens, second_pass):
    """`allocate.micro_batches` for a model that computes each prompt once for its completions.

    prompts, lengths, second_pass: as for `forward_cost`, which counts the tokens here. First each
    question's completions are cut into pieces of similar lengths. A cut repeats the prompt, but it
    saves padding. Then pieces of similar lengths share a micro-batch. Returns lists of indices.
    """
    groups = {}
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    for i in longest_first:
        prompt = tuple(prompts[i])
        groups.setdefault(prompt, []).append(i)
    pieces = []
    for prompt, group in groups.items():
        own_lengths = [lengths[i] for i in group]
        for start, end in best_cuts(own_lengths, len(prompt), max_tokens, second_pass):
            pieces.append(group[start:end])
    pieces.sort(key=lambda piece: -lengths[piece[0]])
    batches = pieces[:1]
    for piece in pieces[1:]:
        together = batches[-1] + piece
        tokens, _ = forward_cost(prompts, lengths, together, second_pass)
        if tokens <= max_tokens:
            batches[-1] = together
        else:
            batches.append(piece)
    return batches


def best_cuts(lengths, prompt, max_tokens, second_pass):
    """Cut one question's completions so that two passes over each piece cost least in sum.

    lengths: the longest first. prompt: tokens of the prompt. A piece of two or more completions
    costs at most `max_tokens`. Returns [(start, end), …].
    """
    best = [(0, [])]  # best[n]: (cost, pieces) of the n longest completions
    for end in range(1, len(lengths) + 1):
        ways = []
        for start in range(end):
            n = end - start
            one_pass = n * (prompt + lengths[start])
            two_passes = two_pass_cost(1, prompt, n, lengths[start])
            cheaper = two_passes if two_passes + second_pass <= one_pass else one_pass
            if n == 1 or cheaper <= max_tokens:
                cost, pieces = best[start]
                ways.append((cost + two_passes, [*pieces, (start, end)]))
        best.append(min(ways))
    return best[-1][1]
