"""Evaluation of files with known verdicts, and the picture of several runs."""

import json

import pytest
import torch

import eval as evaluation
import plot
from engine import data
from engine.options import UserError
from engine.rollout import Sampling


def always(answer):
    return lambda completions, **columns: [float(gold == answer) for gold in columns["answer"]]


def test_accuracy_is_the_share_of_right_completions(loaded):
    model, tokenizer = loaded
    questions, _ = data.load("toy", tokenizer, split="test", limit=7)
    for i, row in enumerate(questions):
        row["answer"] = str(i % 2)  # 0 1 0 1 0 1 0
    # small batches, so that questions are cut into several
    summary, records = evaluation.examine(model, tokenizer, questions, always("1"), Sampling(8), samples=3, batch_size=6)
    assert summary["greedy"]["accuracy"] == summary["sampled"]["accuracy"] == pytest.approx(3 / 7)
    assert [r["index"] for r in records if r["part"] == "sampled"] == [i for i in range(7) for _ in range(3)]
    assert all(r["correct"] == (r["index"] % 2 == 1) for r in records)
    lengths = [r["tokens"] for r in records if r["part"] == "greedy"]
    assert summary["greedy"]["length"] == pytest.approx(sum(lengths) / 7)
    assert len({r["completion"] for r in records if r["part"] == "sampled" and r["index"] == 0}) > 1  # sampled, not repeated


def test_the_greedy_part_does_not_depend_on_the_seed_or_the_batch(loaded):
    model, tokenizer = loaded
    questions, _ = data.load("toy", tokenizer, split="test", limit=9)
    texts = []
    for seed, size in [(1, 2), (2, 9)]:
        records = evaluation.evaluate(model, tokenizer, questions, always("1"), Sampling(48, temperature=0.0), batch_size=size, seed=seed)
        texts.append([r["completion"] for r in records])
    assert texts[0] == texts[1]


def test_a_local_file_is_scored_and_every_answer_kept(small, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [{"question": "1+1=?", "answer": "One and one.\n#### 2"}, {"problem": "2+2=?", "answer": "4", "level": 1}]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluation.main(["--model", small, "--dataset", "mine.jsonl", "--samples", "0", "--max_new_tokens", "9", "--output", "out.json"])
    summary = json.loads((tmp_path / "out.json").read_text())
    assert summary["scored"] == 2 and summary["max_new_tokens"] == 9 and "sampled" not in summary
    answers = [json.loads(line) for line in (tmp_path / "out-answers.jsonl").read_text().splitlines()]
    assert [row["question"] for row in answers] == ["1+1=?", "2+2=?"] and {"completion", "correct", "score"} <= set(answers[0])
    assert "accuracy" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--dataset", "gsm9k"], "unknown data set"),
        (["--samples", "-1"], "--samples must be at least 0"),
        (["--temperature", "0"], "--temperature must be above 0"),
        (["--model", "./nowhere"], "does not exist"),
        (["--benchmark", "toy"], "unknown option --benchmark"),
    ],
)
def test_bad_input_of_eval(argv, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        evaluation.main(argv)


def fake_run(folder, steps, **more):
    folder.mkdir()
    for step in range(1, steps + 1):
        row = {"step": step, "questions": 4, "accuracy": step / steps, "reward": 1.0, "reward/a": 0.5, "reward/b": 0.5, "length": 9.0,
               "no_signal": 0.0, "entropy": 0.1, "seconds/generate": 1.0, "seconds/update": 2.0, "seconds/total": 3.5, **more}
        if step != 2:  # a step without signal has no loss, kl, …
            row |= {"kl": 0.1, "clip_fraction": 0.0, "grad_norm": 1.0}
        (folder / "metrics.jsonl").open("a").write(json.dumps(row) + "\n")


def test_several_runs_on_one_picture(tmp_path, monkeypatch):
    fake_run(tmp_path / "one", 30)
    fake_run(tmp_path / "two", 3)
    figures = []
    monkeypatch.setattr(plot.plt, "close", figures.append)
    plot.main([str(tmp_path / "one"), str(tmp_path / "two"), "--output", str(tmp_path / "both.png")])
    assert (tmp_path / "both.png").stat().st_size > 10_000
    axes = figures[0].axes
    assert {text.get_text() for text in axes[0].get_legend().get_texts()} == {"one", "two"}
    assert axes[0].lines[0].get_xdata()[-1] == 120 and axes[0].lines[0].get_ydata()[-1] == 1.0  # accuracy against questions
    assert {bar.get_height() for bar in axes[8].patches} == {30.0, 60.0, 3.0, 6.0, 0.0}  # seconds by phase
    with pytest.raises(UserError, match="holds no run"):
        plot.main([str(tmp_path)])


def test_the_mean_that_smooths_a_curve_looks_back_only():
    assert plot.smooth([1.0, 2.0, 6.0], 2) == [1.0, 1.5, 4.0]
    assert torch.allclose(torch.tensor(plot.smooth([3.0, 4.0], 1)), torch.tensor([3.0, 4.0]))
