"""What a forward pass over some completions costs, in tokens: in one pass, or in two.

A model reads each different prompt once for all its completions, or it reads prompt + completion of
each row, whatever costs less (prefix_sharing.py).
"""

from typing import NamedTuple


class SequenceCost(NamedTuple):
    """A completion, as far as the cost depends on it."""

    number: int  # of the completion
    prompt: int  # equal prompts have the same number
    prompt_tokens: int
    tokens: int  # of the completion


def forward_cost(rows, second_pass):
    """What it costs to compute these completions: (tokens, True or False).

    rows: a SequenceCost each. second_pass: what a second pass costs in tokens (device_defaults.py).
    True: two passes are cheaper. The first pass computes each different prompt once, the second
    pass computes the completions. False: one pass computes prompt + completion of each row. Padding
    counts.

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
