"""What long runs meet, done to them on two ranks: processes that are killed, a full disk, gradients
that are not finite, preemption.

pytest starts torchrun on this very file, whose __main__ trains as train.py does, with faults at
places named on its command line.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.base import files
from engine.run import checkpoint

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STEPS = 6


def command(small, *arguments, faults=(), restarts=0, steps=STEPS, nodes=()):
    where = nodes or ("--standalone", "--nproc-per-node", "2")
    return [
        sys.executable, "-m", "torch.distributed.run",
        *where, "--max-restarts", str(restarts), "--monitor-interval", "0.1", __file__,
        ",".join(faults), "--model", small, "--output_dir", "run", "--questions_per_step", "1",
        "--group_size", "8", "--lr", "1e-3", "--max_new_tokens", "24", "--eval_questions", "1",
        "--save_every", "2", "--seed", "1", "--steps", str(steps),
        *map(str, arguments),
    ]


ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def job(folder, small, *arguments, **options):
    """Trains in `folder`/run. Returns the finished torchrun."""
    return subprocess.run(
        command(small, *arguments, **options), capture_output=True, text=True, timeout=240,
        cwd=folder, env=ENVIRONMENT,
    )


def metrics(folder):
    """What each step of a run measured, but for the seconds."""
    return [
        {name: value or 0 for name, value in row.items() if not name.startswith("seconds")}
        for row in files.read(folder / "run/metrics.jsonl")
    ]


def result(folder):
    """(what each step measured, the weights at the end)"""
    weights = folder / f"run/checkpoint-{STEPS:06d}/model.safetensors"
    return metrics(folder), weights.read_bytes()


def assert_about_the_same(rows, expected):
    for row, other in zip(rows, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-3, abs=1e-5)  # of sums in another order


@pytest.fixture(scope="module")
def undisturbed(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    done = job(folder, small)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [row["step"] for row in metrics(folder)] == list(range(1, STEPS + 1))
    return folder


def test_a_job_whose_processes_are_killed_goes_on_from_its_last_checkpoint(
    small, undisturbed, tmp_path
):
    """Killed in the generation of step 2, while the checkpoint of step 4 is written, in the update
    of step 5: the last time without a restart."""
    kills = ["kill sample 1 2 0", "kill save 0 4 1", "kill update 1 5 2"]
    done = job(tmp_path, small, faults=kills, restarts=2)
    assert "error: another process of this job has ended" in done.stderr
    assert "To go on from checkpoint-000004: --output_dir run --resume" in done.stderr
    assert "gloo" not in done.stderr and done.stderr.count("Traceback") == 1  # torchrun's own
    done = job(tmp_path, small, "--resume")
    assert done.returncode == 0, done.stderr[-3000:]
    assert result(tmp_path) == result(undisturbed)  # no step is missing, none is there twice


def test_one_rank_out_of_memory_and_one_with_bad_gradients(small, undisturbed, tmp_path):
    """The first cuts its micro-batches smaller, and the update is what it would have been; the
    second makes all skip."""
    done = job(tmp_path, small, faults=["memory update 1 4 0", "nan update 0 6 0"])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "--micro_batch_tokens is 1024" in done.stdout + done.stderr
    rows = metrics(tmp_path)
    assert_about_the_same(rows[:5], metrics(undisturbed)[:5])
    assert [row["skipped_updates"] for row in rows] == [0, 0, 0, 0, 0, 1]
    sums = [(tmp_path / f"weights-{rank}").read_text() for rank in (0, 1)]
    assert sums[0] == sums[1]


def test_preemption_saves_and_exits_0_and_the_run_goes_on(small, undisturbed, tmp_path):
    # as a scheduler does, to every process
    done = job(tmp_path, small, faults=["preempt sample 0 3 0", "preempt sample 1 3 0"])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "To go on from checkpoint-000003" in done.stdout + done.stderr
    assert job(tmp_path, small, "--resume").returncode == 0
    assert result(tmp_path) == result(undisturbed)


def test_all_ranks_stop_at_the_same_kl_and_evaluate_the_checkpoint_from_before(small, tmp_path):
    done = job(tmp_path, small, "--stop_kl", "1e-12", "--beta", "0")
    assert done.returncode == 0, done.stderr[-3000:]
    assert (done.stdout + done.stderr).count("ends the run at step 4,") == 1
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["checkpoint"] == "run/checkpoint-000002" and summary["after"]
    assert [row["step"] for row in metrics(tmp_path)] == [1, 2, 3, 4]


def may_mount():
    trial = ["unshare", "-rm", "mount", "-t", "tmpfs", "x", "/mnt"]
    return shutil.which("unshare") and subprocess.run(trial, capture_output=True).returncode == 0


@pytest.mark.skipif(not may_mount(), reason="a small disk is made with unshare and mount, which "
                                            "this user may not call")
def test_on_a_full_disk_the_checkpoint_before_stays_and_the_run_goes_on(small, tmp_path):
    (tmp_path / "run").mkdir()
    one = sum(path.stat().st_size for path in Path(small).iterdir())
    # room for the first checkpoint, which has no optimizer yet, and half of the second
    words = subprocess.list2cmdline(command(small, steps=3))
    mount = f"mount -t tmpfs -o size={one * 3} small run"
    script = f"{mount} && {words}; code=$?; cp -r run kept; exit $code"
    words = ["unshare", "-rm", "sh", "-c", script]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=240, cwd=tmp_path, env=ENVIRONMENT)
    said = done.stdout + done.stderr
    for step in (2, 3):
        assert re.search(rf"step {step}: the checkpoint .* 0 MB are free there", said)
    assert done.returncode != 0 and "error: the run has ended at step 3" in said
    [left] = (tmp_path / "kept").glob("*checkpoint*")
    assert left.name == "checkpoint-000000" and not checkpoint.is_damaged(left)
    assert len(files.read(tmp_path / "kept/metrics.jsonl")) == 3


def test_two_nodes_train_as_one_node_with_two_devices(small, undisturbed, tmp_path):
    """Two agents of torchrun, with a process each, which share the weights out."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = [
        "--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port",
        str(port), "--node-rank",
    ]
    nodes = [
        subprocess.Popen(
            command(small, "--shard", "full", nodes=[*where, str(n)]), cwd=tmp_path,
            env=ENVIRONMENT)
        for n in (0, 1)
    ]
    assert [node.wait(timeout=240) for node in nodes] == [0, 0]
    assert_about_the_same(metrics(tmp_path), metrics(undisturbed))


if __name__ == "__main__":
    import train
    import update
    from engine.base import ranks
    from engine.model.sampling import Sampler
    from engine.run.command_line import run_program

    places = {
        "sample": (Sampler, "sample"), "update": (update, "accumulate"),
        "save": (checkpoint, "tensors_of"),
    }
    start, now = os.environ["TORCHELASTIC_RESTART_COUNT"], {"step": 0}
    train_step = train.train_step

    def noting(networks, *words):
        run = words[7].__self__  # of its next_questions
        now["step"] = run.state.step + 1
        done = train_step(networks, *words)
        total = sum(p.detach().double().abs().sum() for p in networks.model.parameters())
        Path(f"weights-{ranks.rank()}").write_text(str(total.item()))
        return done

    def arm(effect, place, *where):
        owner, name = places[place]
        real, fired = getattr(owner, name), []

        def faulty(*words, **options):
            strikes = not fired and where == (str(ranks.rank()), str(now["step"]), start)
            fired.extend([True] * strikes)
            if strikes and effect == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if strikes and effect == "preempt":
                os.kill(os.getpid(), signal.SIGTERM)
            if strikes and effect == "memory":
                raise torch.OutOfMemoryError("out of memory")
            done = real(*words, **options)
            if strikes and effect == "nan":
                next(words[0].model.parameters()).grad[0] = torch.nan
            return done

        setattr(owner, name, faulty)

    train.train_step = noting
    for fault in filter(None, sys.argv.pop(1).split(",")):
        arm(*fault.split())
    run_program(train.main)
