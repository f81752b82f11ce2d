"""experiments/gpu.py: every part with a tiny model, parts that fail or take too long, and the
page."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from experiments import gpu

BEFORE = json.loads(gpu.BEFORE.read_text(encoding="utf-8"))
STORED = gpu.BEFORE.with_name("gpu.json")
QUICK = ["--quick", "--output"]


def measured(folder):
    return json.loads((folder / "gpu.json").read_text(encoding="utf-8"))


def rows_of(result, part):
    """{name: row} of a part, which says nothing else."""
    entry = result["parts"][part]
    assert entry["told"] is None
    return {row[""]: row for row in entry["rows"]}


@pytest.fixture
def stub(monkeypatch):
    """stub(name, part): part(lab) in place of a part of this name."""
    def replace(name, part):
        part.__name__, part.__doc__ = name, f"The part {name}\n\nSee."
        monkeypatch.setitem(gpu.NAMES, name, part)
        monkeypatch.setitem(gpu.PARTS, part, 60)

    yield replace
    for number in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.slow
def test_every_part_with_a_tiny_model(tmp_path):
    command = [sys.executable, "experiments/gpu.py", *QUICK, str(tmp_path)]
    more = {"GIT_COMMIT": "abc1234", "CUDA_VISIBLE_DEVICES": ""}
    begin = time.perf_counter()
    subprocess.run(command, cwd=gpu.ROOT, env=os.environ | more, check=True, timeout=300)
    seconds = time.perf_counter() - begin
    result = measured(tmp_path)
    assert list(result["parts"]) == list(gpu.NAMES)
    assert result["card"][0]["commit"] == "abc1234" and result["versions"]["torch"]
    spent = [entry["seconds"] for entry in result["parts"].values()]
    assert 0.5 * seconds < sum(spent) < seconds
    # a token is never sampled in less time than the weights are read
    sampled = rows_of(result, "sampling")
    assert len(sampled) == 3
    for row in sampled.values():
        assert row["ms a token"] > row["floor"] > 0
        assert row["times the floor"] == pytest.approx(row["ms a token"] / row["floor"])
    # fuller micro-batches are fewer passes
    updates = [row["update"] for row in rows_of(result, "update").values()]
    assert len(updates) == 4 and updates[-1] > updates[0] > 0
    # pruning leaves room for more questions in a step that takes hardly longer
    steps = rows_of(result, "protocol")
    assert list(steps) == list(gpu.METHODS)
    for row in steps.values():
        parts = row["sampling"] + row["reference"] + row["update"]
        assert 0 < parts < 1.01 * row["a step, s"] and row["planned, GB"] > 0
        assert row["micro-batch"] == 16384 and row["held, GB"] is None
    rates = [steps[f"CPPO, P = {P}"]["speed-up"] for P in (0.5, 0.9375)]
    assert rates[1] > 2 * rates[0]
    [toy] = rows_of(result, "first_command").values()
    assert toy["a step, s"] > 0 and 0 < toy["greedy accuracy before"] < 1
    told = {name: result["parts"][name]["told"] for name in ("trl", "waits", "vllm")}
    assert "no GPU" in told["waits"]
    for name in ("trl", "vllm"):
        assert (told[name] is None) == (find_spec(name) is not None)
    page = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    assert page == gpu.page(result, BEFORE)
    assert "| CPPO, P = 0.875 | 0" in page and "(63.4)" in page and "*Now: not measured, b" in page


def test_a_part_that_fails_or_is_too_slow_is_told_and_loses_no_other(tmp_path, stub):
    def broken(lab):
        yield [{"": "first", "ms": 1.5}]
        raise RuntimeError("a kernel is missing")

    def slow(lab):
        yield [{"": "second", "ms": 2.5}]
        time.sleep(60)

    def right(lab):
        yield [{"": "third", "ms": 3.5}]

    for name, part in {"update": broken, "protocol": slow, "waits": right}.items():
        stub(name, part)
    gpu.PARTS[slow] = 0.2
    gpu.main([*QUICK, str(tmp_path), "--parts", "update", "protocol", "waits"])
    parts = measured(tmp_path)["parts"]
    assert [entry["rows"][0]["ms"] for entry in parts.values()] == [1.5, 2.5, 3.5]
    assert "a kernel is missing" in parts["update"]["told"]
    assert "stopped after" in parts["protocol"]["told"] and parts["waits"]["told"] is None
    page = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    assert "a kernel is missing.*" in page and "| third | 3.5 |" in page
    assert "*Now: not measured.*" in page  # the parts that were not asked for


def test_all_parts_end_when_the_seconds_are_over(tmp_path, stub):
    def slow(lab):
        time.sleep(60)
        yield []

    stub("update", slow)
    stub("waits", lambda lab: slow(lab))
    gpu.main([*QUICK, str(tmp_path), "--parts", "update", "waits", "--seconds", "1"])
    parts = measured(tmp_path)["parts"]
    assert all("stopped after" in entry["told"] for entry in parts.values())
    assert sum(entry["seconds"] for entry in parts.values()) < 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_stopped_keeps_what_it_has(tmp_path, stub, number):
    def stopped(lab):
        yield [{"": "first", "ms": 1.5}]
        os.kill(os.getpid(), number)
        time.sleep(60)

    stub("update", stopped)
    with pytest.raises(KeyboardInterrupt):
        gpu.main([*QUICK, str(tmp_path), "--parts", "update", "waits"])
    [(name, entry)] = measured(tmp_path)["parts"].items()
    assert (name, entry["told"]) == ("update", "stopped by hand")
    assert entry["rows"] == [{"": "first", "ms": 1.5}]
    assert "*Now: stopped by hand.*" in (tmp_path / "gpu.md").read_text(encoding="utf-8")


def test_a_micro_batch_that_does_not_fit_is_told(stub):
    """`update` goes on with half of it, so the step says so. What was measured before stays."""
    class Tight(gpu.Lab):
        def step(self, seed, micro_batch=None, **options):
            found = super().step(seed, micro_batch, **options)
            return found | {"micro-batch": min(found["micro-batch"], 64)}

    tables = []
    with pytest.raises(gpu.Skipped, match="128 tokens do not fit"):
        for rows in gpu.update(Tight(gpu.Quick)):
            tables.append(list(rows))
    assert [row[""] for row in tables[-1]] == ["32 tokens", "64 tokens"]


def test_waits_are_counted_by_line(monkeypatch):
    class Waiting(gpu.Lab):
        def step(self, seed, **options):
            for _ in range(5 if modes == ["warn"] else 100):
                warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
            warnings.warn("something else", stacklevel=1)

    modes, lab = [], Waiting(gpu.Quick)
    lab.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    [(whole, line)] = gpu.waits(lab)
    assert modes == ["warn", "default"]
    assert whole == {"": "all", "times": 5} and line["times"] == 5
    assert re.fullmatch(r"experiments/test_gpu\.py:\d+", line[""])


def test_vllm_samples_from_the_saved_model_as_ours_does(monkeypatch):
    """vLLM is played by our sampler."""
    def engine(folder, tokenizer, dtype, sampling, *, stop_ids, longest, seed):
        assert (Path(folder) / "model.safetensors").exists() and stop_ids == []
        assert longest == 9 + 6 and sampling.vllm_share == 0.5
        return lab.networks.sampler

    lab = gpu.Lab(gpu.Quick)
    monkeypatch.setattr(gpu, "find_spec", lambda name: name)
    monkeypatch.setattr(gpu, "VLLM", engine)
    [rows] = gpu.vllm(lab)
    assert [row[""] for row in rows] == [f"toy, {n} completions" for n in (16, 64, 128)]
    assert all(row["ms a token"] > 0 for row in rows)


def test_the_stored_page_says_what_is_stored():
    now = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else None
    page = STORED.with_suffix(".md").read_text(encoding="utf-8")
    assert page == gpu.page(now, BEFORE)
    assert "| 2048 tokens |" in page and "(25.3)" in page


def test_a_figure_stands_beside_the_earlier_one():
    now = [{"": "a", "ms": 5.04}, {"": "b", "ms": 7.0, "note": None}]
    table = gpu.table(now, [{"": "c", "ms": 63.4}, {"": "a", "ms": 63.4}])
    assert table.splitlines()[2:] == [
        "| a | 5.04 (63.4) | – |", "| b | 7 | – |", "| c | – (63.4) | – |"]


def test_without_a_gpu_only_the_quick_run_begins(monkeypatch):
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    with pytest.raises(gpu.UserError, match="--quick"):
        gpu.main([])
