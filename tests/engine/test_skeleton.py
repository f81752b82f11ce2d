"""engine/model/skeleton.py: the shapes made here are those of transformers' own models."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from engine.model.skeleton import Decoder, skeleton
from engine.tasks.toy_model import make_model, make_tokenizer

pytestmark = pytest.mark.slow

SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2}
CONFIGS = {
    "qwen2, tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2, untied": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "llama": LlamaConfig(**SIZES),
    "llama, biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, head_dim=16),
    "mistral": MistralConfig(**SIZES, head_dim=16, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "qwen3, biases": Qwen3Config(**SIZES, head_dim=16, attention_bias=True),
}


def look(model):
    """All that a plan asks of a model."""
    layers = next(m for m in model.base_model.modules() if isinstance(m, torch.nn.ModuleList))
    linear = [tuple(m.weight.shape) for m in model.base_model.modules() if isinstance(m, torch.nn.Linear)]
    return {
        "parameters": sorted(p.numel() for p in model.parameters()),
        "the critic's": sorted(p.numel() for p in model.base_model.parameters()),
        "of a layer": [sum(p.numel() for p in layer.parameters()) for layer in layers],
        "linear": sorted(linear),
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_a_decoder_has_the_weights_of_transformers_model(name, tmp_path):
    CONFIGS[name].save_pretrained(tmp_path)
    ours = skeleton(SimpleNamespace(model=str(tmp_path), dataset="gsm8k"))
    assert isinstance(ours, Decoder) and all(p.is_meta for p in ours.parameters())
    assert look(ours) == look(AutoModelForCausalLM.from_config(CONFIGS[name]))


@pytest.mark.parametrize("dataset, kind", [("toy", "base"), ("toy_code", "code")])
def test_so_has_the_toys(dataset, kind):
    ours = skeleton(SimpleNamespace(model="toy", dataset=dataset))
    assert isinstance(ours, Decoder) and look(ours) == look(make_model(make_tokenizer(kind)))


def test_another_model_is_transformers_own(tmp_path):
    config = GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4)
    config.save_pretrained(tmp_path)
    theirs = skeleton(SimpleNamespace(model=str(tmp_path), dataset="gsm8k"))
    assert not isinstance(theirs, Decoder) and all(p.is_meta for p in theirs.parameters())
    assert look(theirs)["parameters"] == look(AutoModelForCausalLM.from_config(config))["parameters"]
