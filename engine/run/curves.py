"""`curves.png`: the picture of a run."""

import math
from itertools import accumulate
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from engine.base import files
from engine.run.metrics import phase_totals

PANELS = {  # metric: title
    "accuracy": "accuracy (sampled, training questions)",
    "reward": "reward",
    "length": "completion length (tokens)",
    "kl": "KL(π ‖ π_ref), estimate k3",
    "entropy": "entropy per token, estimate (nats)",
}
DPI = 80


def curves(folder):
    """Draw the metrics of a run against the questions that it was trained on: `curves.png`.

    A thin line shows single steps. A thick line shows the mean over a twentieth of the run.
    """
    rows = files.read(Path(folder) / "metrics.jsonl")
    questions = list(accumulate(row["questions"] for row in rows))
    titles = shown_panels(rows)
    figure, axes = page(len(titles) + 1)
    for axis, (metric, title) in zip(axes, titles.items()):
        draw(axis, metric, questions, rows)
        label(axis, title, "questions")
    phases = axes[len(titles)]
    seconds = phase_totals(rows)
    del seconds["total"]
    phases.bar(list(seconds), list(seconds.values()))
    phases.set_title("seconds by phase", fontsize=10)
    figure.savefig(Path(folder) / "curves.png", dpi=DPI)


def shown_panels(rows):
    """{metric: title} of the panels that say something.

    A metric is left out if it is 0 throughout, and the reward if it is the accuracy.
    """
    titles = dict(PANELS)
    for name in rows[0]:
        if name.startswith("own/"):
            titles[name] = name
    if all(row["reward"] == row["accuracy"] for row in rows):
        del titles["reward"]
    return {name: titles[name] for name in titles if any(row.get(name) for row in rows)}


def page(count):
    """(figure, its panels): three in a row, `count` of them in use."""
    height = math.ceil(count / 3)
    figure = Figure((14, 3.4 * height + 0.4))
    # fixed margins are faster than a computed layout
    figure.subplots_adjust(
        left=0.05, right=0.99, top=1 - 0.2 / height, bottom=0.14 / height, wspace=0.15, hspace=0.4)
    axes = list(figure.subplots(height, 3).flat)
    for axis in axes[count:]:
        axis.set_axis_off()
    return figure, axes


def draw(axis, metric, x, rows):
    """Draw a metric of a run. x: the x of each step."""
    # a step without an update has no KL
    points = [(end, row[metric]) for end, row in zip(x, rows) if row.get(metric) is not None]
    ends, values = zip(*points)
    axis.plot(ends, smooth(values), "-", color="C0")
    axis.plot(ends, values, color="C0", alpha=0.2, linewidth=0.8)


def smooth(values, window=None):
    """Of each step the mean over the last `window` steps, because single steps are noisy.

    None: over the last twentieth of the run.
    """
    window = window or max(1, len(values) // 20)
    return [fmean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def label(axis, title, x):
    axis.set_title(title, fontsize=10)
    axis.set_xlabel(x, fontsize=9)
    axis.grid(alpha=0.3)
