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
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.model.folders import checkpoints
from engine.run import checkpoint
from tests.helpers.runs import ENVIRONMENT, ROOT, free_port, metrics_of

pytestmark = pytest.mark.slow

STEPS = 6


def command(small, words="", *, faults=(), steps=STEPS, where=None):
    """torchrun on this file. where: its processes and machines; None: two processes."""
    where = where or "--standalone --nproc-per-node 2"
    options = f"{where} --monitor-interval 0.1 {__file__}"
    usual = (
        f"--model {small} --output_dir run --steps {steps} --questions_per_step 1 --group_size 8 "
        "--lr 1e-3 --max_new_tokens 24 --eval_questions 1 --save_every 2 --seed 1")
    torchrun = [sys.executable, "-m", "torch.distributed.run", *options.split()]
    return [*torchrun, ",".join(faults), *f"{usual} {words}".split()]


def finished(words, folder):
    """(exit code, what was said) of a program that is called in this folder."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, cwd=folder,
                          env=os.environ | ENVIRONMENT)
    return done.returncode, done.stdout + done.stderr


def job(folder, small, words="", **options):
    """Trains in `folder`/run, and does not fail. Returns what was said."""
    code, said = finished(command(small, words, **options), folder)
    assert code == 0, said[-3000:]
    return said


def result(folder):
    """(what each step measured, the weights at the end)"""
    weights = folder / f"run/checkpoint-{STEPS:06d}/model.safetensors"
    return metrics_of(folder / "run"), weights.read_bytes()


def assert_about_the_same(rows, expected):
    for row, other in zip(rows, expected, strict=True):
        row, other = ({name: x or 0 for name, x in one.items()} for one in (row, other))
        assert row == pytest.approx(other, rel=1e-3, abs=1e-5)  # of sums in another order


@pytest.fixture(scope="module")
def undisturbed(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    job(folder, small)
    assert [row["step"] for row in metrics_of(folder / "run")] == list(range(1, STEPS + 1))
    return folder


def test_a_job_that_is_killed_and_preempted_goes_on_from_its_last_checkpoint(
    small, undisturbed, tmp_path
):
    """Killed in the generation of step 2, while the checkpoint of step 4 is written, in the update
    of step 5. Then preempted in step 5, as a scheduler does it, in every process."""
    words = ""
    for kill, left in [("sample 1 2", 0), ("save 0 4", 2), ("update 1 5", 4)]:
        code, said = finished(command(small, words, faults=[f"kill {kill}"]), tmp_path)
        assert code != 0
        assert checkpoints(tmp_path / "run")[-1].name == f"checkpoint-{left:06d}"
        words = "--resume"
    assert "error: another process of this job has ended" in said
    assert re.search("To go on from checkpoint-000004: .*--output_dir=run --resume=True", said)
    assert "gloo" not in said and said.count("Traceback") == 1  # torchrun's own
    preempted = [f"preempt sample {rank} 5" for rank in (0, 1)]
    said = job(tmp_path, small, "--resume", faults=preempted)
    assert "To go on from checkpoint-000005" in said
    job(tmp_path, small, "--resume")
    assert result(tmp_path) == result(undisturbed)  # no step is missing, none is there twice


def test_a_reward_that_fails_on_one_rank_ends_all_and_the_last_whole_step_is_saved(
    small, undisturbed, tmp_path
):
    words = command(small, "--save_every 50", faults=["refuse score 1 4"])
    code, said = finished(words, tmp_path)
    assert code != 0 and "error: the reward is wrong. To go on from checkpoint-000003: " in said
    assert said.count("Traceback") == 1  # torchrun's own
    job(tmp_path, small, "--resume")
    assert result(tmp_path) == result(undisturbed)


def test_one_rank_out_of_memory_and_one_with_bad_gradients(small, undisturbed, tmp_path):
    """The first cuts its micro-batches smaller, and the update is what it would have been; the
    second makes all skip."""
    said = job(tmp_path, small, faults=["memory update 1 4", "nan update 0 6"])
    assert "--micro_batch_tokens is 1024" in said
    rows = metrics_of(tmp_path / "run")
    assert_about_the_same(rows[:5], metrics_of(undisturbed / "run")[:5])
    assert [row["skipped_updates"] for row in rows] == [0, 0, 0, 0, 0, 1]
    sums = {(tmp_path / f"weights-{rank}").read_text() for rank in (0, 1)}
    assert len(sums) == 1


def test_all_ranks_stop_at_the_same_kl_and_evaluate_the_checkpoint_from_before(small, tmp_path):
    said = job(tmp_path, small, "--stop_kl 1e-12 --beta 0")
    assert said.count("ends the run at step 4,") == 1
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["checkpoint"] == "run/checkpoint-000002" and summary["after"]
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == [1, 2, 3, 4]


def test_a_closed_pipe_saves_the_last_whole_step_and_says_how_to_go_on(small, tmp_path):
    words = command(small, "--save_every 50", steps=40)
    process = subprocess.Popen(
        [sys.executable, ROOT / "train.py", *words[words.index("--model"):]], cwd=tmp_path,
        env=os.environ | ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for line in process.stdout:
        if line.startswith("      1 "):
            break
    process.stdout.close()  # as head does
    said = process.stderr.read()
    assert process.wait(timeout=120) == 2
    [_, newest] = checkpoints(tmp_path / "run")
    assert f"has ended. To go on from {newest.name}: python" in said
    assert metrics_of(tmp_path / "run")[-1]["step"] == int(newest.name[-2:]) > 1


def may_mount():
    trial = "unshare -rm mount -t tmpfs x /mnt".split()
    return shutil.which("unshare") and subprocess.run(trial, capture_output=True).returncode == 0


@pytest.mark.skipif(not may_mount(), reason="a small disk is made with unshare and mount, which "
                                            "this user may not call")
def test_on_a_full_disk_the_checkpoint_before_stays_and_the_run_goes_on(small, tmp_path):
    (tmp_path / "run").mkdir()
    one = sum(path.stat().st_size for path in Path(small).iterdir())
    # room for the first checkpoint, which has no optimizer yet, and half of the second
    mount = f"mount -t tmpfs -o size={one * 3} small run"
    words = subprocess.list2cmdline(command(small, steps=3))
    script = f"{mount} && {words}; code=$?; cp -r run kept; exit $code"
    code, said = finished(["unshare", "-rm", "sh", "-c", script], tmp_path)
    for step in (2, 3):
        assert re.search(rf"step {step}: the checkpoint .* 0 MB are free there", said)
    assert code != 0 and "error: the run has ended at step 3" in said
    [left] = (tmp_path / "kept").glob("*checkpoint*")
    assert left.name == "checkpoint-000000" and not checkpoint.is_damaged(left)
    assert len(metrics_of(tmp_path / "kept")) == 3


def test_two_nodes_train_as_one_node_with_two_devices(small, undisturbed, tmp_path):
    """Two agents of torchrun, with a process each, which share the weights out."""
    nodes = f"--nnodes 2 --nproc-per-node 1 --master-addr 127.0.0.1 --master-port {free_port()}"
    agents = []
    for rank in (0, 1):
        words = command(small, "--shard full", where=f"{nodes} --node-rank {rank}")
        agents.append(subprocess.Popen(words, cwd=tmp_path, env=os.environ | ENVIRONMENT))
    assert [agent.wait(timeout=240) for agent in agents] == [0, 0]
    assert_about_the_same(metrics_of(tmp_path / "run"), metrics_of(undisturbed / "run"))


if __name__ == "__main__":
    import train
    from engine.base import ranks
    from engine.base.errors import UserError
    from engine.base.program import run_program
    from engine.model.sampler import Sampler
    from engine.scoring import score
    from loop import update

    places = {
        "sample": (Sampler, "sample"), "update": (update, "accumulate"),
        "save": (checkpoint, "tensors_of"), "score": (score, "reward_values"),
    }
    signals = {"kill": signal.SIGKILL, "preempt": signal.SIGTERM}
    now = {"step": 0}
    train_step = train.train_step

    def noting(parts, questions, rng, so_far, more):
        now["step"] = so_far.step
        done = train_step(parts, questions, rng, so_far, more)
        total = sum(p.detach().double().abs().sum() for p in parts.networks.model.parameters())
        Path(f"weights-{ranks.rank()}").write_text(str(total.item()))
        return done

    def arm(effect, place, *where):
        owner, name = places[place]
        real = getattr(owner, name)
        fired = []

        def faulty(*words, **options):
            if fired or where != (str(ranks.rank()), str(now["step"])):
                return real(*words, **options)
            fired.append(True)
            if effect in signals:
                os.kill(os.getpid(), signals[effect])
            if effect == "memory":
                raise torch.OutOfMemoryError("out of memory")
            if effect == "refuse":
                raise UserError("the reward is wrong.")
            done = real(*words, **options)
            if effect == "nan":
                next(words[0].model.parameters()).grad[0] = torch.nan
            return done

        setattr(owner, name, faulty)

    train.train_step = noting
    for fault in filter(None, sys.argv.pop(1).split(",")):
        arm(*fault.split())
    run_program(train.main)
