"""--hooks FILE.py: a schedule, a curriculum and metrics of one's own."""

import json
import random
from pathlib import Path

import pytest
import torch

import train
from algorithms import keep_count
from engine.base import files, ranks
from engine.base.errors import UserError
from engine.run import checkpoint
from engine.run.config import algorithm_with, config_of
from engine.run.hooks import Hooks, load_hooks
from examples import my_curriculum, my_metrics
from records import Step
from tests.test_train import stop_after
from tests.training import a_rollout

ROOT = Path(__file__).parents[2]


def go(small, folder, hooks, *options):
    """A run on 40 questions: its metrics, without the seconds."""
    lines = [{"question": f"{i // 10}+{i % 10}=?", "answer": str(i // 10 + i % 10)}
             for i in range(40)]
    folder.mkdir(exist_ok=True)
    (folder / "x.jsonl").write_text(files.as_lines(lines))
    words = ["--model", small, "--dataset", str(folder / "x.jsonl"), "--output_dir",
             str(folder / "run"), "--hooks", str(hooks), "--rewards", "number_accuracy",
             "--group_size", "8", "--max_new_tokens", "8", "--questions_per_step", "2", *options]
    return train.main(words)


def rows_of(folder):
    return [{name: value for name, value in row.items() if "seconds" not in name}
            for row in files.read(folder / "run" / "metrics.jsonl")]


def weights_of(folder):
    return (checkpoint.newest(folder / "run") / "model.safetensors").read_bytes()


# --- the schedule ---


def test_a_schedule_changes_what_is_kept_and_how_many_questions_are_asked(small, tmp_path, capsys):
    """P falls. All questions are asked, in as many steps as that takes."""
    assert go(small, tmp_path, ROOT / "examples/my_schedule.py") == 0
    rows = rows_of(tmp_path)
    asked = 0
    for row in rows:
        k = keep_count(8, 0.875 - 0.375 * asked / 40)
        questions = min(2 * 8 // k, 40 - asked)
        assert (row["questions"], row["kept"]) == (questions, questions * k)
        asked += questions
    assert asked == 40 and rows[0]["kept"] == rows[0]["questions"] == 16
    assert rows[0]["lr"] > rows[-1]["lr"]
    said = "".join(capsys.readouterr())
    [announced] = [line for line in said.splitlines() if "Each step" in line]
    assert "the 1 of each 8 with the largest |A|" in announced


@pytest.mark.parametrize("changed, expected", [
    ({"pruning_rate": 0.5}, ("k", 8)), ({"group_size": 8}, ("k", 2)), ({"mu": 3}, ("mu", 3)),
    ({"beta": 0.1}, ("beta", 0.1)), ({"questions_per_step": 8}, ("questions_per_step", 32)),
    ({"keep": "random"}, ("k", 4)), ({"target_kl": 0.01}, ("target_kl", 0.01)),
])  # fmt: skip
def test_any_number_of_a_row_can_change(changed, expected):
    config, usual = config_of({"dataset": "toy"})
    algorithm = algorithm_with(config, changed)
    name, value = expected
    assert getattr(algorithm, name) == value
    if "beta" in changed:  # the loss has the number, too
        assert algorithm.loss.keywords["beta"] == 0.1
    assert algorithm_with(config, {}).loss.keywords == usual.loss.keywords


@pytest.mark.parametrize("changed, sentence", [
    ({"lr": 1.0}, "cannot change lr"), ({"pruning_rate": 1.5}, "must lie in"),
    ({"group_size": 1}, "must be at least 2"), ({"keep": "nonsense"}, "unknown rule"),
    ({"pruning_rate": 0.99}, "lower --pruning_rate"), ({"keep": "all"}, "keeps every completion"),
])  # fmt: skip
def test_a_schedule_is_checked_as_the_command_line_is(changed, sentence):
    config, _ = config_of({"dataset": "toy"})
    with pytest.raises(UserError, match=sentence):
        algorithm_with(config, changed)


def test_a_schedule_cannot_ask_for_a_reference_that_is_not_there():
    config, _ = config_of({"dataset": "toy", "algorithm": "dapo"})
    with pytest.raises(UserError, match="has no reference"):
        algorithm_with(config, {"beta": 0.1})
    config, _ = config_of({"dataset": "toy", "algorithm": "dapo", "stop_kl": 0.5})
    assert algorithm_with(config, {"beta": 0.1}).beta == 0.1


# --- the curriculum ---

ONE_BY_ONE = """
def curriculum(questions, past, count, rng):
    new = [n for n in range(len(questions)) if n not in past]
    seen.append({number: list(means) for number, means in past.items()})
    return (new + list(past))[:count]

seen = []
"""


def test_a_curriculum_chooses_by_what_has_happened(small, tmp_path):
    """Every question once, in the order of the file. What each was worth is known afterwards."""
    (tmp_path / "mine.py").write_text(ONE_BY_ONE)
    assert go(small, tmp_path, tmp_path / "mine.py", "--steps", "3", "--algorithm", "grpo") == 0
    seen = load_hooks(str(tmp_path / "mine.py")).curriculum.__globals__["seen"]
    assert [list(past) for past in seen] == [[], [0, 1], [0, 1, 2, 3]]
    state = json.loads((checkpoint.newest(tmp_path / "run") / "state.json").read_text())
    assert [number for number, _ in state["past"]] == [0, 1, 2, 3, 4, 5]
    means = [mean for _, mean in state["past"]]
    assert seen[2] == {number: [means[number]] for number in range(4)}
    rows = rows_of(tmp_path)
    assert [row["reward"] for row in rows] == pytest.approx(
        [(means[i] + means[i + 1]) / 2 for i in (0, 2, 4)])


def test_dynamic_sampling_asks_no_question_twice_in_a_step(small, tmp_path):
    (tmp_path / "mine.py").write_text(ONE_BY_ONE)
    options = ("--steps", "1", "--algorithm", "dapo", "--questions_per_step", "6")
    assert go(small, tmp_path, tmp_path / "mine.py", *options) == 0
    [row] = rows_of(tmp_path)
    state = json.loads((checkpoint.newest(tmp_path / "run") / "state.json").read_text())
    assert row["rollouts"] > 1
    assert sorted(number for number, _ in state["past"]) == list(range(row["questions"]))


def test_the_example_asks_again_where_answers_differed():
    past = {0: [1.0], 1: [0.0], 2: [0.0, 0.5], 3: [1.0, 0.25], 4: []}
    numbers = my_curriculum.curriculum([{}] * 8, past, 4, random.Random(0))
    assert sorted(numbers[:2]) == [2, 3] and set(numbers[2:]) <= {5, 6, 7}
    everything = my_curriculum.curriculum([{}] * 8, past, 8, random.Random(0))
    assert sorted(everything) == list(range(8)) and set(everything[-3:]) == {0, 1, 4}


# --- metrics ---


def test_the_metrics_of_the_example_by_hand(small, tmp_path):
    rollout = a_rollout([[1.0, 0.0]], [[6, 2]], texts=["<think>1</think>2", "3"])
    step = Step({}, rollout, torch.tensor([[1.0, -1.0]]), torch.tensor([0]), [])
    assert my_metrics.metrics(step) == {"thinking": 0.5, "length_of_kept": 1.5}
    assert go(small, tmp_path, ROOT / "examples/my_metrics.py", "--steps", "2") == 0
    assert all({"own/thinking", "own/length_of_kept"} <= row.keys() for row in rows_of(tmp_path))


def test_each_device_counts_by_its_questions(monkeypatch):
    """Two devices with 3 questions and 1, and one with none: (3 · 2 + 1 · 6) / 4."""
    hooks = Hooks("mine.py", metrics=lambda step: {"x": 2})
    step = Step({}, a_rollout([[0.0, 1.0]] * 3), None, None, [])
    monkeypatch.setattr(ranks, "gather", lambda rows: [*rows, (1, "x", 6.0)])
    assert hooks.measure(step) == {"own/x": 3.0}
    nothing = Step({}, a_rollout(torch.zeros(1, 0, 2)), None, None, [])
    assert hooks.measure(nothing) == {"own/x": 6.0}


# --- a run that stops, and mistakes ---


def test_a_run_with_all_three_goes_on_exactly(small, tmp_path, monkeypatch):
    text = "".join((ROOT / f"examples/my_{name}.py").read_text()
                   for name in ("schedule", "curriculum", "metrics"))
    (tmp_path / "mine.py").write_text(text)
    options = ("--lr", "1e-3", "--save_every", "1")
    assert go(small, tmp_path / "straight", tmp_path / "mine.py", *options) == 0
    stop_after(2, monkeypatch)
    assert go(small, tmp_path / "stopped", tmp_path / "mine.py", *options) == 130
    assert train.main(["--output_dir", str(tmp_path / "stopped/run"), "--resume"]) == 0
    assert rows_of(tmp_path / "straight") == rows_of(tmp_path / "stopped")
    assert weights_of(tmp_path / "straight") == weights_of(tmp_path / "stopped")


@pytest.mark.parametrize("text, sentence", [
    ("x = 1", "none of the functions schedule, curriculum, metrics"),
    ("def schedule(step, progress): return 0.5", "schedule must return {option: value}"),
    ("def schedule(step, progress): 1 / 0", "schedule failed: ZeroDivisionError"),
    ("def curriculum(questions, past, count, rng): return [99] * count", "16 numbers of questions"),
    ("def curriculum(questions, past, count, rng): return [0]", "from 0 to 39"),
    ("def curriculum(questions, past, count, rng): pass", "curriculum must return"),
    ("def metrics(step): return 3", "metrics must return {name: number}"),
    ("def metrics(step): return {'x': 'y'}", "metrics must return {name: number}"),
])  # fmt: skip
def test_a_mistake_is_one_sentence(text, sentence, small, tmp_path):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UserError) as caught:
        go(small, tmp_path, tmp_path / "mine.py", "--pruning_rate", "0.875")
    assert sentence in str(caught.value) and "mine.py" in str(caught.value)
