"""The pictures of one run and of several."""

import json
from pathlib import Path

import pytest

from engine.base.errors import UserError
from experiments import plot


def fake_run(folder, steps, **more):
    folder.mkdir()
    for step in range(1, steps + 1):
        row = {
            "step": step, "questions": 4, "completions": 64, "reward": 1.0,
            "accuracy": step / steps, "length": 9.0, "entropy": 0.1, "seconds/generate": 1.0,
            "seconds/update": 2.0, "seconds/total": 3.5, **more,
        }
        if step != 2:  # a step without signal has no loss, kl, …
            row = {"kl": 0.1} | row
        (folder / "metrics.jsonl").open("a").write(json.dumps(row) + "\n")


@pytest.fixture
def figures(monkeypatch):
    """All pictures that were saved."""
    saved = []
    monkeypatch.setattr(plot.Figure, "savefig", lambda figure, *_, **options: saved.append(figure))
    return saved


def titles(figure):
    """{title: panel} of the panels that are shown. The title of a panel with a legend is the
    legend's."""
    shown = [axis for axis in figure.axes if axis.axison]
    return {axis.get_title() or axis.get_legend().get_title().get_text(): axis for axis in shown}


def heights(figure):
    """Of all bars of the seconds by phase."""
    return {bar.get_height() for bar in titles(figure)["seconds by phase"].patches}


def test_several_runs_on_one_picture(tmp_path, figures):
    runs = [str(tmp_path / name) for name in ("one", "two")]
    for run, steps in zip(runs, (30, 3)):
        fake_run(Path(run), steps)
    plot.main(runs)
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == runs
    accuracy = titles(figures[0])["accuracy (sampled, training questions)"].lines[0]
    assert accuracy.get_xdata()[-1] == 120 and accuracy.get_ydata()[-1] == 1.0  # against questions
    assert heights(figures[0]) == {30.0, 60.0, 3.0, 6.0, 0.0}
    with pytest.raises(UserError):
        plot.main([str(tmp_path)])


def test_runs_that_differ_only_in_the_seed_are_one_line_with_a_band(tmp_path, figures):
    for name, lr, seed, accuracy in [
        ("run-1", 1e-6, 1, 0.2), ("run-2", 1e-6, 2, 0.3), ("run-3", 1e-6, 3, 0.7),
        ("other", 1e-5, 1, 0.9),
    ]:
        fake_run(tmp_path / name, 30, accuracy=accuracy)
        options = {"lr": lr, "seed": seed, "output_dir": name}
        (tmp_path / name / "run.json").write_text(json.dumps(options))
    plot.main([str(tmp_path / name) for name in ("run-1", "run-2", "other", "run-3")])
    names = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert names == [f"{tmp_path / 'run-1'} and 2 more", str(tmp_path / "other")]
    accuracy = titles(figures[0])["accuracy (sampled, training questions)"]
    assert accuracy.lines[0].get_ydata() == pytest.approx([0.4] * 30)
    assert {round(y, 6) for _, y in accuracy.collections[0].get_paths()[0].vertices} == {0.2, 0.7}


