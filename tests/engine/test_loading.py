"""Loading a model: in which precision, what is refused, and how long its prompts may be."""

import json
import os
import re
import shutil

import datasets
import huggingface_hub as hub
import pytest
import torch
from huggingface_hub.errors import RemoteEntryNotFoundError, RepositoryNotFoundError
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
from engine.model.folders import ask_hub, context_of, prompt_room, resolve_model
from engine.model.loading import load_model
from engine.model.logprobs import completion_logprobs
from engine.run.shapes import skeleton
from engine.scoring.score import choose
from engine.tasks import questions
from tests.engine.test_logprobs import SIZES, make

CPU = torch.device("cpu")


def save(model, folder, small):
    """A model with random weights in a folder, with the toy's tokenizer."""
    model.save_pretrained(folder)
    load_model(small, CPU)[1].save_pretrained(folder)
    return str(folder)


def test_weights_that_were_saved_in_bfloat16_are_loaded_as_float32(small, tmp_path):
    """In bfloat16 a step of lr 1e-6 is rounded away."""
    model, _ = load_model(small, CPU)
    model, _ = load_model(save(model.to(torch.bfloat16), tmp_path, small), CPU)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_dropout_is_off(tmp_path, small):
    """GPT-2 has dropout 0.1: with it on, π_θ would differ from π_old before the first update."""
    model, _ = load_model(save(make("gpt2"), tmp_path, small), CPU)
    assert model.config.resid_pdrop == 0.1 and not any(m.training for m in model.modules())


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
        assert "its pytorch_model.bin is damaged, or holds more than tensors" in refused(folder)
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


@pytest.mark.parametrize(
    "name", ["runs/toy-cpo-1", "mine/toy-cppo-1", "./toy", "/nowhere/toy", "~/toy", "a/b/c"]
)
def test_a_name_that_looks_like_a_folder_is_not_looked_for_on_the_hub(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        hub, "get_hf_file_metadata", lambda *_, **__: pytest.fail("the hub was asked")
    )
    (tmp_path / "runs/toy-cppo-1").mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    with pytest.raises(UserError) as error:
        resolve_model(name)
    assert name in str(error.value)
    assert ("did you mean runs/toy-cppo-1?" in str(error.value)) == name.startswith("runs")


def answering(monkeypatch, tmp_path, error):
    """A hub that answers with this error class, and an empty cache. Returns the list of what it was
    asked."""
    asked = []

    def answer(url, timeout):
        asked.append((url, timeout))
        if error:
            raise error.__new__(error)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "get_hf_file_metadata", answer)
    monkeypatch.setattr(
        hub, "try_to_load_from_cache",
        lambda name, file, repo_type: "a/file" if "cached" in name else None,
    )
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "0")
    ask_hub.cache_clear()
    return asked


@pytest.mark.parametrize("error, name", [
    (ConnectionError, "me/model"), (RepositoryNotFoundError, "me/model"), (None, "a:b"),
])  # fmt: skip
def test_a_model_that_the_hub_does_not_give_is_refused_after_one_question(
    error, name, tmp_path, monkeypatch
):
    asked = answering(monkeypatch, tmp_path, error)
    with pytest.raises(UserError, match=name):
        resolve_model(name)
    assert len(asked) == (":" not in name)
    assert all(url.endswith("config.json") and timeout <= 5 for url, timeout in asked)


@pytest.mark.parametrize("error", [None, RemoteEntryNotFoundError])
def test_a_hub_that_answers_is_asked_once_for_each_name(error, tmp_path, monkeypatch):
    asked = answering(monkeypatch, tmp_path, error)
    assert [resolve_model("me/model") for _ in range(3)] == ["me/model"] * 3
    assert len(asked) == 1 and not hub.constants.HF_HUB_OFFLINE


def test_without_a_hub_what_is_in_its_cache_is_used_and_the_hub_is_not_asked_again(
    tmp_path, monkeypatch
):
    answering(monkeypatch, tmp_path, ConnectionError)
    assert resolve_model("me/cached") == "me/cached"
    # where transformers, datasets look
    assert hub.constants.HF_HUB_OFFLINE and os.environ["HF_HUB_OFFLINE"] == "1"
    asked = answering(monkeypatch, tmp_path, ConnectionError)
    with pytest.raises(UserError, match="gsm8k cannot be loaded from the hub .*: go online"):
        questions.read_hub("gsm8k", questions.TASKS["gsm8k"].source, "train")
    assert (
        len(asked) == 1 and asked[0][0].endswith("datasets/openai/gsm8k/resolve/main/README.md")
        and hub.constants.HF_HUB_OFFLINE
    )


@pytest.mark.parametrize("name, columns", [
    ("gsm8k", ("question", "answer")), ("gsm8k_zh", ("question_zh-cn", "answer_only")),
])  # fmt: skip
def test_the_message_without_a_hub_makes_the_file(name, columns, tmp_path, monkeypatch):
    answering(monkeypatch, tmp_path, ConnectionError)
    with pytest.raises(UserError) as refused:
        questions.read_hub(name, questions.TASKS[name].source, "train")
    rows = datasets.Dataset.from_dict(
        {"question": ["1+2=?"], columns[0]: ["1 + 2 = ?"], columns[1]: ["3"], "more": [0]}
    )
    monkeypatch.setattr(datasets, "load_dataset", lambda path, configuration, split: rows)
    monkeypatch.chdir(tmp_path)
    exec(re.search('with python -c "(.*)", and name', str(refused.value))[1])
    assert questions.read_jsonl(f"{name}.jsonl") == [{"question": "1 + 2 = ?", "answer": "3"}]


def test_prompts_leave_room_for_the_completion_in_the_context():
    model = make("gpt2")
    assert prompt_room(model, 20, 512) == 44 and prompt_room(model, 20, 10) == 10
    with pytest.raises(UserError, match="context of 64 tokens leaves no room"):
        prompt_room(model, 64, 10)


def test_longrope_models_take_no_more_tokens_than_the_original_length():
    """One longer row would change the log-probabilities of the rows beside it."""
    torch.manual_seed(0)
    rope = {
        "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [8.0] * 4,
        "rope_theta": 100.0,
    }
    config = Phi3Config(
        **SIZES, num_key_value_heads=4, max_position_embeddings=64,
        original_max_position_embeddings=16, pad_token_id=0, bos_token_id=None, eos_token_id=1,
        initializer_range=0.5, rope_parameters=rope,
    )
    model = Phi3ForCausalLM(config).eval()

    # log-probabilities of a short completion, if so many tokens stand in the row beside it
    def beside(tokens):
        prompts, ids = [[3, 4, 5], [6] * (tokens - 2)], torch.tensor([[7, 8], [9, 10]])
        return completion_logprobs(model, prompts, ids, torch.tensor([2, 2]))[0].detach()

    assert (beside(17) - beside(16)).abs().max() > 0.01
    torch.testing.assert_close(beside(16), beside(4), rtol=1e-4, atol=1e-5)
    assert context_of(config) == 16 and prompt_room(model, 10, 512) == 6
    with pytest.raises(UserError, match="context of 16 tokens leaves no room"):
        prompt_room(model, 16, 10)


def test_dynamic_ntk_models_take_what_their_context_holds():
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
    assert context_of(LlamaConfig(**SIZES, max_position_embeddings=64, rope_parameters=rope)) == 64


def test_routers_of_experts_hand_out_no_logits(tmp_path, small):
    """With them transformers computes a loss of the routers in each pass, and fails at the masks of
    sampling."""
    config = MixtralConfig(
        **SIZES, num_key_value_heads=2, num_local_experts=4, output_router_logits=True,
        pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )
    model, _ = load_model(save(MixtralForCausalLM(config), tmp_path, small), CPU)
    assert model(torch.tensor([[1, 2]])).router_logits is None
