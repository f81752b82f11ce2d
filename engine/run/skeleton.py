"""The weights of a model as shapes without numbers, on PyTorch's `meta` device, where a tensor
takes no memory.

Only the model's config.json is read, and shapes.py knows the usual models without it. transformers
takes two seconds to import the code of a model, so the skeletons of the usual decoders are made
here. transformers makes the skeletons of all other models. """

import operator

import torch
from torch.nn import Linear, ModuleList, Parameter, RMSNorm, Sequential

from engine.base.errors import UserError
from engine.model.folders import checkpoints, find
from engine.run.shapes import published
from engine.tasks.table import task_of

DECODERS = ("llama", "mistral", "qwen2", "qwen3")  # the model types that `Decoder` knows


def skeleton(config):
    """The skeleton of a run's model. Raises UserError if its config.json cannot be read."""
    name = config.model
    try:
        with torch.device("meta"):
            if name == "toy":
                from engine.tasks.toy_model import make_config, make_tokenizer

                return Decoder(make_config(make_tokenizer(task_of(config.dataset).base or "base")))
            shape = shape_of(name)
            if shape.model_type in DECODERS:
                return Decoder(shape)
            from transformers import AutoModelForCausalLM

            return AutoModelForCausalLM.from_config(shape, trust_remote_code=False)
    except (OSError, ValueError) as error:
        from engine.model.loading import why

        raise UserError(
            f"the config.json of {name} cannot be read ({why(error, name).rstrip('.')}): name a "
            "folder that holds it, or go online."
        ) from None


def shape_of(name):
    """The config of a model: a folder's, a run's, the one in the hub's cache, a published one, else
    the hub's."""
    from transformers import AutoConfig

    known = published(name)
    if known is None:
        find(name)  # one question to the hub, in place of half a minute of them
    try:  # a model whose shape is known is not looked for in the network
        return AutoConfig.from_pretrained(
            [name, *checkpoints(name)][-1], local_files_only=known is not None,
            trust_remote_code=False,
        )
    except OSError:
        if known is None:
            raise
        return known


def widths(shape):
    """(hidden, heads, key-value heads, head, MLP) of a model's config. Raises UserError if they
    differ by layer."""
    try:
        hidden, heads = shape.hidden_size, shape.num_attention_heads
        optional = [
            getattr(shape, name, None)
            for name in ("num_key_value_heads", "head_dim", "intermediate_size")
        ]
        found = (
            hidden, heads,
            *(
                given or usual
                for given, usual in zip(optional, (heads, hidden // heads, 4 * hidden))
            ),
        )
        return tuple(map(operator.index, found))
    except (AttributeError, TypeError):
        raise UserError(
            f"the memory of a model of type {shape.model_type} cannot be planned, because its "
            "layers differ: train without --plan, and lower --micro_batch_tokens if memory runs "
            "out."
        ) from None


class Decoder(torch.nn.Module):
    """The weights of a dense decoder, with the shapes of transformers. They are only counted: there
    is no forward."""

    def __init__(self, shape):
        super().__init__()
        hidden, heads, kv_heads, head, inner = widths(shape)
        out, mlp = getattr(shape, "attention_bias", False), getattr(shape, "mlp_bias", False)
        qkv = out or shape.model_type == "qwen2"
        # norms of the queries and of the keys
        small = [head, head] if shape.model_type == "qwen3" else []

        def layer():
            attention = [Linear(hidden, n * head, bias=qkv) for n in (heads, kv_heads, kv_heads)]
            attention.append(Linear(heads * head, hidden, bias=out))
            gate, up = Linear(hidden, inner, bias=mlp), Linear(hidden, inner, bias=mlp)
            down = Linear(inner, hidden, bias=mlp)
            return Sequential(*attention, gate, up, down, *map(RMSNorm, [hidden, hidden, *small]))

        # no Embedding: to fill one with random numbers, torch would import its compiler
        table = lambda: Parameter(torch.empty(shape.vocab_size, hidden))
        self.config, self.base_model = shape, torch.nn.Module()
        self.base_model.embedding, self.base_model.norm = table(), RMSNorm(hidden)
        self.base_model.layers = ModuleList(layer() for _ in range(shape.num_hidden_layers))
        self.head = self.base_model.embedding if shape.tie_word_embeddings else table()
