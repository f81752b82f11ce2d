"""Dynamic completion allocation (arXiv 2503.22342, section 3.4), and cutting into micro-batches.

A device has places for B·G completions. GRPO fills them with the G completions of B questions.
After CPPO's pruning only B·k places are taken. The device could train on more completions in about
the same time. So CPPO uses the freed places for more questions: ⌊B·G/k⌋ instead of B. Each question
is sampled G times and pruned to k. A step lasts as long as its busiest device (the bucket effect),
so every device should get as much to do as the others.

Plain Python, no torch: copy what you need.
"""

import heapq


def questions_per_step(questions, group_size, k):
    """How many questions fill B·G places if k completions are kept of each: ⌊B·G/k⌋."""
    return questions * group_size // k


def fill(kept_counts, capacity):
    """How many of the next questions fit into `capacity` places, in order, if k differs.

    kept_counts: completions kept of each question (threshold form, dropped groups).
    Returns a number of questions.
    """
    used = 0
    for questions, count in enumerate(kept_counts):
        used += count
        if used > capacity:
            return questions
    return len(kept_counts)


def balance(lengths, parts):
    """Give `parts` devices about equal work: longest first, each to the least busy device.

    lengths: tokens of each completion. Returns a list of indices per device, each index once.
    """
    shares = [[] for _ in range(parts)]
    busy = [(0, part) for part in range(parts)]
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        work, part = heapq.heappop(busy)
        shares[part].append(i)
        heapq.heappush(busy, (work + lengths[i], part))
    return shares


def step_time(tokens_per_device, *, overhead=0.0, seconds_per_token=1.0):
    """The bucket effect as a model of cost: a step lasts as long as its busiest device.

    tokens_per_device: tokens that each device trains on in this step.
    Returns seconds: the maximum over the devices of overhead + tokens · seconds_per_token.
    """
    return max(overhead + tokens * seconds_per_token for tokens in tokens_per_device)


# --- micro-batches: what one forward pass computes ---


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


# a second forward pass takes about as long as it takes to compute so many tokens more
SECOND_PASS = 256


def forward_cost(prompts, lengths):
    """(tokens, once): what it costs to compute these completions behind their prompts.

    prompts: the prompt of each completion, a list of tokens. lengths: tokens of each completion.
    once: True if two passes are cheaper. The first pass computes each different prompt once, the
    second pass computes the completions. Otherwise one pass computes prompt + completion of each
    row. Padding counts.
    """
    rows = len(prompts) * max(len(p) + n for p, n in zip(prompts, lengths))
    different = len(set(map(tuple, prompts)))
    passes = two_passes(different, max(map(len, prompts)), len(prompts), max(lengths))
    return cheaper(passes, rows)


def cheaper(passes, rows):
    """(cost, once) of the cheaper way. passes, rows: the costs of two passes and of one pass."""
    return (passes, True) if passes + SECOND_PASS <= rows else (rows, False)


def two_passes(questions, prompt, completions, length):
    """The cost of two passes. prompt, length: tokens of the longest prompt and completion.

    In the second pass each row also holds keys and values, one pair for each token of its prompt
    and of its completion. A pair takes about an eighth of the memory that computing a token takes.
    """
    tokens = questions * prompt + completions * length
    return tokens + completions * (prompt + length) // 8


def micro_batches_by_prompt(prompts, lengths, max_tokens):
    """`micro_batches` for a model that computes each prompt once for its completions.

    prompts, lengths: as for `forward_cost`, which counts the tokens here. First each question's
    completions are cut into pieces of similar lengths: a cut repeats the prompt, but saves padding.
    Then pieces of similar lengths share a micro-batch. Returns lists of indices.
    """
    groups = {}
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        groups.setdefault(tuple(prompts[i]), []).append(i)
    pieces = [
        group[start:end]
        for prompt, group in groups.items()
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
    """Where to cut one question's completions so that two passes over each piece cost least in sum.

    lengths: the longest first. prompt: tokens of the prompt. A piece of two or more completions
    costs at most `max_tokens`. Returns [(start, end), …].
    """
    best = [(0, [])]  # best[n]: (cost, pieces) of the n longest completions
    for end in range(1, len(lengths) + 1):
        ways = []
        for start in range(end):
            n, longest, (before, pieces) = end - start, lengths[start], best[start]
            passes = two_passes(1, prompt, n, longest)
            if n == 1 or cheaper(passes, n * (prompt + longest))[0] <= max_tokens:
                ways.append((before + passes, [*pieces, (start, end)]))
        best.append(min(ways))
    return best[-1][1]
