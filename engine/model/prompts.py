"""A prompt is computed once for all its completions, in sampling and in scoring.

Prompts are padded on the left, so that all of them end in the same column. The model reads them and
keeps their keys and values. Then it reads only the completions; each row sees the keys and values
of its prompt.
"""

from copy import copy

import torch
from torch.nn.functional import pad


def left_pad(prompts, pad_id, device):
    """(ids, mask), both (Q, L), of Q token lists: padded on the left, so that all prompts end in
    the same column."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad_id] * (longest - len(p)) + [*p] for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    return ids.to(device, non_blocking=True), mask.to(device, non_blocking=True)


def read_prompts_once(backbone, prompts, tokens, lengths):
    """(hidden states (N, T', H), before (N,)): token t of row i is predicted by hidden[i, before[i]
    + t].

    prompts: N token lists; equal ones are computed once. tokens: (N, T) int64, 0 on padding.
    lengths: (N,), on the CPU. The gradient flows from a completion through the keys and values of
    its prompt. There are two forward passes, even if T is 0 or 1.
    """
    from transformers.cache_utils import Cache

    from engine.model.kv_cache import SharedLayer

    place = {prompt: i for i, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
    prompt_of_row = torch.tensor([place[tuple(prompt)] for prompt in prompts]).to(
        tokens.device, non_blocking=True
    )
    ids, mask = left_pad(place, 0, tokens.device)
    position = (mask.cumsum(1) - 1).clamp(min=0)
    # without a mask there is less to compute; with one, transformers makes a GPU wait once, to see
    # what the mask hides
    padded = len(set(map(len, place))) > 1
    cache = Cache(layer_class_to_replicate=SharedLayer)
    out = backbone(
        input_ids=ids, attention_mask=mask if padded else None, position_ids=position,
        past_key_values=cache, use_cache=True,
    )
    last = out.last_hidden_state[prompt_of_row, -1:]  # predicts token 0

    # nothing is predicted after the last token
    tokens = pad(tokens, (0, 1))[:, : max(1, tokens.shape[1] - 1)]
    mask = torch.cat([mask[prompt_of_row], torch.ones_like(tokens)], 1) if padded else None
    position = (
        position[prompt_of_row, -1:] + 1 + torch.arange(tokens.shape[1], device=tokens.device)
    )
    cache = Cache(layers=[copy(layer) for layer in cache.layers])
    for layer in cache.layers:
        layer.prompt_of_row = prompt_of_row
    out = backbone(
        input_ids=tokens, attention_mask=mask, position_ids=position, past_key_values=cache,
        use_cache=True,
    )
    return torch.cat([last, out.last_hidden_state], 1), torch.zeros(len(prompts), dtype=torch.long)


def read_rows(backbone, prompts, tokens, lengths):
    """`read_prompts_once` in one forward pass, which computes prompt + completion of each row.

    All padding is on the right. A causal model never looks to the right, so no attention mask is
    needed. A GPU makes the host wait once: without a mask and a cache transformers looks at the
    positions, in case they begin again within a row.
    """
    starts = torch.tensor([len(prompt) for prompt in prompts])
    longest, width = int(starts.max()), int((starts + lengths).max())
    ids = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts])
    ids = pad(ids.to(tokens.device, non_blocking=True), (0, tokens.shape[1]))
    columns = (starts.unsqueeze(1) + torch.arange(tokens.shape[1])).to(
        tokens.device, non_blocking=True
    )
    ids = ids.scatter(1, columns, tokens)[:, :width]
    return backbone(input_ids=ids, use_cache=False).last_hidden_state, starts - 1


@torch.no_grad()
def shares_prompts(backbone):
    """Whether `read_prompts_once` gives the hidden states of whole rows. Some models keep more than
    keys and values, so it does not."""
    rows = (
        [[0, 1], [0]], torch.tensor([[2, 3], [1, 2]], device=backbone.device), torch.tensor([2, 2]),
    )
    tolerance = 1e-3 if backbone.dtype == torch.float32 else 0.1
    whole, before = read_rows(backbone, *rows)
    expected = torch.stack([states[b : b + 2] for states, b in zip(whole, before)])
    try:
        found, _ = read_prompts_once(backbone, *rows)
    except (AttributeError, IndexError, TypeError, ValueError):
        return False
    return torch.allclose(found, expected, rtol=tolerance, atol=tolerance)
