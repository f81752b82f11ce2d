"""nano.py, all of CPPO on one page: its step is the step of train.py, however the rows are cut and
the questions shared out.

pytest starts torchrun on this very file, whose __main__ is what each rank does.
"""

import math
import random
import re
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

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


@torch.no_grad()
def another(model):
    """A reference that is not the model, so that the KL has a gradient."""
    reference = deepcopy(model)
    for p in reference.parameters():
        p.mul_(1.05)
    return reference


def sgd_step(model, tokenizer, reward, questions):
    """(how far a step of SGD moves the weights, accuracy, mean length, the first completion).

    AdamW would make a whole step of a rounding error.
    """
    own = deepcopy(model)
    sgd = torch.optim.SGD(own.parameters(), lr=0.1)
    metrics = STEP(own, another(model), sgd, tokenizer, TASKS["toy"], reward, questions)
    return weights_of(own) - weights_of(model), *metrics


# without a limit a gradient that is too long is seen
@pytest.mark.parametrize("numbers", [(0.875, 16, 0.5), (0.0, 50, math.inf)])
def test_one_step_moves_the_weights_as_train_step_does(numbers, loaded, monkeypatch):
    """The same completions, the same μ = 2 updates, in micro-batches of any size."""
    model, tokenizer = loaded
    before, drawn = weights_of(model), []
    for name, value in zip(("P", "ROWS", "MAX_GRAD_NORM"), numbers):
        monkeypatch.setattr(nano, name, value)
    monkeypatch.setattr(nano, "sample", lambda *own: drawn.append(SAMPLE(*own)) or drawn[-1])
    questions, _ = load_questions("toy", tokenizer, limit=nano.Q)
    # a shorter one
    questions[-1] |= {"question": "1+2=?", "answer": "3", "prompt": tokenizer("1+2=?").input_ids}
    torch.manual_seed(0)
    moved, accuracy, length, text = sgd_step(model, tokenizer, rewards.toy_accuracy, questions)

    [(tokens, _)] = drawn
    ends = tokens == tokenizer.eos_token_id
    # EOS counts
    lengths = (ends.cumsum(1) == 0).sum(1).add(1).clamp(max=tokens.shape[1])
    networks = networks_around(
        Policy(model), tokenizer, lr=0.1, beta=nano.BETA, reference=Policy(another(model)))
    networks.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    logp, mask = torch.zeros(tokens.shape), completion_mask(tokens, lengths)
    given = Completions(tokens, lengths, ~ends.any(1), logp, mask)
    networks.sampler.sample = lambda *_: given
    algorithm = resolve("cppo", pruning_rate=nano.P, mu=nano.MU, beta=nano.BETA)
    metrics, *_ = train_step(
        networks, algorithm, named(rewards.toy_accuracy), Sampling(toy.MAX_NEW_TOKENS),
        Limits(max_grad_norm=nano.MAX_GRAD_NORM), questions, random.Random(0),
    )
    assert accuracy == pytest.approx(metrics["accuracy"]) and 0 < accuracy < 1
    assert text == tokenizer.decode(tokens[0, : lengths[0]], skip_special_tokens=True)
    assert length == pytest.approx(metrics["length"]) and lengths.min() < lengths.max()
    difference = before + moved - weights_of(model)
    assert moved.norm() > 0.01 and difference.norm() < 1e-4 * moved.norm()


# --- the questions shared out ---

# which of eight questions have no right answer; rank 0 is asked the even ones, rank 1 the odd ones
SHARED = {"all teach": [], "rank 1 has nothing": [1, 3, 5, 7], "nobody has anything": range(8)}


def sample(model, tokens, *_):
    """Completions that depend on their question and their number alone, not on the batch."""
    number, at = torch.arange(len(tokens))[:, None] % nano.G, torch.arange(8)
    kind = tokens.sum(1, keepdim=True) + number
    return kind * (at + 1) % 20 + 2, at <= kind % 8


def shared_steps(folder, rank=0, ranks=1):
    """{name of SHARED: `sgd_step` on this rank's share of the questions}"""
    model, tokenizer = load_model(folder, CPU)
    reward = lambda texts, answer: [float(len(x) * known > 4) for x, known in zip(texts, answer)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nano, "sample", sample)
        patch.setattr(nano, "MAX_GRAD_NORM", math.inf)
        patch.setattr(nano, "MU", 1)  # without a limit the second one would be enormous
        return {
            name: sgd_step(model, tokenizer, reward, [
                toy.question(i) | {"answer": i not in none} for i in range(rank, 8, ranks)])
            for name, none in SHARED.items()}


def test_two_processes_make_the_update_of_one(small, tmp_path, monkeypatch):
    """Also if one of them has nothing to learn, and if none has. Otherwise they wait for ever."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # two ranks need two GPUs, or none
    done = torchrun("-m", "tests.test_nano", small, tmp_path)
    assert done.returncode == 0, done.stderr[-6000:]
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    (asked, weights, seed, first), (asked_too, same, other_seed, second) = found
    for name, (moved, *metrics, _) in shared_steps(small).items():
        (one, *its, _), (other, *others, _) = first[name], second[name]
        assert torch.equal(one, other) and its == others == pytest.approx(metrics), name
        assert (one - moved).norm() <= 1e-5 * moved.norm(), name
        assert moved.any() == (name != "nobody has anything")

    # in the run each asks its own questions; the first one prints, and saves the trained model
    assert asked + asked_too == [toy.question(i) for i in [*range(0, 32, 2), *range(1, 32, 2)]]
    assert seed != other_seed and torch.equal(weights, same)
    saved, untrained = (weights_of(load_model(str(x), CPU)[0]) for x in (tmp_path / "model", small))
    assert torch.equal(saved, weights) and not torch.equal(saved, untrained)
    assert done.stdout.count("step   2") == done.stdout.count("Saved") == 1


# --- the program ---


def test_it_runs_as_its_first_lines_say_and_eval_reads_what_it_saved(
    loaded, tmp_path, monkeypatch, capsys
):
    """The toy's model reads no words, so it stands for the word problems, too. It has no token for
    padding."""
    model, tokenizer = loaded
    tokenizer.pad_token = None
    base, out = str(tmp_path / "base"), tmp_path / "nano"
    for part in loaded:
        part.save_pretrained(base)
    for name in ("toy", "arithmetic"):
        monkeypatch.setitem(TASKS, name, replace(TASKS["toy"], base=base))
    monkeypatch.setattr(nano, "STEPS", 2)
    monkeypatch.setattr(nano, "FOLDER", str(out))
    for words, name in (([], "toy"), ([base], "arithmetic")):
        nano.main(words)
        lines = capsys.readouterr().out.splitlines()
        first, last = (line.split(maxsplit=2)[2] for line in lines[:2])  # without the number
        assert lines[3] == f"It learned: {first}  →  {last}" and lines[4].endswith("=?")
        assert not list(out.glob("eval-*"))  # the scores of an earlier model
        command = lines[-1].partition("python eval.py ")[2]
        assert command == f"--model {out} --benchmark {name}"
        evaluation.main([*command.split(), "--questions", "4", "--samples", "0"])
        assert "greedy" in capsys.readouterr().out


if __name__ == "__main__":
    folder, out = sys.argv[1], Path(sys.argv[2])
    asked, models = [], []

    def recorded(model, *own):
        models.append(model)
        asked.extend(own[-1])
        return STEP(model, *own)

    nano.step, nano.STEPS, nano.FOLDER = recorded, 2, str(out / "model")
    dist.destroy_process_group = lambda: None  # the ranks stay joined for the shared steps
    nano.main([])
    rank = dist.get_rank()
    found = asked, weights_of(models[-1]), torch.initial_seed(), shared_steps(folder, rank, 2)
    torch.save(found, out / f"{rank}.pt")
