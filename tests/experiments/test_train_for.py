"""experiments/library/train_for.py: runs of the same seconds."""

import pytest
import torch

from engine.run.config import config_of
from experiments.library.train_for import reached, train_for


@pytest.mark.slow
def test_a_run_learns_for_its_seconds_and_is_evaluated_on_the_way(small):
    chosen = {"model": small, "dataset": "toy", "algorithm": "grpo", "questions_per_step": 4}
    config, algorithm = config_of(chosen)
    figures = train_for(config, algorithm, torch.device("cpu"), 2.0, at=(0, 2.0), eval_questions=64)
    seconds = [now for now, *_ in figures["curves"]]
    # the step that goes beyond ends it
    assert seconds == sorted(seconds) and seconds[-1] > 2.0 >= seconds[-2]
    assert figures["questions"] == 4 * figures["steps"] > 8 and 0 < figures["sampling"] < 1
    untrained, trained = (figures[f"greedy {moment}"] for moment in (0, 2.0))
    assert 0 < untrained != trained and 0 < figures["sampled 2.0"] and figures["length"] > 1


def test_the_seconds_to_an_accuracy_are_those_of_the_first_time_that_a_run_has_it():
    points = [(2, 0, 0.4), (4, 0, 0.5), (6, 0, 0.4), (8, 0, 0.6), (11, 0, 0.7)]
    found = [reached({"curves": [points]}, least, 10) for least in (0.4, 0.5, 0.55, 0.7)]
    assert found == [[2], [4], [8], [None]]
