"""The runner of the studies: which runs are made, in which order, and what a page says of them."""

import os
from pathlib import Path

import pytest

import train
from engine.base.errors import UserError
from experiments.library import study
from experiments.library.study import Study, cell, curve, once, one_run, pivot, rows_of, turned


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


@pytest.mark.parametrize("value, form, text", [
    ({"mean": 0.5, "std": 0.25}, ".3f", "0.500 ± 0.250"), (None, ".3f", "–"), (16, "", "16"),
    ({"median": 2.0, "min": 1.5, "max": 2.5}, ".1f", "2.0 (1.5 to 2.5)"), ("words", ".1f", "words"),
    ([0.25, 1], ".1f", "0.2 · 1.0"), (0.25, ".0%", "25%"),
])  # fmt: skip
def test_a_figure_in_words(value, form, text):
    assert cell(value, form) == text


def test_a_page_is_a_table_of_the_rows():
    rows = [{"name": "|A|", "k": 2}, {"name": "b", "k": 4, "more": 0.5}]
    assert pivot(rows, {"kept": ("k", ""), "more": ".1f"}).splitlines() == [
        "|  | kept | more |", "| --- | --- | --- |", "| \\|A\\| | 2 | – |", "| b | 4 | 0.5 |"]
    assert turned(rows, ".1f").splitlines()[2:] == ["| k | 2.0 | 4.0 |", "| more | – | 0.5 |"]


def test_what_was_found_once_is_kept(tmp_path):
    found = [once(tmp_path / "figures.json", lambda i=i: {"figure": i}) for i in range(2)]
    assert found == [{"figure": 0}] * 2


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


def test_the_course_is_the_first_step_and_each_quarter():
    kls = [None, 1.0, 2.0, None, 3.0, 4.0, 5.0, 7.0]
    rows = [{"step": i, "kl": kl, "reward/x": i} for i, kl in enumerate(kls)]
    course = study.course_of(rows)
    assert course["reward/x"] == [0, 0.5, 2.5, 4.5, 6.5] and "step" not in course
    assert course["kl"][1:] == [1, 2, 3.5, 6] and course["kl"][0] != course["kl"][0]  # nan


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
