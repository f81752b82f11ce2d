"""tasks/toy.py: the questions are right and held apart. The shipped base models are those that
experiments/library/toy_model.py makes."""

import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.library import toy_model
from tasks import toy
from tasks.table import base_model
from tests.helpers.training import loss_on

SPLITS = ["train", "test", "warm_start"]


# --- questions ---


@pytest.mark.parametrize("split", SPLITS)
def test_answers_and_thoughts_are_right_step_by_step_and_never_negative(split):
    for i in range(500):
        row = toy.question(i, split)
        assert re.fullmatch(r"[1-9]([+-][1-9]){4}=\?", row["question"])
        total, *rest = [int(term) for term in re.findall(r"[+-]?\d", row["question"])]
        steps = ""
        for term in rest:
            steps += f"{total}{term:+d}={total + term};"
            total += term
            assert total >= 0
        assert (row["thoughts"], row["answer"]) == (steps, str(total))


def test_a_question_follows_from_its_number_and_split_alone():
    # in every process and for ever: saved runs count on it
    assert toy.question(0)["question"] == "6+7-9+9-9=?"
    assert len({toy.question(i, split)["question"] for i in range(20) for split in SPLITS}) > 50


def test_a_tenth_of_all_questions_is_held_out(monkeypatch):
    monkeypatch.setattr(toy, "OPERANDS", 3)  # few enough to draw every one
    train, warm_start, test = (
        {toy.question(i, split)["question"] for i in range(count)}
        for split, count in [("train", 6000), ("warm_start", 6000), ("test", 1200)])
    assert not (train | warm_start) & test
    assert 0.08 < len(test) / len(train | warm_start | test) < 0.12


# --- base models ---


@pytest.mark.parametrize("kind, folder, parameters", [
    ("base", toy.BASE, 108_608), ("code", toy.CODE_BASE, 108_864),
])
def test_a_shipped_base_model_is_the_one_that_the_code_makes(kind, folder, parameters):
    """The same tokenizer and shape; its loss is near the least that guesses allow."""
    tokenizer = toy_model.make_tokenizer(kind)
    loaded = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    made = toy_model.make_config(tokenizer).to_dict()
    shipped = model.config.to_dict()
    for name in ("num_hidden_layers", "rope_parameters", "eos_token_id"):
        assert shipped[name] == made[name]
    assert model.dtype == torch.float32 and model.num_parameters() == parameters
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded.chat_template == tokenizer.chat_template
    # the warm start does not reach these
    unseen = [toy_model.demonstration(i, kind) for i in range(100_000, 100_050)]
    assert loaded(unseen[0][1]).input_ids == tokenizer(unseen[0][1]).input_ids
    after, eos = loss_on(unseen, model, loaded)
    assert after < 0.25 and eos < 0.01


def test_each_toy_has_its_own_base():
    assert base_model("toy", "toy") == toy.BASE != toy.CODE_BASE == base_model("toy", "toy_code")
    assert base_model("toy", "mine.jsonl") == toy.BASE
    assert base_model("x", "toy") == "x"
