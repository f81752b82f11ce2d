"""Several runs in one picture, and the pictures of the tables of reproduce.py.

    python experiments/plot.py runs/toy-cppo-1             writes curves.png into the run
    python experiments/plot.py runs/toy-grpo-1 runs/toy-cppo-1 --output compared.png
    python experiments/plot.py runs/toy-grpo-1 runs/toy-cppo-1 --x seconds --output compared.png

Runs that differ only in their seed are one line, their mean, with a band from the lowest to the
highest.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from statistics import fmean

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from engine.base import files
from engine.base.errors import UserError
from engine.run import metrics
from engine.run.command_line import run_program
from engine.run.curves import DPI, label, page, shown_panels, smooth
from engine.run.folder import NOT_COMPARED, options_of

MARKERS = ["o", "s", "^", "D", "v"]
STYLES = ["-", "--", ":", "-."]
HATCHES = ["", "//", "..", "xx", "--"]
PHASES = ["generate", "score", "logprobs", "update", "other"]
AXES = {  # what may stand on the x axis: (metric of a step that is added up, label)
    "questions": ("questions", "questions"),
    "completions": ("completions", "completions generated"),
    "seconds": ("seconds/total", "seconds of training"),
}
# a method has one colour in all pictures: that of the first of these words in its name
COLOURS = {
    "one of each": "purple", "half of each": "purple", "random": "green", "unbiased": "teal",
    "importance": "teal", "published, p=0.5": "skyblue", "published, p=0.875": "navy",
    "published": "royalblue", "pooled": "royalblue", "smallest": "olive",
    "largest,": "hotpink", "no allocation": "goldenrod", "pruning alone": "goldenrod",
    "larger batches": "dimgrey", "dr. grpo": "saddlebrown", "drgrpo": "saddlebrown",
    # CPPO: the more it prunes, the darker
    "p=0.5": "#fdae6b", "p=0.75": "#f16913", "p=0.875": "#c13d02", "p=0.9375": "#671f03",
    "gspo + cppo": "slateblue", "cppo + nat": "goldenrod", "cppo": "#f16913",
    "largest": "#c13d02", "both": "#c13d02", "deepseek": "mediumvioletred",
    "2grpo": "hotpink", "grpo + nat": "dimgrey",
    "grpo, longer": "silver", "grpo, g=": "darkgrey", "grpo,": "dimgrey", "grpo": "black",
    "gfpo_adaptive": "limegreen", "gfpo": "seagreen", "dapo": "indigo", "gdpo": "tan",
    "gspo_token": "violet", "gspo": "darkviolet", "pods": "darkcyan", "lite_ppo": "lightcoral",
    "ppo": "crimson", "cispo": "steelblue", "sapo": "darkkhaki", "rloo": "sienna",
    "maxrl": "darkgreen",
}
LABELS = {
    "greedy": "accuracy, greedy", "sampled": "accuracy, sampled", "seconds": "seconds of training",
    "length": "completion length (tokens)", "kl_to_base": "KL to the base (nats per completion)",
}


# --- the pictures of the tables. rows: as of reproduce.summarize ---


def colour(name):
    return next((COLOURS[word] for word in COLOURS if word in name.lower()), "grey")


def seeds(axis, rows, names, key):
    """A line for each row: its mean and standard deviation, and a dot for each seed. A dotted line
    is the base model, if it lies among them."""
    for y, row in enumerate(rows):
        of = row[key]
        axis.errorbar(of["mean"], y, xerr=of["std"], fmt="|k", markersize=14, capsize=3)
        axis.plot(of["values"], [y] * len(of["values"]), "o", color=colour(row["name"]), alpha=0.7)
    label = f"{LABELS[key]}\ndots: seeds; bars: mean ± std"
    base = rows[0].get({"sampled": "base", "greedy": "base_greedy"}.get(key), {"mean": -math.inf})
    if axis.get_xlim()[0] < base["mean"]:
        axis.axvline(base["mean"], color="grey", linestyle=":")
        label += "\ndotted: base"
    axis.set_yticks(range(len(rows)), names)
    axis.set_ylim(len(rows) - 0.4, -0.6)  # the first row on top
    axis.set_xlabel(label)
    axis.grid(alpha=0.3, axis="x")


def panels(count, height=5.0, width=14.0, **options):
    """(figure, its panels side by side)."""
    figure = Figure((width, height), layout="constrained")
    return figure, figure.subplots(1, count, **options)


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


def methods(rows, output, keys):
    """A panel for each of several figures, a line for each method."""
    figure, axes = panels(len(keys), 1.5 + len(rows) / 3.5, sharey=True)
    for axis, key in zip(axes, keys):
        seeds(axis, rows, [row["name"] for row in rows], key)
    figure.savefig(output, dpi=DPI)


def factorial(rows, output):
    """Sampled accuracy: a panel for each loss, a line for each choice."""
    losses = list(dict.fromkeys(row["method"] for row in rows))
    figure, axes = panels(len(losses), 3, sharex=True, sharey=True)
    for axis, loss in zip(axes, losses):
        own = [row for row in rows if row["method"] == loss]
        seeds(axis, own, [row["name"].removeprefix(f"{loss}, ") for row in own], "sampled")
        axis.set_title(loss)
    figure.savefig(output, dpi=DPI)


def phases(rows, output):
    """Accuracy, and the seconds of training by phase."""
    figure, (left, right) = panels(2)
    names = [row["name"] for row in rows]
    seeds(left, rows, names, "sampled")
    stack_bars(right, names, [row["phases"] for row in rows], PHASES)
    for i, row in enumerate(rows):
        text, top = f"{row['speedup']['median']:.2f}×", row["seconds"]["mean"]
        right.annotate(text, (i, top), ha="center", va="bottom")
    legend_above(right, "seconds of training, by phase; speed-up over GRPO")
    right.tick_params(axis="x", rotation=35)
    figure.savefig(output, dpi=DPI)


def speed(rows, output):
    """The speed-ups of CPPO's two parts and of both, and Amdahl's bounds."""
    figure, axis = panels(1, 4.5, width=8)
    for i, kind in enumerate(("pruning alone", "larger batches alone", "both")):
        own, style = [row for row in rows if row["method"] == kind], {"color": colour(kind)}
        axis.plot([r["speedup"]["median"] for r in own], f"{MARKERS[i]}-", label=kind, **style)
        if kind != "larger batches alone":
            bounds = [row["bound"] for row in own]
            axis.plot(bounds, f"{MARKERS[i]}:", label=f"Amdahl's bound, {kind}", **style)
    ticks = [f"P={row['pruning_rate']}\n{row['questions_per_step']} questions" for row in own]
    axis.set_xticks(range(len(ticks)), ticks)
    axis.set_xlim(-0.4, len(ticks) - 0.6)  # room for the last tick
    axis.set_ylabel("speed-up over GRPO, median of the seeds")
    axis.grid(alpha=0.3)
    legend_above(axis, columns=3)
    figure.savefig(output, dpi=DPI)


def band(axis, curves, column, i, label):
    """The mean accuracy over the seeds as a line, their range as a band. curves: of each seed, rows
    as of reproduce.curve."""
    grid = np.linspace(
        max(curve[0][column] for curve in curves), min(curve[-1][column] for curve in curves), 60
    )
    seeds = np.array([np.interp(grid, *np.array(curve)[:, [column, 2]].T) for curve in curves])
    axis.fill_between(grid, seeds.min(0), seeds.max(0), color=colour(label), alpha=0.2)
    marks = {"marker": MARKERS[i % 5], "markevery": (5 + 2 * i, 14)}
    axis.plot(grid, seeds.mean(0), STYLES[i % 4], color=colour(label), label=label, **marks)


def time_to_accuracy(rows, output):
    """Accuracy on training questions, which are new to the policy, against time and against
    completions."""
    figure, axes = panels(2, 5, sharey=True)
    for column, title in enumerate(("seconds of training", "completions generated")):
        for i, row in enumerate(rows):
            band(axes[column], row["curves"], column, i, row["name"])
        axes[column].set_xlabel(title)
        axes[column].grid(alpha=0.3)
    axes[0].set_ylabel("accuracy, sampled (moving mean)\nline: mean; band: lowest to highest seed")
    axes[0].set_xscale("log")
    axes[0].xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes[0].xaxis.set_major_formatter("{x:g}")
    axes[0].xaxis.set_minor_formatter("")
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=5, fontsize=9,
        handlelength=4, frameon=False,
    )
    figure.savefig(output, dpi=DPI)


# --- runs ---


def several(groups, output, x):
    """Draw the metrics of runs against what stands on the x axis, a row of AXES.

    groups: lists of folders; the runs of a list differ only in the seed. A thick line shows the
    mean over a twentieth of the run, and over the seeds. A thin line shows single steps of a single
    run; a band shows the seeds' range.
    """
    runs = {}  # {name: steps}; a step has a row of each seed
    for first, *others in groups:
        name = f"{first} and {len(others)} more" if others else str(first)
        logs = [files.read(Path(folder) / "metrics.jsonl") for folder in (first, *others)]
        runs[name] = list(zip(*logs))
    titles = shown_panels([row for steps in runs.values() for step in steps for row in step])
    figure, axes = page(len(titles) + 1)
    for axis, (metric, title) in zip(axes, titles.items()):
        for i, (name, steps) in enumerate(runs.items()):
            draw_group(axis, metric, x, steps, f"C{i}", STYLES[i % len(STYLES)], name)
        label(axis, title, AXES[x][1])
    if len(runs) > 1:
        figure.legend(
            *axes[0].get_legend_handles_labels(), loc="upper center", ncols=6, fontsize=9,
            handlelength=3, frameon=False)
    names = [name.replace(" and ", "\nand ") for name in runs]  # two lines, as bars are narrow
    seconds = [mean_phases(steps) for steps in runs.values()]
    stack_bars(axes[len(titles)], names, seconds, PHASES[:-1])
    legend_above(axes[len(titles)], "seconds by phase")
    axes[len(titles)].tick_params(axis="x", labelsize=8)
    figure.savefig(output, dpi=DPI)


def draw_group(axis, metric, x, steps, color, style, name):
    """Draw a metric of runs: its mean over the seeds, and what it is a mean of. steps: as in
    `several`."""
    end, ends, values = 0, [], []
    for step in steps:
        end += fmean(row[AXES[x][0]] for row in step)
        of_seeds = [row.get(metric) for row in step]
        if None not in of_seeds:  # a step without an update has no KL
            ends.append(end)
            values.append(of_seeds)
    smoothed = list(zip(*[smooth(seed) for seed in zip(*values)]))
    axis.plot(ends, [fmean(step) for step in smoothed], style, color=color, label=name)
    if len(steps[0]) == 1:
        axis.plot(ends, values, color=color, alpha=0.2, linewidth=0.8)
    else:
        low, high = map(min, smoothed), map(max, smoothed)
        axis.fill_between(ends, list(low), list(high), color=color, alpha=0.2)


def mean_phases(steps):
    """{phase: seconds} of runs, the mean over the seeds."""
    totals = metrics.phase_totals([row for step in steps for row in step])
    return {phase: seconds / len(steps[0]) for phase, seconds in totals.items()}


def by_seed(folders):
    """Lists of folders: the runs of each list differ only in the seed."""
    groups = {}
    for folder in map(Path, folders):
        options = options_of(folder) if (folder / "run.json").is_file() else {"run": str(folder)}
        same = {
            name: value for name, value in options.items() if name not in ("seed", *NOT_COMPARED)
        }
        groups.setdefault(json.dumps(same, sort_keys=True), []).append(folder)
    return list(groups.values())


def main(argv):
    parser = argparse.ArgumentParser(description="Curves of one run, or of several on one picture.")
    parser.add_argument("runs", nargs="+", help="folders of runs")
    parser.add_argument(
        "--x", choices=AXES, default="questions", help="what stands on the x axis; none: questions"
    )
    parser.add_argument(
        "--output", help="the picture's path; none: curves.png in the first run's folder"
    )
    args = parser.parse_args(argv)
    for folder in args.runs:
        if not files.read(Path(folder) / "metrics.jsonl"):
            raise UserError(f"{folder} holds no run with at least one step (metrics.jsonl).")
    output = args.output or Path(args.runs[0]) / "curves.png"
    several(by_seed(args.runs), output, args.x)
    print(f"written: {output}")


if __name__ == "__main__":
    run_program(main)
