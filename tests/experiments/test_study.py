"""The runner of the studies: which runs are made, in which order, and what a page says of them."""

import os
from pathlib import Path

import pytest

import train
from engine.base.errors import UserError
from experiments.library.study import Study, curve, one_run, rows_of


def test_all_settings_are_measured_with_one_seed_then_all_with_the_next():
    made = []

    def measure(folder, setting, seed):
        made.append((folder, seed))
        return {"figure": setting * seed, "curve": [seed]}

    rows = rows_of(Study("runs/x", {"one, P=0.5": 1, "1/|o|": 10}, measure, seeds=(1, 2)))
    one, other = Path("runs/x/one-P=0.5-seed-1"), Path("runs/x/1over|o|-seed-1")
    assert made[:3] == [(one, 1), (other, 1), (Path("runs/x/one-P=0.5-seed-2"), 2)]
    assert [row["name"] for row in rows] == ["one, P=0.5", "1/|o|"]
    assert rows[1]["figure"]["values"] == [10, 20] and rows[1]["figure"]["mean"] == 15
    assert rows[1]["curve"] == [[1], [2]]


@pytest.mark.parametrize("questions, accuracies, seconds, means", [
    ([30] * 9, [0.0, 0.0, 0.3, 0.6, *[0.9] * 5], range(3, 10), [0.1, 0.3, 0.6, 0.8, *[0.9] * 3]),
    # with few questions, over the last quarter of them or more: here the last 4; DAPO's first step
    # may draw most of them
    ([12, 2, 2], [0.5, 0.1, 0.3], range(1, 4), [0.5, 6.2 / 14, 0.2]),
])
def test_the_curve_is_the_mean_over_the_last_64_questions_or_more(
    questions, accuracies, seconds, means
):
    rows = curve([
        {"questions": q, "completions": 16 * q, "accuracy": a, "seconds/total": 1.0}
        for q, a in zip(questions, accuracies)])
    assert [second for second, *_ in rows] == list(seconds)
    assert [count for _, count, _ in rows] == [16 * sum(questions[:n]) for n in seconds]
    assert [accuracy for *_, accuracy in rows] == pytest.approx(means)


def tiny(model):
    return {
        "model": model, "algorithm": "grpo", "group_size": 4, "questions_per_step": 4, "seed": 1,
        "steps": 2, "lr": 1e-4, "eval_questions": 8,
    }


@pytest.mark.slow
def test_a_finished_run_is_kept_and_an_interrupted_one_goes_on(small, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    real = train.train_step
    monkeypatch.setattr(train, "train_step", lambda *rest: os.kill(os.getpid(), 2) or real(*rest))
    with pytest.raises(SystemExit) as stopped:
        one_run(folder, tiny(small))
    assert stopped.value.code == 130 and not (folder / "summary.json").exists()
    monkeypatch.setattr(train, "train_step", real)
    result = one_run(folder, tiny(small))
    assert result["steps"] == 2 and result["questions"] == 8
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
    phases = [seconds for name, seconds in result["phases"].items() if name != "total"]
    assert sum(phases) == pytest.approx(result["seconds"])
    monkeypatch.setattr(train, "main", None)  # nothing is trained any more
    assert one_run(folder, tiny(small)) == result
    with pytest.raises(UserError, match="other options"):
        one_run(folder, tiny(small) | {"lr": 2e-4})
