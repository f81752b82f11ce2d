"""engine/run/folder.py: whose a folder is, what run.json keeps, and that one job alone writes a
folder."""

import errno
import fcntl
import json
import os
import re
import shutil
import socket

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import train
from engine.base.errors import UserError
from engine.model.folders import checkpoints
from engine.model.loading import load_model
from engine.run.config import open_run
from engine.run.folder import alone, make_folder
from tasks import toy
from tests.engine.test_ranks import ROOT, torchrun

BRIEF = [
    "--questions_per_step", "1", "--group_size", "4", "--max_new_tokens", "16", "--eval_questions",
    "2", "--lr", "1e-3", "--steps", "1",
]


@pytest.fixture
def restarts(monkeypatch):
    """As under torchrun --max-restarts 3."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")


@pytest.fixture
def run(small, tmp_path):
    """(folder of a run of one step, the words that it was started with)"""
    words = ["--model", small, *BRIEF, "--output_dir", str(tmp_path / "run")]
    assert train.main(words) == 0
    return tmp_path / "run", words


@pytest.mark.parametrize("name", ["lr_schedule", "beta"])
def test_a_run_of_another_version_is_not_resumed(run, name):
    """The other version has an option more, or it lacks one."""
    folder, words = run
    kept = json.loads((folder / "run.json").read_text())
    if name in kept:
        del kept[name]
    else:
        kept[name] = "linear"
    (folder / "run.json").write_text(json.dumps(kept))
    with pytest.raises(UserError, match=f"another version of train.py.*{name}"):
        open_run([*words, "--resume"])


# --- the lock ---


def test_two_jobs_cannot_write_one_folder(run):
    folder, words = run
    holder = f"process {os.getpid()} on {socket.gethostname()}: "
    with alone(folder), pytest.raises(UserError, match=holder):
        train.main([*words, "--resume", "--steps", "2"])
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 1
    assert train.main([*words, "--resume", "--steps", "2"]) == 0  # the lock has ended


@pytest.mark.slow
def test_all_ranks_of_a_job_end_with_the_sentence(small, tmp_path):
    (tmp_path / "run").mkdir()
    with open(tmp_path / "run/run.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        print("process 7 on node0", file=file, flush=True)
        done = torchrun(
            ROOT / "train.py", "--model", small, *BRIEF, "--output_dir", "run", cwd=tmp_path,
            ranks=2)
    assert done.returncode != 0 and "error: run is being written by process 7" in done.stderr
    assert "gloo" not in done.stderr and "Signal" not in done.stderr, done.stderr
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.lock"]  # the other job's


def test_a_file_system_without_locks_does_not_keep_a_run_from_its_work(
    tmp_path, monkeypatch, capsys
):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with alone(tmp_path):
        assert "run.lock cannot be locked" in capsys.readouterr().out


# --- whose a folder is ---


@pytest.mark.parametrize("name", ["file", "file/run"])
def test_a_file_in_place_of_the_folder_is_refused(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"{name} of the run cannot be made .*--output_dir"):
        train.main(["--output_dir", str(tmp_path / name)])


def test_a_run_without_output_dir_takes_the_first_free_number(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/toy-cppo-2").mkdir(parents=True)
    found = [make_folder(None, "toy-cppo") for _ in range(2)]
    assert found == ["runs/toy-cppo-1", "runs/toy-cppo-3"]


@pytest.mark.parametrize("name", [
    "checkpoint-000003", "metrics.jsonl", "config.json", "adapter_config.json"])
def test_a_folder_of_something_else_is_refused(tmp_path, restarts, name):
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=f"holds {name}"):
        open_run(["--output_dir", str(tmp_path)])


def test_a_restarted_job_goes_on_only_with_the_options_of_its_run(run, restarts, tmp_path):
    folder, words = run
    # other words for the same options
    (tmp_path / "recipe.yaml").write_text("lr: 0.001\nsteps: 1\n")
    at = words.index("--lr")
    others = words[:at] + words[at + 4 :] + ["--recipe", str(tmp_path / "recipe.yaml")]
    assert open_run(words)[0].run.resume and open_run(others)[0].run.resume
    for option, value, started in [
        ("--lr", "0.1", "lr is 0.001, not 0.1"), ("--target_kl", "0.5", "target_kl is None"),
        ("--rewards", "format_reward", r"rewards is \['toy_accuracy'\]"),
    ]:
        with pytest.raises(UserError, match=f"holds a run whose --{started}"):
            open_run([*words, option, value])


def test_a_job_that_was_killed_before_its_first_checkpoint_starts_anew(
    small, tmp_path, restarts, monkeypatch
):
    words = ["--model", small, *BRIEF, "--output_dir", str(tmp_path / "run")]

    def killed(*_, **__):
        raise RuntimeError("killed")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        patch.setattr(train, "examine", killed)
        train.main(words)
    assert (tmp_path / "run/run.json").exists()  # the folder is ours from the first moment on
    assert train.main(words) == 0


# --- the options ---


def test_run_json_holds_the_options_with_which_a_run_goes_on(run):
    folder, _ = run
    started = json.loads((folder / "run.json").read_text())
    again = ["--output_dir", str(folder), "--resume"]
    changed = ["--beta", "0.1", "--rewards", "toy_accuracy", "format_reward:0.5", "--steps", "2"]
    train.main([*again, *changed])
    options = {"rewards": ["toy_accuracy", "format_reward:0.5"], "beta": 0.1, "steps": 2}
    assert json.loads((folder / "run.json").read_text()) == started | options
    train.main([*again, "--steps", "3"])  # goes on with the changed options
    assert json.loads((folder / "run.json").read_text()) == started | options | {"steps": 3}


def test_a_run_is_not_resumed_without_a_checkpoint_or_with_other_data(run, monkeypatch):
    folder, _ = run
    words = ["--output_dir", str(folder), "--resume", "--steps", "2"]
    with monkeypatch.context() as patch, pytest.raises(UserError, match="another data set"):
        patch.setattr("engine.data.questions.Questions.fingerprint", lambda questions: "others")
        train.main(words)
    for path in folder.glob("checkpoint-*"):
        path.rename(folder / f"aside-{path.name}")
    with pytest.raises(UserError, match="holds no checkpoint"):
        train.main(words)


def test_a_run_of_the_toy_goes_on_in_another_copy_of_the_project(tmp_path, monkeypatch, capsys):
    """Its base model is the same there, although it has another path."""
    words = ["--output_dir", str(tmp_path), "--eval_questions", "2", "--questions_per_step", "1",
             "--max_new_tokens", "4"]
    train.main([*words, "--steps", "1"])
    copy = tmp_path / "copy"
    base = shutil.copytree(toy.BASE, copy / "tasks/toy_base")
    monkeypatch.setattr("engine.run.begin.PROJECT", copy)
    monkeypatch.setattr("engine.run.state.base_model", lambda *_: str(base))
    train.main(["--output_dir", str(tmp_path), "--resume", "--steps", "2"])
    assert "the run goes on after step 1." in "".join(capsys.readouterr())
    other = shutil.copytree(toy.BASE, tmp_path / "other")
    monkeypatch.setattr("engine.run.state.base_model", lambda *_: str(other))
    with pytest.raises(UserError, match=f"another model .tasks/toy_base, not {other}"):
        train.main(["--output_dir", str(tmp_path), "--resume", "--steps", "3"])


def test_transformers_loads_the_model_that_a_run_names_at_its_end(run, capsys):
    folder, words = run
    train.main([*words, "--resume", "--steps", "2"])
    [path] = re.findall("^model +(.*)$", capsys.readouterr().out, re.MULTILINE)
    model = AutoModelForCausalLM.from_pretrained(path)
    trained, _ = load_model(str(folder), torch.device("cpu"))
    for p, q in zip(model.parameters(), trained.parameters(), strict=True):
        assert torch.equal(p, q)
    assert AutoTokenizer.from_pretrained(path).encode("1+2=?")


def test_a_checkpoint_after_a_million_steps_is_the_newest(tmp_path):
    for name in ("000004", "999999", "1000000", "1000000-of-mine"):
        (tmp_path / f"checkpoint-{name}").mkdir()
    found = [path.name for path in checkpoints(tmp_path)]
    assert found == ["checkpoint-000004", "checkpoint-999999", "checkpoint-1000000"]
