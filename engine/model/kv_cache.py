"""Keys and values, layer by layer, as transformers' Cache asks for them.

In sampling a layer has room for all tokens to come. The cache of transformers is copied as a whole
for every new token, and again when a completion has ended. Here a token is written in place, and
the last running completions replace those that have ended.

In scoring a prompt's layer is computed once, and its completions see it.
"""

import torch
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

# the name of the cache among a model's arguments and in its output; before transformers 5.24 it was
# the second one
CACHE = "cache" if hasattr(CausalLMOutputWithPast, "cache") else "past_key_values"

# --- sampling ---


class RoomyLayer(DynamicLayer):
    """Keys and values of one layer, (rows, heads, tokens, width). They are views into `all_keys`
    and `all_values`, which have room for more tokens.

    layer: the DynamicLayer whose place this one takes. longest: tokens at most, with the prompt.
    """

    def __init__(self, layer, longest):
        super().__init__()
        self.lazy_initialization(layer.keys, layer.values)
        rows, heads, _, width = layer.keys.shape
        self.all_keys = layer.keys.new_empty(rows, heads, longest, width)
        self.all_values = layer.values.new_empty(rows, heads, longest, layer.values.shape[3])
        self.update(layer.keys, layer.values)

    def update(self, keys, values, *args, **kwargs):
        """Append tokens to each row. Returns all keys and values."""
        rows = len(keys)
        length = self.get_seq_length()
        end = length + keys.shape[2]
        self.all_keys[:rows, :, length:end] = keys
        self.all_values[:rows, :, length:end] = values
        self.keys = self.all_keys[:rows, :, :end]
        self.values = self.all_values[:rows, :, :end]
        return self.keys, self.values

    def reorder_cache(self, order):
        """Keep these rows, in this order; only those that move are copied. order: (n,), on the
        CPU."""
        n = len(order)
        target = (order != torch.arange(n)).nonzero().squeeze(1)
        source = order[target].to(self.device, non_blocking=True)
        target = target.to(self.device, non_blocking=True)
        self.keys[target] = self.keys[source]
        self.values[target] = self.values[source]
        self.keys = self.keys[:n]
        self.values = self.values[:n]


def keep_rows(cache, rows, device):
    """Keep only these rows of a cache. Returns them, on the device, in their new order.

    rows: (n,), ascending, on the CPU. The last ones replace those that leave.
    """
    order = torch.arange(len(rows))
    free = torch.ones(len(rows), dtype=torch.bool)
    free[rows[rows < len(rows)]] = False
    order[free] = rows[rows >= len(rows)]
    cache.reorder_cache(order)
    return order.to(device, non_blocking=True)


# --- scoring ---


class EmptyLayer(DynamicLayer):
    """A layer that keeps nothing."""

    def update(self, keys, values, *args, **kwargs):
        return keys, values


class SharedLayer(DynamicLayer):
    """The keys and values of prompts, and what completions see: those of each row's prompt, then
    the row's own.

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
