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
    return made(epochs=1.0)


def made(**options):
    """A run after 1 step and 4 of 40 questions."""
    config, algorithm = config_of(options)
    state = State("model", "data", devices=1, step=1, position=4)
    return Run(config, algorithm, state, [{}] * 40, [], [], None, [], None, Hooks(), 2048)


# the numbers ahead: all that are left, or one step's
@pytest.mark.parametrize("steps, progress, ahead", [(None, 0.1, 36), (2, 0.5, 32), (20, 0.1, 36)])
def test_steps_or_questions_end_a_run_whichever_come_first(a_run, steps, progress, ahead):
    a_run.config.run.steps = steps
    assert a_run.progress == progress
    assert a_run.numbers_ahead() == a_run.next_numbers(ahead)


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


@pytest.mark.parametrize("chosen, makes, note", [
    ({"steps": 3}, 3, False), ({"steps": 50}, 50, False), ({"epochs": 0.5}, 5, False),
    ({"steps": 3, "epochs": 1.0}, 3, True), ({"steps": 50, "epochs": 1.0}, 10, True),
    ({"steps": 3, "epochs": 0.5}, 3, True),
])
def test_steps_are_the_steps_and_of_both_the_smaller_counts(chosen, makes, note):
    """Of 40 questions, 4 a step. The learning rate falls until the end, whatever ends the run."""
    run = made(**chosen, pruning_rate=0.0, questions_per_step=4)
    again, _ = config_of(given(Config, compared(run.config)[0].split()[2:]))
    for config in (run.config, again):
        assert {"steps": config.run.steps, "epochs": config.run.epochs} == {
            "steps": None, "epochs": None} | chosen
    notes = notes_on_options(run.config.options, run.algorithm)
    assert any("the smaller one" in each for each in notes) == note
    assert run.steps == makes
    run.state.step, run.state.position = makes - 1, 4 * (makes - 1)
    assert not run.finished
    assert run.learning_rate(1.0) == pytest.approx(learning_rate(1 - 0.5 / makes, 1.0, 0.1))
    run.state.step, run.state.position = makes, 4 * makes
    assert run.finished


def test_failed_updates_count_in_a_row(a_run):
    metrics = {"seconds/total": 0.0, "loss": None, "skipped_updates": 0, "kl": None}
    for skipped in ([True, True, False, True], [True], []):
        a_run.count(Step(metrics, None, None, None, skipped))
    assert (a_run.state.skipped_in_a_row, a_run.state.no_signal_steps) == (2, 3)


@pytest.mark.parametrize("kls, too_far", [
    ([9.0, 9.0, 9.0], False), ([0.1, 0.1, 0.1, 0.9], False), ([0.4, 0.4, 0.4, 0.9], True),
])
def test_stop_kl_compares_the_mean_of_four_steps(a_run, kls, too_far):
    """A model that went too far is not kept, so it is not evaluated either."""
    a_run.config.data.eval_every = 1
    a_run.state.recent_kl = kls
    assert a_run.evaluates and not a_run.went_too_far  # nobody asked
    a_run.config.run.stop_kl = 0.5
    assert a_run.went_too_far is too_far and a_run.evaluates is not too_far


@pytest.mark.parametrize("last, position, rises", [
    (3.6e-6, 20, True), (1.0, 20, False), (3.6e-6, 2, False),  # it warms up
])
def test_a_longer_run_says_that_its_learning_rate_rises(a_run, tmp_path, last, position, rises):
    a_run.state.position = position
    a_run.config.run.output_dir = tmp_path
    files.append(tmp_path / "metrics.jsonl", {"step": 1, "lr": last}, {"step": 2, "lr": 1.0})
    following = a_run.learning_rate(a_run.config.update.lr)
    said = f"the learning rate rises from 3.6e-06 to {following:.2g}, because it is lowest at the"
    assert (said in "".join(note_on_learning_rate(a_run))) == rises
