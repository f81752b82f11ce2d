"""experiments/library/toy_model.py: the demonstrations are what they say, no token of them is lost,
and the model starts to learn."""

import re
from statistics import fmean

import pytest
import torch

from experiments.library import toy_model
from tasks import toy
from tests.helpers.training import loss_on


@pytest.fixture(scope="module")
def tokenizer():
    return toy_model.make_tokenizer()


def thinking(row):
    return f"<think>{row['thoughts']}</think>\n<answer>{row['answer']}</answer>"


# --- demonstrations ---


def test_demonstrations_think_rightly_or_guess_a_number_nearby_as_often_as_they_say():
    thinks, wrong = [], []
    for i in range(5000):
        row, (question, completion) = toy.question(i, "warm_start"), toy_model.demonstration(i)
        thinks.append(completion == thinking(row))
        if not thinks[-1]:
            guess = re.fullmatch(r"<answer>(\d+)</answer>", completion)
            off = abs(int(guess[1]) - int(row["answer"]))
            assert question == row["question"] and off <= 3
            wrong.append(off > 0)
    assert abs(sum(thinks) / len(thinks) - toy_model.THINKING_SHARE) < 0.02
    assert abs(sum(wrong) / len(wrong) - toy_model.WRONG_SHARE) < 0.03


def test_programs_of_the_code_toy_print_what_they_should_or_a_guess():
    """Those that calculate are right; of those that print a number about half are. No token is lost
    on the way."""
    tokenizer, calculated, guessed = toy_model.make_tokenizer("code"), [], []
    for i in range(400):
        _, completion = toy_model.demonstration(i, "code")
        ids = tokenizer(completion).input_ids
        assert tokenizer.decode(ids) == completion and len(ids) < toy.MAX_NEW_TOKENS
        program = re.fullmatch(r"<think></think>\n```python\nprint\((.*)\)\n```", completion)[1]
        right = eval(program) == int(toy.question(i, "warm_start")["answer"])
        (guessed if program.isdigit() else calculated).append(right)
    assert 80 < len(calculated) < 160 and all(calculated)
    assert 0.4 < sum(guessed) / len(guessed) < 0.6


def test_long_thoughts_slip_as_often_as_they_say():
    slips = {";": [], "\n": []}
    for i in range(400):
        row = toy.question(i, "warm_start", toy.MIDDLE)
        _, text = toy_model.long_demonstration(i, toy.MIDDLE, careless=0.25)
        steps = re.findall(r"([^>]*?)=(-?\d+)(;|\n)", text)
        slips[steps[0][2]] += [eval(sum) != int(result) for sum, result, _ in steps]
        assert text.endswith(f"<answer>{steps[-1][1]}</answer>")
        assert len(text) < len(thinking(row)) + 20
    assert 0.015 < fmean(slips[";"]) < 0.025 and 0.23 < fmean(slips["\n"]) < 0.27
    assert 0.35 < len(slips[";"]) / len(slips[";"] + slips["\n"]) < 0.45


# --- model ---


def test_a_few_steps_of_the_warm_start_lower_the_loss_and_teach_eos(tokenizer):
    torch.manual_seed(0)
    model = toy_model.make_model(tokenizer)
    # the warm start does not reach these
    unseen = [toy_model.demonstration(i) for i in range(100_000, 100_050)]
    before, _ = loss_on(unseen, model, tokenizer)
    toy_model.warm_start(model, tokenizer, steps=25)
    after, eos = loss_on(unseen, model, tokenizer)
    assert after < before / 2 and eos < 0.1
    assert all(p.grad is None for p in model.parameters())  # none is left to whoever trains it next
