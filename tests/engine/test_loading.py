"""Loading a model: what is refused, what is never run, and how long its prompts may be."""

import copy
import ctypes
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub as hub
import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GraniteConfig,
    Llama4TextConfig,
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
from tests.engine.runs import ROOT
from tests.engine.test_logprobs import SIZES, make
from tests.examples import seeded
from tests.training import CPU


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fused_norm_gives_what_transformers_own_gives(dtype):
    class DoubledRMSNorm(LlamaRMSNorm):
        def forward(self, x):
            return 2 * super().forward(x)

    x = torch.randn(3, 5, 32, generator=seeded(0)).to(dtype)
    norms = torch.nn.ModuleList([LlamaRMSNorm(32), GemmaRMSNorm(32), DoubledRMSNorm(32)])
    for norm in norms.to(dtype):
        norm.weight.data = torch.linspace(0.5, 2, 32, dtype=dtype)
    expected = [norm(x) for norm in norms]
    fuse_norms(norms)
    assert ["forward" in vars(norm) for norm in norms] == [True, False, False]
    tolerance = 1e-5 if dtype == torch.float32 else 0.02  # one rounding instead of two
    for norm, before in zip(norms, expected):
        torch.testing.assert_close(norm(x), before, rtol=tolerance, atol=tolerance)
    # a copy has its own weight
    for other in (copy.deepcopy(norms[0]), pickle.loads(pickle.dumps(norms[0]))):
        other.weight.data.mul_(3)
        torch.testing.assert_close(other(x), 3 * norms[0](x), rtol=tolerance, atol=tolerance)


def refused(folder, reason):
    with pytest.raises(UserError, match=f"^.*{reason}.*$"):
        load_model(str(folder), CPU)


@pytest.mark.parametrize("config, reason", [
    (GraniteConfig(**SIZES, num_key_value_heads=4, logits_scaling=8.0), "rescales its logits"),
    # tanh hardly changes the small logits of a probe
    (Gemma2Config(**SIZES, num_key_value_heads=4, head_dim=8, final_logit_softcapping=30.0),
     "rescales its logits"),
    (MiniMaxConfig(**SIZES, num_key_value_heads=4, num_local_experts=2, block_size=8),
     "keys and values"),
    # without a layer of keys and values; its base model is itself
    (Qwen3_5TextConfig(**SIZES, head_dim=8, layer_types=["linear_attention"] * 2),
     "first forward pass fails [(]ValueError: .get_seq_length"),
    (Llama4TextConfig(**SIZES, num_key_value_heads=4, intermediate_size_mlp=48, head_dim=8,
                      num_local_experts=2),
     "first forward pass fails [(]AttributeError"),
])
def test_a_model_that_cannot_be_scored_or_sampled_from_here_is_refused(
    config, reason, tmp_path, loaded
):
    for part in (AutoModelForCausalLM.from_config(config), loaded[1]):
        part.save_pretrained(tmp_path)
    refused(tmp_path, reason)


def test_a_model_that_is_no_causal_one_or_whose_weights_are_quantized_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {
        "quant_method": "bitsandbytes", "load_in_4bit": True}}))
    refused(folder, "cannot be loaded [(]ImportError.* not quantized")  # without its package
    T5Config(vocab_size=22, d_model=32, num_layers=1).save_pretrained(folder)
    refused(folder, "cannot be loaded [(]ValueError.*T5Config'>[)]: name a causal language model")


@pytest.mark.parametrize("kind", ["llama", "qwen2"])  # for qwen2 transformers makes one
def test_a_folder_without_a_tokenizer_is_refused(folder, kind):
    for file in folder.glob("*token*"):
        file.unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": kind}))
    refused(folder, "it holds no tokenizer[)]: name .* with its tokenizer")


def test_quantized_weights_that_can_be_loaded_are_refused_too(folder, monkeypatch):
    monkeypatch.setattr(Qwen2ForCausalLM, "is_quantized", True, raising=False)
    refused(folder, "quantized")


def test_an_adapter_on_the_head_is_refused(loaded, tmp_path):
    loaded[0].add_adapter(LoraConfig(r=2, init_lora_weights=False, target_modules=["lm_head"]))
    for part in loaded:
        part.save_pretrained(tmp_path)
    refused(tmp_path, "rescales its logits")


@pytest.fixture
def folder(small, tmp_path):
    """A folder with a model, to be damaged."""
    return shutil.copytree(small, tmp_path / "model")


@pytest.mark.parametrize("norm, reason", [
    ({"model.norm.weight": torch.full([64], torch.nan)}, "not finite"),
    ({"model.norm.weight": torch.ones(60)}, "cannot be loaded"), ({}, "lack model.norm.weight"),
], ids=range(3))  # fmt: skip
def test_weights_that_are_damaged_or_lack_something_are_refused(folder, norm, reason):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors | norm, folder / "model.safetensors", {"format": "pt"})
    refused(folder, reason)


@pytest.mark.parametrize("missing", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_folder_that_lacks_a_file_is_refused(folder, missing):
    (folder / missing).unlink()
    refused(folder, missing.split(".")[0])


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
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "mine"}
    config["auto_map"] = {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.C"}
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, "custom code")
    with pytest.raises(UserError, match="custom code"):
        skeleton(str(folder))
    assert not (tmp_path / "it ran").exists()


@pytest.mark.parametrize("name, reason", [
    *((name, "does not exist") for name in (
        "runs/toy", "mine/toy", "./toy", "/nowhere/toy", "~/a", "a/b/c")),
    ("mine", "holds no model: .*config.json"), ("half", "holds no model: .*config.json"),
    ("weights", "is a file: name the folder"), ("./weights", "is a file: name the folder"),
])
def test_what_looks_like_a_folder_is_not_looked_for_on_the_hub(name, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folders, "ask_hub", lambda *_: pytest.fail("the hub was asked"))
    for folder in ("mine", "half"):
        Path(folder).mkdir()
    for file in ("weights", "half/tokenizer.json"):
        Path(file).touch()
    with pytest.raises(UserError, match=f"{name} {reason}"):
        resolve_model(name)


@pytest.mark.parametrize("error, offline", [
    (None, False), (HfHubHTTPError, False), (ConnectionError, True),
])
def test_the_hub_is_asked_once_for_a_name_and_is_left_alone_if_it_does_not_answer(
    error, offline, tmp_path, monkeypatch
):
    def answer(url, timeout):
        asked.append(timeout)
        if error:
            raise error.__new__(error)

    asked = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "get_hf_file_metadata", answer)
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "0")
    folders.ask_hub.cache_clear()
    assert [resolve_model("me/model") for _ in range(3)] == ["me/model"] * 3 and asked == [5]
    # where transformers, datasets look
    assert (hub.constants.HF_HUB_OFFLINE, os.environ["HF_HUB_OFFLINE"] == "1") == (offline, offline)


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


# --- the memory of a CPU ---

PAGES = """
import ctypes, resource
import torch
from engine.model.loading import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    [torch.ones(6_000_000) for _ in range(8)]  # 24 MB each
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

for limit in (-3, -1):
    ctypes.CDLL(None).mallopt(limit, 2**17)  # glibc's own limits, as they are at the start
given_back = [faults() for _ in range(5)][-1]
keep_freed_memory()
print(given_back, [faults() for _ in range(5)][-1])
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="glibc only")
def test_freed_memory_is_kept_for_the_tensors_to_come():
    done = subprocess.run(
        [sys.executable, "-c", PAGES], cwd=ROOT, capture_output=True, text=True, check=True)
    given_back, kept = map(int, done.stdout.split())
    assert given_back > 10_000 and kept < given_back / 20
