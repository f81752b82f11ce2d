"""Pictures: `curves.png` of a run, and one picture of several runs."""

import itertools
import math
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

from engine.base import files
from engine.run import logs  # noqa: E402

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
PHASES = ["generate", "score", "logprobs", "update", "other"]


def smooth(values, window):
    """The mean over the last `window` values, because single steps are noisy."""
    return [
        sum(values[max(0, i - window + 1) : i + 1]) / len(values[max(0, i - window + 1) : i + 1])
        for i in range(len(values))
    ]


def panels(rows):
    """The PANELS that say something: the reward is left out if it is the accuracy, a metric if it
    is 0 throughout."""
    metrics = {metric for metric, _ in PANELS if any(row.get(metric) for row in rows)}
    if all(row["reward"] == row["accuracy"] for row in rows):
        metrics -= {"reward"}
    return [(metric, title) for metric, title in PANELS if metric in metrics]


def curves(groups, output, x="questions"):
    """Draw the runs' metrics against questions trained on, completions generated or seconds of
    training: `x`.

    groups: lists of folders; the runs of a list differ only in the seed. A thick line shows the
    mean over a twentieth of the run, and over the seeds. A thin line shows single steps of a single
    run; a band shows the seeds' range. """
    names = [Path(folders[0]).name for folders in groups]
    runs = {  # the steps: a tuple with a row of each seed
        (name if names.count(name) == 1 else str(folders[0]))
        + f" and {len(folders) - 1} more" * (len(folders) > 1): list(
            zip(*(files.read(Path(folder) / "metrics.jsonl") for folder in folders))
        )
        for name, folders in zip(names, groups)
    }
    column, label = AXES[x]
    shown = panels([row for steps in runs.values() for step in steps for row in step])
    height = math.ceil((len(shown) + 1) / 3)
    figure, axes = plt.subplots(height, 3, figsize=(14, 3.4 * height + 0.4), squeeze=False)
    # fixed margins are faster than a computed layout
    inch = 1 / (3.4 * height + 0.4)
    figure.subplots_adjust(
        left=0.05, right=0.99, top=1 - 0.8 * inch, bottom=0.5 * inch, wspace=0.15, hspace=0.4)
    for axis, (metric, title) in zip(axes.flat, shown):
        single = metric == "reward" and len(runs) == 1  # a single run: each of its rewards, too
        for i, (name, steps) in enumerate(runs.items()):
            ends = list(itertools.accumulate(fmean(row[column] for row in step) for step in steps))
            rewards = [key for key in steps[0][0] if key.startswith("reward/")] if single else []
            for j, key in enumerate([metric, *(rewards if len(rewards) > 1 else [])]):
                points = [(end, *(row.get(key) for row in step)) for end, step in zip(ends, steps)]
                at, *seeds = zip(*(point for point in points if None not in point)) or [()]
                if not at:
                    continue
                style, color = STYLES[(i + j) % len(STYLES)], f"C{i + j}"
                lines = list(zip(*(smooth(y, max(1, len(y) // 20)) for y in seeds)))
                if len(seeds) == 1:
                    axis.plot(at, seeds[0], color=color, alpha=0.2, linewidth=0.8)
                else:
                    axis.fill_between(
                        at, [min(y) for y in lines], [max(y) for y in lines], color=color, alpha=0.2
                    )
                line = name if key == metric and not single else key.removeprefix("reward/")
                axis.plot(at, [fmean(y) for y in lines], style, color=color, label=line)
        above(axis, title, legend=single and len(axis.lines) > 2)
        axis.set_xlabel(label, fontsize=9)
        axis.grid(alpha=0.3)
    if len(runs) > 1:
        handles, labels = axes.flat[0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="upper center", ncols=6, fontsize=9, handlelength=3, frameon=False
        )

    totals = [
        {
            phase: s / len(steps[0])
            for phase, s in logs.phase_totals([row for step in steps for row in step]).items()
        }
        for steps in runs.values()
    ]
    phases, *free = axes.flat[len(shown):]
    stacked(phases, list(runs), totals, PHASES[:-1])
    above(phases, "seconds by phase")
    for axis in free:
        axis.set_axis_off()
    save(figure, output)


def above(axis, title=None, columns=5, legend=True):
    """Put the title above a panel, and its legend between both: inside, it would cover what is
    drawn."""
    if legend:
        axis.legend(
            loc="lower center", bbox_to_anchor=(0.5, 1), ncols=columns, fontsize=8, title=title,
            title_fontsize=10, frameon=False, borderpad=0, columnspacing=1.2, handletextpad=0.5,
        )
    elif title:
        axis.set_title(title, fontsize=10)


def stacked(axis, names, phases, parts):
    """Draw one bar per name, made of `parts`. phases: for each name, {part: height}."""
    bottoms = [0.0] * len(names)
    for part, hatch in zip(parts, HATCHES):
        heights = [row.get(part, 0.0) for row in phases]
        axis.bar(
            names, heights, bottom=bottoms, label=part, hatch=hatch, edgecolor="white", width=0.6
        )
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights)]


def save(figure, output):
    figure.savefig(output, dpi=80)
    plt.close(figure)
