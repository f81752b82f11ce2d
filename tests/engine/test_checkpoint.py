"""Checkpoints: what is kept, what is damaged, and what a run reads of one. (test_train.py and
test_faults.py resume runs, and compare them with runs in one go.)"""

import math
import os
import pickle
import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import PreTrainedModel

from engine.base import files, ranks
from engine.base.errors import UserError
from engine.model import folders
from engine.model.logprobs import Policy
from engine.report import logs
from engine.run import checkpoint
from engine.run.folder import how_to_resume
from engine.run.state import State
from tests.helpers.runs import written
from tests.helpers.training import networks_around


def after(step):
    return State("m", "d", 1, step=step)


@pytest.fixture
def untrained(loaded):
    model, tokenizer = loaded
    return networks_around(Policy(model), tokenizer, lr=1e-3)


@pytest.fixture
def networks(untrained):
    """A policy whose optimizer has made a step."""
    networks = untrained
    networks.model(torch.tensor([[3, 4]])).logits.sum().backward()
    networks.optimizer.step()
    networks.optimizer.zero_grad()
    return networks


@pytest.mark.parametrize("owner, name", [
    (PreTrainedModel, "save_pretrained"), (dcp, "save"), (Path, "rename")])
def test_what_fails_in_saving_leaves_the_checkpoint_before(
    networks, tmp_path, monkeypatch, capsys, owner, name
):
    def crash(*_, **__):
        raise OSError("No space left on device")

    assert checkpoint.save(tmp_path, networks, after(3))
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, crash)
        assert not checkpoint.save(tmp_path, networks, after(6))
    said = capsys.readouterr().out
    assert re.search("^step 6: .*No space left.* To go on from checkpoint-000003: ", said)
    # and nothing that takes the disk's place
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000003"]
    _, state, notes = checkpoint.resume(tmp_path)
    assert State(**state) == after(3) and notes == []
    assert checkpoint.save(tmp_path, networks, after(6))


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_the_newest_checkpoints_are_kept_and_only_a_name_with_a_number_is_one(networks, tmp_path):
    """checkpoint-backup was resumed from, and a newer checkpoint was deleted in its place."""
    # the last one is of transformers' Trainer
    others = {"checkpoint-backup", "checkpoint-000001x", "checkpoint-500"}
    for name in others:
        (tmp_path / name).mkdir()
    for step in (9, 999_999, 1_000_000):
        checkpoint.save(tmp_path, networks, after(step))
    found = {path.name for path in tmp_path.iterdir()}
    assert found == others | {"checkpoint-999999", "checkpoint-1000000"}
    assert checkpoint.newest(tmp_path).name == "checkpoint-1000000"
    assert "To go on from checkpoint-1000000: " in how_to_resume(tmp_path)


@pytest.mark.parametrize("harm", [
    lambda folder: flip(folder / "model.safetensors"),
    lambda folder: (folder / "tokenizer.json").unlink(),
    lambda folder: os.truncate(folder / "checksums.json", 50),
])  # fmt: skip
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(networks, tmp_path, harm):
    """Nothing of it is lost, as often as it happens. A file more is no damage."""
    checkpoint.save(tmp_path, networks, after(3))
    (tmp_path / "checkpoint-000003/eval-toy.json").touch()
    for count in (1, 2):
        checkpoint.save(tmp_path, networks, after(6))
        harm(tmp_path / "checkpoint-000006")
        harmed = checkpoint.checksums(tmp_path / "checkpoint-000006")
        folder, state, [note] = checkpoint.resume(tmp_path)
        assert state["step"] == 3 and "checkpoint-000006 is damaged" in note
        # what the summary names, and eval.py
        assert folder == str(checkpoint.newest(tmp_path)) == folders.resolve_model(str(tmp_path))
        aside = [checkpoint.checksums(path) for path in tmp_path.glob("damaged-checkpoint-000006*")]
        assert len(aside) == count and harmed in aside
    harm(tmp_path / "checkpoint-000003")
    with pytest.raises(UserError, match="damaged"):
        checkpoint.resume(tmp_path)


def test_a_damaged_checkpoint_is_renamed_by_the_first_rank_alone(tmp_path, monkeypatch):
    good, damaged = tmp_path / "checkpoint-000003", tmp_path / "checkpoint-000006"
    damaged.mkdir()
    files.write(written(good / "state.json", []), '{"best": {"step": 3}}')
    monkeypatch.setattr(ranks, "rank", lambda: 1)
    monkeypatch.setattr(ranks, "from_first", lambda own: (good, []))
    assert checkpoint.resume(tmp_path)[0] == str(good)
    assert {*tmp_path.iterdir()} == {good, damaged}  # nor does it make the link to the best one


def test_a_checkpoint_before_the_first_update_leaves_the_optimizer_alone(untrained, tmp_path):
    for _ in range(2):  # a start that was interrupted has left the first one
        assert checkpoint.save(tmp_path, untrained, after(0))
    # a made step, with gradients of 0, would count in AdamW's bias correction
    assert not untrained.optimizer.state
    checkpoint.restore(checkpoint.newest(tmp_path), untrained)
    assert not untrained.optimizer.state


def test_logs_are_cut_to_the_checkpoint_and_lose_only_lines_that_cannot_be_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"step": 1}\n{"step": 2, "loss\x00\xff\n{"step": 3}\n{"step": 4}\n{"ste')
    files.append(tmp_path / "samples.jsonl", {"step": 3}, {"step": 4})
    for name in ("summary.json", "answers.jsonl"):  # the run goes on, so it is not finished
        (tmp_path / name).touch()
    logs.trim_logs(tmp_path, 3)
    assert files.read_lines(path) == [{"step": 1}, {"step": 3}]
    assert files.read_lines(tmp_path / "samples.jsonl") == [{"step": 3}]
    assert not [*tmp_path.glob("summary.json"), *tmp_path.glob("answers.jsonl")]


def test_what_is_no_number_is_null_in_a_log():
    values = {"loss": math.nan, "ratios": [math.inf, -math.inf, 0.1], "text": "NaN é"}
    assert files.as_json(values) == '{"loss": null, "ratios": [null, null, 0.1], "text": "NaN é"}\n'


class Touch:
    """A pickle of it makes a file when it is read."""

    def __reduce__(self):
        return Path.touch, (Touch.made,)


def test_a_checkpoint_holds_no_pickle_and_that_of_a_stranger_runs_no_code(networks, tmp_path):
    """torch's own format would be a pickle: .metadata."""
    checkpoint.save(tmp_path, networks, after(1))
    folder = tmp_path / "checkpoint-000001/networks"
    assert sorted(path.name for path in folder.iterdir()) == [
        f"shard-00001-model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    Touch.made = tmp_path / "made"
    (folder / ".metadata").write_bytes(pickle.dumps(Touch()))
    checkpoint.restore(folder.parent, networks)
    assert not Touch.made.exists()
