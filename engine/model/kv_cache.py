"""Keys and values, layer by layer, as transformers' Cache asks for them.

In sampling a layer has room for the tokens to come. The cache of transformers is copied as a whole
for every new token, and again when a completion has ended. Here a token is written in place, and
the last running completions move into the places of those that have ended. For most tokens nothing
is copied and nothing is allocated.

In scoring a prompt's layer is computed once, and its completions see it.
"""

import torch
from transformers.cache_utils import DynamicLayer

# --- sampling ---


class RoomyLayer(DynamicLayer):
    """Keys and values of one layer, (rows, heads, tokens, width). They are views into tensors that
    have more room.

    layer: a DynamicLayer that holds the prompts. repeats: completions of each prompt. longest:
    tokens that will come at most, with the prompt. If the room is full, a layer gets twice as much
    of it.
    """

    def __init__(self, layer, repeats, longest):
        super().__init__()
        self.lazy_initialization(layer.keys, layer.values)
        self.longest, length = longest, layer.keys.shape[2]
        self.rooms = [self.make_room(x, repeats) for x in (layer.keys, layer.values)]
        self.show(len(layer.keys) * repeats, length)

    def make_room(self, x, repeats=1):
        """A tensor with twice the room of x, with each row of x as often as `repeats` says."""
        rows, heads, length, width = x.shape
        room = x.new_empty(rows, repeats, heads, min(2 * length, self.longest), width)
        room[:, :, :, :length] = x.unsqueeze(1)
        return room.flatten(0, 1)

    def show(self, rows, length):
        self.keys, self.values = (room[:rows, :, :length] for room in self.rooms)

    def update(self, keys, values, *args, **kwargs):
        """Append one token to each row. Returns all keys and values."""
        rows, _, length, _ = self.keys.shape
        for i, new in enumerate((keys, values)):
            if length == self.rooms[i].shape[2]:
                self.rooms[i] = self.make_room(self.rooms[i][:rows])
            self.rooms[i][:rows, :, length : length + 1] = new
        self.show(rows, length + 1)
        return self.keys, self.values

    def move(self, rows, source, target):
        """Keep so many rows, after the rows `source` have moved to the places `target`."""
        length = self.keys.shape[2]
        for room in self.rooms:
            room[target, :, :length] = room[source, :, :length]
        self.show(rows, length)


def give_room(cache, rows, repeats, longest, device):
    """Repeat each of the rows of a cache on a device, and give its layers room.

    Layers of another kind, for example of a sliding window or with a state in place of keys, stay
    as transformers made them.
    """
    repeated = torch.arange(rows, device=device).repeat_interleave(repeats)
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[i] = RoomyLayer(layer, repeats, longest)
        else:
            layer.reorder_cache(repeated)


def keep_rows(cache, rows, device):
    """Keep only these rows of a cache on a device. Returns them, on the device, in the order in
    which they now stand.

    rows: (n,), ascending, on the CPU. The last ones move into the places of those that leave.
    """
    n = len(rows)
    source, order, free = rows[rows >= n], torch.arange(n), torch.ones(n, dtype=torch.bool)
    free[rows[rows < n]] = False
    target = free.nonzero().squeeze(1)
    order[target] = source
    target, source, order = (x.to(device, non_blocking=True) for x in (target, source, order))
    for layer in cache.layers:
        if type(layer) is RoomyLayer:
            layer.move(n, source, target)
        else:
            layer.reorder_cache(order)
    return order


# --- scoring ---


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
            before = self.keys[self.prompt_of_row], self.values[self.prompt_of_row]
            return torch.cat([before[0], keys], dim=-2), torch.cat([before[1], values], dim=-2)
        if not self.is_initialized:
            self.keys, self.values, self.is_initialized = keys, values, True
        return keys, values
