"""Completions of another program are judged, and two evaluations are compared."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from engine.base.errors import UserError
from tests.test_eval import go
from tools.compare import main

ROOT = Path(__file__).parents[2]
FEW = '{"question": "1", "answer": "1", '


def test_completions_of_another_program_are_scored(tmp_path, capsys):
    answers = {"2": ["<answer>2</answer>", "<answer>3</answer>", "the answer is 2.0"],
               "4": ["#### 5", "\\boxed{5}", "<answer>4</answer>"]}  # fmt: skip
    many = [{"question": a, "answer": f"#### {a}", "completions": c} for a, c in answers.items()]
    single = [{"question": a, "answer": a, "completion": x} for a, c in answers.items() for x in c]
    for lines in (many, random.Random(0).sample(single, 6), [many[0], *single[3:]]):
        (tmp_path / "x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        main([str(tmp_path / "x.jsonl")])
        shown = capsys.readouterr().out
        assert "  avg@3    0.500" in shown and "judged by gsm8k_accuracy" in shown
        content = json.loads((tmp_path / "scored-x.json").read_text())
        summary = content["sampled"]
        assert (summary["accuracy"], summary["samples"], summary["questions"]) == (0.5, 3, 2)
        assert summary["pass@2"] == pytest.approx((1 + 2 / 3) / 2) and summary["maj@3"] == 0.5
    main([str(tmp_path / "x.jsonl"), "--judge", "format_reward", "--output_dir", f"{tmp_path}/a/b"])
    content = json.loads((tmp_path / "a/b/scored-x.json").read_text())
    assert content["judge"] == "format_reward" and content["sampled"]["accuracy"] == 0


def test_two_models_are_compared_on_the_same_questions_only(small, tmp_path, capsys):
    paths = [str(tmp_path / name / "eval-toy.jsonl") for name in "abc"]
    go(small, tmp_path / "a")
    go(small, tmp_path / "b", "--seed", "7", "--top_p", "0.9")
    go(small, tmp_path / "c", "--questions", "9")
    capsys.readouterr()
    main(paths[:2])
    first, second, *notes, greedy, sampled = capsys.readouterr().out.splitlines()
    assert [first, second] == [f"{small}: {path}" for path in paths[:2]]
    assert notes == ["note: not the same top_p: 1.0 and 0.9."]  # another seed makes other draws
    assert "+0.0000 [-0.2775, +0.2775], p = 1.0000, 10 questions" in greedy
    assert sampled.startswith("sampled")
    with pytest.raises(UserError, match="the same questions"):
        main(paths[1:])
    path = tmp_path / "b/eval-toy.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    question = json.loads(lines[1])["question"]
    path.write_text("".join(lines).replace(question, "1+1=?"))
    with pytest.raises(UserError, match="the same questions .greedy"):
        main(paths[:2])
    path.write_text("".join(lines[: 1 + 10 + 5]))  # killed after 5 of 20 sampled answers
    with pytest.raises(UserError, match="the same questions .sampled.* that have ended"):
        main(paths[:2])


@pytest.mark.parametrize("content", [
    b"\xff\xc0", b"1" * 5000, b"[" * 100_000, b"1", b"", b'{"question": "1"}',
])  # fmt: skip
def test_what_eval_has_not_written_is_not_compared(tmp_path, content):
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(UserError, match="other is no file of answers .*: name eval-NAME.jsonl"):
        main([str(tmp_path / "other"), str(tmp_path / "other")])


@pytest.mark.parametrize("content, message", [
    (FEW + '"completion": "3", "completions": ["3"]}', "question 1: .* or 'completions'"),
    (FEW + '"completion": 3}', "question 1: .* or 'completions'"),
    (FEW + '"completions": "3"}', "question 1: .* or 'completions'"),
    (FEW + '"completions": 3}', "question 1: .* or 'completions'"),
    (FEW + '"completions": []}', "question 1: .* or 'completions'"),
    (FEW + '"text": "3"}', "question 1: .* or 'completions'"),
    (FEW + '"completion": "3"}\n{"question": null}', "question 2: .* is missing .* name both"),
    ('{"setting": {}}\n' + FEW + '"completion": "3"}', "question 1: .* is missing .* name both"),
    ("", "empty"), ("no", "JSON object"),
])  # fmt: skip
def test_a_file_without_completions_is_not_judged(tmp_path, content, message):
    (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(UserError, match=message):
        main([str(tmp_path / "x.jsonl")])


@pytest.mark.parametrize("words, message", [
    ("none", "the file none does not exist"), ("a none", "the file none does not exist"),
    ("a b c", "more than two files"), ("a b --judge toy_accuracy", "no effect with two files"),
    ("a --output_dir runs b", "no effect with two files"), ("a.jsonl --judge nobody", "nobody"),
    ("a.jsonl --output_dir a", "a file in place.*--output_dir than a"),
])  # fmt: skip
def test_bad_input_of_compare(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "c", "a.jsonl"):
        Path(name).write_text(FEW + '"completion": "3"}')
    with pytest.raises(UserError, match=message):
        main(words.split())


def test_it_starts_in_any_folder_and_ends_with_one_sentence(tmp_path):
    words = [sys.executable, ROOT / "tools/compare.py", "none.jsonl"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: the file none.jsonl does not exist")
    assert len(done.stderr.splitlines()) == 1
