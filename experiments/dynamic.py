"""Dynamic sampling alone: is it worth more for each step, each completion, each second?

    python experiments/dynamic.py        all runs, the page and the picture: ten minutes or more

Four methods on the toy, each with 3 seeds, without KL (β = 0), with the same questions:

- GRPO
- GRPO again: the same run, so only its seconds differ, and they say how noisy the seconds are
- dynamic sampling: a question whose rewards are all equal is replaced, at most 3 times in a step
- left out: such a question is not replaced, but nothing is computed for it in the update

A run ends when its 1,024 questions are used up, so after as many completions for each method.
The methods take turns, seed after seed, in one process. Finished runs are kept under runs/dynamic/.
To continue after an interruption, run the same command again.
"""

import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from algorithms import ALGORITHMS, rows_where
from engine.base import files
from engine.run.command_line import parse, run_program
from experiments.library.bench import heading, spread
from experiments.library.plot import BAND, curves, panels, save
from experiments.library.study import (
    Options,
    Study,
    curve,
    middle,
    one_run,
    pivot,
    publish,
    rows_of,
)
from family.dapo import has_signal


def with_signal(rollout, advantages, k):
    """A rule: keep all completions of the questions whose rewards differ."""
    return rows_where(has_signal(rollout.total)[:, None].expand(advantages.shape))


# rows of the table of algorithms that only these runs know
ROWS = {
    "grpo, dynamic sampling": replace(ALGORITHMS["grpo"], max_rollouts=4),
    "grpo, left out": replace(ALGORITHMS["grpo"], keep=with_signal),
}
SAME = {"beta": 0, "questions_per_step": 4, "minibatches": 1, "lr": 3e-4}
PHASES = ("generate", "update")  # whose seconds are shown
AXES = {"steps": 3, "completions": 1, "seconds": 0}  # column of a curve


def measure(folder, algorithm, seed):
    """The figures of a run. curve: rows of (seconds, completions, accuracy, steps)."""
    with mock.patch.dict(ALGORITHMS, ROWS):
        found = one_run(folder, SAME | {"algorithm": algorithm, "seed": seed})
    metrics = files.read(folder / "metrics.jsonl")
    steps = [step for step, *_ in curve([row | {"seconds/total": 1} for row in metrics])]
    points = [(*point, step) for point, step in zip(curve(metrics), steps, strict=True)]
    names = ("steps", "completions", "tokens_trained", "seconds", "sampled")
    phases = {key: found["phases"][key] for key in PHASES}
    rounds = {"samplings in a step": fmean(row["rollouts"] for row in metrics)}
    return {key: found[key] for key in names} | phases | rounds | {"curve": points}


METHODS = Study("runs/dynamic", {
    "GRPO": "grpo", "GRPO again": "grpo", "dynamic sampling": "grpo, dynamic sampling",
    "left out": "grpo, left out",
}, measure)


# --- the page and the picture ---


def mean_accuracy(points, column, end):
    """The mean height of a curve up to x = end. Before its first point it has that point's height.
    """
    points = np.array(points)
    grid = np.linspace(0, end, 200)
    return np.interp(grid, points[:, column], points[:, 2]).mean().item()


COLUMNS = {
    "steps": ".0f", "completions": ".0f", "samplings in a step": ".1f",
    "tokens trained": ("tokens_trained", ".0f"), "seconds": ".1f", "of GRPO's seconds": ".2f",
    "generate": ".1f", "update": ".1f", "sampled at the end": ("sampled", ".3f"),
}


def page(result):
    rows, columns = [dict(row) for row in result["rows"]], dict(COLUMNS)
    for row in rows:
        both = zip(row["seconds"]["values"], rows[0]["seconds"]["values"])
        row["of GRPO's seconds"] = middle([own / grpo for own, grpo in both])
    for axis, column in AXES.items():
        end = min(points[-1][column] for row in rows for points in row["curve"])
        title = f"mean accuracy in {end:,.0f} {axis}"
        columns[title] = ".3f"
        for row in rows:
            row[title] = spread([mean_accuracy(points, column, end) for points in row["curve"]])
    return f"""{heading("Dynamic sampling alone", result)}
3 seeds: mean ± standard deviation; of GRPO's seconds: median (min to max). [What the methods \
are](../dynamic.py). The accuracy is that of the training samples, over the last 64 questions or \
more, and its mean is taken up to where the first run ends.

{pivot(rows, columns)}
"""


def picture(result, folder):
    figure, axes = panels(3, 4.8, sharey=True)
    lines = {row["name"]: row["curve"] for row in result["rows"] if row["name"] != "GRPO again"}
    titles = ("A step is worth more …", "… a completion hardly …", "… and a second not")
    for axis, (x, column), title in zip(axes, AXES.items(), titles):
        curves(axis, lines, column, 2, named=axis is axes[2], title=title, xlabel=x,
               xlim=(0, None))
    axes[0].set_ylabel("accuracy, sampled (moving mean)")
    save(figure, folder / "dynamic.png",
         f"{BAND}; left out: equal groups; each run samples 16,384 completions")


def main(argv):
    options = parse(Options, argv)
    publish(options.output, "dynamic", {"rows": rows_of(METHODS)}, page, picture)


if __name__ == "__main__":
    run_program(main)
