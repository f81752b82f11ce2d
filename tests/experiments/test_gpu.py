"""experiments/gpu.py: every part with a tiny model, parts that fail or take too long, and the
page."""

import signal
import time
from importlib.util import find_spec

import pytest

from experiments import gpu
from tests.helpers.runs import json_of, python


def measured(folder):
    """(what is stored in this folder, the page)"""
    result = json_of(folder / "gpu.json")
    return result, (folder / "gpu.md").read_text()


def rows_of(result, part):
    """{name: row} of a part, which says nothing else."""
    entry = result["parts"][part]
    assert entry["told"] is None
    return {row[""]: row for row in entry["rows"]}


@pytest.fixture
def run(monkeypatch, tmp_path):
    """run({name: part}, limit) → (what is stored of these parts(lab), which stand in place of the
    program's, the page)."""
    def run(parts, limit):
        for name, part in parts.items():
            part.__doc__ = f"The part {name}\n\nSee."
            monkeypatch.setitem(gpu.NAMES, name, part)
            monkeypatch.setitem(gpu.PARTS, part, limit)
        gpu.main(["--quick", "--output", str(tmp_path), "--parts", *parts])
        result, page = measured(tmp_path)
        return result["parts"], page

    yield run
    for number in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.slow
def test_every_part_with_a_tiny_model(tmp_path):
    words = "experiments/gpu.py", "--quick", "--output", tmp_path
    code, said = python(*words, GIT_COMMIT="abc1234")
    assert code == 0, said
    result, page = measured(tmp_path)
    assert list(result["parts"]) == list(gpu.NAMES) and page == gpu.page(result)
    assert result["card"][0]["commit"] == "abc1234" and result["versions"]["torch"]
    # a token is never sampled in less time than the weights are read
    sampled = rows_of(result, "sampling")
    assert len(sampled) == 3 and all(row["times the floor"] > 1 for row in sampled.values())
    # fuller micro-batches are fewer passes
    updates = [row["update"] for row in rows_of(result, "update").values()]
    assert len(updates) == 4 and updates[-1] > updates[0] > 0
    # pruning leaves room for more questions in a step that takes hardly longer
    steps = rows_of(result, "protocol")
    assert list(steps) == list(gpu.METHODS)
    for row in steps.values():
        parts = row["sampling"] + row["reference"] + row["update"]
        assert 0 < parts < 1.01 * row["a step, s"] and row["planned, GB"] > 0
    assert steps["CPPO, P = 0.9375"]["speed-up"] > 2 * steps["CPPO, P = 0.5"]["speed-up"]
    [toy] = rows_of(result, "first_command").values()
    assert toy["a step, s"] > 0 and 0 < toy["greedy accuracy before"] < 1
    assert "no GPU" in result["parts"]["waits"]["told"]
    for name in ("trl", "vllm"):
        assert bool(result["parts"][name]["told"]) != bool(find_spec(name))


def slow(lab):
    yield [{"": "second", "ms": 2.5}]
    time.sleep(60)


def test_a_part_that_fails_or_is_too_slow_is_told_and_loses_no_other(run):
    def broken(lab):
        yield [{"": "first", "ms": 1.5}]
        raise RuntimeError("a kernel is missing")

    def right(lab):
        yield [{"": "third", "ms": 3.5}]

    parts, page = run({"update": broken, "protocol": slow, "waits": right}, limit=1)
    assert [entry["rows"][0]["ms"] for entry in parts.values()] == [1.5, 2.5, 3.5]
    assert "stopped after" in parts["protocol"]["told"] and parts["waits"]["told"] is None
    assert "a kernel is missing.*" in page and "| third | 3.5 |" in page
    assert "*Note: not measured.*" in page  # the parts that were not asked for


def test_the_stored_page_says_what_is_stored():
    result, page = measured(gpu.ROOT / "experiments/results")
    assert page == gpu.page(result) and "| 2048 tokens |" in page
