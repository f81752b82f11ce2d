"""Pictures: `curves.png` of a run, and one picture of several runs."""

import itertools
import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

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


def panels(runs):
    """The PANELS that say something: the reward is left out if it is the accuracy, a metric if it is 0 throughout."""
    rows = [row for run in runs for row in run]
    metrics = {metric for metric, _ in PANELS if any(row.get(metric) for row in rows)}
    if all(row["reward"] == row["accuracy"] for row in rows):
        metrics -= {"reward"}
    return [(metric, title) for metric, title in PANELS if metric in metrics]


def curves(run_dirs, output, x="questions"):
    """Draw the runs' metrics against questions trained on, completions generated or seconds of training: `x`.

    A thin line shows single steps, a thick line the mean over a twentieth of the run.
    """
    names = [Path(d).name for d in run_dirs]
    runs = {
        name if names.count(name) == 1 else str(d): logs.read(Path(d) / "metrics.jsonl")
        for name, d in zip(names, run_dirs)
    }
    column, label = AXES[x]
    shown = panels(runs.values())
    height = math.ceil((len(shown) + 1) / 3)
    figure, axes = plt.subplots(height, 3, figsize=(14, 3.4 * height + 0.4), squeeze=False)
    # fixed margins are faster than a computed layout
    inch = 1 / (3.4 * height + 0.4)
    figure.subplots_adjust(
        left=0.05, right=0.99, top=1 - 0.8 * inch, bottom=0.5 * inch, wspace=0.15, hspace=0.4)
    for axis, (metric, title) in zip(axes.flat, shown):
        single = metric == "reward" and len(runs) == 1  # a single run: each of its rewards, too
        for i, (name, rows) in enumerate(runs.items()):
            ends = list(itertools.accumulate(row[column] for row in rows))
            rewards = [key for key in rows[0] if key.startswith("reward/")] if single else []
            for j, key in enumerate([metric, *(rewards if len(rewards) > 1 else [])]):
                points = [(end, row[key]) for end, row in zip(ends, rows) if row.get(key) is not None]
                if not points:
                    continue
                at, y = zip(*points)
                style, color = STYLES[(i + j) % len(STYLES)], f"C{i + j}"
                axis.plot(at, y, color=color, alpha=0.2, linewidth=0.8)
                line = name if key == metric and not single else key.removeprefix("reward/")
                axis.plot(at, smooth(y, max(1, len(y) // 20)), style, color=color, label=line)
        above(axis, title, legend=single and len(axis.lines) > 2)
        axis.set_xlabel(label, fontsize=9)
        axis.grid(alpha=0.3)
    if len(runs) > 1:
        handles, labels = axes.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="upper center", ncols=6, fontsize=9, handlelength=3, frameon=False)

    totals = [logs.phase_totals(rows) for rows in runs.values()]
    phases, *free = axes.flat[len(shown):]
    stacked(phases, list(runs), totals, PHASES[:-1])
    above(phases, "seconds by phase")
    for axis in free:
        axis.set_axis_off()
    save(figure, output)


def above(axis, title=None, columns=5, legend=True):
    """Put the title above a panel, and its legend between both: inside, it would cover what is drawn."""
    if legend:
        axis.legend(
            loc="lower center", bbox_to_anchor=(0.5, 1), ncols=columns, fontsize=8, title=title, title_fontsize=10,
            frameon=False, borderpad=0, columnspacing=1.2, handletextpad=0.5)
    elif title:
        axis.set_title(title, fontsize=10)


def stacked(axis, names, phases, parts):
    """Draw one bar per name, made of `parts`. phases: for each name, {part: height}."""
    bottoms = [0.0] * len(names)
    for part, hatch in zip(parts, HATCHES):
        heights = [row.get(part, 0.0) for row in phases]
        axis.bar(names, heights, bottom=bottoms, label=part, hatch=hatch, edgecolor="white", width=0.6)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights)]


def save(figure, output):
    figure.savefig(output, dpi=80)
    plt.close(figure)
