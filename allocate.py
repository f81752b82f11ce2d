"""Dynamic completion allocation (arXiv 2503.22342, section 3.4).

A device has room for B·G completions. GRPO fills it with the G completions of B questions. After
CPPO's pruning only B·k completions are left. The device could train on more of them in about the
same time. So CPPO takes more questions: ⌊B·G/k⌋ instead of B. Each question is sampled G times and
pruned to k. A step lasts as long as its busiest device (the bucket effect),
so every device should get as much to do as the others. A device computes its completions in
micro-batches. The papers do not say how it cuts them.

Training uses `questions_per_step`. It uses `micro_batches` for models that cannot compute a prompt
once for all its completions; for the others engine/model/prompts.py has a cut that counts a prompt
once. The code that trains does not use `fill`, `balance` and `step_time`: they are here to be
copied. Plain Python, no torch.
"""

import heapq


def questions_per_step(questions, group_size, k):
    """How many questions fill a device for B·G completions if k are kept of each: ⌊B·G/k⌋."""
    return questions * group_size // k


def fill(kept_counts, capacity):
    """How many of the next questions, in order, fit if `capacity` completions may be kept in all.

    kept_counts: k of each question (threshold form, dropped groups).
    Returns a number of questions.
    """
    used = 0
    for questions, count in enumerate(kept_counts):
        used += count
        if used > capacity:
            return questions
    return len(kept_counts)


def micro_batches(lengths, max_tokens):
    """Cut completions into micro-batches of similar lengths with rows × longest ≤ max_tokens.

    lengths: tokens of each completion. Returns lists of indices, each index exactly once. The
    longest come first, so a batch that does not fit into memory fails at once. A completion
    longer than max_tokens gets a batch of its own.
    """
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    batches = []
    longest = 0  # of the newest batch: each of its rows costs that many tokens
    for i in longest_first:
        if batches and (len(batches[-1]) + 1) * longest <= max_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
            longest = lengths[i]  # the first completion of a batch is its longest
    return batches


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


# --- a prompt counts once ---


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
