"""Dynamic completion allocation (arXiv 2503.22342, section 3.4), and how completions become micro-batches.

A device has places for B·G completions. GRPO fills them with the G completions of B questions. After CPPO's pruning only
B·k places are taken, and the device would wait for the others just as long (the bucket effect: a step lasts as long as the
busiest device). So completions of more questions fill the freed places: ⌊B·G/k⌋ questions instead of B, each sampled G
times and pruned to k in the same way.

Plain Python, no torch: copy what you need.
"""

import heapq


def questions_per_step(questions, group_size, k):
    """How many questions' kept completions fill a device with `questions` × `group_size` places: ⌊B·G/k⌋."""
    return questions * group_size // k


def fill(kept_counts, capacity):
    """How many of the coming questions fit into `capacity` places, taken in order, when their kept counts differ.

    kept_counts: completions kept of each coming question (threshold form, dropped groups). Returns a number of questions.
    """
    used = 0
    for questions, count in enumerate(kept_counts):
        used += count
        if used > capacity:
            return questions
    return len(kept_counts)


def micro_batches(lengths, max_tokens):
    """Cut completions into micro-batches of similar lengths with rows × longest ≤ max_tokens.

    lengths: tokens of each completion. Returns lists of indices, every index exactly once, the longest first (what does
    not fit into memory fails at once). A completion longer than max_tokens gets a batch of its own.
    """
    batches = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        # a batch's first completion is its longest: one more row costs that many tokens, padding included
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= max_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def balance(lengths, parts):
    """Share completions out to `parts` devices with about equal work: longest first, each to the least busy device.

    lengths: tokens of each completion. Returns one list of indices per device, every index exactly once.
    """
    shares = [[] for _ in range(parts)]
    busy = [(0, part) for part in range(parts)]
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        work, part = heapq.heappop(busy)
        shares[part].append(i)
        heapq.heappush(busy, (work + lengths[i], part))
    return shares


def step_time(tokens_per_device, *, overhead=0.0, seconds_per_token=1.0):
    """The bucket effect as a cost model: a step lasts as long as the busiest device.

    tokens_per_device: tokens that each device trains on in this step. Returns seconds: max(overhead + tokens · rate).
    """
    return max(overhead + tokens * seconds_per_token for tokens in tokens_per_device)
