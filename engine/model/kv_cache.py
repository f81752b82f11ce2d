"""Keys and values, layer by layer, as transformers' Cache asks for them.

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
class Place:
    """Where all layers of a cache write the next token, and what they show."""

    column: torch.Tensor  # (1,) int64, on the device: that of the next token
    width: int  # columns that are seen, that of the next token included
    room: int  # columns at most


class RoomyLayer(DynamicLayer):
    """Keys and values of one layer, (rows, heads, room, width of a head), with room for all tokens
    to come. They stay where they are.

    layer: the layer of the prompts, whose stead this one takes. place: the Place that all layers
    share.
    """

    def __init__(self, layer, place):
        super().__init__()
        self.lazy_initialization(layer.keys, layer.values)
        self.place = place
        more = place.room - layer.keys.shape[2]
        # what is hidden has to be finite, because 0 · NaN is NaN
        self.keys = pad(layer.keys, (0, 0, 0, more))
        self.values = pad(layer.values, (0, 0, 0, more))

    def update(self, keys, values, *args, **kwargs):
        """Write the next token of each row. Returns the keys and values that the rows see."""
        self.keys.index_copy_(2, self.place.column, keys)
        self.values.index_copy_(2, self.place.column, values)
        width = self.place.width
        return self.keys[:, :, :width], self.values[:, :, :width]

    def get_seq_length(self):
        return self.place.width - 1

    def reorder_cache(self, order):
        """Keep these rows, in this order; only those that move are copied. order: (n,), on the
        CPU."""
        n = len(order)
        target = (order != torch.arange(n)).nonzero().squeeze(1)
        source = order[target].to(self.device, non_blocking=True)
        target = target.to(self.device, non_blocking=True)
        for whole in (self.keys, self.values):
            seen = whole[:, :, : self.place.width]
            seen[target] = seen[source]
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
