"""nano.py, all of CPPO in one file: each function is that of the paper's file, its step is the step
of train.py, however the rows are cut and the questions shared out, and the file needs no other.

pytest starts torchrun on this very file, whose __main__ is what each rank does.
"""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import pad

import eval as evaluation
import nano
import rewards
from algorithms import resolve
from cppo import batch_rows, prune
from engine.data.questions import load_questions
from engine.model.loading import load_model
from grpo import group_advantages, grpo_loss
from tasks import toy
from tasks.table import TASKS
from tests.engine.test_ranks import torchrun
from tests.helpers.examples import mask_of, seeded
from tests.helpers.nano import nano_step, train_py_step
from tests.helpers.training import weights_of

CPU = torch.device("cpu")
FILE = Path(nano.__file__)
STEP, SAMPLE = nano.step, nano.sample  # as they are, while others stand in their places
close = torch.testing.assert_close


def test_nano_is_one_file_and_short():
    lines = FILE.read_text().splitlines()
    assert len(lines) <= 240 and max(map(len, lines)) <= 100


# --- its functions are those of the paper's files ---


@pytest.mark.parametrize("rewards_of", [
    torch.rand(5, 16, generator=seeded(1)), torch.randint(2, (5, 16), generator=seeded(2)).float(),
    torch.full((2, 16), 0.7), torch.full((2, 16), 3.3)])
def test_the_advantages(rewards_of):
    found = nano.group_advantages(rewards_of)
    assert torch.equal(found, group_advantages(rewards_of))
    if (rewards_of == rewards_of[0, 0]).all():
        assert not found.any()  # else AdamW would move the weights


@pytest.mark.parametrize("G, k", [(16, 1), (16, 2), (16, 16), (300, 150)])
def test_what_is_kept(G, k):
    """Whole numbers, full of ties, too. In wide groups an unstable sort would mix them."""
    for A in (torch.randn(5, G, generator=seeded(3)),
              torch.randint(-2, 3, (5, G), generator=seeded(4)).float()):
        assert torch.equal(nano.prune(A.abs(), k), batch_rows(prune(A, k), G))


MASK = mask_of([5, 0, 3, 1])


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("old_gap", [0.0, 0.5, 100.0, -100.0])
@pytest.mark.parametrize("ref_gap", [0.0, 0.5, 100.0, -100.0])
def test_the_loss_and_its_gradient(sign, old_gap, ref_gap):
    """Log-ratios around 0 and of ±100, both signs of A, an empty row, and −∞ on padding."""
    noise = torch.randn(3, 4, 5, generator=seeded(5)) / 4
    base = (noise[0] - 2).masked_fill(~MASK, -torch.inf)
    old_logp, ref_logp = base - old_gap - noise[1], base - ref_gap - noise[2]
    A = sign * torch.tensor([1.5, 2.0, 0.7, -0.4])
    weights = nano.token_weights(MASK, len(MASK), MASK.sum(), 9)
    logp, logp_too = (base.clone().requires_grad_() for _ in range(2))
    old, ref = (x.clone().requires_grad_() for x in (old_logp, ref_logp))  # they get no gradient
    loss = nano.cppo_loss(logp, old, ref, A[:, None], MASK, weights)
    right, _ = grpo_loss(logp_too, old_logp, A, MASK, ref_logp=ref_logp, beta=nano.BETA,
                         clip_low=nano.EPS_LOW, clip_high=nano.EPS_HIGH)
    close(loss, right, rtol=1e-6, atol=1e-6)
    (gradient, *others), (expected,) = (
        torch.autograd.grad(loss, [logp, old, ref], allow_unused=True),
        torch.autograd.grad(right, logp_too))
    assert others == [None, None]
    assert gradient.isfinite().all()
    close(gradient, expected, rtol=1e-6, atol=1e-6)


def test_positions_begin_at_the_first_token():
    """And a token is predicted one position before it. No other logits are computed."""
    given = []

    def model(tokens, attention_mask, position_ids, logits_to_keep):
        given.append((position_ids.tolist(), logits_to_keep))
        return SimpleNamespace(logits=torch.eye(9)[tokens[:, -logits_to_keep:]])  # of themselves

    tokens = torch.tensor([[0, 0, 5, 5, 5, 6], [4, 5, 6, 7, 7, 7]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
    found = nano.logprobs(model, tokens, mask, 3)
    assert given == [([[0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 4]], 4)]
    assert (found > found.mean()).tolist() == [[True, True, False], [False, True, True]]


@pytest.mark.parametrize("text, answer", [
    ("<think>1+2=3;</think>\n<answer>3</answer>", "3"), ("<answer> 3\n</answer>", "3"),
    ("<answer>3", "3"), ("3", "3"), ("", "3"), ("<answer>2</answer><answer>3</answer>", "3"),
    ("<answer>3</answer><answer>2</answer>", "3"), ("<think>1+2\n<answer>3</answer>", "3"),
    ("<think><answer>3</answer></think>", "3"), ("<answer><answer>3</answer>", "3"),
    ("<answer>-3</answer>", "3"), ("<answer>3.0</answer>", "3"), ("<answer></answer>", "0")])
def test_the_reward(text, answer):
    assert nano.reward(text, answer) == rewards.toy_accuracy([text], [answer])[0]


TEMPLATE = "{{ messages[-1].content }}{% if messages[-1].role == 'assistant' %}AFTER{% endif %}"


@pytest.mark.parametrize("after, ends", [
    ("<eos>\n", []), (" <turn>\n", ["<turn>"]), ("\n", []), ("</answer>", [])])
def test_every_token_that_ends_a_turn_ends_a_completion(after, ends, loaded, tmp_path):
    """EOS, what the generation config names, and each special token of the template after an
    answer."""
    model, tokenizer = loaded
    eos, think = tokenizer.convert_tokens_to_ids(["<eos>", "<think>"])
    model.generation_config.eos_token_id = [think]
    model.save_pretrained(tmp_path)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    tokenizer.chat_template = TEMPLATE.replace("AFTER", after)
    tokenizer.save_pretrained(tmp_path)
    model, tokenizer = nano.load(str(tmp_path))
    ends = {eos, think, *tokenizer.convert_tokens_to_ids(ends)}
    assert {*model.generation_config.eos_token_id} == ends
    torch.manual_seed(0)
    tokens, _, mask = nano.sample(model, tokenizer, nano.TOY, [toy.question(i) for i in range(64)])
    tokens, ended = tokens[:, -mask.shape[1] :], set()
    for row, length in zip(tokens.tolist(), mask.sum(1).tolist()):
        assert not ends & {*row[: length - 1]} and not any(row[length:])
        ended.add(row[length - 1])
    assert ended == {eos, think}


def test_a_comma_in_a_number_does_not_matter():
    assert nano.reward("<answer>1,234</answer>", "1234") == 1


def test_the_questions_and_the_settings():
    for i in range(200):
        question = toy.question(i)
        assert nano.toy_question(i) == {key: question[key] for key in ("question", "answer")}
    for own, name in ((nano.TOY, "toy"), (nano.GSM8K, "gsm8k")):
        task = TASKS[name]
        assert (own["lr"], own["longest"]) == (task.lr, task.max_new_tokens)
    assert nano.GSM8K["system_prompt"] == TASKS["gsm8k"].system_prompt
    assert Path(nano.TOY_BASE) == Path(toy.BASE)


# --- its step is that of train.py ---


# without a limit a gradient that is too long is seen
@pytest.mark.parametrize("P, rows, norm", [(0.875, 16, 0.5), (0.0, 50, math.inf), (0.875, 1, 0.5)])
def test_one_step_moves_the_weights_as_train_step_does(P, rows, norm, small, monkeypatch):
    """The same completions, the same μ = 2 updates, in micro-batches of any size. Columns behind
    the longest kept completion are not computed."""
    model, tokenizer = nano.load(small)
    model.cpu()  # a GPU would compute in bfloat16
    drawn, widths, logprobs = [], [], nano.logprobs

    def wider(*own):
        drawn.append([pad(x, (0, 5)) for x in SAMPLE(*own)])
        return drawn[-1]

    monkeypatch.setattr(nano, "K", int(nano.G * (1 - P)))
    monkeypatch.setattr(nano, "MAX_GRAD_NORM", norm)
    monkeypatch.setitem(nano.TOY, "rows", rows)
    monkeypatch.setattr(nano, "sample", wider)
    monkeypatch.setattr(nano, "logprobs", lambda *own: widths.append(own[-1]) or logprobs(*own))
    questions, _ = load_questions("toy", tokenizer, limit=nano.Q)
    # a shorter one
    questions[-1] |= {"question": "1+2=?", "answer": "3", "prompt": tokenizer("1+2=?").input_ids}
    torch.manual_seed(0)
    moved, accuracy, length, text = nano_step(nano, model, tokenizer, questions)

    algorithm = resolve("cppo", pruning_rate=P, mu=nano.MU, beta=nano.BETA)
    right, (metrics, rollout, _, kept, _) = train_py_step(
        algorithm, model, tokenizer, questions, drawn[0], norm)
    assert accuracy == pytest.approx(metrics["accuracy"]) and 0 < accuracy < 1
    assert text == rollout.texts[0]
    lengths = rollout.lengths.flatten()
    assert length == pytest.approx(metrics["length"]) and lengths.min() < lengths.max()
    assert {*widths} == {lengths[kept].max().item()}
    assert moved.norm() > 0.01 and (moved - right).norm() < 1e-4 * moved.norm()
    assert (moved - right).abs().max() < 1e-6


# --- the questions shared out ---

# which of eight questions have no right answer; rank 0 is asked the even ones, rank 1 the odd ones
SHARED = {"all teach": [], "rank 1 has nothing": [1, 3, 5, 7], "nobody has anything": range(8)}


def sample(model, tokenizer, task, asked):
    """Completions that depend on their question and their number alone, not on the batch."""
    read = tokenizer([question["question"] for question in asked], return_tensors="pt")
    number, at = torch.arange(len(asked))[:, None] % nano.G, torch.arange(8)
    kind = read.input_ids.sum(1, keepdim=True) + number
    mask = at <= kind % 8
    tokens = torch.cat([read.input_ids, (kind * (at + 1) % 20 + 2) * mask], dim=1)
    return tokens, torch.cat([read.attention_mask, mask], dim=1), mask


def shared_steps(folder, rank=0, ranks=1):
    """{name of SHARED: `nano_step` on this rank's share of the questions}"""
    model, tokenizer = nano.load(folder)
    model.cpu()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nano, "sample", sample)
        patch.setattr(nano, "reward", lambda text, known: float(len(text) * known > 4))
        patch.setattr(nano, "MAX_GRAD_NORM", math.inf)
        patch.setattr(nano, "MU", 1)  # without a limit the second one would be enormous
        return {
            name: nano_step(nano, model, tokenizer, [
                toy.question(i) | {"answer": i not in none} for i in range(rank, 8, ranks)])
            for name, none in SHARED.items()}


@pytest.mark.slow
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
    numbers = [*range(0, 32, 2), *range(1, 32, 2)]
    assert asked + asked_too == [nano.toy_question(i) for i in numbers]
    assert seed != other_seed and torch.equal(weights, same)
    saved, untrained = (weights_of(load_model(str(x), CPU)[0]) for x in (tmp_path / "model", small))
    assert torch.equal(saved, weights) and not torch.equal(saved, untrained)
    assert done.stdout.count("step   2") == done.stdout.count("saved") == 1


# --- the program ---


@pytest.fixture
def short(monkeypatch, tmp_path):
    """Two steps of nano.py, in a folder of its own."""
    monkeypatch.setattr(nano, "STEPS", 2)
    monkeypatch.setattr(nano, "FOLDER", str(tmp_path / "nano"))
    return tmp_path / "nano"


def test_it_trains_the_toy_and_eval_reads_what_it_saved(short, capsys):
    short.mkdir()
    (short / "eval-toy.jsonl").write_text("the scores of an earlier model")
    nano.main([])
    steps, answered, saved = capsys.readouterr().out.strip().split("\n\n")
    assert [line[:8] for line in steps.splitlines()] == ["step   1", "step   2"]
    assert "=?\n" in answered and saved == f"The model is saved in {short}."
    assert not list(short.glob("eval-*"))
    evaluation.main(["--model", str(short), "--benchmark", "toy", "--questions", "4",
                     "--samples", "0"])
    assert "greedy" in capsys.readouterr().out


ROWS = [{"question": "1+2=?", "answer": "1+2 is 3\n#### 3"}, {"question": "4+4=?", "answer": 8}]


def test_gsm8k_is_read_from_the_hub(short, monkeypatch, loaded, small):
    """A model without a token for padding. The answers are what follows ####."""
    model, tokenizer = loaded
    tokenizer.pad_token = None
    tokenizer.save_pretrained(small)
    seen, asked, rates = [], [], []

    def recorded(model, reference, optimizer, tokenizer, task, questions):
        asked.append(questions)
        rates.append(optimizer.param_groups[0]["lr"])
        assert task is nano.GSM8K and not any(p.requires_grad for p in reference.parameters())
        return 0.0, 0.0, ""

    hub = SimpleNamespace(load_dataset=lambda *own, **more: seen.append((own, more)) or ROWS)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    monkeypatch.setattr(nano, "step", recorded)
    nano.main([small])
    assert seen == [(("openai/gsm8k", "main"), {"split": "train"})]
    pair = [{"question": "1+2=?", "answer": "3"}, {"question": "4+4=?", "answer": "8"}]
    assert asked == [pair * 4, pair * 4]  # 8 questions of a step
    assert rates == pytest.approx([1e-6, 0.5e-6])  # it falls in a line to 0


@pytest.mark.slow
def test_it_runs_in_a_folder_that_holds_nothing_else(small, tmp_path):
    """nano.py, a model and a file of questions. Nothing of this project is on the path."""
    shutil.copy(FILE, tmp_path)
    shutil.copytree(small, tmp_path / "model")
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + "\n")
    code = ("import nano; nano.STEPS = 2; nano.GSM8K['longest'] = 16; "
            "nano.main(['model', 'mine.jsonl'])")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "step   2" in done.stdout and (tmp_path / "runs/nano/model.safetensors").is_file()


def no_template(folder):
    (folder / "model/chat_template.jinja").unlink()
    return ["model"]


def lines(text):
    def write(folder):
        (folder / "mine.jsonl").write_text(text)
        return ["model", "mine.jsonl"]
    return write


@pytest.mark.parametrize("words, said", [
    (lambda folder: ["nobody/nothing"], "nobody/nothing cannot be used"),
    (lambda folder: ["model", "no.jsonl"], "model no.jsonl cannot be used (FileNotFoundError"),
    (lines("\n"), "mine.jsonl cannot be used (AssertionError('the file is empty'))"),
    (lines('{"question": "?"}'), "KeyError('answer')"),
    (lines('{"question": "?", "answer": null}'), "an answer is empty"),
    (lines('{"question": "?", "answer": ""}'), "an answer is empty"),
    (lines("?"), "JSONDecodeError"), (no_template, "chat_template is not set"),
])
def test_what_cannot_be_used_is_told_in_a_sentence(words, said, small, tmp_path, monkeypatch):
    shutil.copytree(small, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(nano, "step", None)  # it must not come so far
    with pytest.raises(SystemExit) as stopped:
        nano.main(words(tmp_path))
    sentence = stopped.value.code
    assert said in sentence and "\n" not in sentence and "MODEL is a chat model" in sentence


@pytest.mark.parametrize("words, said", [
    ([], "the toy's model, tasks/toy_base, is not beside nano.py"),
    (["--steps", "4"], "--steps is no model. nano.py has no options")])
def test_a_first_try_that_fails_is_told_what_is_missing(words, said, tmp_path, monkeypatch):
    monkeypatch.setattr(nano, "TOY_BASE", str(tmp_path / "tasks/toy_base"))
    monkeypatch.setattr(nano, "step", None)
    with pytest.raises(SystemExit) as stopped:
        nano.main(words)
    assert stopped.value.code.startswith("error: " + said)


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
    nano.step = STEP
    rank = dist.get_rank()
    found = asked, weights_of(models[-1]), torch.initial_seed(), shared_steps(folder, rank, 2)
    torch.save(found, out / f"{rank}.pt")
