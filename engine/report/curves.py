"""Training curves. `curves.png`: the picture of a run. `compared.png`: that of several runs. The
colours of the methods in all pictures of the project."""

from itertools import accumulate
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from engine.base import files
from engine.report.metrics import AXES, mean

GRPO, CPPO, FAILS, INK = "#848e9a", "#1d4f8f", "#b1452b", "#1d2733"
STYLES = ["-", "--", ":", "-."]  # of lines that have the same colour
PANELS = {  # metric: title of its panel, below that of the measure
    "length": "tokens of a completion",
    "entropy": "entropy of a token (nats)",
}
DPI = 80


def curves(folder, algorithm, measure, tested):
    """Draw metrics of a run against the questions that it was trained on: `curves.png`. Metrics of
    the user have panels of their own.

    A thin line shows single steps. A thick line shows the mean over a twentieth of the run. Points
    show the greedy accuracy of --eval_every. measure: "accuracy" or "reward". tested: what it was
    before and after training, in words: the title of its panel; [] if nothing was evaluated.
    """
    rows = files.read_lines(Path(folder, "metrics.jsonl"))
    questions = list(accumulate(row["questions"] for row in rows))
    colour = colour_of(algorithm)
    figure = Figure()
    # fixed margins are faster than a computed layout
    figure.subplots_adjust(left=0.05, right=0.98, top=0.89, bottom=0.11)
    axes = panels(figure, rows[0], measure, "questions")
    for name, axis in axes.items():
        values = [row.get(name) for row in rows]
        means = smooth(values)
        axis.plot(questions, values, color=colour, alpha=0.3, linewidth=0.8)
        axis.plot(questions, means, color=colour, linewidth=2.5)
        axis.set_title(f"{axis.get_title()}: {means[0]:.2g} → {means[-1]:.2g}")
    first = axes[measure]
    if tested:
        first.set_title("\n".join(tested), fontsize="medium")
        first.set_ylabel(f"{measure} of the samples")
    points = [row.get(f"eval_{measure}") for row in rows]
    first.plot(questions, points, "o", color=colour, mfc="white")
    figure.savefig(Path(folder, "curves.png"), dpi=DPI)


def panels(figure, row, measure, below):
    """{metric: its panel in the figure}: the measure, PANELS, the kept signs of a run that prunes,
    and custom metrics. row: the metrics of a step. below: what stands below the curves, in words.
    """
    titles = {measure: f"{measure} of the samples"} | PANELS
    if "kept_negative" in row and row["kept"] < row["completions"]:
        titles["kept_negative"] = "share of A < 0 among the kept"
    titles |= {name: name for name in row if name.startswith("custom/")}
    figure.set_size_inches(4.7 * len(titles), 5)
    axes = dict(zip(titles, figure.subplots(1, len(titles))))
    for name, axis in axes.items():
        axis.set_title(titles[name])
        axis.set_xlabel(below)
        axis.grid(alpha=0.3)
    return axes


def smooth(values):
    """Of each step the mean over the last twentieth of the run, because single steps are noisy."""
    window = max(1, len(values) // 20)
    return [mean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


# --- several runs ---


def curves_of_runs(groups, x, path):
    """Draw the metrics of several runs against what stands below, a row of AXES.

    groups: {name: (algorithm, [rows of metrics.jsonl, for each seed])}. A line shows the mean over
    a twentieth of the run, and over the seeds. A band shows the range of the seeds.
    """
    _, [first, *_] = next(iter(groups.values()))
    # a run whose first reward is no verdict has no accuracy at its end
    measure = "accuracy" if first[-1].get("accuracy") is not None else "reward"
    column, below = AXES[x]
    figure = Figure(layout="constrained")
    colours = [colour_of(algorithm) for algorithm, _ in groups.values()]
    lines = {}  # {name of a group: one of its lines}
    for metric, axis in panels(figure, first[0], measure, below).items():
        for (name, (_, runs)), colour, style in zip(groups.items(), colours, styles(colours)):
            seeds = [points_of(rows, metric, column) for rows in runs]
            if all(seeds):
                lines[name] = band(axis, seeds, 0, colour, style)
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=DPI)


def colour_of(algorithm):
    """GRPO is grey and CPPO is blue, and nothing else is."""
    if algorithm == "grpo":
        return GRPO
    return CPPO if algorithm.startswith("cppo") else INK


def styles(colours):
    """The style of each line: lines of one colour differ in their style."""
    return [STYLES[colours[:i].count(own) % len(STYLES)] for i, own in enumerate(colours)]


def points_of(rows, metric, column):
    """[(x, a metric's mean over a twentieth of the run)], of the steps that have this metric. x:
    the sum of a column up to the step."""
    ends = accumulate(row[column] for row in rows)
    known = [(end, row[metric]) for end, row in zip(ends, rows) if row.get(metric) is not None]
    means = smooth([value for _, value in known])
    return [(end, value) for (end, _), value in zip(known, means)]


def band(axis, lines, column, color, style="-"):
    """The mean over the seeds as a line, their range as a band. Returns the line. lines: of each
    seed, a list of points (x, …, y). column: which number of a point is x; the last one is y."""
    seeds = []
    for points in lines:
        ordered = sorted((point[column], point[-1]) for point in points)
        seeds.append(np.array(ordered).T)
    # the seeds are compared at every x of theirs, from the last start to the first end
    first = max(xs[0] for xs, _ in seeds)
    last = min(xs[-1] for xs, _ in seeds)
    grid = np.unique(np.concatenate([xs for xs, _ in seeds]).clip(first, last))
    values = np.array([np.interp(grid, xs, ys) for xs, ys in seeds])
    axis.fill_between(grid, values.min(0), values.max(0), color=color, alpha=0.12, linewidth=0)
    return axis.plot(grid, values.mean(0), color=color, linestyle=style, linewidth=2.5)[0]
