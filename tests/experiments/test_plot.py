"""The pictures of one run and of several."""

import json
from pathlib import Path

import pytest

from engine.base.errors import UserError
from experiments.library import plot


def fake_run(folder, steps, **more):
    folder.mkdir()
    for step in range(1, steps + 1):
        row = {
            "step": step, "questions": 4, "completions": 64, "reward": 1.0,
            "accuracy": step / steps, "length": 9.0, "entropy": 0.1, "seconds/generate": 1.0,
            "seconds/score": 0.0, "seconds/logprobs": 0.0, "seconds/update": 2.0,
            "seconds/total": 3.5, **more,
        }
        if step != 2:  # a step without signal has no loss, kl, …
            row = {"kl": 0.1} | row
        (folder / "metrics.jsonl").open("a").write(json.dumps(row) + "\n")


@pytest.fixture
def figures(monkeypatch):
    """All pictures that were saved. Each knows where."""
    saved = []

    def savefig(figure, place, **options):
        figure.place = place
        saved.append(figure)

    monkeypatch.setattr(plot.Figure, "savefig", savefig)
    return saved


def names(axis):
    """{name that stands in a panel: its colour}"""
    return {text.get_text(): text.get_color() for text in axis.texts}


def test_several_runs_on_one_picture(tmp_path, figures):
    runs = [str(tmp_path / name) for name in ("one", "two")]
    for run, steps in zip(runs, (30, 3)):
        fake_run(Path(run), steps)
    plot.main([*runs, "--title", "what it shows"])
    plot.main(runs[:1])
    figure, of_one = figures
    # a run keeps its own picture
    assert (figure.place, of_one.place) == ("compared.png", Path(runs[0], "curves.png"))
    accuracy, *_, seconds = figure.axes
    assert accuracy.get_title() == "accuracy of the samples"
    assert names(accuracy).keys() == {"one", "two"} and figure.get_suptitle() == "what it shows"
    line = accuracy.lines[0]
    assert line.get_xdata()[-1] == 120 and line.get_ydata()[-1] == 1.0  # against questions
    assert {bar.get_width() for bar in seconds.patches} == {30.0, 60.0, 3.0, 6.0, 0.0}
    with pytest.raises(UserError):
        plot.main([str(tmp_path)])


def test_runs_that_differ_only_in_the_seed_are_one_line_with_a_band(tmp_path, figures):
    """GRPO is grey, CPPO is blue, and what ends as it began has the colour of what fails."""
    for name, algorithm, seed, accuracy in [
        ("run-1", "cppo", 1, 0.2), ("run-2", "cppo", 2, 0.3), ("run-3", "cppo", 3, 0.7),
        ("other", "grpo", 1, None),
    ]:
        fake_run(tmp_path / name, 30, **({"accuracy": accuracy} if accuracy else {}))
        options = {"algorithm": algorithm, "seed": seed, "output_dir": name}
        (tmp_path / name / "run.json").write_text(json.dumps(options))
    plot.main([str(tmp_path / name) for name in ("run-1", "run-2", "other", "run-3")])
    accuracy = figures[0].axes[0]
    assert [line.get_color() for line in accuracy.lines] == [plot.FAILS, plot.GRPO]
    assert accuracy.lines[0].get_ydata() == pytest.approx([0.4] * 30)
    assert {round(y, 6) for _, y in accuracy.collections[0].get_paths()[0].vertices} == {0.2, 0.7}
