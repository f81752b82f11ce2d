"""engine/run/trackers.py: what TensorBoard, Weights & Biases and Trackio hold of a run, read back
from their files."""

import json
import math
import os
import sqlite3
import sys

import pytest

from engine.base.errors import UserError
from engine.run.config import config_of
from engine.run.trackers import Tracker
from train import main

pytestmark = pytest.mark.slow


def scalars(folder):
    """{name: [(step, value), …]} as TensorBoard would show it."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {
        name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]
    }


def test_tensorboard_holds_the_numbers_of_the_metrics_and_no_step_twice(small, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    words = ["--model", small, "--output_dir", str(tmp_path), "--questions_per_step", "2",
             "--group_size", "4", "--eval_questions", "4"]
    main([*words, "--log", "tensorboard", "--steps", "3"])
    # these two steps are lost with a crash: the checkpoint is that of step 3
    later = Tracker("tensorboard", tmp_path, 3, {})
    later.log(4, {"accuracy": 7.0, "loss": None})
    later.log(5, {"accuracy": 7.0})
    main([*words, "--resume", "--steps", "4"])
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    logged = scalars(tmp_path / "tensorboard")
    for name in {name for row in rows for name in row}:
        expected = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        assert [step for step, _ in logged.get(name, [])] == [step for step, _ in expected], name
        values = [value for _, value in expected]
        assert [value for _, value in logged.get(name, [])] == pytest.approx(values, rel=1e-6), name
    assert "lr" in logged


def test_a_process_that_is_killed_has_lost_nothing(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    if (child := os.fork()) == 0:
        tracker = Tracker("tensorboard", tmp_path, 0, {})
        tracker.log(1, {"accuracy": 0.5, "kl": math.nan})
        os._exit(0)
    os.waitpid(child, 0)
    assert scalars(tmp_path / "tensorboard")["accuracy"] == [(1, 0.5)]


def test_wandb_keeps_the_options_and_the_numbers_of_each_start(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    for step, value in [(0, b"0.671875"), (1, b"0.578125")]:
        tracker = Tracker("wandb", "mine", step, {"lr": 0.25 + step})
        assert tracker.run.config["lr"] == 0.25 + step
        assert tracker.run.name == str(tmp_path / "mine")[-128:]
        tracker.log(step + 1, {"reward/own": float(value), "loss": None})
        tracker.close()
        [written] = tmp_path.glob(f"wandb/offline-*/run-{tracker.run.id}.wandb")
        assert value in written.read_bytes() and b"loss" not in written.read_bytes()
    assert wandb.run is None  # it is over


def test_wandb_that_cannot_begin_says_why_in_one_sentence(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")

    def refuse(**options):
        raise wandb.errors.UsageError("No API key configured.\nUse `wandb login`.")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(UserError, match="--log wandb: UsageError: No API key"):
        Tracker("wandb", tmp_path, 0, {})


def test_trackio_keeps_the_run_the_options_and_the_numbers(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # it is read at the import
    pytest.importorskip("trackio", reason="trackio is not installed")
    folder, namesake = tmp_path / "a" / "mine", tmp_path / "b" / "mine"
    for path, step, accuracy in [
        (folder, 0, 0.25), (namesake, 0, 0.5), (folder, 1, 0.75), (namesake, 0, 1.0)
    ]:
        tracker = Tracker("trackio", path, step, {"lr": 0.125})
        tracker.log(step + 1, {"accuracy": accuracy, "loss": None})
        tracker.close()
    with sqlite3.connect(tmp_path / "trackio" / "grpo-cppo.db") as file:
        table = "SELECT run_id, run_name, step, metrics FROM metrics ORDER BY id"
        rows = file.execute(table).fetchall()
        configs = [json.loads(text) for (text,) in file.execute("SELECT config FROM configs")]
    runs = {}
    for run, name, step, metrics in rows:
        runs.setdefault((run, name), []).append((step, json.loads(metrics)))
    # the third resumes the first, not its namesake; the fourth begins its run anew
    assert [(name, numbers) for (_, name), numbers in runs.items()] == [
        (str(folder), [(1, {"accuracy": 0.25}), (2, {"accuracy": 0.75})]),
        (str(namesake), [(1, {"accuracy": 0.5})]),
        (str(namesake), [(1, {"accuracy": 1.0})]),
    ]
    assert {config["lr"] for config in configs} == {0.125}


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio", "mlflow"])
def test_a_missing_package_is_told_before_any_work(name, tmp_path, monkeypatch):
    kept = [path for path in sys.path if not os.path.isdir(os.path.join(path or ".", name))]
    monkeypatch.setattr(sys, "path", [*kept, str(tmp_path)])
    monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / name).mkdir()  # a mere folder is no package
    with pytest.raises(UserError, match=f"^--log {name} .*pip install {name}$"):
        config_of({"log": name})
