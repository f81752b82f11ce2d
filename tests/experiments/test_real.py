"""real.py: runs of the same seconds, and what counts as a difference."""

import json

import pytest

from engine.base.errors import UserError
from experiments import real

pytestmark = pytest.mark.slow


def test_a_run_on_a_real_model_has_the_same_seconds_whatever_the_method(
    small, tmp_path, monkeypatch
):
    other = "CPPO, P=0.875"
    monkeypatch.setattr(real, "AT", (0.5, 1.0))
    monkeypatch.setattr(real, "EVAL_QUESTIONS", 3)
    runs = tmp_path / "runs"
    words = ["--model", small, "--seeds", "1", "--methods", "GRPO", other]
    words += ["--folder", str(runs), "--output", str(tmp_path)]
    real.main(words)
    files = sorted(runs.iterdir())
    assert {path.name for path in files} == {
        other.replace(", ", "-") + "-seed-1.json", "GRPO-seed-1.json",
    }
    for path in files:
        done = json.loads(path.read_text())
        assert list(done) == ["method", "seed", "lr", "options", "steps", "evaluations"]
        assert [e["at"] for e in done["evaluations"]] == [0.5, 1.0]
        seconds = [step["seconds"] for step in done["steps"]]
        # the step that goes beyond ends it
        assert seconds == sorted(seconds) and seconds[-1] > 1.0 >= ([0] + seconds)[-2]
    before = [path.stat().st_mtime_ns for path in files]
    real.main([*words, "--page"])
    real.main(words)  # finished runs are kept
    assert [path.stat().st_mtime_ns for path in files] == before
    page = (tmp_path / "real.md").read_text()
    assert "lan, written " in page and f"| {other} | 1 |" in page
    assert (tmp_path / "real.png").exists()


def test_a_difference_is_each_seed_above_each_seed():
    seeds = {
        "GRPO": (0.4, 0.6), "CPPO, P=0.875": (0.6, 0.7), "random, P=0.875": (0.61, 0.9),
        "CPPO, P=0.5": (0.1, 0.39),
    }
    rows = {
        name: {f"greedy {when}": {"min": low, "max": high} for when in real.AT}
        for name, (low, high) in seeds.items()
    }
    table = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in real.differences(rows, "greedy").splitlines()[2:]
    ]
    beside = [["–", "–"], ["–", "–"], ["above", "–"], ["below", "below"]]  # GRPO, CPPO
    assert [line[2:4] for line in table] == [line[5:7] for line in table] == beside


@pytest.mark.parametrize("words", [["--methods", "GPRO"], ["--page"]])
def test_a_mistake_is_one_sentence(words, tmp_path):
    with pytest.raises(UserError):
        real.main([*words, "--folder", str(tmp_path)])
