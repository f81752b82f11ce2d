"""engine/run/trackers.py: what TensorBoard, Weights & Biases and Trackio hold of a run, read back
from their files."""

import json
import math
import os
import sqlite3

import pytest

from engine.base import files
from engine.base.errors import UserError
from engine.run.config import config_of
from engine.run.trackers import Tracker
from tests.engine.runs import go_on, run

pytestmark = pytest.mark.slow


def scalars(folder):
    """{name: {step: value}} as TensorBoard would show it."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    found = {}
    for name in events.Tags()["scalars"]:
        found[name] = {event.step: event.value for event in events.Scalars(name)}
        assert len(found[name]) == len(events.Scalars(name))  # no step comes twice
    return found


def test_tensorboard_holds_the_numbers_of_the_metrics_and_no_step_twice(small, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    run(small, tmp_path, "--questions_per_step 2 --group_size 4 --eval_questions 4 --steps 3 "
        "--log tensorboard")
    # these two steps are lost with a crash: the checkpoint is that of step 3
    later = Tracker("tensorboard", tmp_path, 3, {})
    later.log(4, {"accuracy": 7.0, "loss": None})
    later.log(5, {"accuracy": 7.0})
    go_on(tmp_path, "--steps 4")
    rows = files.read(tmp_path / "metrics.jsonl")
    logged = scalars(tmp_path / "tensorboard")
    assert "lr" in logged
    for name in {*logged, *rows[0]}:
        expected = {row["step"]: row[name] for row in rows if row[name] is not None}
        assert logged.get(name, {}) == pytest.approx(expected, rel=1e-6), name


def test_a_process_that_is_killed_has_lost_nothing(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    if (child := os.fork()) == 0:
        tracker = Tracker("tensorboard", tmp_path, 0, {})
        tracker.log(1, {"accuracy": 0.5, "kl": math.nan})
        os._exit(0)
    os.waitpid(child, 0)
    assert scalars(tmp_path / "tensorboard")["accuracy"] == {1: 0.5}


def test_wandb_keeps_the_options_and_the_numbers(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    tracker = Tracker("wandb", "mine", 0, {"lr": 0.25})
    assert tracker.run.config["lr"] == 0.25 and tracker.run.name == str(tmp_path / "mine")[-128:]
    tracker.log(1, {"reward/own": 0.671875, "loss": None})
    tracker.close()
    [written] = tmp_path.glob(f"wandb/offline-*/run-{tracker.run.id}.wandb")
    assert b"0.671875" in written.read_bytes() and b"loss" not in written.read_bytes()
    assert wandb.run is None  # it is over


def test_wandb_that_cannot_begin_says_why_in_one_sentence(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")

    def refuse(**options):
        raise wandb.errors.UsageError("No API key configured.\nUse `wandb login`.")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(UserError, match="--log wandb: UsageError: No API key"):
        Tracker("wandb", tmp_path, 0, {})


def test_trackio_goes_on_with_a_run_and_begins_another_of_the_same_name(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # it is read at the import
    pytest.importorskip("trackio", reason="trackio is not installed")
    folder = tmp_path / "a" / "mine"
    namesake = tmp_path / "b" / "mine"
    for path, step in [(folder, 0), (namesake, 0), (folder, 1), (namesake, 0)]:
        tracker = Tracker("trackio", path, step, {})
        tracker.log(step + 1, {"accuracy": 0.25})
        tracker.close()
    with sqlite3.connect(tmp_path / "trackio" / "grpo-cppo.db") as file:
        table = "SELECT run_id, run_name, step, metrics FROM metrics ORDER BY id"
        ids, names, steps, metrics = zip(*file.execute(table))
    assert names == (str(folder), str(namesake)) * 2 and steps == (1, 1, 2, 1)
    # the third resumes the first, not its namesake; the fourth begins its run anew
    assert ids[2] == ids[0] and len(set(ids)) == 3
    assert [*map(json.loads, metrics)] == [{"accuracy": 0.25}] * 4


def test_a_missing_package_is_told_before_any_work(tmp_path, monkeypatch):
    (tmp_path / "no_tracker").mkdir()  # a mere folder is no package
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="^--log no_tracker .*pip install no_tracker$"):
        config_of({"log": "no_tracker"})
