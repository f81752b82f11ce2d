"""Solutions to the exercises of 3_allocation.ipynb."""

from allocate import micro_batches, questions_per_step
from cppo import keep_count


def empty_places(questions, group_size, pruning_rate):
    k = keep_count(group_size, pruning_rate)
    return questions * group_size - k * questions_per_step(questions, group_size, k)


def padding(lengths, max_tokens):
    area = sum(
        len(batch) * max(lengths[i] for i in batch) for batch in micro_batches(lengths, max_tokens)
    )
    return 1 - sum(lengths) / area


def share_to_keep(phases, speedup):
    # T / (stays + share · shrinks) = S
    shrinks = phases["logprobs"] + phases["update"]
    stays = phases["total"] - shrinks
    return (phases["total"] / speedup - stays) / shrinks
