"""Several runs in one picture, and the pictures of the tables of reproduce.py.

    python experiments/plot.py runs/toy-cppo-1                            writes curves.png into the
                                                                          run
    python experiments/plot.py runs/toy-grpo-1 runs/toy-cppo-1 --output compared.png
    python experiments/plot.py runs/toy-grpo-1 runs/toy-cppo-1 --x seconds --output
    runs/compared.png

Runs that differ only in their seed are one line, their mean, with a band from the lowest to the
highest. """

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from matplotlib.ticker import LogLocator

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from engine.base import files
from engine.base.errors import UserError
from engine.run.curves import AXES, PHASES, STYLES, above, curves, plt, save, stacked
from engine.run.folder import NOT_COMPARED, options_file, options_of
from engine.run.options import run_program

MARKERS = ["o", "s", "^", "D", "v"]


def accuracies(axis, x, rows, title=None, **style):
    """Greedy and sampled accuracy, their spread over the seeds, and the base model's accuracy."""
    for key, marker, offset in [("greedy", "o", -0.06), ("sampled", "s", 0.06)]:
        means, stds = [row[key]["mean"] for row in rows], [row[key]["std"] for row in rows]
        axis.errorbar(
            [i + offset for i in x], means, stds, marker=marker, capsize=3, label=key,
            linestyle="none",
            **style,
        )
    axis.axhline(rows[0]["base"]["mean"], color="gray", linestyle=":", label="base, sampled")
    axis.set_ylabel("accuracy, held-out questions")
    axis.grid(alpha=0.3)
    above(axis, title)


def speedups(axis, x, rows, label, style):
    medians = [row["speedup"]["median"] for row in rows]
    spread = [
        [m - row["speedup"]["min"] for m, row in zip(medians, rows)],
        [row["speedup"]["max"] - m for m, row in zip(medians, rows)],
    ]
    axis.errorbar(x, medians, spread, capsize=3, label=label, **style)


def ticks(axis, labels, **style):
    axis.set_xticks(range(len(labels)), labels, **style)


def pruning_rates(rows, output):
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    names = [row["name"] for row in rows]
    accuracies(left, range(len(rows)), rows, "accuracy")
    stacked(right, names, [row["phases"] for row in rows], PHASES)
    for i, row in enumerate(rows):
        right.annotate(
            f"{row['speedup']['median']:.2f}×", (i, row["seconds"]["mean"]), ha="center",
            va="bottom",
        )
    above(right, "seconds of training, by phase; speed-up over GRPO")
    right.margins(y=0.08)
    for axis in (left, right):
        ticks(axis, names, rotation=35, ha="right", rotation_mode="anchor")
    save(figure, output)


def speed(rows, output):
    figure, axis = plt.subplots(figsize=(8, 4.5), constrained_layout=True)
    both = [row for row in rows if row["method"] == "both"]
    styles = {"pruning alone": "o--", "larger batches alone": "s:", "both": "D-"}
    for kind, style in styles.items():
        chosen = [row for row in rows if row["method"] == kind]
        speedups(axis, range(len(chosen)), chosen, kind, {"fmt": style})
    for kind, style in [("pruning alone", "k_"), ("both", "kx")]:
        bounds = [row["bound"] for row in rows if row["method"] == kind]
        axis.plot(range(len(bounds)), bounds, style, markersize=14, label=f"Amdahl's bound, {kind}")
    ticks(
        axis,
        [
            f"P={row['pruning_rate']}\n{row['questions_per_step']} questions per step"
            for row in both
        ],
    )
    axis.set_ylabel("speed-up over GRPO, seconds per question")
    above(axis)
    axis.grid(alpha=0.3)
    save(figure, output)


def keep_rules(rows, output):
    rates = sorted({row["pruning_rate"] for row in rows} - {0.0})
    figure, axes = plt.subplots(
        1, len(rates), figsize=(11, 4), sharey=True, constrained_layout=True
    )
    for axis, rate in zip(axes, rates):
        chosen = [row for row in rows if row["pruning_rate"] in (0.0, rate)]
        accuracies(
            axis, range(len(chosen)), chosen, f"P = {rate}: k = {chosen[-1]['k']} of 16 are kept"
        )
        ticks(axis, [row["method"] for row in chosen], rotation=20)
    save(figure, output)


def dots(axis, names, values, colors):
    """A dot for each seed, a stroke at their mean. values: of each name, one for each seed."""
    for y, (own, color) in enumerate(zip(values, colors)):
        axis.plot(own, [y] * len(own), "o", color=color, alpha=0.6)
        axis.plot(np.mean(own), y, "|", color="black", markersize=14)
    axis.set_yticks(range(len(names)), names)
    axis.grid(alpha=0.3, axis="x")


def factorial(rows, output):
    """A panel for each loss, a line for each choice."""
    losses = list(dict.fromkeys(row["method"] for row in rows))
    figure, axes = plt.subplots(
        1, len(losses), figsize=(13, 3), sharex=True, sharey=True, constrained_layout=True
    )
    for axis, loss in zip(axes, losses):
        own = [row for row in rows if row["method"] == loss]
        names = [row["name"].removeprefix(f"{loss}, ") for row in own]
        dots(
            axis, names, [row["sampled"]["values"] for row in own],
            [f"C{i}" for i in range(len(own))],
        )
        axis.set(title=loss, xlabel="accuracy, sampled; a dot is a seed")
    axes[0].invert_yaxis()
    save(figure, output)


def controls(rows, output):
    """A line for each method: accuracy at the end, and seconds of training."""
    figure, axes = plt.subplots(1, 2, figsize=(12, 5), sharey=True, constrained_layout=True)
    names, colors = [row["name"] for row in rows], [f"C{i % 10}" for i in range(len(rows))]
    for axis, key, label in [
        (axes[0], "sampled", "accuracy, sampled; a dot is a seed"),
        (axes[1], "seconds", "seconds of training"),
    ]:
        dots(axis, names, [row[key]["values"] for row in rows], colors)
        axis.set_xlabel(label)
    axes[0].invert_yaxis()
    axes[1].set_xlim(left=0)
    save(figure, output)


def group_sizes(rows, output):
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    sizes = sorted({row["group_size"] for row in rows})
    for kind, name, style in [("grpo", "GRPO", "o-"), ("both", "CPPO, P=0.75", "s--")]:
        chosen = [row for row in rows if row["method"] == kind]
        for key, fill in [("greedy", "full"), ("sampled", "none")]:
            means, stds = [row[key]["mean"] for row in chosen], [row[key]["std"] for row in chosen]
            left.errorbar(
                range(len(chosen)), means, stds, fmt=style, fillstyle=fill, capsize=3,
                label=f"{name}, {key}",
            )
        right.plot(
            range(len(chosen)), [row["seconds"]["mean"] for row in chosen], style, label=name
        )
    left.set_ylabel("accuracy, held-out questions")
    right.set_ylabel("seconds of training")
    for axis in (left, right):
        ticks(axis, sizes)
        axis.set_xlabel("group size G")
        axis.grid(alpha=0.3)
        above(axis, columns=2)
    right.set_ylim(bottom=0)
    save(figure, output)


def family(rows, output):
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.5), constrained_layout=True)
    names = [row["name"] for row in rows]
    accuracies(axes[0], range(len(rows)), rows)
    bars = [
        ("length", "completion length (tokens)"),
        ("kl_to_base", "KL to the base (nats per completion)"),
    ]
    for axis, (key, label) in zip(axes[1:], bars):
        axis.bar(
            range(len(rows)), [row[key]["mean"] for row in rows],
            yerr=[row[key]["std"] for row in rows], capsize=3, color="C7",
        )
        axis.set_ylabel(label)
    for axis in axes:
        ticks(axis, names, rotation=60, ha="right")
    save(figure, output)


def millions(rows):
    """The parameters of the model whose memory was measured. GRPO is the first row: policy and
    reference, in float32."""
    return f"{rows[0]['memory']['parameters'] / 8e6:.2g}"


def ppo(rows, output):
    """What a critic costs and gives: the accuracy of each seed during training, the time and the
    memory of a step."""
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.5), constrained_layout=True)
    for i, row in enumerate(rows):
        for curve in row["curves"]:
            _, completions, accuracy = zip(*curve)
            label = row["name"] if curve is row["curves"][0] else None
            marker = "o" if len(curve) == 1 else None  # a line through one point would not be seen
            axes[0].plot(
                completions, accuracy, STYLES[i % 4], color=f"C{i}", linewidth=1, marker=marker,
                label=label,
            )
    axes[0].set(xlabel="completions generated", ylabel="accuracy, sampled (moving mean)")
    axes[0].grid(alpha=0.3)
    above(axes[0], "a line for each seed")
    names = [row["name"] for row in rows]
    stacked(
        axes[1], names,
        [
            {name: 1000 * seconds / row["steps"] for name, seconds in row["phases"].items()}
            for row in rows
        ],
        PHASES,
    )
    above(axes[1], "milliseconds of a step on the toy, by phase")
    parts = [
        {"parameters": held["parameters"] / 1e6, "AdamW's moments": held["optimizer"] / 1e6,
         "gradients, activations": (held["peak"] - held["parameters"] - held["optimizer"]) / 1e6}
        for held in (row["memory"] for row in rows)
    ]
    stacked(axes[2], names, parts, list(parts[0]))
    above(axes[2], f"MB at the peak of a step, {millions(rows)} million parameters")
    save(figure, output)


def band(axis, curves, column, i, label):
    """The mean accuracy over the seeds as a line, their range as a band. curves: of each seed, rows
    as of reproduce.curve."""
    grid = np.linspace(
        max(curve[0][column] for curve in curves), min(curve[-1][column] for curve in curves), 60
    )
    seeds = np.array([np.interp(grid, *np.array(curve)[:, [column, 2]].T) for curve in curves])
    axis.fill_between(grid, seeds.min(0), seeds.max(0), color=f"C{i}", alpha=0.2)
    marks = {"marker": MARKERS[i % 5], "markevery": (5 + 2 * i, 14)}
    axis.plot(grid, seeds.mean(0), STYLES[i % 4], color=f"C{i}", label=label, **marks)


def time_to_accuracy(rows, output):
    """Accuracy on training questions, which are new to the policy, against time and against
    completions."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True, constrained_layout=True)
    for column, axis, title in [
        (0, axes[0], "seconds of training"), (1, axes[1], "completions generated"),
    ]:
        for i, row in enumerate(rows):
            band(axis, row["curves"], column, i, row["name"])
        axis.set_xlabel(title)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("accuracy, sampled (moving mean)")
    axes[0].set_xscale("log")
    axes[0].xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes[0].xaxis.set_major_formatter("{x:g}")
    axes[0].xaxis.set_minor_formatter("")
    handles, names = axes[0].get_legend_handles_labels()
    columns = min(len(rows), 130 // (10 + max(map(len, names))))  # as many as the figure is wide
    figure.legend(
        handles, names, loc="outside upper center", ncols=columns, fontsize=9, handlelength=4,
        frameon=False,
    )
    save(figure, output)


def by_seed(folders):
    """Lists of folders: the runs of each list differ only in the seed."""
    groups = {}
    for folder in map(Path, folders):
        options = options_of(folder)[1] if options_file(folder) else {"run": str(folder)}
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
        if not (Path(folder) / "metrics.jsonl").exists() or not files.read(
            Path(folder) / "metrics.jsonl"
        ):
            raise UserError(f"{folder} holds no run with at least one step (metrics.jsonl).")
    output = args.output or Path(args.runs[0]) / "curves.png"
    curves(by_seed(args.runs), output, args.x)
    print(f"written: {output}")


if __name__ == "__main__":
    run_program(main)
