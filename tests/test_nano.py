"""nano.py, all of CPPO on one page: its step is the step of train.py, however the rows are cut and
the questions shared out.

pytest starts torchrun on this very file, whose __main__ is what each rank does.
"""

import math
import random
import re
import shutil
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoTokenizer

import eval as evaluation
import nano
import rewards
from algorithms import resolve
from engine.data.questions import load_questions
from engine.model.contract import Completions, Sampling
from engine.model.loading import load_model
from engine.model.logprobs import Policy, completion_mask
from tasks import toy
from tasks.table import TASKS
from tests.engine.test_ranks import torchrun
from tests.examples import named
from tests.training import networks_around, weights_of
from train import train_step
from update import Limits

CPU = torch.device("cpu")
STEP, SAMPLE = nano.step, nano.sample  # as they are, while others stand in their places


def test_nano_is_one_page():
    text = Path(nano.__file__).read_text()
    assert len(text.splitlines()) <= 160 and not re.search("import engine|from engine", text)


@pytest.mark.parametrize("pruning_rate", [0.875, 0.0], ids=["CPPO", "GRPO"])
def test_one_step_changes_the_weights_as_train_step_does(pruning_rate, small, monkeypatch):
    """The same completions, the same rows: the same μ = 2 updates."""
    monkeypatch.setattr(nano, "P", pruning_rate)
    model, tokenizer = load_model(small, CPU)
    before, drawn = weights_of(model), []
    monkeypatch.setattr(nano, "sample", lambda *own: drawn.append(SAMPLE(*own)) or drawn[-1])
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


# --- the rows cut into micro-batches, the questions shared out ---


@torch.no_grad()
def another(model):
    """A reference that is not the model, so that the KL has a gradient."""
    reference = deepcopy(model)
    for p in reference.parameters():
        p.mul_(1.05)
    return reference


def toy_questions(n, without_answer=()):
    """Questions of the toy. Those without an answer are answered wrongly by every completion."""
    found = [toy.question(i) for i in range(n)]
    return [q | {"answer": "none"} if i in without_answer else q for i, q in enumerate(found)]


def sgd_step(model, reference, tokenizer, questions):
    """(how far a step of SGD moves the weights, accuracy, mean length)"""
    own = deepcopy(model)
    sgd = torch.optim.SGD(own.parameters(), lr=0.1)
    task, reward = TASKS["toy"], rewards.toy_accuracy
    accuracy, length, _ = STEP(own, reference, sgd, tokenizer, task, reward, questions)
    return weights_of(own) - weights_of(model), accuracy, length


@pytest.mark.parametrize("rows", [1, 5])
def test_micro_batches_of_any_size_give_the_same_gradient(rows, loaded, monkeypatch):
    model, tokenizer = loaded
    reference, moved = another(model), []
    monkeypatch.setattr(nano, "MU", 1)
    monkeypatch.setattr(nano, "MAX_GRAD_NORM", math.inf)  # it would hide that one is longer
    for together in (16, rows):
        monkeypatch.setattr(nano, "ROWS", together)
        torch.manual_seed(0)
        moved.append(sgd_step(model, reference, tokenizer, toy_questions(nano.Q))[0])
    assert (moved[0] - moved[1]).norm() < 1e-5 * moved[0].norm()


# which of eight questions have no right answer; rank 0 is asked the even ones, rank 1 the odd ones
SHARED = {"all teach": [], "rank 1 has nothing": [1, 3, 5, 7], "nobody has anything": range(8)}


def sample_by_question(model, tokens, mask, longest, tokenizer):
    """nano.sample, but what is drawn for a question does not depend on the others of the batch."""
    drawn = []
    for group, its_mask in zip(tokens.split(nano.G), mask.split(nano.G)):
        torch.manual_seed(int(group[0].sum()))
        completions, seen = SAMPLE(model, group, its_mask, longest, tokenizer)
        missing = (0, longest - completions.shape[1])
        drawn.append([torch.nn.functional.pad(x, missing) for x in (completions, seen)])
    return [torch.cat(group) for group in zip(*drawn)]


def shared_steps(folder, rank=0, ranks=1):
    """{name of SHARED: `sgd_step` on this rank's share of the questions}"""
    nano.sample, nano.MAX_GRAD_NORM = sample_by_question, math.inf
    try:
        model, tokenizer = load_model(folder, CPU)
        return {
            name: sgd_step(model, another(model), tokenizer, toy_questions(8, none)[rank::ranks])
            for name, none in SHARED.items()}
    finally:
        nano.sample, nano.MAX_GRAD_NORM = SAMPLE, 1.0


@pytest.fixture(scope="module")
def by_two(small, tmp_path_factory):
    """(folder of what two ranks made, what torchrun printed)"""
    out = tmp_path_factory.mktemp("by_two")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")  # two ranks need two GPUs, or none
        done = torchrun("-m", "tests.test_nano", small, out)
    assert done.returncode == 0, done.stderr[-6000:]
    return out, done.stdout


def test_two_processes_make_the_update_of_one(small, by_two):
    """Also if one of them has nothing to learn, and if none has. Otherwise they wait for ever."""
    one = shared_steps(small)
    first, second = (torch.load(by_two[0] / f"steps-{rank}.pt") for rank in (0, 1))
    for name, (moved, *metrics) in one.items():
        assert torch.equal(first[name][0], second[name][0]), name
        assert (first[name][0] - moved).norm() <= 1e-5 * moved.norm(), name
        assert (moved.norm() > 0.01) == (name != "nobody has anything")
        assert first[name][1:] == second[name][1:] == pytest.approx(tuple(metrics))


def test_two_processes_ask_their_own_questions_and_the_first_one_prints_and_saves(by_two):
    out, printed = by_two
    (first, weights, seed), (second, other_weights, other_seed) = (
        torch.load(out / f"run-{rank}.pt") for rank in (0, 1))
    numbers = [[toy.question(i)["question"] for i in range(rank, 32, 2)] for rank in (0, 1)]
    assert [first, second] == numbers and seed != other_seed
    assert torch.equal(weights, other_weights)
    saved = load_file(out / "model/model.safetensors")
    assert saved and all(weight.dtype == torch.float32 for weight in saved.values())
    assert printed.count("step   2") == 1 and printed.count("Saved") == 1


# --- the program ---


def small_task(monkeypatch, folder, out):
    """Two steps of the toy; its model reads no words, so it stands for the word problems, too."""
    own = replace(TASKS["toy"], base=str(folder))
    for name in ("toy", "arithmetic"):
        monkeypatch.setitem(TASKS, name, own)
    monkeypatch.setattr(nano, "STEPS", 2)
    monkeypatch.setattr(nano, "FOLDER", str(out))


def test_it_runs_as_its_first_lines_say(small, tmp_path, monkeypatch, capsys):
    small_task(monkeypatch, small, tmp_path)
    for words, name in (([], "toy"), ([small], "arithmetic")):
        nano.main(words)
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) >= 7 and lines[1].startswith("step   2   accuracy ")
        first, last = (line.removeprefix(f"step   {i}   ") for i, line in enumerate(lines[:2], 1))
        assert lines[3] == f"It learned: {first}  →  {last}"
        assert lines[4].endswith("=?")
        assert lines[-1].endswith(f"python eval.py --model {tmp_path} --benchmark {name}")


def test_the_model_that_it_saves_is_the_trained_one_and_eval_reads_it(
    small, tmp_path, monkeypatch, capsys
):
    small_task(monkeypatch, small, tmp_path / "nano")
    models = []
    monkeypatch.setattr(
        nano, "step", lambda model, *own: models.append(model) or STEP(model, *own))
    nano.main([])
    saved, _ = load_model(str(tmp_path / "nano"), CPU)
    assert torch.equal(weights_of(saved), weights_of(models[-1]).cpu())
    assert not torch.equal(weights_of(saved), weights_of(load_model(small, CPU)[0]))
    capsys.readouterr()
    command = f"--model {tmp_path}/nano --benchmark toy --questions 4 --samples 0"
    evaluation.main(command.split())
    assert "greedy" in capsys.readouterr().out


def test_a_tokenizer_without_padding_gets_one(small, tmp_path, monkeypatch):
    folder = shutil.copytree(small, tmp_path / "small")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder).pad_token is None
    small_task(monkeypatch, folder, tmp_path / "nano")
    nano.main([])
    saved = AutoTokenizer.from_pretrained(tmp_path / "nano")
    assert saved.pad_token == saved.eos_token


if __name__ == "__main__":
    folder, out = sys.argv[1], Path(sys.argv[2])
    asked = []

    def recorded(model, *own):
        """A step of the run. After the last one, while the ranks are joined: the shared steps."""
        asked.extend(question["question"] for question in own[-1])
        done, rank = STEP(model, *own), dist.get_rank()
        if len(asked) == 2 * nano.Q:
            torch.save((asked, weights_of(model), torch.initial_seed()), out / f"run-{rank}.pt")
            torch.save(shared_steps(folder, rank, 2), out / f"steps-{rank}.pt")
        return done

    nano.step, nano.STEPS, nano.FOLDER = recorded, 2, str(out / "model")
    nano.main([])
