"""Loading a model: in which precision, what is refused, and how long its prompts may be."""

import pytest
import torch
from transformers import GraniteConfig, GraniteForCausalLM

from engine.model.folders import prompt_room, resolve_model
from engine.model.loading import load_model
from engine.model.logprobs import completion_logprobs
from engine.run.options import UserError
from tests.engine.test_logprobs import SIZES, batch, make

CPU = torch.device("cpu")


def test_weights_are_float32_masters_that_a_step_of_1e_6_moves(small, tmp_path):
    """In bfloat16 a step of lr 1e-6 is rounded away; weights saved in bfloat16 are loaded as float32."""
    model, tokenizer = load_model(small, CPU)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model, _ = load_model(str(tmp_path), CPU)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0).step()
    for name, p in model.named_parameters():
        assert (p != before[name]).float().mean() > 0.9
        assert (before[name].bfloat16() + torch.tensor(-1e-6).bfloat16() == before[name].bfloat16()).float().mean() > 0.9


def test_dropout_is_off(tmp_path, small):
    """GPT-2 has dropout 0.1: with it on, π_θ would differ from π_old before the first update."""
    make("gpt2").save_pretrained(tmp_path)
    load_model(small, CPU)[1].save_pretrained(tmp_path)
    model, _ = load_model(str(tmp_path), CPU)
    assert model.config.resid_pdrop == 0.1 and not model.training
    args = batch()
    assert torch.equal(completion_logprobs(model, *args), completion_logprobs(model, *args))


def test_a_model_that_rescales_its_logits_is_refused(tmp_path, small):
    GraniteForCausalLM(GraniteConfig(**SIZES, num_key_value_heads=4, logits_scaling=8.0)).save_pretrained(tmp_path)
    load_model(small, CPU)[1].save_pretrained(tmp_path)
    with pytest.raises(UserError, match="rescales its logits"):
        load_model(str(tmp_path), CPU)


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


def test_prompts_leave_room_for_the_completion_in_the_context():
    model = make("gpt2")
    assert prompt_room(model, 20, 512) == 44 and prompt_room(model, 20, 10) == 10
    with pytest.raises(UserError, match="context of 64 tokens leaves no room"):
        prompt_room(model, 64, 10)
