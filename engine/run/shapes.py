"""Weight shapes of a model, known before any weights are loaded.

Only the model's config.json is read. shapes.json holds what matters of it for the toy and the usual
models, so their memory can be planned without a network. transformers makes the model on PyTorch's
`meta` device, where a tensor has a shape but no memory.
"""

import functools
import json
from pathlib import Path

import torch

from engine.base.errors import UserError
from engine.model.folders import base_of, resolve_model, why_unread


@functools.cache  # a plan asks for each lever
def skeleton(name):
    """The causal language model `name` on the `meta` device.

    name: of shapes.json (also with -Instruct, -Base or -Coder), a folder's, a run's, or the hub's.
    Raises UserError if its config.json cannot be read.
    """
    import transformers  # takes a second, and `--help` does not need it

    published = json.loads(Path(__file__).with_suffix(".json").read_text())
    base = name.removesuffix("-Instruct").removesuffix("-Base")
    base = base.replace("Qwen2.5-Coder-", "Qwen2.5-")  # has the same shapes
    try:
        if base in published:
            config = transformers.AutoConfig.for_model(**published[base])
        else:
            config = transformers.AutoConfig.from_pretrained(
                base_of(resolve_model(name)), trust_remote_code=False)
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(
            f"the config.json of {name} cannot be read ({why_unread(name, error)}): name a folder "
            "that holds it, or go online.") from None


def widths(shape):
    """Numbers per token of the (stream, queries, keys, MLP) of a layer. shape: a model's config.

    Raises UserError if it is not that of equal layers as in Qwen or Llama.
    """
    try:
        hidden = int(shape.hidden_size)
        heads = int(shape.num_attention_heads)
        key_heads = int(shape.num_key_value_heads)
        inner = int(shape.intermediate_size)
    except (AttributeError, TypeError):
        raise UserError(
            f"the memory of a model of type {shape.model_type} cannot be planned, because its "
            "layers are not like those of Qwen or Llama: train without --plan, and lower "
            "--micro_batch_tokens if memory runs out.") from None
    head = getattr(shape, "head_dim", None) or hidden // heads
    return hidden, heads * head, key_heads * head, inner
