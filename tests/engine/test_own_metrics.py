"""--hooks FILE.py: metrics of one's own."""

import pytest
import torch

from engine.base import ranks
from engine.base.errors import UserError
from engine.options.hooks import load_metrics
from examples import my_metrics
from loop.records import Step
from tests.helpers.training import a_rollout


@pytest.fixture
def own(tmp_path):
    """own(text) → what is logged of a step by the metrics in a file with this text."""
    def own(text):
        (tmp_path / "mine.py").write_text(text)
        return load_metrics(str(tmp_path / "mine.py"))

    return own


def a_step(rollout, advantages=None, rows=None, **metrics):
    return Step(metrics, rollout, advantages, rows, [])


def test_the_metrics_of_the_example_by_hand():
    rollout = a_rollout([[1.0, 0.0]], [[6, 2]], texts=["<think>1</think>2", "3"])
    step = a_step(rollout, torch.tensor([[1.0, -1.0]]), torch.tensor([0]))
    assert my_metrics.metrics(step) == {"thinking": 0.5, "length_of_kept": 1.5}


def test_each_device_counts_by_its_questions(own, monkeypatch):
    """Two devices with 3 questions and 1, and one with none: (3 · 2 + 1 · 6) / 4."""
    measure = own("def metrics(step): return {'x': 6 / len(step.rollout.questions)}")
    monkeypatch.setattr(ranks, "gather", lambda rows: [*rows, ("own/x", 6.0)])
    assert measure(a_step(a_rollout([[0.0, 1.0]] * 3))) == {"own/x": 3.0}
    assert measure(a_step(a_rollout(torch.zeros(1, 0, 2)))) == {"own/x": 6.0}


def test_what_metrics_change_in_a_step_changes_no_log(own):
    measure = own("def metrics(step):\n    step.metrics.clear()\n    return {}")
    step = a_step(a_rollout([[1.0, 1.0]]), loss=1.0)
    measure(step)
    assert step.metrics == {"loss": 1.0}


@pytest.mark.parametrize("text, sentence", [
    ("def metrics(step): return {'x': 'y'}", "metrics must return .name: number."),
    ("x = 1", "has no function 'metrics'"),
])
def test_a_mistake_is_one_sentence(text, sentence, own):
    with pytest.raises(UserError, match=f"mine.py.*{sentence}"):
        own(text)(a_step(a_rollout([[0.0, 1.0]])))
