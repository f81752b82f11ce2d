"""Loading a model: in which precision, what is refused, and how long its prompts may be."""

import json
import os
import shutil

import huggingface_hub as hub
import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    MiniMaxConfig,
    MiniMaxForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from engine.base.errors import UserError
from engine.model import folders
from engine.model.folders import prompt_room, resolve_model
from engine.model.loading import load_model
from engine.run.shapes import skeleton
from engine.scoring.score import choose
from tests.engine.test_logprobs import SIZES, make

CPU = torch.device("cpu")


def save(model, folder, small):
    """A model with random weights in a folder, with the toy's tokenizer."""
    model.save_pretrained(folder)
    load_model(small, CPU)[1].save_pretrained(folder)
    return str(folder)


def granite():
    config = GraniteConfig(**SIZES, num_key_value_heads=4, logits_scaling=8.0)
    return GraniteForCausalLM(config)


def gemma2():
    """tanh hardly changes the small logits of a probe."""
    config = Gemma2Config(**SIZES, num_key_value_heads=4, head_dim=8, final_logit_softcapping=30.0)
    return Gemma2ForCausalLM(config)


def minimax():
    config = MiniMaxConfig(**SIZES, num_key_value_heads=4, num_local_experts=2, block_size=8)
    return MiniMaxForCausalLM(config)


@pytest.mark.parametrize("make_it, reason", [
    (granite, "rescales its logits"), (gemma2, "rescales its logits"), (minimax, "has a cache"),
])  # fmt: skip
def test_a_model_that_cannot_be_scored_or_sampled_from_here_is_refused(
    make_it, reason, tmp_path, small
):
    folder, before = save(make_it(), tmp_path, small), torch.get_rng_state()
    with pytest.raises(UserError, match=reason):
        load_model(folder, CPU, "bfloat16" if make_it is gemma2 else "auto", frozen=True)
    load_model(small, CPU)
    assert torch.equal(torch.get_rng_state(), before)  # of a run that is resumed, for example


@pytest.fixture
def folder(small, tmp_path):
    """(a folder with a model, its tensors), to be damaged."""
    shutil.copytree(small, tmp_path / "model")
    return tmp_path / "model", load_file(tmp_path / "model/model.safetensors")


def refused(folder, *, load=lambda name: load_model(name, CPU)):
    with pytest.raises(UserError) as error:
        load(str(folder))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("change, reason", [
    (lambda x: x.fill_(torch.nan), "not finite"), (lambda x: x.fill_(torch.inf), "not finite"),
    (lambda x: x.mul_(1e38), "not finite"), (lambda x: torch.ones(60), "in another shape"),
    (lambda x: None, "lack model.norm.weight"),
])  # fmt: skip
def test_weights_that_are_damaged_or_lack_something_are_refused_for_what_they_are(
    folder, change, reason
):
    folder, tensors = folder
    tensors["model.norm.weight"] = change(tensors["model.norm.weight"])
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert reason in refused(folder)


class Program:
    def __reduce__(self):
        return open, (Program.trace, "w")  # what unpickling would do


def test_pickled_weights_are_loaded_if_they_are_tensors_and_never_run(folder, tmp_path):
    folder, tensors = folder
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    load_model(str(folder), CPU)
    Program.trace = str(tmp_path / "it ran")
    torch.save({**tensors, "lm_head.weight": Program()}, folder / "pytorch_model.bin")
    for content in (None, b"hello"):
        if content:
            (folder / "pytorch_model.bin").write_bytes(content)
        assert "cannot be loaded" in refused(folder)
    assert not (tmp_path / "it ran").exists()


def test_code_that_a_model_brings_is_never_run_and_nobody_is_asked(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question on the terminal"))
    folder, _ = folder
    code = f"open({str(tmp_path / 'it ran')!r}, 'w')\nclass C: pass\n"
    (folder / "mine.py").write_text(code)
    config = json.loads((folder / "config.json").read_text())
    brought = {
        "AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.C",
        "AutoModelForSequenceClassification": "mine.C",
    }
    (folder / "config.json").write_text(
        json.dumps(config | {"auto_map": brought, "model_type": "mine"})
    )
    reason = "it brings code of its own (auto_map), which is never run here"
    plan = lambda name: skeleton(name, "gsm8k")
    assert reason in refused(folder) and reason in refused(folder, load=plan)
    with pytest.raises(UserError, match="the reward model"):
        choose([f"RewardModel:{folder}"], CPU)
    # transformers knows qwen2
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": brought}))
    load_model(str(folder), CPU)
    assert not (tmp_path / "it ran").exists()


def test_a_broken_model_folder_is_told_in_one_sentence(small, tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        resolve_model(str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="no weights"):
        resolve_model(str(tmp_path))
    model, _ = load_model(small, CPU)
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="no tokenizer"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("name", ["runs/toy", "mine/toy", "./toy", "/nowhere/toy", "~/a", "a/b/c"])
def test_a_name_that_looks_like_a_folder_is_not_looked_for_on_the_hub(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(folders, "ask_hub", lambda *_: pytest.fail("the hub was asked"))
    (tmp_path / "mine").mkdir()
    with pytest.raises(UserError, match=f"{name} does not exist"):
        resolve_model(name)


@pytest.mark.parametrize("error, name, offline", [
    (None, "me/model", False), (HfHubHTTPError, "me/model", False), (None, "a:b", False),
    (ConnectionError, "me/model", True),
])  # fmt: skip
def test_the_hub_is_asked_once_for_a_name_and_is_left_alone_if_it_does_not_answer(
    error, name, offline, tmp_path, monkeypatch
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
    assert [resolve_model(name) for _ in range(3)] == [name] * 3
    assert asked == [5] * (":" not in name)
    # where transformers, datasets look
    assert (hub.constants.HF_HUB_OFFLINE, os.environ["HF_HUB_OFFLINE"] == "1") == (offline, offline)


def test_prompts_leave_room_for_the_completion_in_the_context():
    model = make("gpt2")
    assert prompt_room(model, 20, 512) == 44 and prompt_room(model, 20, 10) == 10
    with pytest.raises(UserError, match="context of 64 tokens leaves no room"):
        prompt_room(model, 64, 10)


def test_longrope_models_take_no_more_tokens_than_the_original_length():
    """One longer row would change the log-probabilities of the rows beside it: the angles of all
    turn."""
    rope = {
        "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [8.0] * 4,
        "rope_theta": 100.0,
    }
    config = Phi3Config(
        **SIZES, num_key_value_heads=4, max_position_embeddings=64,
        original_max_position_embeddings=16, pad_token_id=0, bos_token_id=None, eos_token_id=1,
        rope_parameters=rope,
    )
    assert prompt_room(Phi3ForCausalLM(config), 10, 512) == 6
    # turns all rows by other angles only beyond its context
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
    dynamic = LlamaConfig(**SIZES, max_position_embeddings=64, rope_parameters=rope)
    assert folders.context_of(dynamic) == 64


def test_routers_of_experts_hand_out_no_logits(tmp_path, small):
    """With them transformers computes a loss of the routers in each pass, and fails at the masks of
    sampling."""
    config = MixtralConfig(
        **SIZES, num_key_value_heads=2, num_local_experts=4, output_router_logits=True,
        pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )
    model, _ = load_model(save(MixtralForCausalLM(config), tmp_path, small), CPU)
    assert model(torch.tensor([[1, 2]])).router_logits is None
