"""notebooks/exercises/seams.py: the shift by one token, positions and masks, and the step made of
them."""

from copy import deepcopy
from itertools import count, islice

import pytest
import torch

import nano
from notebooks.exercises import loops
from notebooks.exercises.seams import (
    completion_logits,
    completion_mask,
    logprobs,
    positions,
    train_step,
)
from tests.helpers.training import weights_of

EOS = 1
# a whole row, one that is cut off, one whose padding is EOS, one that is only EOS
SAMPLED = torch.tensor([[7, 8, 9, EOS], [7, 8, 9, 7], [7, EOS, EOS, EOS], [EOS, 7, EOS, 7]])


@pytest.fixture
def loaded():
    """(model, tokenizer) of the toy; here, because the judge of the exercises reads no conftest."""
    return nano.load(nano.TOY_BASE)


def test_the_logits_of_a_token_stand_one_position_before_it():
    logits = torch.arange(6.0).view(1, 6, 1).expand(2, 6, 3)  # each position has its own number
    assert completion_logits(logits, 4)[0, :, 0].tolist() == [1, 2, 3, 4]
    assert completion_logits(logits, 1).shape == (2, 1, 3)


def test_positions_begin_at_the_first_token():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]])
    assert positions(mask)[:, 2:].tolist() == [[0, 1, 2], [2, 3, 3]]
    assert positions(mask)[:, :2].tolist() == [[0, 0], [0, 1]]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_the_first_eos_is_trained_on_and_nothing_behind_it(dtype):
    mask = completion_mask(SAMPLED.to(dtype), EOS)
    assert mask.dtype == torch.bool and mask.sum(1).tolist() == [4, 4, 2, 1]
    assert mask[:, 0].all() and (mask.int().diff(dim=1) <= 0).all()


def test_padding_changes_no_logprob(loaded):
    """A short prompt beside a long one has the log-probabilities that it has alone."""
    model, tokenizer = loaded
    short, long, answer = tokenizer(["1+2=?", "1+2+3+4+5=?", "<answer>3</answer>"]).input_ids
    pad = len(long) - len(short)
    tokens = torch.tensor([[tokenizer.pad_token_id] * pad + short + answer, long + answer])
    mask = torch.ones_like(tokens)
    mask[0, :pad] = 0
    both = logprobs(model, tokens, mask, len(answer))
    for row, prompt in zip(both, (short, long)):
        for t, token in enumerate(answer):  # one token after the other, without a shift
            logits = model(torch.tensor([prompt + answer[:t]])).logits[0, -1]
            assert row[t].item() == pytest.approx(logits.log_softmax(0)[token].item(), abs=1e-4)


def steps(one_step, loaded, number=1):
    """(weights, what a step returned last) after some steps of SGD, whose steps rounding errors
    move little."""
    model, tokenizer = loaded
    own, reference = deepcopy(model), deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.3)
    questions = map(nano.toy_question, count())
    torch.manual_seed(0)
    for _ in range(number):
        asked = [*islice(questions, nano.Q)]
        got = one_step(own, reference, optimizer, tokenizer, nano.TOY, asked)
    return weights_of(own), got


def test_a_step_in_micro_batches_is_the_step_of_nano(loaded):
    """If it is not, the message says which of the five broken loops it is."""
    start, (right, _), (mine, got) = (
        weights_of(loaded[0]), steps(nano.step, loaded, 2), steps(train_step, loaded, 2))
    moved = (right - start).norm()

    def near(weights):
        return (mine - weights).norm() < 1e-3 * moved

    if not near(right):
        known = [n for n in loops.BUGS if near(steps(loops.module(n).train_step, loaded, 2)[0])]
        pytest.fail(f"two steps move the weights as loop {known[0]} of loops.py does"
                    if known else "two steps move the weights otherwise than nano.step")
    assert moved > 0.01 and {"accuracy", "length", "ended", "logp", "−A", "loss", "ratio"} == {*got}


def test_what_the_metrics_of_the_first_step_must_be(loaded):
    """All ratios are 1 and the KL is 0, so the loss is minus the mean advantage."""
    (_, (accuracy, length, _)), (_, got) = steps(nano.step, loaded), steps(train_step, loaded)
    assert got["accuracy"] == pytest.approx(accuracy) and got["length"] == pytest.approx(length)
    assert got["loss"] == pytest.approx(got["−A"], abs=1e-4)
    assert got["ratio"] == pytest.approx(1, abs=1e-4) and got["logp"] < 0 < got["ended"] <= 1


# --- the five broken loops ---


def assert_told(loop, right, first, later):
    """A number that cannot be right. right, first: metrics of the first step, by the right loop and
    by this one. later: metrics of a later step."""
    told = {
        1: first["logp"] < right["logp"] - 1,
        2: first["length"] == pytest.approx(right["length"] - right["ended"]),
        3: abs(later["ratio"] - 1) > 1e-3,
        4: first["−A"] != pytest.approx(right["−A"], abs=1e-3),
        5: abs(first["loss"] - first["−A"]) > 1e-3,
    }
    assert told[loop]


@pytest.mark.slow
@pytest.mark.parametrize("loop", loops.BUGS)
def test_each_mistake_can_be_seen(loop, loaded):
    """One line is wrong, the weights go elsewhere, and a metric tells it in at most two steps."""
    made = loops.module(loop).train_step
    (right, _), (wrong, second) = steps(train_step, loaded, 2), steps(made, loaded, 2)
    assert (wrong - right).norm() > 0.03 * (right - weights_of(loaded[0])).norm()
    (_, well), (_, first) = steps(train_step, loaded), steps(made, loaded)
    assert_told(loop, well, first, second)


def test_the_table_shows_what_the_solutions_say():
    """Of the first step, and of the last ones. The accuracy does not tell two of the mistakes."""
    table = dict(loops.table())
    (right, _) = table[0]
    for loop in loops.BUGS:
        assert_told(loop, right, *table[loop])
    assert {loop for loop, (_, last) in table.items() if last["accuracy"] > 0.7} == {0, 2, 5}


def test_the_five_loops_are_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loops, "HERE", tmp_path)
    loops.main([])
    for loop, (right, wrong) in loops.BUGS.items():
        text = (tmp_path / "mine" / f"loop_{loop}.py").read_text(encoding="utf-8")
        assert wrong in text and text.replace(wrong, right) == loops.RIGHT
    assert "loop_5.py" in capsys.readouterr().out
