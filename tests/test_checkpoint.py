"""Resume: a run that was killed, or asked to stop, goes on as if nothing had happened."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from engine import checkpoint, logs, policy
from engine.options import UserError

ROOT = Path(__file__).parent.parent
SAME = {"source": "m", "data": "d", "per_step": 4}


def start(small, folder, *more, cwd):
    argv = ["--model", small, "--output_dir", folder, "--questions_per_step", "2", "--group_size", "8", "--max_new_tokens", "48",
            "--lr", "1e-3", "--eval_questions", "8", "--steps", "12", *more]
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *argv], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process):
    out, _ = process.communicate(timeout=120)
    return process.returncode, out


def wait_for_lines(process, path, count):
    while process.poll() is None and (not path.exists() or len(path.read_text().splitlines()) < count):
        time.sleep(0.02)
    assert process.poll() is None, "the run ended before it could be interrupted"


def without_seconds(run):
    return [{key: value for key, value in row.items() if not key.startswith("seconds/")} for row in logs.read(run / "metrics.jsonl")]


def weights(run):
    model, _ = policy.load(str(run), torch.device("cpu"))
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.fixture(scope="module")
def straight(small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    code, out = finish(start(small, "run", cwd=folder))
    assert code == 0, out
    return folder / "run"


def assert_same_run(run, straight):
    assert without_seconds(run) == without_seconds(straight)
    assert [row["step"] for row in logs.read(run / "metrics.jsonl")] == list(range(1, 13))
    assert logs.read(run / "samples.jsonl") == logs.read(straight / "samples.jsonl")
    assert torch.equal(weights(run), weights(straight))
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (run, straight)]
    for key in ("before", "after"):
        assert summaries[0][key]["sampled"] == summaries[1][key]["sampled"]


@pytest.mark.parametrize("save_every", ["3", "50"])
def test_a_killed_run_resumes_to_the_same_weights_and_metrics(small, straight, tmp_path, save_every):
    """kill -9 after step 5, past the checkpoint of step 3 or only that of step 0: what came after is made again, logged once."""
    process = start(small, "run", "--save_every", save_every, cwd=tmp_path)
    wait_for_lines(process, tmp_path / "run/metrics.jsonl", 5)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert len(logs.read(tmp_path / "run/metrics.jsonl")) >= 5
    code, out = finish(start(small, "run", "--resume", cwd=tmp_path))
    assert code == 0, out
    assert_same_run(tmp_path / "run", straight)
    assert not (tmp_path / "run/unfinished-checkpoint").exists()


def test_ctrl_c_saves_a_checkpoint_and_says_how_to_go_on(small, straight, tmp_path):
    process = start(small, "run", cwd=tmp_path)
    wait_for_lines(process, tmp_path / "run/metrics.jsonl", 4)
    process.send_signal(signal.SIGINT)
    code, out = finish(process)
    assert code == 130 and "--output_dir run --resume" in out and "Traceback" not in out
    done = len(logs.read(tmp_path / "run/metrics.jsonl"))
    assert checkpoint.newest(tmp_path / "run").name == f"checkpoint-{done:06d}"
    code, out = finish(start(small, "run", "--resume", cwd=tmp_path))
    assert code == 0, out
    assert_same_run(tmp_path / "run", straight)


def test_exit_code_2_and_one_sentence_for_a_users_mistake(tmp_path):
    done = subprocess.run([sys.executable, str(ROOT / "train.py"), "--pruning_rate", "1"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "error: the pruning rate must lie in [0, 1), not 1.0: lower --pruning_rate.\n"


@pytest.mark.parametrize("crash_in", ["save_pretrained", "torch.save", "rename"])
def test_a_crash_while_saving_leaves_the_checkpoint_before(loaded, tmp_path, monkeypatch, crash_in):
    model, tokenizer = loaded
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint.save(tmp_path, model, tokenizer, optimizer, {"step": 3, **SAME}, {})

    def crash(*_, **__):
        raise OSError("No space left on device")

    targets = {"save_pretrained": (type(model), "save_pretrained"), "torch.save": (torch, "save"), "rename": (Path, "rename")}
    with monkeypatch.context() as patch:
        patch.setattr(*targets[crash_in], crash)
        with pytest.raises(OSError):
            checkpoint.save(tmp_path, model, tokenizer, optimizer, {"step": 6, **SAME}, {})
    assert checkpoint.newest(tmp_path).name == "checkpoint-000003"
    folder, saved = checkpoint.resume(tmp_path, 9, SAME)
    state = saved["state"]
    assert state["step"] == 3 and policy.load(folder, torch.device("cpu"))
    # the next one succeeds over what the crash has left
    checkpoint.save(tmp_path, model, tokenizer, optimizer, {"step": 9, **SAME}, {})
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["checkpoint-000009"]


def test_a_checkpoint_is_not_resumed_with_another_model_or_other_data(loaded, tmp_path):
    model, tokenizer = loaded
    with pytest.raises(UserError, match="nothing to resume"):
        checkpoint.newest(tmp_path)
    checkpoint.save(tmp_path, model, tokenizer, torch.optim.AdamW(model.parameters()), {"step": 3, **SAME}, {})
    for other in ({**SAME, "source": "x"}, {**SAME, "data": "x"}, {**SAME, "per_step": 9}):
        with pytest.raises(UserError, match="was started with another"):
            checkpoint.resume(tmp_path, 9, other)
    assert checkpoint.resume(tmp_path, 3, SAME)  # killed after its last step: the summary is still to come
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(UserError, match="has finished its 3 steps"):
        checkpoint.resume(tmp_path, 3, SAME)


def test_logs_are_cut_to_the_checkpoint_and_lose_a_half_written_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste')
    logs.cut(path, 2)
    assert logs.read(path) == [{"step": 1}, {"step": 2}]
    logs.cut(tmp_path / "none.jsonl", 5)
    assert logs.read(tmp_path / "none.jsonl") == []
