"""What a forward pass costs in tokens if each prompt is computed once, and how completions are cut
into micro-batches so that this costs little. The papers do not say how."""

# a second pass takes about as long as computing this many more tokens. On a CPU: 160 with 0.1
# million parameters, 90 with 0.4 million, 40 with 135 million
SECOND_PASS = 128


def forward_cost(prompts, lengths):
    """What it costs to compute these completions behind their prompts: (tokens, True or False).

    prompts: the prompt of each completion, a list of tokens. lengths: tokens of each completion.
    True: two passes are cheaper. The first pass computes each different prompt once, the second
    pass computes the completions. False: one pass computes prompt + completion of each row.
    Padding counts.
    """
    whole = [len(prompt) + n for prompt, n in zip(prompts, lengths)]
    in_one = len(prompts) * max(whole)
    different = len(set(map(tuple, prompts)))
    longest = max(map(len, prompts))
    _, cost, cheaper = two_passes(different, longest, len(prompts), max(lengths), in_one)
    return cost, cheaper


def two_passes(questions, prompt, completions, length, in_one):
    """(cost of two passes, cost of the cheaper way, whether two passes are cheaper).

    prompt, length: tokens of the longest prompt and completion. in_one: the cost of one pass.

    In the second pass each row also holds keys and values, one pair for each token of its prompt
    and of its completion. A pair takes about an eighth of the memory that computing a token takes.
    """
    in_two = questions * prompt + completions * length + completions * (prompt + length) // 8
    cheaper = in_two + SECOND_PASS <= in_one
    cost = in_two if cheaper else in_one
    return in_two, cost, cheaper


def micro_batches_by_prompt(prompts, lengths, max_tokens):
    """`allocate.micro_batches` for a model that computes each prompt once for its completions.

    prompts, lengths: as for `forward_cost`, which counts the tokens here. First each question's
    completions are cut into pieces of similar lengths. A cut repeats the prompt, but it saves
    padding. Then pieces of similar lengths share a micro-batch. Returns lists of indices.
    """
    groups = {}
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    for i in longest_first:
        prompt = tuple(prompts[i])
        groups.setdefault(prompt, []).append(i)
    pieces = []
    for prompt, group in groups.items():
        own_lengths = [lengths[i] for i in group]
        for start, end in best_cuts(own_lengths, len(prompt), max_tokens):
            pieces.append(group[start:end])
    pieces.sort(key=lambda piece: -lengths[piece[0]])
    batches = pieces[:1]
    for piece in pieces[1:]:
        together = batches[-1] + piece
        own_prompts = [prompts[i] for i in together]
        own_lengths = [lengths[i] for i in together]
        tokens, _ = forward_cost(own_prompts, own_lengths)
        if tokens <= max_tokens:
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
            n = end - start
            longest = lengths[start]
            in_one = n * (prompt + longest)
            cost, tokens, _ = two_passes(1, prompt, n, longest, in_one)
            if n == 1 or tokens <= max_tokens:
                before, pieces = best[start]
                ways.append((before + cost, [*pieces, (start, end)]))
        best.append(min(ways))
    return best[-1][1]
