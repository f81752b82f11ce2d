"""`curves.png`: the picture of a run."""

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
HATCHES = ["", "//", "..", "xx", "--"]
DPI = 80
PHASES = ["generate", "score", "logprobs", "update", "other"]


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
    draw_phases(axes[len(titles)], [str(folder)], [phase_totals(rows)])
    figure.savefig(Path(folder) / "curves.png", dpi=DPI)


def shown_panels(rows):
    """{metric: title} of the panels that say something.

    A metric is left out if it is 0 throughout, and the reward if it is the accuracy.
    """
    titles = dict(PANELS)
    if all(row["reward"] == row["accuracy"] for row in rows):
        del titles["reward"]
    return {name: titles[name] for name in titles if any(row.get(name) for row in rows)}


def page(count):
    """(figure, its six panels), `count` of them in use."""
    figure = Figure((14, 7.2))
    # fixed margins are faster than a computed layout
    figure.subplots_adjust(
        left=0.05, right=0.99, top=0.9, bottom=0.07, wspace=0.15, hspace=0.4)
    axes = list(figure.subplots(2, 3).flat)
    for axis in axes[count:]:
        axis.set_axis_off()
    return figure, axes


def draw(axis, metric, x, rows):
    """Draw a metric of a run. x: where each step stands."""
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


def draw_phases(axis, names, phases):
    """Draw the seconds of runs by phase. phases: for each run, {phase: seconds}."""
    stack_bars(axis, names, phases, PHASES[:-1])
    legend_above(axis, "seconds by phase")


def stack_bars(axis, names, heights, parts):
    """Draw one bar per name, made of `parts`. heights: for each name, {part: height}."""
    bottoms = [0.0] * len(names)
    for part, hatch in zip(parts, HATCHES):
        of_part = [row.get(part, 0.0) for row in heights]
        axis.bar(
            names, of_part, bottom=bottoms, label=part, hatch=hatch, edgecolor="white", width=0.6)
        bottoms = [bottom + height for bottom, height in zip(bottoms, of_part)]


def legend_above(axis, title=None, columns=5):
    """Put a panel's legend and title above it: inside, the legend would cover what is drawn."""
    axis.legend(
        loc="lower center", bbox_to_anchor=(0.5, 1), ncols=columns, fontsize=8, title=title,
        title_fontsize=10, frameon=False, borderpad=0, columnspacing=1.2, handletextpad=0.5)
