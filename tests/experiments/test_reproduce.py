"""reproduce.py: its arithmetic, what it does after an interruption, and the whole of it, small."""

import importlib
import json
import os
import re
import statistics
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

import train
from algorithms import ALGORITHMS
from engine.base.errors import UserError
from engine.run.command_line import given
from engine.run.config import Config, config_of
from experiments import reproduce
from experiments.library import toy_model
from experiments.reproduce import TABLES, amdahl, curve, main, one_run, summarize

pytestmark = pytest.mark.slow

PHASES = {
    "generate": 3.0, "score": 0.5, "logprobs": 1.0, "update": 5.0, "other": 0.5, "total": 10.0,
}


def test_amdahls_bound():
    assert amdahl(PHASES, 1.0) == pytest.approx(1)
    assert amdahl(PHASES, 0.25) == pytest.approx(10 / (3 + 0.5 + 0.5 + 0.25 * 6))
    # pruning is free: what is left is generation and the rest
    assert amdahl(PHASES, 0.0) == pytest.approx(10 / 4)


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


def fake_run(seconds, k=16, **more):
    return {
        "group_size": 16, "pruning_rate": 1 - k / 16, "k": k, "questions_per_step": 16 // k,
        "steps": 4, "questions": 4, "completions": 64, "base": 0.4, "greedy": 0.9, "sampled": 0.8,
        "length": 30.0, "seconds": seconds, "no_signal": 0.0, "no_update": 0.0, "fall": 0.0,
        "seconds_to_85": 1.0, "completions_to_85": 64, "tokens_generated": 100,
        "tokens_trained": 100 * k // 16, "phases": PHASES, "curve": [(1.0, 64, 0.5)],
        "course": {},
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
    assert both["speedup_per_token"] == 2.0  # it generated half as many tokens in that time
    # the law is asked of the same batches without pruning: GRPO's, or those of GRPO with 4
    # questions a step
    assert pruning["bound"] == pytest.approx(10 / 5.5)
    assert both["bound"] == pytest.approx(4 * 10 / 5.5)
    assert grpo["bound"] is None and batches["bound"] is None


@pytest.mark.parametrize("name", TABLES)
def test_every_method_is_a_valid_run_and_trains_on_as_many_completions_as_its_row_says(name):
    table = TABLES[name]
    for method in table.methods.values():
        options = reproduce.PROTOCOL | method.options
        chosen = given(Config, reproduce.words_of(options))
        with mock.patch.dict(ALGORITHMS, reproduce.OTHER_LOSSES):
            _, algorithm = config_of(chosen)
        assert method.baseline in table.methods
        if table.measures or "dataset" in method.options:  # as many questions a step for each
            continue
        other = (
            method.kind in ("pruning alone", "larger batches alone") or algorithm.group_size > 16
        )
        trained = algorithm.questions_per_step * algorithm.k
        assert (trained == 16 * algorithm.minibatches) == (not other)


def test_the_standard_error_of_an_effect_is_taken_over_the_seeds():
    cells = [{"name": name, "sampled": {"values": [0.5, 0.5, 0.8]}} for name in
             TABLES["factorial"].methods]
    cells[0]["sampled"]["values"] = [0.8, 0.8, 0.8]
    lines = reproduce.effects(cells).splitlines()
    assert lines[5].startswith("| largest \\|A\\| | 0.800 ± 0.000 | 0.600 ± 0.100 |")
    assert lines[-1].split("|")[2].strip() == "0.640 ± 0.080"


def tiny(model):
    return {
        "model": model, "algorithm": "grpo", "group_size": 4, "questions_per_step": 4, "seed": 1,
        "steps": 2, "lr": 1e-4, "eval_questions": 8,
    }


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


def test_all_figures_of_the_claims_come_from_one_command(monkeypatch):
    made = []
    for name in reproduce.CLAIMS:
        module = importlib.import_module(f"experiments.{name}")
        monkeypatch.setattr(module, "main", lambda argv, name=name: made.append((name, argv)))
    main(["--table", "claims"])
    assert made == [(name, []) for name in reproduce.CLAIMS]
    text = Path(__file__).parents[2].joinpath("docs/claims.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^    python experiments/(\w+)\.py", text, re.M))
    assert named - {"reproduce", "claims_real"} == set(reproduce.CLAIMS)  # or a --model is needed
    with pytest.raises(UserError, match="--quick"):
        main(["--table", "claims", "--quick"])


@pytest.mark.parametrize("name", ["1", "ppo", "factorial"])
def test_a_table_and_its_picture_are_made(name, tmp_path, monkeypatch):
    """The other tables have nothing that these have not."""
    with pytest.raises(UserError):
        main(["--table", "2"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(toy_model, "warm_start", partial(toy_model.warm_start, steps=80))
    main(["--table", name, "--quick"])
    stem = tmp_path / "runs/reproduce-quick" / ("table1" if name == "1" else name)
    rows = json.loads(stem.with_suffix(".json").read_text())["rows"]
    text = stem.with_suffix(".md").read_text()
    assert [row["name"] for row in rows] == list(TABLES[name].methods)
    assert all(row["name"].replace("|", "\\|") in text for row in rows)
    assert stem.with_suffix(".png").stat().st_size > 10_000
    of_its_own = {
        "1": "| paper: accuracy |", "ppo": "0.1 million parameters: peak",
        "factorial": "| all choices |",
    }
    assert of_its_own[name] in text
    assert (stem.parent / "time_to_accuracy.png").exists() == (name == "1")
