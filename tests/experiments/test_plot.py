"""The picture of several runs."""

import json

import pytest
import torch

from engine.run.curves import smooth
from engine.run.options import UserError
from experiments import plot


def fake_run(folder, steps, **more):
    folder.mkdir()
    for step in range(1, steps + 1):
        row = {"step": step, "questions": 4, "accuracy": step / steps, "reward": 1.0, "reward/a": 0.5, "reward/b": 0.5, "length": 9.0,
               "no_signal": 0.0, "entropy": 0.1, "seconds/generate": 1.0, "seconds/update": 2.0, "seconds/total": 3.5, **more}
        if step != 2:  # a step without signal has no loss, kl, …
            row |= {"kl": 0.1, "clip_fraction": 0.0, "grad_norm": 1.0}
        (folder / "metrics.jsonl").open("a").write(json.dumps(row) + "\n")


def test_several_runs_on_one_picture(tmp_path, monkeypatch):
    fake_run(tmp_path / "one", 30)
    fake_run(tmp_path / "two", 3)
    figures = []
    monkeypatch.setattr(plot.plt, "close", figures.append)
    plot.main([str(tmp_path / "one"), str(tmp_path / "two"), "--output", str(tmp_path / "both.png")])
    assert (tmp_path / "both.png").stat().st_size > 10_000
    axes = figures[0].axes
    assert {text.get_text() for text in axes[0].get_legend().get_texts()} == {"one", "two"}
    assert axes[0].lines[0].get_xdata()[-1] == 120 and axes[0].lines[0].get_ydata()[-1] == 1.0  # accuracy against questions
    assert {bar.get_height() for bar in axes[8].patches} == {30.0, 60.0, 3.0, 6.0, 0.0}  # seconds by phase
    with pytest.raises(UserError, match="holds no run"):
        plot.main([str(tmp_path)])


def test_the_mean_that_smooths_a_curve_looks_back_only():
    assert smooth([1.0, 2.0, 6.0], 2) == [1.0, 1.5, 4.0]
    assert torch.allclose(torch.tensor(smooth([3.0, 4.0], 1)), torch.tensor([3.0, 4.0]))
