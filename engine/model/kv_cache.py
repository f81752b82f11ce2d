"""Static and prefix-sharing KV cache: layers, as transformers' Cache asks for them.

In sampling a layer has room for all tokens to come. The cache of transformers is copied as a whole
for every new token, and again when a completion has ended. Here a token is written in place, and
the last running completions replace those that have ended.

In scoring a prompt's layer is computed once, and its completions see it.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

# the name of the cache among a model's arguments and in its output; before transformers 5.24 it was
# the second one
CACHE = "cache" if hasattr(CausalLMOutputWithPast, "cache") else "past_key_values"

# --- sampling ---


@dataclass
class CachePosition:
    """Where all layers of a cache write the next token, and what they show."""

    column: torch.Tensor  # (1,) int64, on the device: that of the next token
    width: int  # columns that are seen, that of the next token included


class StaticLayer(DynamicLayer):
    """Static KV cache of one layer, (rows, heads, columns, width of a head), with room for all
    tokens to come. They are views into `all_keys` and `all_values`, which stay where they are.

    layer: that of the prompts, which this one replaces. room: columns at most. cache_position: the
    CachePosition that all layers share.
    """

    def __init__(self, layer, room, cache_position):
        super().__init__()
        self.lazy_initialization(layer.keys, layer.values)
        self.cache_position = cache_position
        width = layer.keys.shape[2]
        more = (0, 0, 0, room - width)
        # what is hidden has to be finite, because 0 · NaN is NaN
        self.all_keys = pad(layer.keys, more)
        self.all_values = pad(layer.values, more)
        self.keys = self.all_keys[:, :, :width]
        self.values = self.all_values[:, :, :width]

    def update(self, keys, values, *args, **kwargs):
        """Write the next token of each row. Returns the keys and values that the rows see."""
        n, width = len(keys), self.cache_position.width
        self.all_keys[:n].index_copy_(2, self.cache_position.column, keys)
        self.all_values[:n].index_copy_(2, self.cache_position.column, values)
        self.keys = self.all_keys[:n, :, :width]
        self.values = self.all_values[:n, :, :width]
        return self.keys, self.values

    def reorder_cache(self, order):
        """Keep these rows, in this order; only those that move are copied. order: (n,), on the
        CPU."""
        target = (order != torch.arange(len(order))).nonzero().squeeze(1)
        source = order[target].to(self.device, non_blocking=True)
        target = target.to(self.device, non_blocking=True)
        for seen in (self.keys, self.values):
            seen[target] = seen[source]


# --- scoring ---


class NoCacheLayer(DynamicLayer):
    """No cache: a layer that keeps nothing."""

    def update(self, keys, values, *args, **kwargs):
        return keys, values


class SharedPrefixLayer(DynamicLayer):
    """Prefix-sharing KV cache: the keys and values of prompts. A completion sees those of its
    prompt, then its own.

    prompt_of_row: (N,), of the completions; None while the prompts are read. The prompts' are
    written once: with gradient checkpointing a layer is computed again. The completions' are not
    kept, because one pass reads whole completions.
    """

    prompt_of_row = None

    def update(self, keys, values, *args, **kwargs):
        if self.prompt_of_row is not None:
            keys = torch.cat([self.keys[self.prompt_of_row], keys], dim=-2)
            values = torch.cat([self.values[self.prompt_of_row], values], dim=-2)
        elif not self.is_initialized:
            self.keys = keys
            self.values = values
            self.is_initialized = True
        return keys, values
