"""engine/run/state.py: how far a run is, and the updates that failed."""

import pytest

from engine.options.config import config_of
from engine.run.state import Run, State, learning_rate
from loop.records import Step


@pytest.fixture
def a_run():
    return made(epochs=1.0)


def made(**options):
    """A run after 1 step and 4 of 40 questions."""
    config, algorithm = config_of(options)
    state = State("model", "data", devices=1, step=1, position=4)
    return Run(config, algorithm, state, [{}] * 40, [], [], None, [], None, None, 2048)


# the numbers ahead: all that are left, or one step's
@pytest.mark.parametrize("steps, progress, ahead", [(None, 0.1, 36), (2, 0.5, 32), (20, 0.1, 36)])
def test_steps_or_questions_end_a_run_whichever_come_first(a_run, steps, progress, ahead):
    a_run.config.run.steps = steps
    assert a_run.progress == progress
    assert len(a_run.numbers_ahead()) == ahead


@pytest.mark.parametrize("chosen, makes", [
    ({"steps": 50}, 50), ({"epochs": 0.5}, 5), ({"steps": 3, "epochs": 1.0}, 3),
    ({"steps": 50, "epochs": 1.0}, 10),
])
def test_steps_are_the_steps_and_of_both_the_smaller_counts(chosen, makes):
    """Of 40 questions, 4 a step. The learning rate falls until the end, whatever ends the run."""
    run = made(**chosen, pruning_rate=0.0, questions_per_step=4)
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
    assert (a_run.state.skipped_in_a_row, a_run.state.steps_without_signal) == (2, 3)
