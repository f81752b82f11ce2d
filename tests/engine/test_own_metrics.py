"""--hooks FILE.py: metrics of one's own."""

import torch

from engine.base import ranks
from engine.options.hooks import load_metrics
from examples import my_metrics
from loop.records import Step
from tests.helpers.training import a_rollout


def a_step(rollout, advantages=None, rows=None):
    return Step({}, rollout, advantages, rows, [])


def test_the_metrics_of_the_example_by_hand():
    rollout = a_rollout([[1.0, 0.0]], [[6, 2]], texts=["<think>1</think>2", "3"])
    step = a_step(rollout, torch.tensor([[1.0, -1.0]]), torch.tensor([0]))
    assert my_metrics.metrics(step) == {"thinking": 0.5, "length_of_kept": 1.5}


def test_each_device_counts_by_its_questions(tmp_path, monkeypatch):
    """Two devices with 3 questions and 1, and one with none: (3 · 2 + 1 · 6) / 4."""
    text = "def metrics(step): return {'x': 6 / len(step.rollout.questions)}"
    (tmp_path / "mine.py").write_text(text)
    measure = load_metrics(str(tmp_path / "mine.py"))
    monkeypatch.setattr(ranks, "gather", lambda rows: [*rows, ("custom/x", 6.0)])
    assert measure(a_step(a_rollout([[0.0, 1.0]] * 3)))[0] == {"custom/x": 3.0}
    assert measure(a_step(a_rollout(torch.zeros(1, 0, 2))))[0] == {"custom/x": 6.0}
