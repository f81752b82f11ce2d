"""nano.py, all of CPPO on one page: its step is the step of train.py."""

import random
import re
from copy import deepcopy
from pathlib import Path

import pytest
import torch

import nano
import rewards
from algorithms import resolve
from engine.data.questions import load_questions
from engine.model.contract import Completions, Sampling
from engine.model.loading import load_model
from engine.model.logprobs import Policy, completion_mask
from tasks import toy
from tasks.table import TASKS
from tests.examples import named
from tests.training import networks_around, weights_of
from train import train_step
from update import Limits

CPU = torch.device("cpu")


def test_nano_is_one_page():
    text = Path(nano.__file__).read_text()
    assert len(text.splitlines()) <= 120 and not re.search(r"engine\.(model|run)", text)


@pytest.mark.parametrize("pruning_rate", [0.875, 0.0], ids=["CPPO", "GRPO"])
def test_one_step_changes_the_weights_as_train_step_does(pruning_rate, small, monkeypatch):
    """The same completions, the same rows: the same μ = 2 updates."""
    monkeypatch.setattr(nano, "P", pruning_rate)
    model, tokenizer = load_model(small, CPU)
    before, drawn, sample = weights_of(model), [], nano.sample
    monkeypatch.setattr(nano, "sample", lambda *own: drawn.append(sample(*own)) or drawn[-1])
    questions, _ = load_questions("toy", tokenizer, limit=nano.Q - 1)
    questions.append({"question": "1+2=?", "answer": "3", "thoughts": "", "begun": "",
                      "prompt": tokenizer("1+2=?").input_ids})  # a shorter one
    torch.manual_seed(0)

    one = deepcopy(model)
    # AdamW would make a whole step of a rounding error
    sgd = torch.optim.SGD(one.parameters(), lr=0.1)
    accuracy, length, text = nano.step(
        one, deepcopy(model), sgd, tokenizer, TASKS["toy"], rewards.toy_accuracy, questions
    )

    [(tokens, _)] = drawn
    ends = tokens == tokenizer.eos_token_id
    # EOS counts
    lengths = (ends.cumsum(1) == 0).sum(1).add(1).clamp(max=tokens.shape[1])
    networks = networks_around(Policy(model), tokenizer, lr=0.1, beta=nano.BETA)
    networks.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    logp, mask = torch.zeros(tokens.shape), completion_mask(tokens, lengths)
    given = Completions(tokens, lengths, ~ends.any(1), logp, mask)
    networks.sampler.sample = lambda *_: given
    algorithm = resolve("cppo", pruning_rate=pruning_rate, mu=nano.MU, beta=nano.BETA)
    metrics, *_ = train_step(
        networks, algorithm, named(rewards.toy_accuracy), Sampling(toy.MAX_NEW_TOKENS), Limits(),
        questions, random.Random(0),
    )
    assert accuracy == pytest.approx(metrics["accuracy"]) and 0 < accuracy < 1
    assert text == tokenizer.decode(tokens[0, : lengths[0]], skip_special_tokens=True)
    assert length == pytest.approx(metrics["length"]) and lengths.min() < lengths.max()
    moved, difference = weights_of(one) - before, weights_of(one) - weights_of(model)
    assert moved.norm() > 0.01 and difference.norm() < 1e-4 * moved.norm()


def test_a_step_without_a_signal_leaves_the_weights(loaded):
    model, tokenizer = loaded
    before, optimizer = weights_of(model), torch.optim.AdamW(model.parameters(), lr=1.0)
    questions, _ = load_questions("toy", tokenizer, limit=2)
    ones = lambda texts, answer: [1.0] * len(texts)
    nano.step(model, model, optimizer, tokenizer, TASKS["toy"], ones, questions)
    assert torch.equal(weights_of(model), before)


def test_it_runs_as_its_first_lines_say(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(nano, "STEPS", 2)
    monkeypatch.setattr(toy, "BASE", small)
    for words in ([], [small]):
        monkeypatch.setitem(TASKS, "arithmetic", TASKS["toy"])  # this model reads no words
        nano.main(words)
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) >= 5 and lines[1].startswith("step   2   accuracy ")
        first, last = (line.removeprefix(f"step   {i}   ") for i, line in enumerate(lines[:2], 1))
        assert lines[3] == f"It learned: {first}  →  {last}"
        assert lines[4].endswith("=?")
