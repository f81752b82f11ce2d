"""--hooks FILE.py: a schedule, a curriculum and metrics of one's own."""

import json
import random

import pytest
import torch

from algorithms import keep_count
from engine.base import ranks
from engine.base.errors import UserError
from engine.run import checkpoint
from engine.run.config import algorithm_with, config_of
from engine.run.hooks import Hooks, load_hooks
from examples import my_curriculum, my_metrics
from records import Step
from tests.helpers.runs import ROOT, go_on, metrics_of, run, sums, written
from tests.helpers.training import a_rollout
from tests.test_train import stop_after

pytestmark = pytest.mark.usefixtures("undrawn")
EXAMPLES = ROOT / "examples"


def go(small, folder, hooks, words=""):
    """A run on 40 questions, of which a step asks 2, before allocation."""
    data = written(folder / "x.jsonl", sums(40))
    usual = ("--rewards number_accuracy --group_size 8 --max_new_tokens 8 --questions_per_step 2 "
             f"--dataset {data} --hooks {hooks}")
    return run(small, folder / "run", f"{usual} {words}")


def past_of(folder):
    """{number of a question: its mean reward} in the newest checkpoint."""
    state = json.loads((checkpoint.newest(folder / "run") / "state.json").read_text())
    return dict(state["past"])


# --- the schedule ---


@pytest.mark.parametrize("options, changed, name, value", [
    ({}, {"pruning_rate": 0.5}, "k", 8), ({}, {"keep": "random"}, "k", 4),
    ({}, {"beta": 0.1}, "beta", 0.1), ({"target_kl": 0.1}, {"target_kl": None}, "target_kl", None),
    ({}, {"questions_per_step": 8}, "questions_per_step", 32),
    # the reference is there
    ({"algorithm": "dapo", "stop_kl": 0.5}, {"beta": 0.1}, "beta", 0.1),
])  # fmt: skip
def test_a_number_of_a_row_can_change(options, changed, name, value):
    config, usual = config_of(options)
    algorithm = algorithm_with(config, changed)
    assert getattr(algorithm, name) == value
    # the loss has β, too
    assert algorithm.loss.keywords == usual.loss.keywords | {"beta": algorithm.beta}


@pytest.mark.parametrize("options, changed, sentence", [
    ({}, {"lr": 1.0}, "cannot change lr"), ({}, {"pruning_rate": 1.5}, "must lie in"),
    ({"algorithm": "dapo"}, {"beta": 0.1}, "has no reference"),
    ({}, {"mu": 1.5}, "schedule: .*--mu.*1.5"), ({}, {"mu": torch.ones(2)}, "--mu.*tensor"),
    ({}, {"importance_weights": "tokens"}, "--importance_weights.*tokens"),
])  # fmt: skip
def test_a_schedule_is_checked_as_the_command_line_is(options, changed, sentence):
    config, _ = config_of(options)
    with pytest.raises(UserError, match=sentence):
        algorithm_with(config, changed)


# --- the curriculum ---

ONE_BY_ONE = """
def curriculum(questions, past, count, rng):
    new = [n for n in range(len(questions)) if n not in past]
    seen.append({number: list(means) for number, means in past.items()})
    return (new + list(past))[:count]

seen = []
"""


@pytest.fixture
def one_by_one(tmp_path):
    """A file whose curriculum asks every question once, in the order of the data set."""
    (path := tmp_path / "mine.py").write_text(ONE_BY_ONE)
    return str(path)


def test_a_curriculum_chooses_by_what_has_happened(small, tmp_path, one_by_one):
    """What each question was worth is known afterwards."""
    assert go(small, tmp_path, one_by_one, "--steps 3 --algorithm grpo") == 0
    seen = load_hooks(one_by_one).curriculum.__globals__["seen"]
    past = past_of(tmp_path)
    for row, before, i in zip(metrics_of(tmp_path / "run"), seen, (0, 2, 4), strict=True):
        assert before == {number: [past[number]] for number in range(i)}
        assert row["reward"] == pytest.approx((past[i] + past[i + 1]) / 2)


def test_dynamic_sampling_asks_no_question_twice_in_a_step(small, tmp_path, one_by_one):
    go(small, tmp_path, one_by_one, "--steps 1 --algorithm dapo --questions_per_step 6")
    [row] = metrics_of(tmp_path / "run")
    assert row["rollouts"] > 1 and sorted(past_of(tmp_path)) == [*range(row["questions"])]


def test_the_example_asks_again_where_answers_differed():
    past = {0: [1.0], 1: [0.0], 2: [0.0, 0.5], 3: [1.0, 0.25], 4: []}
    asked = my_curriculum.curriculum([{}] * 8, past, 8, random.Random(0))
    assert [*map(sorted, (asked[:2], asked[2:5], asked[5:]))] == [[2, 3], [5, 6, 7], [0, 1, 4]]


# --- metrics ---


def a_step(rollout, advantages=None, rows=None, **metrics):
    return Step(metrics, rollout, advantages, rows, [])


def test_the_metrics_of_the_example_by_hand():
    rollout = a_rollout([[1.0, 0.0]], [[6, 2]], texts=["<think>1</think>2", "3"])
    step = a_step(rollout, torch.tensor([[1.0, -1.0]]), torch.tensor([0]))
    assert my_metrics.metrics(step) == {"thinking": 0.5, "length_of_kept": 1.5}


def test_each_device_counts_by_its_questions(monkeypatch):
    """Two devices with 3 questions and 1, and one with none: (3 · 2 + 1 · 6) / 4."""
    hooks = Hooks("mine.py", metrics=lambda step: {"x": 6 / len(step.rollout.questions)})
    monkeypatch.setattr(ranks, "gather", lambda rows: [*rows, ("own/x", 6.0)])
    assert hooks.measure(a_step(a_rollout([[0.0, 1.0]] * 3))) == {"own/x": 3.0}
    assert hooks.measure(a_step(a_rollout(torch.zeros(1, 0, 2)))) == {"own/x": 6.0}


def test_what_metrics_change_in_a_step_changes_no_log():
    def metrics(step):
        step.rollout.rewards.zero_(), step.metrics.clear()
        return {}

    step = a_step(a_rollout([[1.0, 1.0]]), loss=1.0)
    Hooks("mine.py", metrics=metrics).measure(step)
    assert step.rollout.rewards.all() and step.metrics == {"loss": 1.0}


# --- a run that stops, and mistakes ---


def test_a_run_with_all_three_obeys_them_and_goes_on_exactly(small, tmp_path, monkeypatch, capsys):
    """P falls: it changes what is kept and how many questions are asked. All are asked, in as many
    steps as that takes."""
    names = ("schedule", "curriculum", "metrics")
    text = "".join((EXAMPLES / f"my_{name}.py").read_text() for name in names)
    (mine := tmp_path / "mine.py").write_text(text)
    words = "--lr 1e-3 --save_every 1"
    assert go(small, tmp_path / "straight", mine, words) == 0
    said = "".join(capsys.readouterr())
    assert said.count("Each step") == 1 and "the 1 of each 8 with the largest |A|" in said
    rows = metrics_of(tmp_path / "straight/run")
    asked = 0
    for row in rows:
        k = keep_count(8, 0.875 - 0.375 * asked / 40)
        questions = min(2 * 8 // k, 40 - asked)
        assert (row["questions"], row["kept"]) == (questions, questions * k)
        asked += questions
    assert asked == 40 and rows[0]["kept"] == rows[0]["questions"] == 16
    assert rows[0]["lr"] > rows[-1]["lr"] and "own/thinking" in rows[-1]

    stop_after(2, monkeypatch)
    assert go(small, tmp_path / "stopped", mine, words) == 130
    assert go_on(tmp_path / "stopped/run") == 0
    assert metrics_of(tmp_path / "stopped/run") == rows  # its last row tells of all weights before


@pytest.mark.parametrize("text, sentence", [
    ("def schedule(step, progress): return 0.5", "schedule must return .option: value."),
    ("def schedule(step, progress): 1 / 0", "schedule failed: ZeroDivisionError"),
    ("def curriculum(questions, past, count, rng): return [99] * count", "16 numbers of questions"),
    ("def curriculum(*given): return [1.7] * 16", r"16 numbers of questions.*returned \[1.7"),
    ("def metrics(step): return {'x': 'y'}", "metrics must return .name: number."),
])  # fmt: skip
def test_a_mistake_is_one_sentence(text, sentence, tmp_path):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UserError, match=f"mine.py.*{sentence}"):
        hooks = load_hooks(str(tmp_path / "mine.py"))
        if hooks.schedule:
            hooks.options_at(1, 0.0)
        hooks.measure(a_step(a_rollout([[0.0, 1.0]])))
        hooks.choose(range(40), {}, 16, random.Random(0))
