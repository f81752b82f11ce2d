"""real.py: runs of the same seconds, and what counts as a difference."""

import json

import pytest

from experiments import real

pytestmark = pytest.mark.slow


def test_a_run_on_a_real_model_has_the_same_seconds_whatever_the_method(
    small, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(real, "AT", (0.5, 1.0))
    monkeypatch.setattr(real, "EVAL_QUESTIONS", 3)
    names = "GRPO", "CPPO, P=0.875"
    monkeypatch.setitem(real.STUDIES, "real", {name: real.METHODS[name] for name in names})
    words = ["--model", small, "--seeds", "1"]
    real.main(words)
    files = sorted((tmp_path / "runs/real").iterdir())
    assert [path.name for path in files] == ["CPPO-P=0.875-seed-1.json", "GRPO-seed-1.json"]
    for path in files:
        figures = json.loads(path.read_text())
        seconds = [0, *(at for at, *_ in figures["curves"])]
        # the step that goes beyond ends it
        assert seconds == sorted(seconds) and seconds[-1] > 1.0 >= seconds[-2]
        assert {f"{how} {at}" for how in ("greedy", "sampled") for at in real.AT} < set(figures)
    before = [path.stat().st_mtime_ns for path in files]
    real.main(words)  # finished runs are kept
    assert [path.stat().st_mtime_ns for path in files] == before
    page = (tmp_path / "runs/results/real.md").read_text()
    assert "## Plan, written before the runs" in page and "| CPPO, P=0.875 | " in page
    assert (tmp_path / "runs/results/real.png").exists()


def test_a_difference_is_each_seed_above_each_seed():
    seeds = {
        "GRPO": (0.4, 0.6), "CPPO, P=0.875": (0.6, 0.7), "random, P=0.875": (0.61, 0.9),
        "CPPO, P=0.5": (0.1, 0.39),
    }
    rows = [
        {"name": name, "greedy": {"mean": low, "std": 0, "min": low, "max": high}}
        for name, (low, high) in seeds.items()
    ]
    lines = real.differences(rows, "greedy").splitlines()[2:]
    beside = [line.split(" | ")[-2:] for line in lines]  # GRPO, CPPO
    assert beside == [["–", "– |"], ["–", "– |"], ["above", "– |"], ["below", "below |"]]


def test_the_seconds_to_an_accuracy_are_those_of_the_first_time_that_a_run_has_it(monkeypatch):
    monkeypatch.setattr(real, "AT", (5, 10))
    points = [(2, 0, 0.4), (4, 0, 0.5), (6, 0, 0.4), (8, 0, 0.6), (11, 0, 0.7)]
    for least, seconds in ((0.4, 2), (0.5, 4), (0.55, 8), (0.7, None)):
        monkeypatch.setattr(real, "REACHED", least)
        assert real.reached({"curves": [points]}) == [seconds]
