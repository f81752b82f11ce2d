"""Several runs in one picture, and the pictures of the tables of reproduce.py.

    python experiments/library/plot.py runs/toy-cppo-1             writes curves.png into the run
    python experiments/library/plot.py runs/toy-grpo-1 runs/toy-cppo-1 --output compared.png
    python experiments/library/plot.py RUN RUN --x seconds --output compared.png

Runs that differ only in their seed are one line, their mean, with a band from the lowest to the
highest.
"""

import argparse
import json
import math
import re
import sys
from pathlib import Path
from statistics import fmean

import numpy as np
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[2]))  # the project's root

from engine.base import files
from engine.base.errors import UserError
from engine.run import metrics
from engine.run.command_line import run_program
from engine.run.curves import CPPO, DPI, FAILS, GRPO, draw_seconds, page, smooth
from engine.run.curves import SHADES as PHASE_SHADES
from engine.run.folder import NOT_COMPARED, options_of

PHASES = ["generate", "score", "logprobs", "update", "other"]
SHADES = {**PHASE_SHADES, "other": "#f0f2f4"}
AXES = {  # what may stand on the x axis: (metric of a step that is added up, label)
    "questions": ("questions", "questions"),
    "completions": ("completions", "completions generated"),
    "seconds": ("seconds/total", "seconds of training"),
}
# CPPO: the less it prunes, the paler
PALER = {"P=0.5": "#a3bcd9", "P=0.75": "#6c93c0", "P=0.875": CPPO, "P=0.9375": "#0e2c53"}
# how the names of CPPO's rows begin
OF_CPPO = ("cppo", "p=", "largest_abs", "largest |a|", "both", "published", "as published")
OTHER = "#4a535d"  # a method that is neither, in a picture of lines
STYLES = ["-", "--", ":", "-."]
MAIN = ("GRPO", "P=0.875")  # of Table 1
LEARNED = 0.55  # accuracy of a toy that has learned something; the base: 0.39 greedy, 0.43 sampled
LABELS = {
    "greedy": "accuracy, greedy", "sampled": "accuracy, sampled", "seconds": "seconds of training",
    "length": "tokens of a completion", "kl_to_base": "KL to the base (nats per completion)",
}
WORDS = {  # of a row: what the pictures call it
    "largest_abs": "largest |A|", "smallest_abs": "smallest |A|", "largest": "largest A",
    "pooled": "largest |A| of the step", "unbiased": "drawn, unbiased",
    "grpo": "GRPO", "2grpo": "2-GRPO", "cppo": "CPPO", "cppo_published": "CPPO, published code",
    "drgrpo": "Dr. GRPO", "dapo": "DAPO", "cispo": "CISPO", "sapo": "SAPO", "rloo": "RLOO",
    "lite_ppo": "Lite PPO", "maxrl": "MaxRL", "gspo": "GSPO", "gspo_token": "GSPO-token",
    "gfpo": "GFPO", "gfpo_adaptive": "GFPO, adaptive k", "gdpo": "GDPO", "pods": "PODS",
    "deepseek_v32": "DeepSeek-V3.2", "ppo": "PPO", "gspo + cppo": "GSPO + CPPO",
    "grpo + nat": "GRPO + NAT", "cppo + nat": "CPPO + NAT",
}


# --- the pictures of the tables. rows: as of reproduce.summarize ---


def in_words(name):
    """The name of a row, as a reader says it: "largest_abs, P=0.5" is "largest |A|, P = 0.5"."""
    parts = [WORDS.get(part, part) for part in name.split(", ")]
    return ", ".join(parts).replace("P=", "P = ").replace("G=", "G = ")


def colour(name, other=GRPO):
    """GRPO is grey and CPPO is blue, and paler if it prunes less. `other`: all other methods."""
    first, *more = name.split(", ")
    if first.lower().startswith(OF_CPPO):
        rate = next((part for part in (first, *more) if part in PALER), "P=0.875")
        return PALER[rate]
    return GRPO if first.lower() == "grpo" else other


def of_seed(row, key, value):
    """The colour of one seed: FAILS if it has learned nothing."""
    accuracy = value if key in ("greedy", "sampled") else row["sampled"]["mean"]
    return FAILS if accuracy < LEARNED else colour(row["name"])


def seeds(axis, rows, key, title=None, left=None):
    """A line for each row: its mean and standard deviation, and a dot for each seed.

    left: where the axis begins; a row whose mean lies before that gets a number in its place.
    """
    for y, row in enumerate(rows):
        of = row[key]
        values = of.get("values", [of["mean"]])  # older results have no figures of single seeds
        dots = [of_seed(row, key, value) for value in values]
        if left is not None and of["mean"] < left:
            axis.text(left, y, f" ◂ {of['mean']:.2f}", color=dots[0], va="center", fontsize=11)
            continue
        axis.plot([of["mean"] - of["std"], of["mean"] + of["std"]], [y, y], color="#c3cad2",
                  linewidth=5, solid_capstyle="butt", zorder=1)
        axis.plot([of["mean"]], [y], "|", color="black", markersize=13, zorder=3)
        axis.scatter(values, [y] * len(dots), color=dots, s=42, alpha=0.85, zorder=2)
    axis.set_yticks(range(len(rows)), [in_words(row["name"]) for row in rows], fontsize=11)
    axis.set_ylim(len(rows) - 0.4, -0.6)  # the first row on top
    if left is not None:
        axis.set_xlim(left=left)
    axis.set_xlabel(LABELS[key])
    axis.set_title(title or LABELS[key], fontsize=13)
    plain(axis, "x")


def plain(axis, grid="both"):
    """No frame but the two axes, and a pale grid."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.3, axis=grid)


def panels(count, height=5.0, width=14.0, **options):
    """(figure, its panels side by side)."""
    figure = Figure((width, height), layout="constrained")
    return figure, figure.subplots(1, count, **options)


def foot(figure, text):
    figure.supxlabel(text, fontsize=10, color=OTHER)


def foot_of_seeds(figure, rows):
    dots = "dots: seeds; " if "values" in rows[0]["sampled"] else ""
    foot(figure, f"{dots}line and band: mean ± standard deviation of the seeds")


def name_lines(axis, lines, low=0.03, high=0.97):
    """Write the names of lines to the right of a panel, each at its end, one below the other.

    lines: (value at the end, name, colour) of each. low, high: the part of the panel that is used.
    """
    bottom, top = axis.get_ylim()
    step = (top - bottom) * 0.062
    lines = sorted(lines, key=lambda line: line[0])
    heights = []
    for value, *_ in lines:
        least = heights[-1] + step if heights else bottom + low * (top - bottom)
        heights.append(max(value, least))
    over = heights[-1] - (bottom + high * (top - bottom))
    for i in reversed(range(len(heights))):  # too high: push down again
        most = heights[i + 1] - step if i + 1 < len(heights) else heights[i] - max(0.0, over)
        heights[i] = min(heights[i], most)
    for height, (_, name, own) in zip(heights, lines):
        axis.annotate(name, (1.0, height), xycoords=("axes fraction", "data"), color=own,
                      xytext=(6, 0), textcoords="offset points", va="center", fontsize=11)


def methods(rows, output, keys, titles=None, order=None, left=None):
    """A panel for each of several figures, a line for each method.

    titles: what the panels show, in words. order: a key; the method with the largest mean is above.
    left: where the first axis begins.
    """
    if order:
        rows = sorted(rows, key=lambda row: -row[order]["mean"])
    figure, axes = panels(len(keys), 1.5 + len(rows) / 3.2, sharey=True)
    for i, (axis, key) in enumerate(zip(axes, keys)):
        seeds(axis, rows, key, titles and titles[i], None if i else left)
        if key == "seconds":
            axis.set_xlim(left=0)
    foot_of_seeds(figure, rows)
    figure.savefig(output, dpi=DPI)


def course(rows, output, titles):
    """How metrics change: in the first step, then in each quarter of the run. Rows whose name ends
    with "trained on results" have the colour of what fails. titles: {metric: title of its panel}"""
    figure, axes = panels(len(titles), 4.4)
    for axis, (metric, title) in zip(axes, titles.items()):
        lines = []
        for row in rows:
            values = row["course"][metric]
            if not any(values):  # a row that has no such figure
                continue
            fails = row["name"].endswith("trained on results")
            own = FAILS if fails else colour(row["name"])
            style = "--" if row["name"].startswith("GRPO") else "-"
            axis.plot([0, 1 / 8, 3 / 8, 5 / 8, 7 / 8], values, style, color=own, linewidth=2.5)
            lines.append((values[-1], in_words(row["name"]), own))
        axis.set_title(title, fontsize=13)
        axis.set_xlabel("share of the run")
        plain(axis)
    name_lines(axis, lines)
    foot(figure, "first step, then the mean of each quarter; mean of the seeds")
    figure.savefig(output, dpi=DPI)


def factorial(rows, output):
    """Sampled accuracy: a panel for each loss, a line for each choice."""
    losses = list(dict.fromkeys(row["method"] for row in rows))
    figure, axes = panels(len(losses), 3.6, sharex=True, sharey=True)
    for axis, loss in zip(axes, losses):
        own = [row | {"name": row["name"].removeprefix(f"{loss}, ")} for row in rows
               if row["method"] == loss]
        seeds(axis, own, "sampled", f"weight: {loss}")
    figure.suptitle("One pair fails: the largest |A| of the whole step with 1/|o|", fontsize=14)
    foot_of_seeds(figure, rows)
    figure.savefig(output, dpi=DPI)


def phases(rows, output, titles):
    """Accuracy, and the seconds of training by phase. titles: of the two panels."""
    figure, (left, right) = panels(2, 2 + len(rows) / 2.4, sharey=True)
    seeds(left, rows, "sampled", titles[0])
    total = max(row["seconds"]["mean"] for row in rows)
    for y, row in enumerate(rows):
        start = 0.0
        for phase, shade in SHADES.items():
            width = row["phases"].get(phase, 0.0)
            right.barh(y, width, left=start, color=shade, height=0.7)
            if row["seconds"]["mean"] == total and width > total / 7:
                word = metrics.WORDS[phase]
                right.text(start + width / 2, y, word, ha="center", va="center", fontsize=11)
            start += width
        right.text(start, y, f"  {row['speedup']['median']:.2f}×", va="center", fontsize=11,
                   color=colour(row["name"]), fontweight="bold")
    right.set_xlim(0, 1.1 * total)
    right.set_title(titles[1], fontsize=13)
    right.set_xlabel(
        "seconds: sampling, scoring, log-probabilities, update, other; speed-up over GRPO")
    plain(right, "x")
    foot_of_seeds(figure, rows)
    figure.savefig(output, dpi=DPI)


def speed(rows, output):
    """The speed-ups of CPPO's two parts and of both, and Amdahl's bounds."""
    figure, axis = panels(1, 4.8, width=9)
    lines = []
    colours = {"pruning alone": PALER["P=0.75"], "larger batches alone": GRPO, "both": CPPO}
    for kind, own_colour in colours.items():
        own = [row for row in rows if row["method"] == kind]
        speedups = [row["speedup"]["median"] for row in own]
        axis.plot(speedups, "o-", color=own_colour, linewidth=2.5)
        lines.append((speedups[-1], f"{kind}: {speedups[-1]:.1f}×", own_colour))
        if kind != "larger batches alone":
            bounds = [row["bound"] for row in own]
            axis.plot(bounds, ":", color=own_colour)
            if kind == "both":
                lines.append((bounds[-1], "Amdahl's bound (dotted)", own_colour))
    ticks = [f"P = {row['pruning_rate']}\n{row['questions_per_step']} questions" for row in own]
    axis.set_xticks(range(len(ticks)), ticks, fontsize=11)
    axis.set_ylabel("speed-up over GRPO, median of the seeds")
    axis.set_title("Neither part alone is fast; both together are", fontsize=13)
    plain(axis)
    name_lines(axis, lines)
    figure.savefig(output, dpi=DPI)


def band(axis, curves, column, color, style="-", width=2.5, until=math.inf):
    """The mean accuracy over the seeds as a line, their range as a band. Returns the last mean
    before `until`. curves: of each seed, rows as of reproduce.curve."""
    end = min(until, *(curve[-1][column] for curve in curves))
    grid = np.linspace(max(curve[0][column] for curve in curves), end, 80)
    seeds = np.array([np.interp(grid, *np.array(curve)[:, [column, 2]].T) for curve in curves])
    axis.fill_between(grid, seeds.min(0), seeds.max(0), color=color, alpha=0.12, linewidth=0)
    axis.plot(grid, seeds.mean(0), style, color=color, linewidth=width)
    return seeds.mean(0)[-1]


def time_to_accuracy(rows, output):
    """Accuracy on training questions, which are new to the policy, against time and against
    completions. The dots: when the seeds reach 0.85, in the median."""
    figure, axes = panels(2, 5.2, sharey=True)
    sides = (
        ("seconds_to_85", 30, "seconds of training", "By the clock, CPPO is ahead", "{:.1f} s"),
        ("completions_to_85", 20_000, "completions sampled",
         "By the answers it samples, GRPO is ahead", "{:,.0f}"),
    )
    for column, (axis, (key, end, x, title, words)) in enumerate(zip(axes, sides)):
        axis.axhline(0.85, color="#c3cad2", linewidth=1, zorder=0)
        for row in rows:
            own = colour(row["name"])
            main = row["name"] in MAIN
            band(axis, row["curves"], column, own, width=3 if main else 1.6, until=end)
            if main and row[key]:  # else 0.85 was not reached
                axis.plot(row[key], 0.85, "o", color=own, markersize=9, zorder=5)
                first = row[key] == min(row[key] or math.inf for row in rows if row["name"] in MAIN)
                place = {"xytext": (-9, 4), "ha": "right"} if first else {"xytext": (8, -16)}
                axis.annotate(words.format(row[key]), (row[key], 0.85), **place, color=own,
                              textcoords="offset points", fontsize=13, fontweight="bold")
        axis.set(xlim=(0, end), xlabel=x)
        axis.set_title(title, fontsize=15, fontweight="bold")
        plain(axis)
    axes[0].set_ylabel("accuracy, sampled (moving mean)")
    names = {row["name"]: "GRPO" if row["name"] == "GRPO" else f"CPPO, {in_words(row['name'])}"
             for row in rows}
    for axis in axes:
        for i, row in enumerate(rows):
            axis.text(0.98, 0.40 - 0.065 * i, names[row["name"]], color=colour(row["name"]),
                      transform=axis.transAxes, ha="right", fontsize=12, fontweight="bold")
    foot(figure, "line: mean of the seeds; band: lowest to highest; dot: 0.85 is reached (median)")
    figure.savefig(output, dpi=DPI)


# --- runs ---


def several(groups, output, x):
    """Draw the metrics of runs against what stands on the x axis, a row of AXES.

    groups: {name: folders}; the runs of a group differ only in the seed. A thick line shows the
    mean over a twentieth of the run, and over the seeds. A thin line shows single steps of a single
    run; a band shows the seeds' range.
    """
    runs = {}  # {name: steps}; a step has a row of each seed
    for name, folders in groups.items():
        logs = [files.read(Path(folder) / "metrics.jsonl") for folder in folders]
        runs[name] = list(zip(*logs))
    first_row = next(iter(runs.values()))[0][0]
    figure, axes, strip = page(first_row, AXES[x][1])
    colours, styles = looks(groups, runs)
    for metric, axis in axes.items():
        lines = []
        for name, steps in runs.items():
            last = draw_group(axis, metric, x, steps, colours[name], styles[name])
            lines.append((last, name, colours[name]))
        if metric == "accuracy" and len(runs) > 1:
            name_lines(axis, lines)
    seconds = {name: mean_phases(steps) for name, steps in runs.items()}
    longest = max(of["total"] for of in seconds.values())
    for y, (name, of) in enumerate(seconds.items()):
        draw_seconds(strip, y, of | {"total": longest})
        if len(runs) > 1:
            strip.text(0, y, f"{name} ", ha="right", va="center", color=colours[name], fontsize=11)
    strip.set_ylim(len(runs) - 0.5, -0.5)  # the first one on top
    if len(runs) > 1:  # room for the names, and for a bar of each
        figure.set_layout_engine("constrained")
        figure.set_figheight(5 + 0.4 * len(runs))
        strip.get_gridspec().set_height_ratios([10, len(runs)])
    figure.savefig(output, dpi=DPI)


def looks(groups, runs):
    """({name: colour}, {name: line style}) of groups of runs. A run that ends no more accurate than
    it began has the colour of what fails. Groups of one colour differ in the style."""
    colours, styles = {}, {}
    for name, folders in groups.items():
        path = Path(folders[0], "run.json")
        options = options_of(folders[0]) if path.is_file() else {"algorithm": "cppo"}
        own = GRPO if options.get("algorithm") == "grpo" else CPPO
        accuracies = [fmean(row["accuracy"] for row in step) for step in runs[name]]
        if fmean(accuracies[-4:]) < fmean(accuracies[:2]) + 0.05:
            own = FAILS
        styles[name] = STYLES[list(colours.values()).count(own) % 4]
        colours[name] = own
    return colours, styles


def draw_group(axis, metric, x, steps, color, style):
    """Draw a metric of runs: its mean over the seeds, and what it is a mean of. Returns the last
    mean. steps: as in `several`."""
    end, ends, values = 0, [], []
    for step in steps:
        end += fmean(row[AXES[x][0]] for row in step)
        of_seeds = [row.get(metric) for row in step]
        if None not in of_seeds:
            ends.append(end)
            values.append(of_seeds)
    smoothed = list(zip(*[smooth(seed) for seed in zip(*values)]))
    means = [fmean(step) for step in smoothed]
    axis.plot(ends, means, style, color=color, linewidth=2.5)
    if len(steps[0]) == 1:
        axis.plot(ends, values, color=color, alpha=0.2, linewidth=0.8)
    else:
        low, high = map(min, smoothed), map(max, smoothed)
        axis.fill_between(ends, list(low), list(high), color=color, alpha=0.12, linewidth=0)
    return means[-1]


def mean_phases(steps):
    """{phase: seconds} of runs, the mean over the seeds."""
    totals = metrics.phase_totals([row for step in steps for row in step])
    return {phase: seconds / len(steps[0]) for phase, seconds in totals.items()}


def by_seed(folders):
    """{name: folders}: the runs of each group differ only in the seed. The name is that of the
    first folder, without its number if there are several."""
    groups = {}
    for folder in map(Path, folders):
        options = options_of(folder) if (folder / "run.json").is_file() else {"run": str(folder)}
        same = {
            name: value for name, value in options.items() if name not in ("seed", *NOT_COMPARED)
        }
        groups.setdefault(json.dumps(same, sort_keys=True), []).append(folder)
    return {name_of(group): group for group in groups.values()}


def name_of(folders):
    name = folders[0].name
    return re.sub(r"-\d+$", "", name) if len(folders) > 1 else name


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
