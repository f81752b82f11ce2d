"""experiments/library/train_for.py and learning.py: runs of the same seconds, and their page."""

import json

import pytest
import torch

from engine.base.errors import UserError
from engine.run.config import config_of
from experiments import learning
from experiments.library.train_for import reached, train_for
from tasks import toy

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
    assert moments == (0, 1.0, 2.0) and 0 == completions[0] < completions[1] < completions[2]
    assert completions[2] == figures["completions"] and 0 < accuracies[0] != accuracies[2]


def test_the_seconds_to_an_accuracy_are_those_of_the_first_time_that_a_run_has_it():
    points = [(2, 0, 0.4), (4, 0, 0.5), (6, 0, 0.4), (8, 0, 0.6), (11, 0, 0.7)]
    found = [reached([points], least, 10) for least in (0.4, 0.5, 0.55, 0.7)]
    assert found == [[2], [4], [8], [None]]


@pytest.mark.slow
def test_the_learning_study_makes_base_pilot_and_runs_once_and_a_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for part in ("base", "pilot", "all"):
        learning.main(["--size", "quick", "--part", part])
    made = sorted(tmp_path.glob("runs/learning_quick/*/*.json"))
    # three methods with two learning rates in the pilot, and two seeds
    assert [file.parent.name for file in made].count("pilot") == 6 == len(made) - 6 - 4
    before = [file.stat().st_mtime_ns for file in made]
    learning.main(["--size", "quick"])  # finished runs are kept
    assert [file.stat().st_mtime_ns for file in made] == before
    page = (tmp_path / "runs/results/learning_quick.md").read_text()
    assert "## Plan, written before the runs" in page and "| CPPO, P=0.875 | " in page
    found = json.loads((tmp_path / "runs/results/learning_quick.json").read_text())
    assert [row["name"] for row in found["rows"]] == list(learning.SIZES["quick"].methods)
    assert (tmp_path / "runs/results/learning_quick.png").exists()


@pytest.mark.parametrize("method", learning.METHODS)
def test_each_method_updates_on_16_completions_as_the_plan_says(method, monkeypatch, small):
    monkeypatch.setattr(learning, "train_for", lambda config, algorithm, *others: algorithm)
    a = learning.Learning("cpu", CPU, small).run(method, 1e-4, 1, 300)
    assert (a.questions_per_step * a.k, a.group_size, a.mu) == (16 * a.minibatches, 16, 1)


def test_ahead_is_each_seed_above_each_seed():
    spreads = [{"min": low, "max": high} for low, high in ((0.4, 0.6), (0.6, 0.7), (0.61, 0.9))]
    assert learning.ahead(spreads[2], spreads[0]) == "ahead"
    assert learning.ahead(spreads[0], spreads[2]) == "behind"
    assert learning.ahead(spreads[1], spreads[0]) == learning.ahead(spreads[2], spreads[1]) == "–"


def test_a_base_outside_of_the_plan_and_a_pilot_that_learns_nothing_end_the_study():
    def study(start, end, model=None):
        made = learning.Learning("cpu", CPU, model)
        made.kept = lambda *_: {"held_out": [(0, 0, start), (1, 1, end)]}
        return made

    for start, end in ((0.1, 0.9), (0.6, 0.9), (0.3, 0.34)):
        with pytest.raises(UserError):
            study(start, end).rate("GRPO")
    assert study(0.3, 0.34).rate("CPPO, P=0.875") == study(0.3, 0.36).rate("GRPO")
    # a model that is given may know less; it must learn all the same
    study(0.1, 0.16, "DIR").rate("GRPO")
    with pytest.raises(UserError, match="gains 0.04"):
        study(0.1, 0.14, "DIR").rate("GRPO")


def test_longer_sums_have_thoughts_of_the_length_that_the_plan_says():
    for operands, most, low, high in (
        (toy.MIDDLE, toy.MIDDLE_TOKENS, 75, 130), (toy.LONG, toy.LONG_TOKENS, 135, 250)):
        rows = [toy.question(i, "warm_start", operands) for i in range(300)]
        # one token for each character, and eight for the tags, the answer and the end
        lengths = [len(row["thoughts"]) + 8 for row in rows]
        assert low <= min(lengths) and max(lengths) <= high < most
