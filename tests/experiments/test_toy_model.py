"""experiments/library/toy_model.py: the demonstrations are what they say, and the model starts to
learn."""

import re

import torch

from experiments.library import toy_model
from tasks import toy
from tests.helpers.training import loss_on


def test_demonstrations_think_rightly_or_guess_a_number_nearby_as_often_as_they_say():
    thinks, wrong = [], []
    for i in range(5000):
        row, (question, completion) = toy.question(i, "warm_start"), toy_model.demonstration(i)
        right = f"<think>{row['thoughts']}</think>\n<answer>{row['answer']}</answer>"
        thinks.append(completion == right)
        if not thinks[-1]:
            guess = re.fullmatch(r"<answer>(\d+)</answer>", completion)
            off = abs(int(guess[1]) - int(row["answer"]))
            assert question == row["question"] and off <= 3
            wrong.append(off > 0)
    assert abs(sum(thinks) / len(thinks) - toy_model.THINKING_SHARE) < 0.02
    assert abs(sum(wrong) / len(wrong) - toy_model.WRONG_SHARE) < 0.03


def test_a_few_steps_of_the_warm_start_lower_the_loss_and_teach_eos():
    tokenizer = toy_model.make_tokenizer()
    torch.manual_seed(0)
    model = toy_model.make_model(tokenizer)
    # the warm start does not reach these
    unseen = [toy_model.demonstration(i) for i in range(100_000, 100_050)]
    before, _ = loss_on(unseen, model, tokenizer)
    toy_model.warm_start(model, tokenizer, steps=25)
    after, eos = loss_on(unseen, model, tokenizer)
    assert after < before / 2 and eos < 0.1
    assert all(p.grad is None for p in model.parameters())  # none is left to whoever trains it next
