"""engine/run/state.py: how far a run is, and the updates that failed."""

import pytest

from engine.base import files
from engine.base.errors import UserError
from engine.run.begin import note_on_learning_rate
from engine.run.checks import notes_on_options
from engine.run.command_line import given
from engine.run.config import Config, compared, config_of
from engine.run.hooks import Hooks
from engine.run.state import Run, State, learning_rate
from records import Step


@pytest.fixture
def a_run():
    """A run after 1 step and 4 of 40 questions."""
    config, algorithm = config_of({"epochs": 1.0})
    state = State("model", "data", devices=1, step=1, position=4)
    return Run(config, algorithm, state, [{}] * 40, [], [], None, [], None, Hooks(), 2048)


@pytest.mark.parametrize("steps, expected", [(None, 0.1), (2, 0.5), (20, 0.1)])
def test_progress_is_of_the_steps_or_of_the_questions_whichever_ends_first(a_run, steps, expected):
    a_run.config.run.steps = steps
    assert a_run.progress == expected


@pytest.mark.parametrize("steps, count", [(None, 36), (2, 32)])  # all that are left, one step's
def test_the_numbers_ahead_are_those_that_the_next_steps_take(a_run, steps, count):
    a_run.config.run.steps = steps
    assert a_run.numbers_ahead() == a_run.next_numbers(count)


def test_what_a_schedule_no_longer_changes_is_as_in_the_run(a_run):
    """Else a run that goes on would differ from one that never stopped."""
    a_run.hooks = Hooks("mine.py", lambda step, progress: {"mu": 5} if step == 2 else {})
    usual, found = a_run.algorithm.mu, []
    for a_run.state.step in (1, 2):
        a_run.follow_schedule()
        found.append(a_run.algorithm.mu)
    assert found == [5, usual]


class Unasked(list):
    """Questions whose prompts are all too long."""

    def ask(self, numbers):
        return {}


def test_a_run_without_a_question_that_can_be_asked_ends(a_run):
    a_run.questions = Unasked([{}] * 40)
    with pytest.raises(UserError, match="raise --max_prompt_tokens"):
        a_run.next_questions()


@pytest.mark.parametrize("steps, epochs, makes, note", [
    (3, None, 3, False), (50, None, 50, False), (None, 0.5, 5, False), (3, 1.0, 3, True),
    (50, 1.0, 10, True), (3, 0.5, 3, True),
])
def test_steps_are_the_steps_and_of_both_the_smaller_counts(steps, epochs, makes, note):
    """Of 40 questions, 4 a step. The learning rate falls until the end, whatever ends the run."""
    chosen = {"steps": steps, "epochs": epochs, "pruning_rate": 0.0, "questions_per_step": 4}
    config, algorithm = config_of({name: x for name, x in chosen.items() if x is not None})
    again, _ = config_of(given(Config, compared(config)[0].split()[2:]))
    assert (again.run.steps, again.run.epochs) == (steps, epochs) == (
        config.run.steps, config.run.epochs)
    state = State("model", "data", devices=1)
    made = Run(config, algorithm, state, [{}] * 40, [], [], None, [], None, Hooks(), 2048)
    notes = notes_on_options(config.options, algorithm)
    assert any("the smaller one" in each for each in notes) == note
    while not made.finished:
        state.step, state.position = state.step + 1, state.position + 4
    assert state.step == makes
    state.step, state.position = makes - 1, 4 * (makes - 1)
    assert made.learning_rate(1.0) == pytest.approx(learning_rate(1 - 0.5 / makes, 1.0, 0.1))


def test_failed_updates_count_in_a_row(a_run):
    metrics = {"seconds/total": 0.0, "loss": None, "skipped_updates": 0, "kl": None}
    for skipped in ([True, True, False, True], [True], []):
        a_run.count(Step(metrics, None, None, None, skipped))
    assert (a_run.state.skipped_in_a_row, a_run.state.no_signal_steps) == (2, 3)


@pytest.mark.parametrize("kls, expected", [
    ([9.0, 9.0, 9.0], False), ([0.1, 0.1, 0.1, 0.9], False), ([0.4, 0.4, 0.4, 0.9], True),
])
def test_stop_kl_compares_the_mean_of_four_steps(a_run, kls, expected):
    a_run.state.recent_kl = kls
    assert not a_run.went_too_far  # nobody asked
    a_run.config.run.stop_kl = 0.5
    assert a_run.went_too_far is expected


def test_a_model_that_went_too_far_is_not_evaluated_for_it_is_not_kept(a_run):
    a_run.config.data.eval_every = 1
    a_run.state.recent_kl = [0.4, 0.4, 0.4, 0.9]
    assert a_run.evaluates
    a_run.config.run.stop_kl = 0.5
    assert not a_run.evaluates


@pytest.mark.parametrize("last, position, rises", [
    (3.6e-6, 20, True), (1.0, 20, False), (3.6e-6, 2, False),  # it warms up
])
def test_a_longer_run_says_that_its_learning_rate_rises(a_run, tmp_path, last, position, rises):
    a_run.state.position = position
    a_run.config.run.output_dir = tmp_path
    files.append(tmp_path / "metrics.jsonl", {"step": 1, "lr": last}, {"step": 2, "lr": 1.0})
    following = a_run.learning_rate(a_run.config.update.lr)
    note = f"the learning rate rises from 3.6e-06 to {following:.2g}, because it is lowest at the"
    assert [sentence[: len(note)] for sentence in note_on_learning_rate(a_run)] == [note] * rises
