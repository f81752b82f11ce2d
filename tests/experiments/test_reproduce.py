"""reproduce.py: its arithmetic, and the whole of it, small."""

import statistics
from functools import partial
from unittest import mock

import pytest

from algorithms import ALGORITHMS
from engine.options.command_line import parse_given
from engine.options.config import Config, config_of
from experiments import reproduce
from experiments.library import toy_model
from experiments.library.study import words_of
from experiments.reproduce import TABLES, main, summarize
from tests.helpers.runs import json_of

pytestmark = pytest.mark.slow

PHASES = {
    "generate": 3.0, "score": 0.5, "logprobs": 1.0, "update": 5.0, "other": 0.5, "total": 10.0,
}


def fake_run(seconds, k=16, **more):
    same = dict.fromkeys(reproduce.SAME, 4) | {"group_size": 16, "k": k}
    return same | {
        "seconds": seconds, "reached": (seconds / 2, 64) if seconds < 50 else (float("inf"),) * 2,
        "tokens_generated": 100, "phases": PHASES, "curve": [(1.0, 64, 0.5)],
        **more,
    }


def test_a_speed_up_is_the_median_of_the_ratios_within_a_seed():
    names = ("GRPO", "pruning alone, P=0.75", "larger batches alone, B=4", "both, P=0.75")
    methods = {name: TABLES["speed"].methods[name] for name in names}
    runs = {"GRPO": [fake_run(s) for s in (10, 20, 90)]}
    for name in names[1:]:
        runs[name] = [fake_run(s, k=4, tokens_generated=50) for s in (5, 5, 10)]
    grpo, pruning, batches, both = summarize(methods, runs)
    assert both["speedup"] == {"median": 4.0, "min": 2.0, "max": 9.0}
    assert grpo["speedup"]["median"] == 1
    assert grpo["seconds"]["std"] == pytest.approx(statistics.stdev([10, 20, 90]))
    assert grpo["seconds_to_85"] == 10 and both["k"] == 4
    assert both["speedup_per_token"] == 2.0  # it generated half as many tokens in that time
    # the law is asked of the same batches without pruning: GRPO's, or those of GRPO with 4
    # questions a step
    assert pruning["bound"] == pytest.approx(10 / 5.5)
    assert both["bound"] == pytest.approx(4 * 10 / 5.5)
    assert grpo["bound"] is None and batches["bound"] is None
    runs["GRPO"] = [fake_run(s) for s in (10, 60, 90)]
    assert summarize(methods, runs)[0]["seconds_to_85"] is None  # two of three do not get there


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_method_is_a_valid_run_and_trains_on_as_many_completions_as_its_row_says(table):
    for name, method in table.methods.items():
        chosen = parse_given(Config, words_of(reproduce.PROTOCOL | method.options))
        with mock.patch.dict(ALGORITHMS, reproduce.OTHER_LOSSES):
            _, algorithm = config_of(chosen)
        assert method.baseline in table.methods
        if table.measures:  # as many questions a step for each
            continue
        other = (
            not method.options.get("allocation", True)
            or name.startswith("larger batches alone") or name == "GRPO, 8 questions"
            or algorithm.group_size > 16
        )
        trained = algorithm.questions_per_step * algorithm.k
        assert (trained == 16 * algorithm.minibatches) == (not other)


@pytest.mark.parametrize("name, of_its_own", [
    ("1", "| paper: accuracy |"), ("family", "| MB of a step: peak |"),
])
def test_a_table_and_its_picture_are_made(name, of_its_own, tmp_path, monkeypatch):
    """The other tables have nothing that these have not."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(toy_model, "warm_start", partial(toy_model.warm_start, steps=80))
    main(["--table", name, "--quick"])
    stem = tmp_path / "runs/reproduce-quick" / reproduce.stem_of(name)
    rows = json_of(stem.with_suffix(".json"))["rows"]
    text = stem.with_suffix(".md").read_text()
    assert [row["name"] for row in rows] == list(TABLES[name].methods)
    assert all(row["name"].replace("|", "\\|") in text for row in rows) and of_its_own in text
    assert stem.with_suffix(".png").stat().st_size > 10_000
    assert (stem.parent / "time_to_accuracy.png").exists() == (name == "1")
