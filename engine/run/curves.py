"""Pictures: `curves.png` of a run, and one picture of several runs."""

import itertools
import math
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from engine.base import files
from engine.run import metrics

PANELS = [  # (metric, title)
    ("accuracy", "accuracy (sampled, training questions)"),
    ("reward", "reward"),
    ("length", "completion length (tokens)"),
    ("kl", "KL(π ‖ π_ref), estimate k3"),
    ("clip_fraction", "clip fraction"),
    ("no_signal", "share of groups without signal"),
    ("entropy", "entropy per token, estimate (nats)"),
    ("grad_norm", "gradient norm, before clipping"),
]
AXES = {  # what may stand on the x axis: (metric of a step that is added up, label)
    "questions": ("questions", "questions"),
    "completions": ("completions", "completions generated"),
    "seconds": ("seconds/total", "seconds of training"),
}
STYLES = ["-", "--", ":", "-."]
HATCHES = ["", "//", "..", "xx", "--"]
DPI = 80
PHASES = ["generate", "score", "logprobs", "update", "other"]


def smooth(values, window):
    """The mean over the last `window` values, because single steps are noisy."""
    return [fmean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def panels(rows):
    """(metric, title) of the panels that say something: a metric is left out if it is 0
    throughout, and the reward if it is the accuracy."""
    rewards = [(name, name) for name in rows[0] if name.startswith("reward/")]
    same = all(row["reward"] == row["accuracy"] for row in rows)
    return [(metric, title) for metric, title in [*PANELS, *rewards]
            if any(row.get(metric) for row in rows) and not (same and metric.startswith("reward"))]


def curves(groups, output, x="questions"):
    """Draw the runs' metrics against questions trained on, completions generated or seconds of
    training: `x`.

    groups: lists of folders; the runs of a list differ only in the seed. A thick line shows the
    mean over a twentieth of the run, and over the seeds. A thin line shows single steps of a single
    run; a band shows the seeds' range.
    """
    runs = {  # the steps: a tuple with a row of each seed
        str(first) + f" and {len(more)} more" * bool(more): list(
            zip(*(files.read(Path(folder) / "metrics.jsonl") for folder in (first, *more)))
        ) for first, *more in groups
    }
    shown = panels([row for steps in runs.values() for step in steps for row in step])
    height = math.ceil((len(shown) + 1) / 3)
    figure = Figure((14, 3.4 * height + 0.4))
    # fixed margins are faster than a computed layout
    margins = {"left": 0.05, "right": 0.99, "top": 1 - 0.2 / height, "bottom": 0.14 / height}
    axes = figure.subplots(height, 3, gridspec_kw=margins | {"wspace": 0.15, "hspace": 0.4})
    for axis, (metric, title) in zip(axes.flat, shown):
        for i, (name, steps) in enumerate(runs.items()):
            draw(axis, metric, x, steps, f"C{i}", STYLES[i % len(STYLES)], name)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(AXES[x][1], fontsize=9)
        axis.grid(alpha=0.3)
    if len(runs) > 1:
        figure.legend(
            *axes.flat[0].get_legend_handles_labels(), loc="upper center", ncols=6, fontsize=9,
            handlelength=3, frameon=False,
        )
    totals = [  # of each run: {phase: seconds}, the mean over the seeds
        {phase: seconds / len(steps[0]) for phase, seconds in
         metrics.phase_totals([row for step in steps for row in step]).items()}
        for steps in runs.values()
    ]
    phases, *free = axes.flat[len(shown):]
    stacked(phases, list(runs), totals, PHASES[:-1])
    above(phases, "seconds by phase")
    for axis in free:
        axis.set_axis_off()
    figure.savefig(output, dpi=DPI)


def draw(axis, metric, x, steps, color, style, name):
    """Draw a metric of a run: its mean over the seeds, and what it is a mean of. steps: as in
    `curves`."""
    ends = itertools.accumulate(fmean(row[AXES[x][0]] for row in step) for step in steps)
    points = [(end, *(row.get(metric) for row in step)) for end, step in zip(ends, steps)]
    # a step without an update has no KL
    at, *seeds = zip(*(point for point in points if None not in point)) or [()]
    smoothed = list(zip(*(smooth(values, max(1, len(values) // 20)) for values in seeds)))
    axis.plot(at, [fmean(values) for values in smoothed], style, color=color, label=name)
    if len(seeds) == 1:
        axis.plot(at, seeds[0], color=color, alpha=0.2, linewidth=0.8)
    else:
        axis.fill_between(at, [*map(min, smoothed)], [*map(max, smoothed)], color=color, alpha=0.2)


def above(axis, title=None, columns=5):
    """Put the legend of a panel and its title above it: inside, the legend would cover what is
    drawn."""
    axis.legend(
        loc="lower center", bbox_to_anchor=(0.5, 1), ncols=columns, fontsize=8, title=title,
        title_fontsize=10, frameon=False, borderpad=0, columnspacing=1.2, handletextpad=0.5,
    )


def stacked(axis, names, phases, parts):
    """Draw one bar per name, made of `parts`. phases: for each name, {part: height}."""
    bottoms = [0.0] * len(names)
    for part, hatch in zip(parts, HATCHES):
        heights = [row.get(part, 0.0) for row in phases]
        axis.bar(
            names, heights, bottom=bottoms, label=part, hatch=hatch, edgecolor="white", width=0.6
        )
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights)]

