"""engine/run/skeleton.py: the shapes made here are those of transformers' own models."""

from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from engine.run.shapes import PUBLISHED
from engine.run.skeleton import Decoder, skeleton
from engine.tasks.toy_model import make_model, make_tokenizer

pytestmark = pytest.mark.slow

SIZES = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}
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
    linear = [
        tuple(m.weight.shape) for m in model.base_model.modules() if isinstance(m, torch.nn.Linear)
    ]
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
    assert (
        look(theirs)["parameters"] == look(AutoModelForCausalLM.from_config(config))["parameters"]
    )


PARAMETERS = {  # as published on the hub; tied weights count once
    "Qwen/Qwen2.5-0.5B": 494_032_768, "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688, "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen3-0.6B": 596_049_920, "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096, "Qwen/Qwen3-8B": 8_190_735_360,
    "meta-llama/Llama-3.2-1B": 1_235_814_400, "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008, "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
}


def of(name):
    return skeleton(SimpleNamespace(model=name, dataset="gsm8k"))


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_published_shape_has_as_many_parameters_as_published(name):
    assert set(PARAMETERS) == set(PUBLISHED)
    for variant in (name, f"{name}-Instruct", f"{name}-Base"):
        assert sum(p.numel() for p in of(variant).parameters()) == PARAMETERS[name]


def test_a_config_in_the_cache_of_the_hub_wins_over_a_published_shape(tmp_path, monkeypatch):
    """And nothing is looked for in the network. For another model the hub is asked once first, so
    it fails fast."""
    def from_pretrained(name, local_files_only, trust_remote_code):
        asked.append(local_files_only)
        return CONFIGS["qwen2, tied"]

    asked = []
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", from_pretrained)
    monkeypatch.setattr("engine.run.skeleton.find", asked.append)
    assert (
        of("Qwen/Qwen2.5-0.5B").config.hidden_size == 32
        and of("somebody/else").config.hidden_size == 32
    )
    assert asked == [True, "somebody/else", False]
