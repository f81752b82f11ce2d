"""experiments/library/train_for.py and learning.py: runs of the same seconds, and their page."""

import pytest
import torch

from engine.options.config import config_of
from experiments import learning
from experiments.library.train_for import train_for
from tests.helpers.runs import json_of

CPU = torch.device("cpu")


@pytest.mark.slow
def test_a_run_learns_for_its_seconds_and_is_evaluated_on_the_way(small):
    chosen = {"model": small, "dataset": "toy", "algorithm": "grpo", "questions_per_step": 4}
    figures = train_for(*config_of(chosen), CPU, 2.0, at=(0, 1.0, 2.0), eval_questions=64)
    seconds = [now for now, *_ in figures["curves"]]
    # the step that goes beyond ends it
    assert seconds == sorted(seconds) and seconds[-1] > 2.0 >= seconds[-2]
    assert figures["questions"] == 4 * figures["steps"] > 8 and 0 < figures["sampling"] < 1
    moments, completions, accuracies = zip(*figures["held_out"])
    assert moments == (0, 1.0, 2.0) and 0 < accuracies[0] != accuracies[2]
    assert 0 == completions[0] < completions[1] < completions[2] == figures["completions"]


@pytest.mark.slow
def test_the_learning_study_makes_base_pilot_and_runs_once_and_a_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for part in ("base", "pilot", "all"):
        learning.main(["--size", "quick", "--part", part])
    made = {file: file.stat().st_mtime_ns for file in tmp_path.glob("runs/learning_quick/*/*.json")}
    # three methods with two learning rates in the pilot, and two seeds
    assert [file.parent.name for file in made].count("pilot") == 6 == len(made) - 6 - 4
    learning.main(["--size", "quick"])  # finished runs are kept
    assert all(file.stat().st_mtime_ns == before for file, before in made.items())
    results = tmp_path / "runs/results"
    page = (results / "learning_quick.md").read_text()
    assert "## Plan, written before the runs" in page and "| CPPO, P=0.875 | " in page
    found = json_of(results / "learning_quick.json")
    assert [row["name"] for row in found["rows"]] == list(learning.SIZES["quick"].methods)
    assert (results / "learning_quick.png").exists()


@pytest.mark.parametrize("method", learning.METHODS)
def test_each_method_updates_on_16_completions_as_the_plan_says(method, monkeypatch, small):
    monkeypatch.setattr(learning, "train_for", lambda config, algorithm, *others: algorithm)
    a = learning.Learning("cpu", CPU, small).run(method, 1e-4, 1, 300)
    assert (a.questions_per_step * a.k, a.group_size, a.mu) == (16 * a.minibatches, 16, 1)
