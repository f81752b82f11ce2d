"""Evaluation: verdicts on completions, resuming, ranks, and the comparison of two models."""

import errno
import json
import os
import random
from pathlib import Path

import pytest
import torch

import eval as evaluation
from engine.base import files
from engine.base.errors import UserError
from engine.data.questions import load_questions
from engine.model.contract import Sampling
from engine.model.sampling import Sampler
from tasks.table import SYSTEM_PROMPT
from tests.engine.test_ranks import torchrun

ROOT = Path(__file__).parent.parent


def always(answer):
    return lambda completions, **columns: [float(gold == answer) for gold in columns["answer"]]


def test_accuracy_is_the_share_of_right_completions(loaded, tmp_path):
    model, tokenizer = loaded
    questions, _ = load_questions("toy", tokenizer, split="test", limit=7)
    for i, row in enumerate(questions):
        row["answer"] = str(i % 2)  # 0 1 0 1 0 1 0
    summary = evaluation.examine(
        Sampler(model, tokenizer), tokenizer, questions, always("1"), Sampling(8), samples=3,
        batch_size=6, path=tmp_path / "answers")  # so the questions are cut into several batches
    records = files.read(tmp_path / "answers")
    greedy, sampled = ([r for r in records if r["part"] == p] for p in ("greedy", "sampled"))
    assert summary["greedy"]["accuracy"] == summary["sampled"]["accuracy"] == pytest.approx(3 / 7)
    assert [r["index"] for r in sampled] == [i for i in range(7) for _ in range(3)]
    assert all(r["correct"] == (r["index"] % 2 == 1) for r in records)
    assert summary["greedy"]["length"] == pytest.approx(sum(r["tokens"] for r in greedy) / 7)
    assert len({r["completion"] for r in sampled[:3]}) > 1  # not repeated


@pytest.mark.parametrize("completion, answer", [
    ("<answer>5.0</answer>", 5), ("the answer is $5", 5), ("<answer>x = y</answer>", "x = y"),
    ("<answer>0</answer>", 0), ("no answer", None),
])  # fmt: skip
def test_equal_numbers_are_one_answer(completion, answer):
    assert evaluation.answer_of(completion) == answer


WORDS = ["--questions", "10", "--samples", "2", "--batch_size", "6", "--max_new_tokens", "20"]


def go(small, folder, *words):
    evaluation.main(["--model", small, *WORDS, "--output_dir", str(folder), *words])
    return (folder / "eval-toy.jsonl").read_text().splitlines()


def test_an_interrupted_evaluation_goes_on_where_it_was(small, tmp_path):
    def score():
        return json.loads((tmp_path / "a/eval-toy.json").read_text()) | {"seconds": None}

    whole, first = go(small, tmp_path / "a"), score()
    assert len(whole) == 1 + 10 + 20
    for cut in (1, 5, 16, 31):  # after so many lines, and in the middle of the next one
        text = "\n".join([*whole[:cut], *whole[cut : cut + 1]])
        (tmp_path / "a/eval-toy.jsonl").write_text(text[:-30] if cut < 31 else text)
        assert sorted(go(small, tmp_path / "a")) == sorted(whole) and score() == first
    with pytest.raises(UserError, match="temperature.* --output_dir"):
        go(small, tmp_path / "a", "--temperature", "0.5")


@pytest.mark.parametrize("error, message", [
    (torch.OutOfMemoryError(), "--batch_size 6"),
    (OSError(errno.ENOSPC, "it is full"), "it is full.* --output_dir"),
])
def test_without_room_the_option_that_needs_less_is_named(
    small, tmp_path, monkeypatch, error, message
):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr(evaluation, "examine", fails)
    with pytest.raises(UserError, match=message):
        go(small, tmp_path / "a")


@pytest.mark.parametrize("name", ["file", "file/results"])
def test_a_file_in_place_of_the_folder_is_refused(small, tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"(FileExists|NotADirectory)Error.*{name}.*--output_dir"):
        go(small, tmp_path / name)


@pytest.mark.slow
def test_the_number_of_ranks_changes_nothing(small, tmp_path):
    alone = go(small, tmp_path / "a")
    words = [*WORDS, "--output_dir", tmp_path / "b"]
    done = torchrun(ROOT / "eval.py", "--model", small, *words, ranks=3)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "b/eval-toy.jsonl").read_text().splitlines() == alone


def test_several_benchmarks_each_with_its_setting(small, tmp_path, capsys):
    rows = [{"question": "1+1=?", "answer": "One and one.\n#### 2"},
            {"question": "2+2=?", "answer": "4", "level": 1}]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluation.main([
        "--model", small, "--questions", "3", "--samples", "0", "--max_new_tokens", "9",
        "--output_dir", f"{tmp_path}/out", "--benchmark", f"{tmp_path}/mine.jsonl", "toy"])
    assert capsys.readouterr().out.count("greedy") == 2
    summary, toy = (json.loads((tmp_path / f"out/eval-{x}.json").read_text())
                    for x in ("mine", "toy"))
    assert (summary["questions"], summary["max_new_tokens"]) == (2, 9)
    assert (summary["judge"], toy["judge"]) == ("gsm8k_accuracy", "toy_accuracy")
    assert summary["system_prompt"] == SYSTEM_PROMPT and "sampled" not in summary
    answers = files.read(tmp_path / "out/eval-mine.jsonl")[1:]
    assert [row["question"] for row in answers] == ["1+1=?", "2+2=?"]


def test_each_number_is_said_in_words_with_its_interval(small, tmp_path, capsys):
    go(small, tmp_path)
    shown = capsys.readouterr().out
    scores = json.loads((tmp_path / "eval-toy.json").read_text())
    for part, name, title, words in (
        ("greedy", "accuracy", "greedy", "the most likely answer is right"),
        ("sampled", "accuracy", "avg@2", "a sampled answer is right (2 for each question)"),
        ("sampled", "pass@2", "pass@2", "at least one of 2 sampled answers is right"),
    ):
        low, high = scores[part]["intervals"][name]
        line = f"  {title:8} {scores[part][name]:.3f}  [{low:.3f}, {high:.3f}]  {words}\n"
        assert line in shown
    assert max(map(len, shown.splitlines()[:-1])) <= 100  # the last one names the files


def test_completions_of_another_program_are_scored(tmp_path, capsys):
    answers = {"2": ["<answer>2</answer>", "<answer>3</answer>", "the answer is 2.0"],
               "4": ["#### 5", "\\boxed{5}", "<answer>4</answer>"]}  # fmt: skip
    many = [{"question": a, "answer": f"#### {a}", "completions": c} for a, c in answers.items()]
    single = [{"question": a, "answer": a, "completion": x} for a, c in answers.items() for x in c]
    for lines in (many, random.Random(0).sample(single, 6), [many[0], *single[3:]]):
        (tmp_path / "x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        evaluation.main(["--from_file", "none", "--from_file", str(tmp_path / "x.jsonl")])
        assert "note: --from_file is given more than once: the last" in capsys.readouterr().out
        summary = json.loads((tmp_path / "scored-x.json").read_text())["sampled"]
        assert (summary["accuracy"], summary["samples"], summary["questions"]) == (0.5, 3, 2)
        assert summary["pass@2"] == pytest.approx((1 + 2 / 3) / 2) and summary["maj@3"] == 0.5


@pytest.mark.parametrize("bad", [
    '"completion": "3", "completions": ["3"]', '"completion": 3', '"completions": "3"',
    '"completions": 3', '"completions": []', '"text": "3"',
])  # fmt: skip
def test_completions_that_are_no_texts_are_refused(tmp_path, bad):
    (tmp_path / "x.jsonl").write_text('{"question": "1", "answer": "1", ' + bad + "}\n")
    with pytest.raises(UserError, match="completions"):
        evaluation.main(["--from_file", str(tmp_path / "x.jsonl")])


def test_results_go_beside_what_is_evaluated_or_under_runs(tmp_path, monkeypatch):
    """Under runs/ go those of a model of the hub, and if the folder is read-only."""
    def folder(**options):
        return str(evaluation.results_folder(evaluation.Config(**options)))

    assert folder(model=str(tmp_path)) == folder(from_file=f"{tmp_path}/x.jsonl") == str(tmp_path)
    assert folder(model=str(tmp_path), output_dir="out") == "out"
    assert folder(model="Me/Model-1B") == "runs/eval-Model-1B"
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    assert folder(from_file=f"{tmp_path}/x.jsonl") == "runs/eval-x"


def test_two_models_are_compared_on_the_same_questions_only(small, tmp_path, capsys):
    paths = [str(tmp_path / name / "eval-toy.jsonl") for name in "abc"]
    go(small, tmp_path / "a")
    go(small, tmp_path / "b", "--seed", "7", "--top_p", "0.9")
    go(small, tmp_path / "c", "--questions", "9")
    capsys.readouterr()
    evaluation.main(["--compare", *paths[:2]])
    _, _, note, greedy, sampled = capsys.readouterr().out.splitlines()
    assert note.startswith("note: not the same top_p: 1.0 and 0.9")  # and no note of the seed
    assert "+0.0000 [-0.2775, +0.2775], p = 1.0000, 10 questions" in greedy
    assert sampled.startswith("sampled")
    with pytest.raises(UserError, match="the same questions"):
        evaluation.main(["--compare", *paths[1:]])


@pytest.mark.parametrize("content", [
    b"\xff\xc0", b"1" * 5000, b"[" * 100_000, b'{"question": "1"}',
])  # fmt: skip
def test_what_eval_has_not_written_is_not_compared(tmp_path, content):
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(UserError, match="other is no file of answers"):
        evaluation.main(["--compare", str(tmp_path / "other"), str(tmp_path / "other")])


@pytest.mark.parametrize("words, message", [
    ("--benchmark gsm9k", "gsm9k"), ("--benchmark toy toy", "--benchmark"),
    ("--benchmark toy toy_code", "one by one"), ("--model ./nowhere", "nowhere"),
    ("--samples -1", "--samples"), ("--samples 0 --top_p 0.9", "--top_p .*--samples 0"),
    ("--seed 9223372036854775807", "--seed"), ("--top_p 0", "--top_p"),
    ("--temperature 0", "--temperature"), ("--temperature nan", "--temperature"),
    ("--dataset toy", "--dataset"), ("--judge nobody", "nobody"),
    (f"--judge {ROOT}/examples/my_reward.py", "--judge.*:FUNCTION"),
    ("--compare a.jsonl", "--compare"), ("--compare a.jsonl b.jsonl", "is no file of answers"),
    ("--compare . .", "is no file of answers"),
    ("--compare a.jsonl b.jsonl --samples 2", "--samples .*--compare"),
    ("--from_file a.jsonl --model toy2", "--model .*--from_file"),
    ("--from_file none", "--from_file: the file none does not exist"),
])  # fmt: skip
def test_bad_input_of_eval(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        evaluation.main(words.split())


def test_a_file_of_ones_own_is_evaluated_beside_the_toy(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"question": "1+1=?", "answer": "2"}')
    assert evaluation.check({"benchmark": ["toy", str(path)]}).model == "toy"
