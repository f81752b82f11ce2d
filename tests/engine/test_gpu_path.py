"""The GPU path: placement, types, memory, and what the ranks tell each other. It runs on a GPU, or
on a simulated one.

The environment variable CPPO_GPU_SIMULATOR names the simulator, which is not part of the project: a
Python program that runs another one with a CUDA backend whose memory is the host's, and with as
many GPUs as PRETEND_GPUS says. Without it and without a GPU these tests are skipped. It proves that
tensors stand on the right devices in the right types, that the memory is as planned, and that the
ranks say the same things in the same order. It proves nothing about real kernels, speed, or NCCL
itself.

pytest starts this very file on the device; its __main__ is what is done there.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from algorithms import ALGORITHMS
from engine.base import files, ranks
from engine.base.errors import UserError
from engine.model.loading import load_model
from tasks import toy
from tests.engine.test_ranks import sgd_update
from tests.helpers.training import weights_of

ROOT = Path(__file__).parents[2]
SIMULATOR = os.environ.get("CPPO_GPU_SIMULATOR")
GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not GPUS and not SIMULATOR,
        reason="needs a GPU, or CPPO_GPU_SIMULATOR: the path of a program that simulates one",
    ),
]

RUN = (
    "--questions_per_step 2 --group_size 8 --max_new_tokens 24 --eval_questions 6 --lr 1e-3 "
    "--micro_batch_tokens 256 --mu 1 ")
RUNS = dict.fromkeys(ALGORITHMS, "") | {
    "cppo": "--gradient_checkpointing", "dapo": "--mask_truncated",
    "gfpo": "--sampler_correction sequence_mask", "pods": "--lora 4 --seed 2",
}
UPDATED = ("cppo", "gspo", "ppo")


def on_gpu(*words, ranks=1, cwd=ROOT, timeout=400):
    """Run a Python program on the GPU, or on the simulated one. Returns what it printed."""
    simulator = [] if GPUS else [Path(SIMULATOR).resolve()]
    launch = f"-m torch.distributed.run --standalone --nproc-per-node {ranks}" if ranks > 1 else ""
    more = {
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PRETEND_GPUS": str(ranks),
        "PRETEND_QUIET": "1",
    }
    command = [sys.executable, *map(str, [*launch.split(), *simulator, *words])]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, cwd=cwd, env=os.environ | more
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


# --- what is done on the device ---


def runs(small, out):
    """Every kind of run, in bfloat16."""
    import eval as evaluation
    import train
    for name, more in RUNS.items():
        words = f"--model {small} --dataset toy --algorithm {name} --output_dir {out}/{name} "
        # the toy has two mini-batches
        words += f"--minibatches {ALGORITHMS[name].minibatches} --steps 2 "
        assert train.main((words + RUN + more).split()) == 0
    for name in ("cppo", "pods"):  # resumed: whole weights and adapters
        assert train.main(f"--output_dir {out}/{name} --resume --steps 3".split()) == 0
    train.main(f"--model {small} --check_rewards --group_size 4".split())
    for name in ("cppo", "pods"):
        evaluation.main((
            f"--model {out}/{name} --questions 6 --samples 2 --max_new_tokens 24 --output_dir "
            f"{out}/eval/{name}").split())


def updates(small, out, device):
    """One update of six fixed completions by each algorithm, in float32: the weights after it, to
    files."""
    rank, world = ranks.rank(), ranks.world_size()
    for algorithm in UPDATED:
        for shard in ("none", "full") if world > 1 else ("none",):
            weights = sgd_update(small, algorithm, shard, device=device)["weights"]
            assert weights.is_cuda
            torch.save(weights.cpu(), out / f"{algorithm}-{shard}-{rank}-of-{world}.pt")


def nano_run(out, dtype=torch.bfloat16):
    """Two steps of nano.py, in micro-batches. dtype: of the logits."""
    import nano
    load = nano.load

    def check(model, arguments, output):
        assert output.logits.dtype == dtype

    def checked(source):
        model, tokenizer = load(source)
        model.register_forward_hook(check)
        return model, tokenizer

    nano.load = checked
    nano.STEPS, nano.FOLDER, nano.TOY["rows"] = 2, str(out / "model"), 5
    nano.main([])


# --- the tests ---


@pytest.fixture(scope="module")
def ran(small, tmp_path_factory):
    out = tmp_path_factory.mktemp("ran")
    on_gpu(__file__, "runs", small, out, cwd=out)
    return out


def test_every_kind_of_run_learns_and_goes_on_in_bfloat16(ran):
    gaps = []
    for name in RUNS:
        metrics = files.read_lines(ran / name / "metrics.jsonl")
        assert [row["step"] for row in metrics] == [1, 2, 3][: len(metrics)]
        assert len(metrics) == (3 if name in ("cppo", "pods") else 2)  # two are resumed
        gaps += [row["sampler_logp_diff"] for row in metrics]
        learned = [row for row in metrics if row["loss"] is not None]
        assert learned
        for row in learned:
            assert abs(row["loss"]) < 100 and row["skipped_updates"] == 0 and row["grad_norm"] > 0
            # it is the rounding of bfloat16, and not another policy
            assert row["sampler_logp_diff"] < 0.05
            if ALGORITHMS[name].minibatches == 1:  # π_θ is still π_old
                assert row["ratio_max"] == pytest.approx(1, abs=1e-6)
    # in a short step sampler and trainer may round alike, but not in all steps of all runs
    assert any(gaps)


def needs(gpus):
    if GPUS and gpus > GPUS:
        pytest.skip(f"needs {gpus} GPUs")


@pytest.mark.parametrize("ranks", [1, 2])
def test_in_float32_an_update_is_that_of_a_cpu(small, tmp_path, ranks):
    needs(ranks)
    on_gpu(__file__, "updates", small, tmp_path, ranks=ranks)
    for algorithm in UPDATED:
        expected = sgd_update(small, algorithm)["weights"]
        for shard in ("none", "full") if ranks > 1 else ("none",):
            for rank in range(ranks):
                weights = torch.load(tmp_path / f"{algorithm}-{shard}-{rank}-of-{ranks}.pt")
                torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_nano_computes_in_bfloat16_and_learns_in_float32(tmp_path, ranks):
    needs(ranks)
    on_gpu(__file__, "nano", toy.BASE, tmp_path, ranks=ranks)
    base, saved = (
        weights_of(load_model(str(folder), torch.device("cpu"))[0])
        for folder in (toy.BASE, tmp_path / "model"))
    # an update at this learning rate is lost in bfloat16, which has 8 bits
    moved = (saved - base).abs()
    assert 0 < moved.max() < 1e-2 and (moved > 0).float().mean() > 0.9


def test_more_processes_than_gpus_is_one_sentence():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "2")
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        with pytest.raises(UserError, match="--nproc-per-node 2"):
            ranks.start()


if __name__ == "__main__":
    job, small, out = sys.argv[1:]
    if job == "nano":
        nano_run(Path(out))  # it joins the other ranks itself
        sys.exit()
    device = ranks.start()
    if job == "runs":
        runs(small, Path(out))
    else:
        updates(small, Path(out), device)
        ranks.gather([])
    ranks.stop()
