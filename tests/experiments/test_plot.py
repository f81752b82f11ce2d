"""The pictures of one run and of several."""

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from engine.base.errors import UserError
from experiments.library import pictures, plot


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


def test_a_band_is_the_mean_and_the_range_where_all_seeds_have_points():
    axis = plot.Figure().subplots()
    of_seeds = [[(0, 0.0), (2, 2.0)], [(1, 3.0), (4, 6.0)]]
    line = plot.band(axis, of_seeds, 0, "k", height=1)
    area = axis.collections[0].get_paths()[0].vertices
    assert line.get_xdata().tolist() == [1, 1, 2, 2] and line.get_ydata().tolist() == [2, 2, 3, 3]
    assert (area[:, 1].min(), area[:, 1].max()) == (1, 4)


@pytest.mark.parametrize("name, colour", [
    ("GRPO, G=8", plot.GRPO), ("P=0.875, 4 mini-batches", plot.CPPO), ("cppo", plot.CPPO),
    ("CPPO, P=0.5", plot.PALER["P=0.5"]), ("largest_abs, P=0.75", plot.PALER["P=0.75"]),
    ("random, P=0.875", plot.INK), ("largest, P=0.5", plot.INK), ("gspo", plot.INK),
    ("1/|o|, largest |A|", plot.CPPO), ("constant, largest |A|", plot.INK),
    ("judge, β = 0", plot.FAILS),
])  # fmt: skip
def test_a_method_has_one_colour(name, colour):
    assert plot.colour(name) == colour
    assert plot.of_seed({"name": name}, "sampled", 0.4) == plot.FAILS


def test_every_text_can_be_read_on_white():
    """Its contrast is 4.5 : 1 or more, by the formula of WCAG 2."""
    for own in (plot.GRPO, plot.CPPO, plot.FAILS, plot.INK, plot.TINT, *plot.PALER.values()):
        parts = (np.array(to_rgb(plot.of_text(own))) + 0.055) / 1.055
        assert 1.05 / (parts**2.4 @ (0.2126, 0.7152, 0.0722) + 0.05) >= 4.5


def test_names_at_the_ends_of_lines_do_not_cover_each_other():
    axis = plot.Figure().subplots()
    axis.set_ylim(0, 1)
    ends = {"a": 0.5, "b": 0.51, "c": 0.99, "d": 0.2}
    plot.name_lines(axis, {name: axis.plot([0, y])[0] for name, y in ends.items()})
    heights = {text.get_text(): text.xyann[1] for text in axis.texts}
    order = sorted(heights, key=heights.get)
    gaps = [heights[b] - heights[a] for a, b in zip(order, order[1:])]
    assert [text.xy[1] for text in axis.texts] == pytest.approx([ends[name] for name in order])
    assert order == ["d", "a", "b", "c"] and min(gaps) > 0.06 and max(heights.values()) < 0.98


def test_the_pictures_of_the_tables_say_what_is_stored(figures, tmp_path):
    """The dots of the first picture are the seconds to 0.85."""
    pictures.main(["--names", "table1", "family", "code", "--output", str(tmp_path)])
    table, first, family, code = figures
    dots = [line.get_xdata()[0] for line in first.axes[0].lines if line.get_marker() == "o"]
    assert [round(dots[i], 1) for i in (0, 3)] == [14.4, 6.3]
    assert {"GRPO: 14.4 s   ", "CPPO, P = 0.875: 6.3 s   "} <= names(first.axes[0]).keys()
    assert [axis.get_title() for axis in first.axes] == [
        "By the clock, CPPO is ahead", "By the answers it samples, GRPO is ahead"]
    assert code.axes[0].dataLim.x1 <= 1  # no accuracy is above 1, nor is its band
    left = family.axes[0]
    assert left.get_xlim()[0] == 0.86 and "◂ 0.34" in left.texts[0].get_text()
    assert len(table.axes[1].patches) == 50
