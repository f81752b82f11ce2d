"""Completions of another program are judged, and two evaluations are compared."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine.base import files
from engine.base.errors import UserError
from tests.engine.runs import ROOT
from tests.test_eval import go
from tools.compare import main

FEW = '{"question": "1", "answer": "1", '


def test_completions_of_another_program_are_scored(tmp_path, capsys):
    answers = {"2": ["<answer>2</answer>", "<answer>3</answer>", "the answer is 2.0"],
               "4": ["#### 5", "\\boxed{5}", "<answer>4</answer>"]}  # fmt: skip
    many = [{"question": a, "answer": f"#### {a}", "completions": c} for a, c in answers.items()]
    single = [{"question": a, "answer": a, "completion": x} for a, c in answers.items() for x in c]
    right = {"accuracy": 0.5, "samples": 3, "questions": 2, "pass@2": 5 / 6, "maj@3": 0.5}
    path = tmp_path / "x.jsonl"
    for rows in (many, single[::2] + single[1::2], [many[0], *single[3:]]):
        path.write_text(files.as_lines(rows))
        main([str(path)])
        shown = capsys.readouterr().out
        assert "  avg@3    0.500" in shown and "judged by gsm8k_accuracy" in shown
        found = json.loads((tmp_path / "scored-x.json").read_text())["sampled"]
        assert {name: found[name] for name in right} == pytest.approx(right)
    main([str(path), "--judge", "format_reward", "--output_dir", f"{tmp_path}/a/b"])
    found = json.loads((tmp_path / "a/b/scored-x.json").read_text())
    assert found["judge"] == "format_reward" and found["sampled"]["accuracy"] == 0


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
    question = json.loads(lines[1])["question"]
    for part, text in {
        "greedy": "\n".join(lines).replace(question, "1+1=?"),
        "sampled": "\n".join(lines[: 1 + 10 + 5]),  # killed after 5 of 20 answers
    }.items():
        Path(paths[1]).write_text(text + "\n")
        with pytest.raises(UserError, match=f"the same questions .{part}.* that have ended"):
            main(paths)


@pytest.mark.parametrize("words, content, message", [
    *(("a.jsonl", FEW + wrong + "}", "question 1: .* or 'completions'") for wrong in (
        '"completion": "3", "completions": ["3"]', '"completion": 3', '"completions": "3"',
        '"completions": 3', '"completions": []', '"text": "3"',
    )),
    ("a.jsonl", FEW + '"completion": "3"}\n{"question": null}', "question 2: .* name both"),
    ("a.jsonl", '{"setting": {}}\n' + FEW + '"completion": "3"}', "question 1: .* name both"),
    ("a.jsonl", "", "empty"), ("a.jsonl", "no", "JSON object"),
    ("a.jsonl none", "", "the file none does not exist"),
    ("a.jsonl a.jsonl a.jsonl", "", "more than two files"),
    ("a.jsonl a.jsonl --judge toy_accuracy", "", "no effect with two files"),
    ("a.jsonl --output_dir runs a.jsonl", "", "no effect with two files"),
    ("a.jsonl --judge nobody", "", "nobody"),
    ("a.jsonl --output_dir a.jsonl", FEW + '"completion": "3"}', "a file in.*--output_dir than a"),
    *(("a.jsonl a.jsonl", content, "a.jsonl is no file of answers .*: name another one")
      for content in ("ÿÀ", "1" * 5000, "[" * 100_000, "1", "", '{"question": "1"}')),
], ids=lambda value: value[:30])  # fmt: skip
def test_bad_input_of_compare(words, content, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match=message):
        main(words.split())


def test_it_starts_in_any_folder_and_ends_with_one_sentence(tmp_path):
    words = [sys.executable, ROOT / "tools/compare.py", "none.jsonl"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch("error: the file none.jsonl does not exist.*\n", done.stderr)
