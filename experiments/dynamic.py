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

import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from algorithms import ALGORITHMS, rows_where
from engine.base import files
from engine.run.command_line import option, parse, run_program
from engine.run.curves import CPPO, DPI, GRPO
from experiments.library.bench import markdown_table, pm, report, spread
from experiments.library.plot import PALER, band, foot, name_lines, panels, plain
from experiments.reproduce import curve, name_of, one_run
from family.dapo import has_signal

SEEDS = (1, 2, 3)
FOLDER = Path("runs/dynamic")


def with_signal(rollout, advantages, k):
    """A rule: keep all completions of the questions whose rewards differ."""
    return rows_where(has_signal(rollout.total)[:, None].expand(advantages.shape))


# rows of the table of algorithms that only these runs know
ROWS = {
    "grpo, dynamic sampling": replace(ALGORITHMS["grpo"], max_rollouts=4),
    "grpo, left out": replace(ALGORITHMS["grpo"], keep=with_signal),
}
METHODS = {"GRPO": "grpo", "GRPO again": "grpo", "dynamic sampling": "grpo, dynamic sampling",
           "left out": "grpo, left out"}
SAME = {"beta": 0, "questions_per_step": 4, "minibatches": 1, "lr": 3e-4}
PHASES = ("generate", "update")  # whose seconds are shown
AXES = {"steps": 3, "completions": 1, "seconds": 0}  # column of a curve


@dataclass
class Options:
    output: str = option("experiments/results", "folder of dynamic.json, .md and .png")


def run(name, seed):
    """The figures of a run. curve: rows of (seconds, completions, accuracy, steps)."""
    folder = FOLDER / name_of(name, seed)
    with mock.patch.dict(ALGORITHMS, ROWS):
        found = one_run(folder, SAME | {"algorithm": METHODS[name], "seed": seed})
    metrics = files.read(folder / "metrics.jsonl")
    steps = [step for step, *_ in curve([row | {"seconds/total": 1} for row in metrics])]
    points = [(*point, step) for point, step in zip(curve(metrics), steps, strict=True)]
    names = ("steps", "completions", "tokens_trained", "seconds", "sampled")
    phases = {key: found["phases"][key] for key in PHASES}
    rounds = {"samplings in a step": statistics.fmean(row["rollouts"] for row in metrics)}
    return {key: found[key] for key in names} | phases | rounds | {"curve": points}


def mean_accuracy(points, column, end):
    """The mean height of a curve up to x = end. Before its first point it has that point's height.
    """
    points = np.array(points)
    grid = np.linspace(0, end, 200)
    return np.interp(grid, points[:, column], points[:, 2]).mean().item()


def measure():
    """{name: runs, one of each seed}. All methods run with one seed, then all with the next."""
    found = {name: [] for name in METHODS}
    for seed in tqdm(SEEDS, "seeds"):
        for name in METHODS:
            found[name].append(run(name, seed))
    return {"runs": found}


# --- the page and the picture ---


def ends(runs):
    """{axis: where the first of all runs ends}"""
    curves = [one["curve"] for own in runs.values() for one in own]
    return {axis: min(points[-1][column] for points in curves) for axis, column in AXES.items()}


def page(result):
    runs, common = result["runs"], ends(result["runs"])
    head = [f"mean accuracy in {end:,.0f} {axis}" for axis, end in common.items()]
    lines = [["", "steps", "completions", "samplings in a step", "tokens trained", "seconds",
              "of GRPO's seconds", *PHASES, "sampled at the end", *head]]
    for name, own in runs.items():
        of = {key: spread([one[key] for one in own]) for key in own[0] if key != "curve"}
        ratios = [one["seconds"] / other["seconds"] for one, other in zip(own, runs["GRPO"])]
        line = [name, pm(of["steps"], 0), f"{of['completions']['mean']:.0f}",
                pm(of["samplings in a step"], 1), pm(of["tokens_trained"], 0),
                pm(of["seconds"], 1),
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                *(pm(of[phase], 1) for phase in PHASES), pm(of["sampled"])]
        for axis, column in AXES.items():
            line.append(pm(spread(
                [mean_accuracy(one["curve"], column, common[axis]) for one in own])))
        lines.append(line)
    return f"""# Dynamic sampling alone

`{result['command']}`, {result['date']}, {result['processor']}

3 seeds: mean ± standard deviation; of GRPO's seconds: median (min to max). [What the methods \
are](../dynamic.py). The accuracy is that of the training samples, over the last 64 questions or \
more, and its mean is taken up to where the first run ends.

{markdown_table(lines)}
"""


def picture(result, output):
    figure, axes = panels(3, 4.8, sharey=True)
    looks = {"GRPO": (GRPO, "-"), "dynamic sampling": (CPPO, "-"),
             "left out": (PALER["P=0.75"], "--")}
    titles = ("A step is worth more …", "… a completion hardly …", "… and a second not")
    for axis, (x, column), title in zip(axes, AXES.items(), titles):
        lines = []
        for name, (colour, style) in looks.items():
            curves = [one["curve"] for one in result["runs"][name]]
            last = band(axis, curves, column, colour, style)
            words = "equal groups left out" if name == "left out" else name
            lines.append((last, words, colour))
        axis.set_xlim(left=0)
        axis.locator_params(axis="x", nbins=5)
        axis.set_xlabel(x)
        axis.set_title(title, fontsize=13)
        plain(axis)
    axes[0].set_ylabel("accuracy, sampled (moving mean)")
    name_lines(axes[2], lines)
    foot(figure, "line: mean of 3 seeds; band: lowest to highest; each run samples 16,384 "
                 "completions")
    figure.savefig(output, dpi=DPI)


def main(argv):
    options = parse(Options, argv)
    result = measure()
    report(options, "dynamic", result, page)
    picture(result, Path(options.output, "dynamic.png"))


if __name__ == "__main__":
    run_program(main)
