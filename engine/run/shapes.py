"""The shapes of a model's weights, known before any weights are loaded.

Only the model's config.json is read; the table below stands for that of the usual models, so their
memory can be planned without a network. transformers makes the model on PyTorch's `meta` device,
where a tensor has a shape but no memory.
"""

import functools
import operator

import torch

from engine.base.errors import UserError, one_line
from engine.model.folders import checkpoints, find
from engine.tasks.table import task_of

KEYS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "intermediate_size", "vocab_size", "tie_word_embeddings", "max_position_embeddings",
)
PUBLISHED = {  # from each model's config.json on the hub: the model type, and the KEYS
    "Qwen/Qwen2.5-0.5B": ("qwen2", 896, 24, 14, 2, 4864, 151_936, True, 32_768),
    "Qwen/Qwen2.5-1.5B": ("qwen2", 1536, 28, 12, 2, 8960, 151_936, True, 32_768),
    "Qwen/Qwen2.5-3B": ("qwen2", 2048, 36, 16, 2, 11_008, 151_936, True, 32_768),
    "Qwen/Qwen2.5-7B": ("qwen2", 3584, 28, 28, 4, 18_944, 152_064, False, 32_768),
    "Qwen/Qwen3-0.6B": ("qwen3", 1024, 28, 16, 8, 3072, 151_936, True, 40_960),
    "Qwen/Qwen3-1.7B": ("qwen3", 2048, 28, 16, 8, 6144, 151_936, True, 40_960),
    "Qwen/Qwen3-4B": ("qwen3", 2560, 36, 32, 8, 9728, 151_936, True, 40_960),
    "Qwen/Qwen3-8B": ("qwen3", 4096, 36, 32, 8, 12_288, 151_936, False, 40_960),
    "meta-llama/Llama-3.2-1B": ("llama", 2048, 16, 32, 8, 8192, 128_256, True, 131_072),
    "meta-llama/Llama-3.2-3B": ("llama", 3072, 28, 24, 8, 8192, 128_256, True, 131_072),
    "HuggingFaceTB/SmolLM2-135M": ("llama", 576, 30, 9, 3, 1536, 49_152, True, 8192),
    "HuggingFaceTB/SmolLM2-360M": ("llama", 960, 32, 15, 5, 2560, 49_152, True, 8192),
    "HuggingFaceTB/SmolLM2-1.7B": ("llama", 2048, 24, 32, 32, 8192, 49_152, True, 8192),
}


@functools.lru_cache(maxsize=4)  # the search for a command that fits asks again and again
def skeleton(name, dataset=None, kind="AutoModelForCausalLM"):
    """The model `name` on the `meta` device. Raises UserError if its config.json cannot be read.

    name: of the table (also with -Instruct or -Base), a folder's, a run's, or the hub's; `toy` is
    the base model of `dataset`. kind: a class of transformers.
    """
    import transformers  # takes a second, and `--help` does not need it

    try:
        row = PUBLISHED.get(name.removesuffix("-Instruct").removesuffix("-Base"))
        if name == "toy":
            from engine.tasks import toy_model

            tokenizer = toy_model.make_tokenizer(task_of(dataset).base or "base")
            shape = toy_model.make_config(tokenizer)
        elif row:
            # of the other models: hidden size / heads
            head = {"head_dim": 128} if row[0] == "qwen3" else {}
            shape = transformers.AutoConfig.for_model(row[0], **dict(zip(KEYS, row[1:])), **head)
        else:
            find(name)  # one question to the hub, in place of half a minute of them
            source = [name, *checkpoints(name)][-1]
            shape = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
        with torch.device("meta"):
            return getattr(transformers, kind).from_config(shape, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(
            f"the config.json of {name} cannot be read ({one_line(error)}): name a "
            "folder that holds it, or go online."
        ) from None


def widths(shape):
    """(hidden, heads, key-value heads, head, MLP) of a model's config. Raises UserError if they
    differ by layer."""
    try:
        hidden, heads = shape.hidden_size, shape.num_attention_heads
        usual = {
            "num_key_value_heads": heads, "head_dim": hidden // heads,
            "intermediate_size": 4 * hidden,
        }
        others = [getattr(shape, name, None) or value for name, value in usual.items()]
        return tuple(map(operator.index, [hidden, heads, *others]))
    except (AttributeError, TypeError):
        raise UserError(
            f"the memory of a model of type {shape.model_type} cannot be planned, because its "
            "layers differ: train without --plan, and lower --micro_batch_tokens if memory runs "
            "out."
        ) from None
