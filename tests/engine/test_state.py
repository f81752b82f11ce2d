"""engine/run/state.py: how far a run is, and the updates that failed."""

import pytest

from engine.base.errors import UserError
from engine.options.checks import notes_on_options
from engine.options.command_line import given
from engine.options.config import Config, config_of
from engine.report.logs import compared
from engine.run.state import Run, State, learning_rate
from loop.records import Step


@pytest.fixture
def a_run():
    return made(epochs=1.0)


def made(**options):
    """A run after 1 step and 4 of 40 questions."""
    config, algorithm = config_of(options)
    state = State("model", "data", devices=1, step=1, position=4)
    return Run(config, algorithm, state, [{}] * 40, [], [], None, [], None, lambda step: {}, 2048)


# the numbers ahead: all that are left, or one step's
@pytest.mark.parametrize("steps, progress, ahead", [(None, 0.1, 36), (2, 0.5, 32), (20, 0.1, 36)])
def test_steps_or_questions_end_a_run_whichever_come_first(a_run, steps, progress, ahead):
    a_run.config.run.steps = steps
    assert a_run.progress == progress
    assert len(a_run.numbers_ahead()) == ahead


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
    again, _ = config_of(given(Config, compared(run.config).split()[2:]))
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
