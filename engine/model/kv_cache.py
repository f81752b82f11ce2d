"""Keys and values, layer by layer, as transformers' Cache asks for them.

In sampling a layer has room for all tokens to come. The cache of transformers is copied as a whole
for every new token, and again when a completion has ended. Here a token is written in place, and
the last running completions move into the places of those that have ended.

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
    """Keys and values of one layer, (rows, heads, tokens, width). They are views into tensors that
    have room for more tokens.

    layer: the DynamicLayer whose place this one takes. longest: tokens at most, with the prompt.
    """

    def __init__(self, layer, longest):
        super().__init__()
        self.lazy_initialization(layer.keys, layer.values)
        rows, heads, _, width = layer.keys.shape
        self.rooms = [
            layer.keys.new_empty(rows, heads, longest, width),
            layer.values.new_empty(rows, heads, longest, layer.values.shape[3]),
        ]
        self.view(rows, 0)
        self.update(layer.keys, layer.values)

    def view(self, rows, length):
        """Let keys and values be the part of the rooms that is in use."""
        self.keys = self.rooms[0][:rows, :, :length]
        self.values = self.rooms[1][:rows, :, :length]

    def update(self, keys, values, *args, **kwargs):
        """Append tokens to each row. Returns all keys and values."""
        rows = len(keys)
        length = self.keys.shape[2]
        self.view(rows, length + keys.shape[2])
        self.keys[:, :, length:] = keys
        self.values[:, :, length:] = values
        return self.keys, self.values

    def reorder_cache(self, order):
        """Keep these rows, in this order; only those that move are copied. order: (n,), on the
        CPU."""
        n = len(order)
        length = self.keys.shape[2]
        target = (order != torch.arange(n)).nonzero().squeeze(1)
        source = order[target].to(self.device, non_blocking=True)
        target = target.to(self.device, non_blocking=True)
        for room in self.rooms:
            room[target, :, :length] = room[source, :, :length]
        self.view(n, length)


def give_room(cache, order, longest):
    """Repeat the rows of a cache in this order, and give its layers room.

    Layers of another kind, for example of a sliding window or with a state in place of keys, stay
    as transformers made them.
    """
    cache.reorder_cache(order)
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[i] = RoomyLayer(layer, longest)


def keep_rows(cache, rows, device):
    """Keep only these rows of a cache. Returns them, on the device, in the order in which they now
    stand.

    rows: (n,), ascending, on the CPU. The last ones move into the places of those that leave.
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
