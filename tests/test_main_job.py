"""The README's first command, from nothing, in an empty folder: the base guesses, training makes it
think and be right."""

import subprocess
import sys

import pytest

from tests.helpers.runs import ROOT, json_of

SHORT = ["--steps", "8", "--eval_questions", "32"]


@pytest.mark.parametrize("words, accuracy, longer", [
    (SHORT, 0.6, 1.3), pytest.param([], 0.85, 2.0, marks=pytest.mark.slow)], ids=["short", "whole"])
def test_torchrun_train_py_teaches_the_toy_to_think(words, accuracy, longer, tmp_path):
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", ROOT / "train.py", *words,
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    run = tmp_path / "runs/toy-cppo-1"
    summary = json_of(run / "summary.json")
    before, after = summary["before"], summary["after"]
    assert before["sampled"]["accuracy"] <= 0.50 < accuracy <= after["sampled"]["accuracy"]
    assert after["sampled"]["length"] >= longer * before["sampled"]["length"]
    written = ("metrics.jsonl", "samples.jsonl", "curves.png", "run.json")
    assert all((run / name).stat().st_size > 0 for name in written)
    assert (tmp_path / summary["checkpoint"] / "model.safetensors").exists()
    if words:
        return
    assert after["greedy"]["accuracy"] >= 0.93
    lines = [line.split() for line in done.stdout.splitlines()]
    [last] = [words for words in lines if words and words[0] == "17–32"]
    # the second example, because the base answers the first one right
    assert last[-1].endswith("</answer>") and "7+4-2-8+7=?  (right: 8), greedy:" in done.stdout
    assert "On 512 test questions: greedy accuracy 0.393 → 0.9" in done.stdout
    assert "\nIt thinks now. The reward asked only for right answers.\n" in done.stdout
