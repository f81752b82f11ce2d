"""reproduce.py: its arithmetic, what it does after an interruption, and the whole of it, small."""

import json
import os
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

import train
from algorithms import ALGORITHMS
from engine.base.errors import UserError
from engine.run.config import Config, check
from engine.run.options import parse
from engine.tasks import toy_model
from experiments import reproduce
from experiments.reproduce import TABLES, amdahl, curve, main, one_run, summarize

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PHASES = {
    "generate": 3.0, "score": 0.5, "logprobs": 1.0, "update": 5.0, "other": 0.5, "total": 10.0,
}


def test_amdahls_bound():
    assert amdahl(PHASES, 1.0) == pytest.approx(1)
    assert amdahl(PHASES, 0.25) == pytest.approx(10 / (3 + 0.5 + 0.5 + 0.25 * 6))
    # pruning is free: what is left is generation and the rest
    assert amdahl(PHASES, 0.0) == pytest.approx(10 / 4)


def test_the_curve_is_the_mean_over_the_last_64_questions_or_more():
    metrics = [
        {"questions": 30, "completions": 480, "accuracy": a, "seconds/total": 2.0}
        for a in (0.0, 0.0, 0.3, 0.6, *[0.9] * 5)
    ]
    rows = curve(metrics)
    assert [(seconds, completions) for seconds, completions, _ in rows[:3]] == [
        (6.0, 1440), (8.0, 1920), (10.0, 2400),
    ]
    assert [accuracy for *_, accuracy in rows] == pytest.approx([0.1, 0.3, 0.6, 0.8, 0.9, 0.9, 0.9])
    assert (
        len(curve([{"questions": 4, "completions": 64, "accuracy": 1.0, "seconds/total": 1.0}]))
        == 1
    )
    # with few questions, over the last quarter of them or more: here the last 4; DAPO's first step
    # may draw most of them
    few = [
        {"questions": q, "completions": 16 * q, "accuracy": a, "seconds/total": 1.0}
        for q, a in ((12, 0.5), (2, 0.1), (2, 0.3))
    ]
    assert curve(few) == [
        (1.0, 192, 0.5), (2.0, 224, pytest.approx(6.2 / 14)), (3.0, 256, pytest.approx(0.2)),
    ]


def fake_run(seconds, k=16, **more):
    return {
        "group_size": 16, "pruning_rate": 1 - k / 16, "k": k, "questions_per_step": 16 // k,
        "steps": 4, "questions": 4, "completions": 64, "base": 0.4, "greedy": 0.9, "sampled": 0.8,
        "length": 30.0, "seconds": seconds, "no_signal": 0.0, "no_update": 0.0, "fall": 0.0,
        "seconds_to_85": 1.0, "completions_to_85": 64, "tokens_generated": 100,
        "tokens_trained": 100 * k // 16, "phases": PHASES, "curve": [(1.0, 64, 0.5)],
        **more,
    }


def test_a_speed_up_is_the_median_of_the_ratios_within_a_seed():
    names = ("GRPO", "pruning alone, P=0.75", "larger batches alone, B=4", "both, P=0.75")
    methods = {name: TABLES["speed"].methods()[name] for name in names}
    runs = {"GRPO": [fake_run(s) for s in (10, 20, 90)]}
    runs |= {
        name: [fake_run(s, k=4, tokens_generated=50) for s in (5, 5, 10)] for name in names[1:]
    }
    rows = {row["name"]: row for row in summarize(methods, runs)}
    assert rows["both, P=0.75"]["speedup"] == {"median": 4.0, "min": 2.0, "max": 9.0}
    assert rows["GRPO"]["speedup"]["median"] == 1 and rows["GRPO"]["seconds"][
        "std"
    ] == pytest.approx(statistics.stdev([10, 20, 90]))
    # it generated half as many tokens in that time
    assert rows["both, P=0.75"]["speedup_per_token"] == 2.0
    # the law is asked of the same batches without pruning: GRPO's, or those of GRPO with 4
    # questions a step
    assert rows["pruning alone, P=0.75"]["bound"] == pytest.approx(10 / 5.5)
    assert rows["both, P=0.75"]["bound"] == pytest.approx(4 * 10 / 5.5)
    assert rows["GRPO"]["bound"] is None and rows["larger batches alone, B=4"]["bound"] is None


def test_every_method_is_a_valid_run_and_trains_on_as_many_completions_as_its_row_says():
    for table in TABLES.values():
        methods = table.methods()
        for method in methods.values():
            options = reproduce.PROTOCOL | method.options
            config = parse(Config, [f"--{key}={value}" for key, value in options.items()])
            with mock.patch.dict(ALGORITHMS, reproduce.OTHER_LOSSES):
                algorithm = check(config)
            assert method.baseline in methods
            if table.measures:  # four questions a step for each
                continue
            other = (
                method.kind in ("pruning alone", "larger batches alone") or config.group_size == 32
            )
            assert (algorithm.questions_per_step * algorithm.k == 16 * algorithm.minibatches) == (
                not other
            )


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
    assert (
        result["steps"] == 2
        and result["questions"] == 8
        and len((folder / "metrics.jsonl").read_text().splitlines()) == 2
    )
    assert sum(
        result["phases"][name] for name in ("generate", "score", "logprobs", "update", "other")
    ) == pytest.approx(result["seconds"])
    monkeypatch.setattr(train, "main", None)  # nothing is trained any more
    assert one_run(folder, tiny(small)) == result
    with pytest.raises(UserError, match="other options: remove it"):
        one_run(folder, tiny(small) | {"lr": 2e-4})


@pytest.mark.parametrize(("words", "sentence"), [
    (["--table", "2"], "unknown table '2': there are 1, speed, keep, group, family, ppo, length, "
                       "controls, together, factorial, or all"),
    (["--table", "1", "--seeds", "2"], "--seeds must be at least 3, not 2"),
    (["--tabel", "1"], "unknown option --tabel: did you mean --table?"),
])
def test_a_mistake_is_one_sentence(words, sentence):
    with pytest.raises(UserError, match=sentence.replace("?", r"\?")):
        main(words)


def test_quick_makes_every_table_and_picture(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(toy_model, "warm_start", partial(toy_model.warm_start, steps=80))
    for kind in ("base", "wordy"):  # both are there already, after a tenth of their training
        toy_model.base(kind)
    command = [sys.executable, str(ROOT / "experiments/reproduce.py"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("One seed and 16 questions of each: about 5 minutes ")
    output = tmp_path / "runs/reproduce-quick"
    # of the model that was measured
    assert "(0.1 million parameters)" in (output / "ppo.md").read_text()
    for stem, table in [
        ("table1", "1"), ("speed", "speed"), ("keep", "keep"), ("group", "group"),
        ("family", "family"), ("ppo", "ppo"), ("length", "length"),
    ]:
        names = list(TABLES[table].methods())
        assert [
            row["name"] for row in json.loads((output / f"{stem}.json").read_text())["rows"]
        ] == names
        text = (output / f"{stem}.md").read_text()
        assert (
            all(f"| {name} |" in text for name in names)
            and "python experiments/reproduce.py --quick" in text
        )
        assert (output / f"{stem}.png").stat().st_size > 10_000
    assert (output / "time_to_accuracy.png").stat().st_size > 10_000
