"""Resume: a run that was killed, or asked to stop, goes on as if nothing had happened."""

import json
import os
import pickle
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from engine.base import files
from engine.base.errors import UserError
from engine.model import folders, loading
from engine.model.logprobs import Policy
from engine.model.networks import whole_networks
from engine.run import checkpoint, metrics

ROOT = Path(__file__).parents[2]
SAME = {"source": "m", "data": "d"}


def start_words(small, folder):
    return [
        "--model", small, "--output_dir", folder, "--questions_per_step", "2", "--group_size", "8",
        "--max_new_tokens", "48", "--lr", "1e-3", "--eval_questions", "8", "--steps", "12",
    ]


def start(small, folder, *more, cwd):
    words = [sys.executable, str(ROOT / "train.py"), *start_words(small, folder), *more]
    return subprocess.Popen(
        words, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process):
    out, _ = process.communicate(timeout=120)
    return process.returncode, out


def wait_for_lines(process, path, count):
    while process.poll() is None and (
        not path.exists() or len(path.read_text().splitlines()) < count
    ):
        time.sleep(0.02)
    assert process.poll() is None, "the run ended before it could be interrupted"


def without_seconds(run):
    return [
        {key: value for key, value in row.items() if not key.startswith("seconds/")}
        for row in files.read(run / "metrics.jsonl")
    ]


def weights(run):
    model, _ = loading.load_model(str(run), torch.device("cpu"))
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.fixture(scope="module")
def straight(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    code, out = finish(start(small, "run", cwd=folder))
    assert code == 0, out
    return folder / "run"


def assert_same_run(run, straight):
    assert without_seconds(run) == without_seconds(straight)
    assert [row["step"] for row in files.read(run / "metrics.jsonl")] == list(range(1, 13))
    assert files.read(run / "samples.jsonl") == files.read(straight / "samples.jsonl")
    assert torch.equal(weights(run), weights(straight))
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (run, straight)]
    for key in ("before", "after"):
        assert summaries[0][key]["sampled"] == summaries[1][key]["sampled"]


def test_a_run_that_is_stopped_and_killed_resumes_to_the_same_weights_and_metrics(
    small, straight, tmp_path
):
    """Ctrl-C after step 2, which ends the step and saves; kill -9 after step 6, past the checkpoint
    of step 5: what came after is made again, logged once."""
    process = start(small, "run", cwd=tmp_path)
    wait_for_lines(process, tmp_path / "run/metrics.jsonl", 2)
    process.send_signal(signal.SIGINT)
    code, out = finish(process)
    assert code == 130 and "--output_dir run --resume" in out and "Traceback" not in out
    done = len(files.read(tmp_path / "run/metrics.jsonl"))
    assert checkpoint.newest(tmp_path / "run").name == f"checkpoint-{done:06d}"
    process = start(small, "run", "--resume", "--save_every", "5", cwd=tmp_path)
    wait_for_lines(process, tmp_path / "run/metrics.jsonl", 6)
    process.kill()
    process.communicate()
    code, out = finish(start(small, "run", "--resume", cwd=tmp_path))
    assert code == 0, out
    assert_same_run(tmp_path / "run", straight)
    assert not (tmp_path / "run/unfinished-checkpoint").exists()


def without_step(loaded):
    model, tokenizer = loaded
    return whole_networks(Policy(model), tokenizer, lr=1e-3)


def networks_of(loaded):
    """A policy whose optimizer has made a step."""
    networks = without_step(loaded)
    networks.model(torch.tensor([[3, 4]])).logits.sum().backward()
    networks.optimizer.step()
    networks.optimizer.zero_grad()
    return networks


@pytest.mark.parametrize("crash_in", ["save_pretrained", "dcp.save", "rename"])
def test_what_fails_in_saving_leaves_the_checkpoint_before(loaded, tmp_path, monkeypatch, crash_in):
    networks = networks_of(loaded)
    assert checkpoint.save(tmp_path, networks, {"step": 3, **SAME}, {}) is None

    def crash(*_, **__):
        raise OSError("No space left on device")

    targets = {
        "save_pretrained": (type(loaded[0]), "save_pretrained"), "dcp.save": (dcp, "save"),
        "rename": (Path, "rename"),
    }
    with monkeypatch.context() as patch:
        patch.setattr(*targets[crash_in], crash)
        assert "No space left" in checkpoint.save(tmp_path, networks, {"step": 6, **SAME}, {})
    # and nothing that takes the disk's place
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000003"]
    assert checkpoint.resume(tmp_path)[1:] == ({"step": 3, **SAME}, [])
    assert checkpoint.save(tmp_path, networks, {"step": 6, **SAME}, {}) is None
    (tmp_path / "file").touch()  # a disk that is gone: a file where the run's folder was
    problem = checkpoint.save(tmp_path / "file/run", networks, {"step": 3, **SAME}, {})
    assert problem.startswith("NotADirectoryError: ")


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("limit, kept", [
    (1, [1_000_000]), (2, [999_999, 1_000_000]), (3, [999_998, 999_999, 1_000_000]),
])  # fmt: skip
def test_the_newest_checkpoints_are_kept_and_only_a_name_with_a_number_is_one(
    loaded, tmp_path, limit, kept
):
    """checkpoint-backup was resumed from, and a newer checkpoint was deleted in its place."""
    # the last one is of transformers' Trainer
    for name in ("checkpoint-backup", "checkpoint-000001x", "checkpoint-500"):
        (tmp_path / name).mkdir()
    for step in (999_998, 999_999, 1_000_000):
        checkpoint.save(tmp_path, networks_of(loaded), {"step": step, **SAME}, {}, limit)
    found = [path.name for path in checkpoint.checkpoints(tmp_path)]
    assert found == [f"checkpoint-{step:06d}" for step in kept]
    assert (tmp_path / "checkpoint-backup").exists()


@pytest.mark.parametrize("harm", [
    lambda folder: flip(folder / "model.safetensors"),
    lambda folder: flip(next((folder / "networks").glob("*.distcp"))),
    lambda folder: os.truncate(folder / "state.json", 10),
    lambda folder: (folder / "tokenizer.json").unlink(),
    lambda folder: os.truncate(folder / "checksums.json", 50),
])  # fmt: skip
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_is_used(loaded, tmp_path, harm):
    for step in (3, 6):
        checkpoint.save(tmp_path, networks_of(loaded), {"step": step, **SAME}, {})
    harm(tmp_path / "checkpoint-000006")
    folder, state, [note] = checkpoint.resume(tmp_path)
    assert state["step"] == 3 and folder.endswith("checkpoint-000003")
    assert "checkpoint-000006 is damaged" in note
    harm(tmp_path / "checkpoint-000003")
    with pytest.raises(UserError, match="damaged"):
        checkpoint.resume(tmp_path)


def test_after_a_resume_the_newest_checkpoint_is_the_one_resumed_from(loaded, tmp_path):
    """A damaged newer one is set aside, and nothing of it is lost, as often as it happens."""
    networks = networks_of(loaded)
    checkpoint.save(tmp_path, networks, {"step": 3, **SAME}, {})
    for count in (1, 2):
        checkpoint.save(tmp_path, networks, {"step": 6, **SAME}, {})
        flip(tmp_path / "checkpoint-000006/model.safetensors")
        harmed = checkpoint.checksums(tmp_path / "checkpoint-000006")
        checkpoint.resume(tmp_path)
        # what the summary and --merge_lora name, and eval.py
        assert checkpoint.newest(tmp_path).name == "checkpoint-000003"
        assert Path(folders.resolve_model(str(tmp_path))).name == "checkpoint-000003"
        aside = [checkpoint.checksums(path) for path in tmp_path.glob("damaged-checkpoint-000006*")]
        assert len(aside) == count and harmed in aside


def test_the_optimizer_and_other_networks_come_back_as_they_were(loaded, tmp_path):
    networks = networks_of(loaded)
    head = torch.nn.Linear(3, 1)
    checkpoint.save(tmp_path, networks, {"step": 3, **SAME}, {"head": head})
    folder, _, _ = checkpoint.resume(tmp_path)
    again, other = (
        without_step(loading.load_model(folder, torch.device("cpu"))),
        torch.nn.Linear(3, 1),
    )
    checkpoint.restore(folder, again, {"head": other})
    assert torch.equal(other.weight, head.weight) and torch.equal(other.bias, head.bias)
    for p, q in zip(networks.model.parameters(), again.model.parameters(), strict=True):
        ours, theirs = networks.optimizer.state[p], again.optimizer.state[q]
        assert (
            ours["step"] == theirs["step"] == 1 and torch.equal(ours["exp_avg"], theirs["exp_avg"])
            and ours["exp_avg"].any()
        )
        assert torch.equal(ours["exp_avg_sq"], theirs["exp_avg_sq"]) and torch.equal(p, q)


def test_a_checkpoint_before_the_first_update_leaves_the_optimizer_alone(loaded, tmp_path):
    networks = without_step(loaded)
    checkpoint.save(tmp_path, networks, {"step": 0, **SAME}, {})
    # a made step, with gradients of 0, would count in AdamW's bias correction
    assert not networks.optimizer.state
    checkpoint.restore(checkpoint.newest(tmp_path), networks, {})
    assert not networks.optimizer.state


def test_logs_are_cut_to_the_checkpoint_and_lose_only_lines_that_cannot_be_read(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"step": 1}\n{"step": 2, "loss\x00\xff\n17\n{"step": 3}\n{"step": 4}\n{"ste')
    files.append(tmp_path / "samples.jsonl", {"step": 1}, {"step": 2}, {"step": 3}, {"step": 4})
    (tmp_path / "summary.json").touch()  # the run goes on, so it is not finished
    metrics.start_logs(tmp_path, 3)
    assert files.read(path) == [{"step": 1}, {"step": 3}]
    assert [row["step"] for row in files.read(tmp_path / "samples.jsonl")] == [1, 2, 3]
    assert "metrics.jsonl lacks 1 of the 3 steps" in capsys.readouterr().out
    assert not (tmp_path / "summary.json").exists()


def test_what_is_no_number_is_null_in_a_log(tmp_path):
    files.append(
        tmp_path / "x.jsonl",
        {"loss": float("nan"), "ratios": [float("inf"), -float("inf"), 0.1], "text": "NaN é"},
    )
    assert (
        tmp_path / "x.jsonl"
    ).read_text() == '{"loss": null, "ratios": [null, null, 0.1], "text": "NaN é"}\n'


class Touch:
    """A pickle of it makes a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("place", ["metadata", "value"])
def test_a_checkpoint_of_a_stranger_runs_no_code(loaded, tmp_path, place):
    """torch.distributed.checkpoint reads by pickle what stands in .metadata, and what is no
    tensor."""
    networks, made = networks_of(loaded), tmp_path / "made"
    if place == "value":
        networks.optimizer.param_groups[0]["eps"] = Touch(made)
    checkpoint.save(tmp_path, networks, {"step": 1, **SAME}, {})
    folder = tmp_path / "checkpoint-000001"
    if place == "metadata":
        (folder / "networks/.metadata").write_bytes(pickle.dumps(Touch(made)))
    networks.optimizer.param_groups[0]["eps"] = 1e-8
    with pytest.raises(UserError, match="code"):
        checkpoint.restore(folder, networks, {})
    assert not made.exists()


@pytest.mark.slow
def test_a_lost_connection_ends_a_run_after_its_step(small, straight, tmp_path):
    """The run's terminal is closed, as by a lost ssh connection: SIGHUP, and nothing can be printed
    any more."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` of these tests would be inherited
        words = [*start_words(small, "run"), "--save_every", "50"]
        os.execv(sys.executable, [sys.executable, str(ROOT / "train.py"), *words])
    path = tmp_path / "run/metrics.jsonl"
    while not path.exists() or len(path.read_text().splitlines()) < 3:
        if select.select([terminal], [], [], 0.02)[0]:  # somebody must read
            os.read(terminal, 10_000)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    done = len(files.read(path))
    assert 3 <= done < 12 and checkpoint.newest(tmp_path / "run").name == f"checkpoint-{done:06d}"


@pytest.mark.slow
def test_a_closed_pipe_ends_a_run_with_a_sentence(small, tmp_path):
    words = [sys.executable, str(ROOT / "train.py"), *start_words(small, "run")]
    process = subprocess.Popen(
        words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()
    process.stdout.close()  # as head -1 does
    said = process.stderr.read()
    assert process.wait(timeout=120) == 2
    assert said.count("\n") == 1 and "checkpoint-000000: --output_dir run --resume" in said
