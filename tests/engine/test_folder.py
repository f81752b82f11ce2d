"""engine/run/folder.py: whose a folder is, what run.json keeps, and that one job alone writes a
folder."""

import errno
import fcntl
import os
import shutil
import socket
from contextlib import chdir
from pathlib import Path

import pytest

import train
from engine.base import files
from engine.base.errors import UserError
from engine.model.folders import checkpoints
from engine.run.begin import open_run
from engine.run.folder import exclusive_run_folder, make_folder
from tasks import toy
from tests.helpers.runs import go_on, json_of, metrics_of, run

pytestmark = pytest.mark.usefixtures("undrawn")
BRIEF = "--questions_per_step 1 --group_size 4 --max_new_tokens 16 --eval_questions 2 --lr 1e-3"
RUN = Path("run")


@pytest.fixture(scope="module")
def made(small, tmp_path_factory):
    """A folder with a run of one step."""
    folder = tmp_path_factory.mktemp("made")
    with chdir(folder):
        assert run(small, RUN, f"{BRIEF} --steps 1") == 0
    return folder


@pytest.fixture
def words(small, made, tmp_path, monkeypatch):
    """The words with which the run in the folder `run` was started."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return f"--model {small} --output_dir run {BRIEF} --steps 1".split()


@pytest.mark.parametrize("old, new, named", [
    ("{", '{"lr_schedule": "linear", ', "lr_schedule"), ('"beta"', '"seed"', "beta"),
])
def test_a_run_of_another_version_is_not_resumed(words, old, new, named):
    """The other version has an option more, or it lacks one."""
    text = (RUN / "run.json").read_text().replace(old, new, 1)
    (RUN / "run.json").write_text(text)
    with pytest.raises(UserError, match=f"another version of train.py.*{named}"):
        open_run([*words, "--resume"])


@pytest.mark.parametrize("form", [None, 3])
def test_a_run_whose_fingerprint_has_another_form_is_of_another_version(words, form):
    """It is no other data set. Earlier versions did not say which form theirs had."""
    folder = RUN / "checkpoint-000001"
    saved = json_of(folder / "state.json") | {"data": "of another form", "data_form": form}
    if form is None:
        del saved["data_form"], saved["prompt"]
    files.write(folder / "state.json", files.as_json(saved))
    files.write(folder / "checksums.json", "{}")  # the checkpoint is whole
    with pytest.raises(UserError, match="another version of train.py, .* finish it with that"):
        go_on(RUN, "--steps 2")


# --- the lock ---


def test_two_jobs_cannot_write_one_folder(words):
    holder = f"process {os.getpid()} on {socket.gethostname()}: "
    with exclusive_run_folder(RUN), pytest.raises(UserError, match=holder):
        go_on(RUN, "--steps 2")
    assert len(metrics_of(RUN)) == 1
    with exclusive_run_folder(RUN):  # the lock has ended
        pass


def test_a_file_system_without_locks_does_not_keep_a_run_from_its_work(
    tmp_path, monkeypatch, capsys
):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with exclusive_run_folder(tmp_path):
        assert "run.lock cannot be locked" in capsys.readouterr().out


# --- whose a folder is ---


def test_a_run_without_output_dir_takes_the_first_free_number(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs/toy-cppo-2").mkdir(parents=True)
    found = [make_folder(None, "toy-cppo") for _ in range(2)]
    assert found == ["runs/toy-cppo-1", "runs/toy-cppo-3"]


@pytest.mark.parametrize(
    "name", ["checkpoint-000003", "metrics.jsonl", "adapter_config.json", "notes.md"])
def test_a_folder_of_something_else_is_refused(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=f"holds {name}"):
        open_run(["--output_dir", str(tmp_path)])


def test_a_job_that_was_killed_before_its_first_checkpoint_starts_anew(
    small, tmp_path, monkeypatch
):
    monkeypatch.setattr(train, "evaluate", lambda *_, **__: 1 / 0)
    for _ in range(2):  # the folder is ours from the first moment on
        with pytest.raises(ZeroDivisionError):
            run(small, tmp_path / "run", BRIEF)
        assert (tmp_path / "run/run.json").exists()


def test_a_resume_that_is_refused_keeps_the_run(words, monkeypatch):
    for path in ("metrics.jsonl", "samples.jsonl"):
        (RUN / path).write_text("")  # its only checkpoint is that from before the first step
    shutil.rmtree(RUN / "checkpoint-000001")
    with monkeypatch.context() as patch, pytest.raises(UserError, match="another data set"):
        patch.setattr("engine.data.questions.Questions.fingerprint", lambda questions: "others")
        go_on(RUN)
    go_on(RUN)  # to its end
    with pytest.raises(UserError, match="has made its 1 step, and --steps 1 asks for no more"):
        go_on(RUN)


# --- the options ---


def test_run_json_holds_the_options_with_which_a_run_goes_on(words):
    expected = json_of(RUN / "run.json")
    for given, changed in (
        ("--beta 0.1 --rewards toy_accuracy format_reward:0.5",
         {"rewards": ["toy_accuracy", "format_reward:0.5"], "beta": 0.1}),
        ("", {}),  # it goes on with the changed options
    ):
        expected |= changed | {"steps": expected["steps"] + 1}
        go_on(RUN, f"--steps {expected['steps']} {given}")
        assert json_of(RUN / "run.json") == expected


def test_a_run_is_not_resumed_without_a_checkpoint(words):
    for path in checkpoints(RUN):
        path.rename(RUN / f"aside-{path.name}")
    with pytest.raises(UserError, match="holds no checkpoint"):
        go_on(RUN, "--steps 2")


def test_a_run_of_the_toy_goes_on_in_another_copy_of_the_project(tmp_path, monkeypatch, capsys):
    """Its base model is the same there, although it has another path."""
    def copy_base(folder):
        shutil.copytree(toy.BASE, folder)
        monkeypatch.setattr("engine.run.state.base_model", lambda *_: str(folder))

    run("toy", tmp_path, f"{BRIEF} --steps 1")
    monkeypatch.setattr("engine.run.begin.PROJECT", tmp_path / "copy")
    copy_base(tmp_path / "copy/tasks/toy_base")
    go_on(tmp_path, "--steps 2")
    assert "the run goes on after step 1." in "".join(capsys.readouterr())
    copy_base(tmp_path / "other")
    with pytest.raises(UserError, match=f"another model .tasks/toy_base, not {tmp_path}/other"):
        go_on(tmp_path, "--steps 3")
