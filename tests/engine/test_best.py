"""--eval_every: the best checkpoint of a run is kept, also after a kill."""

import pytest

import train
from engine.base.errors import UserError
from engine.data.questions import HELD_OUT, hold_out
from engine.data.rows import read_rows
from engine.run import checkpoint
from tests.helpers.runs import go_on, metrics_of, run, sums, written
from tests.test_train import stop_after

pytestmark = pytest.mark.usefixtures("undrawn")
ACCURACY = {2: 0.1, 4: 0.5, 6: 0.3, 8: 0.5, 9: 0.2}  # of each evaluation
BRIEF = ("--questions_per_step 1 --group_size 4 --algorithm grpo --max_new_tokens 16 --lr 1e-3 "
         "--eval_questions 2 --steps 9 --save_every 3 --eval_every 2")


@pytest.fixture(autouse=True)
def known_accuracy(monkeypatch):
    def evaluate(run, label, questions, samples=1, path=None):
        if samples:
            return {}
        assert len(questions) == HELD_OUT
        greedy = {"accuracy": ACCURACY[run.state.step], "length": 5.0}
        return {"greedy": greedy, "seconds": 2.0}

    monkeypatch.setattr(train, "evaluate_run", evaluate)


def tensors(folder):
    return (folder / "model.safetensors").read_bytes()


def test_the_earliest_of_the_best_checkpoints_survives_newer_ones_and_a_kill(
    small, tmp_path, monkeypatch, capsys
):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(small, whole, BRIEF)
    printed = "".join(capsys.readouterr())
    assert f"best      {whole}/best: step 4, greedy accuracy 0.500, chosen on 256 held" in printed
    assert printed.count("the best so far") == 2 and "; and 10 s for --eval_every" in printed
    assert (whole / "best").resolve() == whole / "checkpoint-000004"
    assert [path.name[-1] for path in checkpoint.checkpoints(whole)] == ["4", "6", "9"]
    found = {row["step"]: row.get("eval_accuracy") for row in metrics_of(whole)}
    assert {step: value for step, value in found.items() if value is not None} == ACCURACY

    stop_after(5, monkeypatch)
    run(small, killed, BRIEF)
    (killed / "best").unlink()  # it was killed just before it made the link
    go_on(killed)
    assert (killed / "best").resolve() == killed / "checkpoint-000004"
    for name in ("best", "checkpoint-000009"):
        assert tensors(whole / name) == tensors(killed / name)
    assert metrics_of(whole) == metrics_of(killed)
    for other in ("eval_every 3", "eval_questions 3", "rewards number_accuracy"):
        with pytest.raises(UserError, match=f"started with --{other.split()[0]} .*, not .*: leave"):
            go_on(killed, f"--{other}")


def test_a_run_that_its_data_set_evaluates_goes_on_with_the_same_evaluation(small, tmp_path):
    """Also without --eval_dataset and --eval_every: before and after are compared at its end."""
    usual = BRIEF.removesuffix(" --eval_every 2")
    run(small, tmp_path / "run", f"{usual} --steps 1")
    with pytest.raises(UserError, match="started with --max_new_tokens 16, not 17"):
        go_on(tmp_path / "run", "--max_new_tokens 17")


def test_a_best_model_that_cannot_be_saved_is_not_the_best(small, tmp_path, monkeypatch):
    real = checkpoint.publish_checkpoint

    def finish(folder, run_dir, state):
        if state.step == 4:
            raise OSError("no space")
        real(folder, run_dir, state)

    monkeypatch.setattr(checkpoint, "publish_checkpoint", finish)
    run(small, tmp_path / "run", BRIEF)
    assert (tmp_path / "run/best").resolve().name == "checkpoint-000008"  # as good as step 4


def test_held_out_questions_are_not_trained_on(tmp_path):
    def asked(rows):
        return [row["question"] for row in rows]

    files = read_rows(str(written(tmp_path / "x.jsonl", sums(12))))
    for rows in (sums(12), files, sums(4000)):
        others, chosen = map(asked, hold_out(rows, seed=3))
        assert len(chosen) == min(256, len(rows) // 4)
        assert sorted(others + chosen) == sorted(asked(rows))
        assert chosen == asked(hold_out(rows, seed=3)[1])
    assert chosen != asked(hold_out(sums(4000), seed=4)[1])
