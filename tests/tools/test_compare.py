"""Two evaluations, or several runs, are compared."""

from pathlib import Path

import pytest

from engine.base.errors import UserError
from engine.report import curves
from tests.helpers.runs import written
from tests.test_eval import go
from tools.compare import main


def test_two_models_are_compared_on_the_same_questions_only(small, tmp_path, capsys):
    folders = tmp_path / "a", tmp_path / "b"
    paths = [f"{folder}/eval-toy.jsonl" for folder in folders]
    go(small, folders[0])
    lines = go(small, folders[1], "--seed", "7", "--top_p", "0.9")
    capsys.readouterr()
    main(paths)
    *two, note, _, _, greedy, sampled, _ = capsys.readouterr().out.splitlines()
    assert two == [f"{path}: {small}" for path in paths]
    assert note == "note: not the same top_p: 1.0 and 0.9."  # another seed makes other draws
    assert "+0.0000 [-0.2775, +0.2775], p = 1.0000, 10 questions" in greedy
    assert sampled.startswith("sampled")
    Path(paths[1]).write_text("\n".join(lines[: 1 + 10 + 5]) + "\n")  # killed after 5 answers
    with pytest.raises(UserError, match="the same questions.* that have ended"):
        main(paths)


# --- runs ---


def fake_run(folder, verdicts, steps=30, algorithm="cppo", questions="?"):
    """A finished run that answered its test questions with these verdicts."""
    usual = {"questions": 4, "completions": 64, "length": 9.0, "entropy": None,
             "seconds/total": 3.5, "custom/x": None}
    rows = [usual | {"step": step, "accuracy": step / steps} for step in range(1, steps + 1)]
    answers = [{"setting": {"model": folder, "judge": "toy_accuracy"}}]
    answers += [{"part": part, "index": i, "question": f"{i}{questions}", "correct": verdict}
                for part in ("greedy", "sampled") for i, verdict in enumerate(verdicts)]
    options = {"algorithm": algorithm, "seed": 1, "output_dir": folder}
    written(Path(folder, "metrics.jsonl"), rows)
    written(Path(folder, "answers.jsonl"), answers)
    written(Path(folder, "summary.json"), [{}])
    written(Path(folder, "run.json"), [options])


def test_runs_are_compared_by_their_test_questions_and_by_the_clock(tmp_path, monkeypatch, capsys):
    drawn = []
    monkeypatch.setattr(
        curves.Figure, "savefig", lambda figure, path, **options: drawn.append((figure, path)))
    monkeypatch.chdir(tmp_path)
    fake_run("a", [True] * 8)
    fake_run("b", [True, False] * 4, steps=10, algorithm="grpo")
    main(["a", "b"])
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("the difference from the first one")
    assert out[1:3] == [
        "greedy accuracy      a    1.0000",
        "                     b    0.5000  -0.5000 [-0.8750, -0.1250], p = 0.1237, 8 questions"]
    assert out[5:] == [
        "seconds of training  a       105", "                     b        35  0.33 times",
        "completions          a     1,920", "                     b       640  0.33 times",
        "questions            a       120", "                     b        40  0.33 times",
        "written: compared.png"]
    main(["a", "b", "--x", "completions", "--output_dir", "new"])
    for ends, label in (([105, 35], "seconds of training"), ([1920, 640], "completions")):
        figure, path = drawn.pop(0)
        accuracy, *_, own = figure.axes
        assert accuracy.get_xlabel() == label and own.get_title() == "custom/x" and not own.lines
        assert [line.get_xdata()[-1] for line in accuracy.lines] == ends
        assert [line.get_color() for line in accuracy.lines] == [curves.CPPO, curves.GRPO]
    assert path == Path("new/compared.png")


def test_runs_with_answers_to_other_questions_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fake_run("a", [True])
    fake_run("b", [True], questions="!")
    with pytest.raises(UserError, match="not answers to the same questions"):
        main(["a", "b"])
