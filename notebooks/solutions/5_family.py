"""Solution to the exercise of 5_family.ipynb."""

import torch

from grpo import token_logprobs


def my_kept_logprobs(logits, tokens, kept, *, temperature=1.0):
    inside = logits.masked_fill(~kept, -torch.inf)
    return token_logprobs(inside, tokens, temperature=temperature)
