"""Dynamic completion allocation (arXiv 2503.22342, section 3.4).

A device has room for B·G completions. GRPO fills it with the G completions of B questions. After
CPPO's pruning only B·k completions are left. The device could train on more of them in about the
same time. So CPPO takes more questions: ⌊B·G/k⌋ instead of B. Each question is sampled G times and
pruned to k. A step lasts as long as its busiest device (the bucket effect),
so every device should get as much to do as the others. A device computes its completions in
micro-batches. The papers do not say how it cuts them.

Training uses `questions_per_step`. It uses `micro_batches` for models that cannot compute a prompt
once for all its completions. For the others loop/batches.py counts a prompt once. Plain Python, no
torch.
"""

import heapq


def questions_per_step(questions, group_size, k):
    """How many questions fill a device for B·G completions if k are kept of each: ⌊B·G/k⌋."""
    return questions * group_size // k


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


# --- to be copied: the code that trains does not use these three ---


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
