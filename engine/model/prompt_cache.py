"""Keys and values of prompts, and what completions see of them, layer by layer, as transformers'
Cache asks for it."""

import torch
from transformers.cache_utils import DynamicLayer


class PromptLayer(DynamicLayer):
    """The keys and values of prompts. They are written once: with gradient checkpointing a layer is
    computed again."""

    def update(self, keys, values, *args, **kwargs):
        if not self.is_initialized:
            self.keys, self.values, self.is_initialized = keys, values, True
        return keys, values


class CompletionLayer(DynamicLayer):
    """What completions see: the keys and values of each row's prompt, then the row's own.

    The row's own are not kept, because one pass reads whole completions.
    """

    def __init__(self, prompts, prompt_of_row):
        super().__init__()
        self.keys, self.values, self.is_initialized = prompts.keys, prompts.values, True
        self.prompt_of_row = prompt_of_row

    def update(self, keys, values, *args, **kwargs):
        before = self.keys[self.prompt_of_row], self.values[self.prompt_of_row]
        return torch.cat([before[0], keys], dim=-2), torch.cat([before[1], values], dim=-2)
