"""Prefix sharing: a prompt is computed once for all its completions, in sampling and in scoring.

Prompts are padded on the left, so that all of them end in the same column. The model reads them and
keeps their keys and values. Then it reads only the completions; each row sees the keys and values
of its prompt.
"""

from copy import copy
from typing import NamedTuple

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from engine.model.precision import nearly_equal


def read_prompts(model, prompts, device, **options):
    """Let a model read Q prompts, token lists, and keep their keys and values.

    Returns (its output, mask (Q, L), positions (Q, L), whether there is padding).
    """
    rows = [torch.tensor(prompt) for prompt in prompts]
    ids = pad_sequence(rows, batch_first=True, padding_value=-1, padding_side="left")
    ids = on_device(ids, device)
    mask = (ids >= 0).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    # without a mask there is less to compute; with one, transformers makes a GPU wait once, to see
    # what the mask hides
    padded = len(set(map(len, prompts))) > 1
    out = model(
        input_ids=ids.clamp(min=0), attention_mask=mask if padded else None,
        position_ids=positions, use_cache=True, **options)
    return out, mask, positions, padded


def on_device(numbers, device):
    """Numbers as a tensor. The host does not wait for the copy."""
    return torch.as_tensor(numbers).to(device, non_blocking=True)


def forward_shared_prefix(backbone, prompts, tokens):
    """(hidden states (N, T', H), before (N,)): token t of row i is predicted by hidden[i, before[i]
    + t].

    prompts: N token lists; equal ones are computed once. tokens: (N, T) int64, 0 on padding. The
    gradient flows from a completion through the keys and values of its prompt. There are two
    forward passes, even if T is 0 or 1.
    """
    from transformers.cache_utils import Cache

    from engine.model.kv_cache import CACHE, SharedPrefixLayer

    device = tokens.device
    number = {}  # {prompt: its row among the distinct ones}
    numbers = [number.setdefault(tuple(prompt), len(number)) for prompt in prompts]
    prompt_of_row = on_device(numbers, device)
    cache = Cache(layer_class_to_replicate=SharedPrefixLayer)
    out, mask, position, padded = read_prompts(backbone, number, device, **{CACHE: cache})
    first = out.last_hidden_state[prompt_of_row, -1:]  # predicts token 0

    # nothing is predicted after the last token
    width = max(1, tokens.shape[1] - 1)
    tokens = pad(tokens, (0, 1))[:, :width]
    mask = torch.cat([mask[prompt_of_row], torch.ones_like(tokens)], 1) if padded else None
    column = torch.arange(width, device=device)
    position = position[prompt_of_row, -1:] + 1 + column
    layers = [copy(layer) for layer in cache.layers]
    for layer in layers:
        layer.prompt_of_row = prompt_of_row
    out = backbone(
        input_ids=tokens, attention_mask=mask, position_ids=position, use_cache=True,
        **{CACHE: Cache(layers=layers)})
    hidden = torch.cat([first, out.last_hidden_state], 1)
    return hidden, torch.zeros(len(prompts), dtype=torch.long)


def forward_whole(backbone, prompts, tokens, lengths, with_cache=False):
    """`forward_shared_prefix` in one forward pass, which computes prompt + completion of each row.

    lengths: (N,), of the completions, on the CPU. All padding is on the right. A causal model never
    looks to the right, so no attention mask is needed. with_cache: give the model a cache, which
    stays empty. Without a cache transformers looks at the positions, in case they begin again
    within a row, and a GPU makes the host wait.
    """
    from transformers.cache_utils import Cache

    from engine.model.kv_cache import CACHE, NoCacheLayer

    starts = torch.tensor([len(prompt) for prompt in prompts])
    ids = pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
    ids = on_device(ids, tokens.device)
    # the tokens of row i begin at column starts[i]
    T = tokens.shape[1]
    columns = on_device(starts.unsqueeze(1) + torch.arange(T), tokens.device)
    ids = pad(ids, (0, T)).scatter(1, columns, tokens)
    width = int((starts + lengths).max())
    cache = Cache(layer_class_to_replicate=NoCacheLayer) if with_cache else None
    out = backbone(input_ids=ids[:, :width], use_cache=False, **{CACHE: cache})
    return out.last_hidden_state, starts - 1


@torch.no_grad()
def can_share_prefix(backbone):
    """Whether `forward_shared_prefix` gives the hidden states of whole rows. It does not for models
    that keep more than keys and values."""
    prompts = [[0, 1], [0]]
    tokens = torch.tensor([[2, 3], [1, 2]], device=backbone.device)
    whole, _ = forward_whole(backbone, prompts, tokens, torch.tensor([2, 2]))
    expected = torch.stack([whole[0, 1:3], whole[1, 0:2]])  # they predict the four tokens
    try:
        states, _ = forward_shared_prefix(backbone, prompts, tokens)
    except (AttributeError, IndexError, TypeError, ValueError):
        return False
    return nearly_equal(states, expected)


# --- whether it pays ---


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
