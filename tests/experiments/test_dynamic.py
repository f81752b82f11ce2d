"""experiments/dynamic.py: its rows differ from GRPO's in one field, which acts."""

import pytest

from algorithms import ALGORITHMS
from engine.base import files
from experiments import dynamic


@pytest.mark.parametrize("name, field", [
    ("dynamic sampling", "max_rollouts"), ("left out", "keep")])
def test_a_row_differs_from_grpo_in_one_field(name, field):
    algorithm = dynamic.METHODS.settings[name]
    row, grpo = vars(dynamic.ROWS[algorithm]), vars(ALGORITHMS["grpo"])
    assert [key for key in row if row[key] != grpo[key]] == [field]


def test_what_happens_to_questions_with_equal_rewards(tmp_path, monkeypatch):
    """With 2 completions of a question many groups have equal rewards."""
    small = {"group_size": 2, "steps": 4, "eval_questions": 8}
    monkeypatch.setattr(dynamic, "SAME", dynamic.SAME | small)
    asked, kept, groups = {}, {}, {}
    for name, algorithm in dynamic.METHODS.settings.items():
        run = dynamic.measure(tmp_path / name, algorithm, 1)
        rows = files.read(tmp_path / name / "metrics.jsonl")
        asked[name] = [row["questions"] for row in rows]
        kept[name] = [row["kept"] for row in rows]
        groups[name] = [2 * row["questions"] * (1 - row["no_signal"]) for row in rows]
        assert run["curve"][-1][dynamic.AXES["steps"]] == run["steps"] == 4
    assert asked["GRPO"] == asked["left out"] == [4] * 4 and kept["GRPO"] == [8] * 4
    assert max(asked["dynamic sampling"]) > 4  # further questions replace some
    for name in ("dynamic sampling", "left out"):
        assert kept[name] == pytest.approx(groups[name])
    assert sum(kept["left out"]) < 32


def test_the_mean_accuracy_is_the_height_of_the_curve():
    points = [(1.0, 10, 0.4, 1), (3.0, 30, 0.8, 2)]  # 0.4 until second 1, then up to 0.8
    assert dynamic.mean_accuracy(points, 0, 3.0) == pytest.approx((0.4 + 0.6 * 2) / 3, abs=0.002)
    assert dynamic.mean_accuracy(points, 1, 10) == pytest.approx(0.4)
