"""Completions of another program are judged, and two evaluations are compared."""

import json
from pathlib import Path

import pytest

from engine.base import files
from engine.base.errors import UserError
from tests.test_eval import go
from tools.compare import main


def test_completions_of_another_program_are_scored(tmp_path, capsys):
    answers = {"2": ["<answer>2</answer>", "<answer>3</answer>", "the answer is 2.0"],
               "4": ["#### 5", "\\boxed{5}", "<answer>4</answer>"]}  # fmt: skip
    many = [{"question": a, "answer": f"#### {a}", "completions": c} for a, c in answers.items()]
    single = [{"question": a, "answer": a, "completion": x} for a, c in answers.items() for x in c]
    right = {"accuracy": 0.5, "samples": 3, "questions": 2, "pass@2": 5 / 6, "maj@3": 0.5}
    path = tmp_path / "x.jsonl"
    for rows in (many, single[::2] + single[1::2]):
        path.write_text(files.as_lines(rows))
        main([str(path)])
        shown = capsys.readouterr().out
        assert "  avg@3    0.500" in shown and "judged by gsm8k_accuracy" in shown
        found = json.loads((tmp_path / "scored-x.json").read_text())["sampled"]
        assert {name: found[name] for name in right} == pytest.approx(right)


@pytest.mark.parametrize("judge, answer, completions, majority", [
    ("math_accuracy", "(1, 2)", ["\\boxed{(0,0)}", "\\boxed{(1,2)}", "\\boxed{(0,0)}",
                                 "\\boxed{(1, 2)}", "\\boxed{\\left(1,2\\right)}"], 1.0),
    ("number_accuracy", "7", ["so 7", "3 + 4 = 7", "we get 7", "it is <answer>8</answer>"], 1.0),
    ("number_accuracy", "7", ["so 8", "3 + 4 = 8", "we get 8.0", "7", "7"], 0.0),
])
def test_a_majority_is_of_answers_that_are_right_and_not_of_spellings(
    judge, answer, completions, majority, tmp_path
):
    row = {"question": "1", "answer": answer, "completions": completions}
    (tmp_path / "x.jsonl").write_text(files.as_lines([row]))
    main([f"{tmp_path}/x.jsonl", "--judge", judge])
    found = json.loads((tmp_path / "scored-x.json").read_text())["sampled"]
    assert found[f"maj@{len(completions)}"] == majority


def test_two_models_are_compared_on_the_same_questions_only(small, tmp_path, capsys):
    folders = tmp_path / "a", tmp_path / "b"
    paths = [f"{folder}/eval-toy.jsonl" for folder in folders]
    go(small, folders[0])
    lines = go(small, folders[1], "--seed", "7", "--top_p", "0.9")
    capsys.readouterr()
    main(paths)
    *two, note, greedy, sampled = capsys.readouterr().out.splitlines()
    assert two == [f"{small}: {path}" for path in paths]
    assert note == "note: not the same top_p: 1.0 and 0.9."  # another seed makes other draws
    assert "+0.0000 [-0.2775, +0.2775], p = 1.0000, 10 questions" in greedy
    assert sampled.startswith("sampled")
    Path(paths[1]).write_text("\n".join(lines[: 1 + 10 + 5]) + "\n")  # killed after 5 answers
    with pytest.raises(UserError, match="the same questions .sampled.* that have ended"):
        main(paths)


@pytest.mark.parametrize("words, content, message", [
    ("a.jsonl", '{"question": "1", "answer": "1", "text": "3"}', "question 1: .* or 'completions'"),
    ("a.jsonl none", "", "the file none does not exist"),
    ("a.jsonl a.jsonl --judge toy_accuracy", "", "no effect with two files"),
    ("a.jsonl a.jsonl", "1", "a.jsonl is no file of answers .*: name another one"),
])
def test_bad_input_of_compare(words, content, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text(content)
    with pytest.raises(UserError, match=message):
        main(words.split())
