"""Cut completions into micro-batches. One forward pass computes one. The papers do not say how.

Plain Python, no torch: copy what you need.
"""

# a second forward pass takes about as long as computing this many more tokens
SECOND_PASS = 256


def micro_batches(lengths, max_tokens):
    """Cut completions into micro-batches of similar lengths with rows × longest ≤ max_tokens.

    lengths: tokens of each completion. Returns lists of indices, each index exactly once. The
    longest come first, so a batch that does not fit into memory fails at once. A completion
    longer than max_tokens gets a batch of its own.
    """
    batches = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        # the first completion of a batch is its longest: each row costs that many tokens
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= max_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def forward_cost(prompts, lengths):
    """What it costs to compute these completions behind their prompts: (tokens, True or False).

    prompts: the prompt of each completion, a list of tokens. lengths: tokens of each completion.
    True: two passes are cheaper. The first pass computes each different prompt once, the second
    pass computes the completions. False: one pass computes prompt + completion of each row.
    Padding counts.
    """
    in_one = len(prompts) * max(len(p) + n for p, n in zip(prompts, lengths))
    different = len(set(map(tuple, prompts)))
    longest = max(map(len, prompts))
    return two_passes(different, longest, len(prompts), max(lengths), in_one)[1:]


def two_passes(questions, prompt, completions, length, in_one):
    """(cost of two passes, cost of the cheaper way, whether two passes are cheaper).

    prompt, length: tokens of the longest prompt and completion. in_one: the cost of one pass.

    In the second pass each row also holds keys and values, one pair for each token of its prompt
    and of its completion. A pair takes about an eighth of the memory that computing a token takes.
    """
    in_two = questions * prompt + completions * length + completions * (prompt + length) // 8
    cheaper = in_two + SECOND_PASS <= in_one
    return in_two, in_two if cheaper else in_one, cheaper


def micro_batches_by_prompt(prompts, lengths, max_tokens):
    """`micro_batches` for a model that computes each prompt once for its completions.

    prompts, lengths: as for `forward_cost`, which counts the tokens here. First each question's
    completions are cut into pieces of similar lengths. A cut repeats the prompt, but it saves
    padding. Then pieces of similar lengths share a micro-batch. Returns lists of indices.
    """
    groups = {}
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        groups.setdefault(tuple(prompts[i]), []).append(i)
    pieces = [
        group[start:end] for prompt, group in groups.items()
        for start, end in best_cuts([lengths[i] for i in group], len(prompt), max_tokens)
    ]
    batches = []
    for piece in sorted(pieces, key=lambda piece: -lengths[piece[0]]):
        together = batches[-1] + piece if batches else piece
        tokens, _ = forward_cost([prompts[i] for i in together], [lengths[i] for i in together])
        if batches and tokens <= max_tokens:
            batches[-1] = together
        else:
            batches.append(piece)
    return batches


def best_cuts(lengths, prompt, max_tokens):
    """Cut one question's completions so that two passes over each piece cost least in sum.

    lengths: the longest first. prompt: tokens of the prompt. A piece of two or more completions
    costs at most `max_tokens`. Returns [(start, end), …].
    """
    best = [(0, [])]  # best[n]: (cost, pieces) of the n longest completions
    for end in range(1, len(lengths) + 1):
        ways = []
        for start in range(end):
            n, longest, (before, pieces) = end - start, lengths[start], best[start]
            cost, cheaper, _ = two_passes(1, prompt, n, longest, n * (prompt + longest))
            if n == 1 or cheaper <= max_tokens:
                ways.append((before + cost, [*pieces, (start, end)]))
        best.append(min(ways))
    return best[-1][1]
