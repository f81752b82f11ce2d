"""experiments/library/toy_model.py: the demonstrations are what they say, and the model starts to
learn."""


import torch

from experiments.library import toy_model
from tests.helpers.training import loss_on


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
