"""Loading a model: what is refused, what is never run, and how long its prompts may be."""

import copy
import json
import os
import pickle
import shutil
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub as hub
import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    MiniMaxConfig,
    Phi3Config,
    Qwen2ForCausalLM,
    Qwen3_5TextConfig,
    T5Config,
)
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from engine.base.errors import UserError
from engine.model import folders
from engine.model.folders import prompt_room, resolve_model
from engine.model.loading import fuse_norms, load_model
from engine.run.shapes import skeleton
from tests.engine.test_logprobs import SIZES, make
from tests.helpers.examples import seeded
from tests.helpers.training import CPU


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fused_norm_gives_what_transformers_own_gives(dtype):
    class DoubledRMSNorm(LlamaRMSNorm):
        def forward(self, x):
            return 2 * super().forward(x)

    def equal(*pair):
        tolerance = 1e-5 if dtype == torch.float32 else 0.02  # one rounding instead of two
        torch.testing.assert_close(*pair, rtol=tolerance, atol=tolerance)

    x = torch.randn(3, 5, 32, generator=seeded(0)).to(dtype)
    norms = torch.nn.ModuleList([LlamaRMSNorm(32), GemmaRMSNorm(32), DoubledRMSNorm(32)])
    for norm in norms.to(dtype):
        norm.weight.data = torch.linspace(0.5, 2, 32, dtype=dtype)
    expected = [norm(x) for norm in norms]
    fuse_norms(norms)
    assert ["forward" in vars(norm) for norm in norms] == [True, False, False]
    equal([norm(x) for norm in norms], expected)
    # a copy has its own weight
    for other in (copy.deepcopy(norms[0]), pickle.loads(pickle.dumps(norms[0]))):
        other.weight.data.mul_(3)
        equal(other(x), 3 * norms[0](x))


def refused(folder, reason):
    with pytest.raises(UserError, match=f"^.*{reason}.*$"):
        load_model(str(folder), CPU)


@pytest.fixture
def folder(small, tmp_path):
    """A folder with a model, to be damaged."""
    return shutil.copytree(small, tmp_path / "model")


def saved(config):
    """Damage: a model of another kind."""
    return lambda folder: AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def configured(**changes):
    """Damage: another config."""
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def without(pattern):
    """Damage: files are missing."""
    return lambda folder: [file.unlink() for file in folder.glob(pattern)]


def weighted(**norm):
    """Damage: another final norm, or none."""
    def change(folder):
        tensors = load_file(folder / "model.safetensors")
        del tensors["model.norm.weight"]
        tensors |= {f"model.norm.{name}": tensor for name, tensor in norm.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return change


def adapted(folder):
    """Damage: an adapter on the head."""
    model = load_model(str(folder), CPU)[0]
    model.add_adapter(LoraConfig(r=2, init_lora_weights=False, target_modules=["lm_head"]))
    model.save_pretrained(folder)


BITS = {"quant_method": "bitsandbytes", "load_in_4bit": True}
DAMAGES = [  # (damage, what is said)
    (saved(GraniteConfig(**SIZES, num_key_value_heads=4, logits_scaling=8.0)),
     "rescales its logits"),
    # tanh hardly changes the small logits of a probe
    (saved(Gemma2Config(**SIZES, num_key_value_heads=4, head_dim=8, final_logit_softcapping=30.0)),
     "rescales its logits"),
    (adapted, "rescales its logits"),
    (saved(MiniMaxConfig(**SIZES, num_key_value_heads=4, num_local_experts=2, block_size=8)),
     "sampled from here [(].*earlier checkpoint"),
    # without a layer of keys and values; its base model is itself
    (saved(Qwen3_5TextConfig(**SIZES, head_dim=8, layer_types=["linear_attention"] * 2)),
     "sampled from here [(]ValueError: .get_seq_length"),
    # without the package for it
    (configured(quantization_config=BITS), "cannot be loaded [(]ImportError.* not quantized"),
    (T5Config(vocab_size=22, d_model=32, num_layers=1).save_pretrained,
     "cannot be loaded [(]ValueError.*T5Config'>[)]: name a causal language model"),
    (without("*token*"), "it holds no tokenizer[)]: name .* with its tokenizer"),
    (weighted(weight=torch.full([64], torch.nan)), "not finite"),
    (weighted(), "lack model.norm.weight"),
    (without("model.safetensors"), "model"), (without("config.json"), "config"),
]


@pytest.mark.parametrize("damage, reason", DAMAGES)
def test_a_model_that_is_damaged_or_cannot_be_scored_or_sampled_from_is_refused(
    damage, reason, folder
):
    damage(folder)
    refused(folder, reason)


def test_quantized_weights_that_can_be_loaded_are_refused_too(folder, monkeypatch):
    monkeypatch.setattr(Qwen2ForCausalLM, "is_quantized", True, raising=False)
    refused(folder, "quantized")


class Program:
    def __reduce__(self):
        return open, (Program.trace, "w")  # what unpickling would do


def test_pickled_weights_are_loaded_if_they_are_tensors_and_never_run(folder, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    load_model(str(folder), CPU)
    Program.trace = str(tmp_path / "it ran")
    torch.save({**tensors, "lm_head.weight": Program()}, folder / "pytorch_model.bin")
    refused(folder, "cannot be loaded")
    assert not (tmp_path / "it ran").exists()


def test_code_that_a_model_brings_is_never_run_and_nobody_is_asked(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question on the terminal"))
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'it ran')!r}, 'w')\nclass C: pass\n")
    own = {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.C"}
    configured(model_type="mine", auto_map=own)(folder)
    refused(folder, "custom code")
    with pytest.raises(UserError, match="custom code"):
        skeleton(str(folder))
    assert not (tmp_path / "it ran").exists()


@pytest.mark.parametrize("name, reason", [
    ("runs/toy", "does not exist"), ("half", "holds no model: .*config.json"),
])
def test_what_looks_like_a_folder_is_not_looked_for_on_the_hub(name, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folders, "ask_hub", lambda *_: pytest.fail("the hub was asked"))
    Path("runs").mkdir()
    Path("half").mkdir()
    Path("half/tokenizer.json").touch()
    with pytest.raises(UserError, match=f"{name} {reason}"):
        resolve_model(name)


@pytest.mark.parametrize("error, offline", [(None, "0"), (ConnectionError, "1")])
def test_the_hub_is_asked_once_for_a_name_and_is_left_alone_if_it_does_not_answer(
    error, offline, monkeypatch
):
    asked = Mock(side_effect=error)
    monkeypatch.setattr(hub, "get_hf_file_metadata", asked)
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    folders.ask_hub.cache_clear()
    assert [resolve_model("me/model") for _ in range(3)] == ["me/model"] * 3
    asked.assert_called_once()
    assert asked.call_args.kwargs["timeout"] == 5
    # where transformers and datasets look
    assert os.environ["HF_HUB_OFFLINE"] == offline
    assert hub.constants.HF_HUB_OFFLINE == (offline == "1")


def test_prompts_leave_room_for_the_completion_in_the_context():
    """A longer row of a LongRoPE model would turn the angles of the rows beside it: its original
    length is the limit."""
    model = make("gpt2")
    assert prompt_room(model, 20, 512) == 44 and prompt_room(model, 20, 10) == 10
    with pytest.raises(UserError, match="--max_new_tokens"):
        prompt_room(model, 64, 10)
    model.config = Phi3Config(
        **SIZES, max_position_embeddings=64, original_max_position_embeddings=16, pad_token_id=0,
        rope_parameters={
            "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [8.0] * 4,
            "rope_theta": 100.0,
        },
    )
    assert prompt_room(model, 10, 512) == 6
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
    model.config = LlamaConfig(max_position_embeddings=32, rope_parameters=rope)
    assert prompt_room(model, 10, 512) == 22
