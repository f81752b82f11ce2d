"""A judge that errs: what it takes from PPO, GRPO and CPPO.

    python experiments/noise.py         75 runs, an hour on one core

Writes noise.json, noise.md and noise.png. Finished runs are kept under runs/noise/: after an
interruption the same command goes on. results/noise_plan.md says what is asked, what is run and
what counts. docs/claims.md says what it shows.
"""

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from engine.base import files
from engine.run.command_line import parse, run_program
from engine.run.state import WINDOW
from experiments.library.bench import heading, spread
from experiments.library.plot import BAND, across, curves, panels, save
from experiments.library.study import (
    Options,
    Study,
    by_name,
    cell,
    grid,
    mean_over,
    one_run,
    publish,
    rows_of,
)
from tasks.table import TASKS

JUDGE = Path(__file__).parent / "library/noisy_judge.py"
METHODS = {
    "GRPO": {"algorithm": "grpo"},
    "CPPO, P=0.875": {"algorithm": "cppo", "pruning_rate": 0.875, "allocation": False},
    # added after the runs of the others: is it the choice?
    "random, P=0.875": {"algorithm": "cppo", "pruning_rate": 0.875, "allocation": False,
                        "keep": "random"},
    "PPO": {"algorithm": "ppo"},
    "PPO, slower critic": {"algorithm": "ppo"},
}
SLOWER = {"toy": replace(TASKS["toy"], critic_lr=3e-4)}  # in place of 1e-3
JUDGES = {"0 %": "turned_0", "10 %": "turned_10", "20 %": "turned_20", "30 %": "turned_30",
          "30 % of wrong answers": "false_right_30"}
RATES = ("0 %", "10 %", "20 %", "30 %")  # both kinds of errors
WRONG = {"of all": "own/wrong", "of the kept": "own/wrong_kept", "of Σ|A|": "own/wrong_weight"}


def run(folder, setting, seed):
    """The figures of one run."""
    method, judge = setting
    options = METHODS[method] | {
        "dataset": "toy", "seed": seed, "steps": 64, "epochs": 1, "mu": 2, "minibatches": 2,
        "questions_per_step": 8, "rewards": ["toy_accuracy:0", f"{JUDGE}:{judge}"], "hooks": JUDGE}
    with mock.patch.dict(TASKS, SLOWER if "slower" in method else {}):
        found = one_run(folder, options)
    rows = files.read(folder / "metrics.jsonl")
    accuracy = [row["accuracy"] for row in rows]
    shares = {title: mean_over(rows, name) for title, name in WRONG.items()}
    return {"sampled": found["sampled"], "greedy": found["greedy"], "base": found["base"],
            "change": fmean(abs(b - a) for a, b in zip(accuracy, accuracy[1:])),
            "fall": deepest_fall(accuracy), "accuracy": accuracy} | shares


def means_of(accuracy):
    """The means of WINDOW steps."""
    ends = range(WINDOW, len(accuracy) + 1)
    return [fmean(accuracy[end - WINDOW : end]) for end in ends]


def deepest_fall(accuracy):
    """How far the mean of WINDOW steps falls below an earlier one: 0.5, 0.8, 0.6, 0.9 → 0.2."""
    highest, fall = 0.0, 0.0
    for mean in means_of(accuracy):
        highest = max(highest, mean)
        fall = max(fall, highest - mean)
    return fall


STUDY = Study("runs/noise", {
    f"{method}, {noise}": (method, JUDGES[noise])
    for method, noise in product(METHODS, JUDGES)}, run)


def lost(rows, method, noise):
    """The accuracy without noise minus that with noise, of each seed."""
    without, with_noise = (rows[f"{method}, {of}"]["sampled"]["values"] for of in ("0 %", noise))
    return spread([a - b for a, b in zip(without, with_noise)])


def page(result):
    rows = by_name(result["rows"])

    def table(figure, form):
        return grid("wrong verdicts", JUDGES, METHODS,
                    lambda noise, method: cell(rows[f"{method}, {noise}"][figure], form))

    def shares(corner, method):
        return grid(corner, JUDGES, WRONG,
                    lambda noise, share: cell(rows[f"{method}, {noise}"][share], ".3f"))

    losses = grid("wrong verdicts", list(JUDGES)[1:], METHODS,
                  lambda noise, method: cell(lost(rows, method, noise), ".3f"))
    return f"""{heading("A judge that errs", result)}
[The plan, written before the runs](noise_plan.md). Mean ± standard deviation of 3 seeds. The base \
has {rows["GRPO, 0 %"]["base"]["mean"]:.3f} on held-out questions.

## True accuracy, sampled, on held-out questions

{table("sampled", ".3f")}

Greedy:

{table("greedy", ".3f")}

## What the noise takes, within a seed

{losses}

## How rough the curve is: mean change from one step to the next

{table("change", ".3f")}

The deepest fall below an earlier value (means of {WINDOW} steps):

{table("fall", ".3f")}

## Does CPPO keep the wrong verdicts? Their share

{shares("wrong verdicts of CPPO", "CPPO, P=0.875")}

{shares("of a random choice", "random, P=0.875")}
"""


def picture(result, folder):
    """What each method learns; which verdicts CPPO keeps; and the curves without noise."""
    figure, (left, middle, right) = panels(3, width=19.0)
    rows = by_name(result["rows"])
    learned = {method: across([rows[f"{method}, {rate}"]["sampled"] for rate in RATES])
               for method in METHODS}
    kept = {f"CPPO, {share}": across([rows[f"CPPO, P=0.875, {rate}"][share] for rate in RATES])
            for share in WRONG}
    steps = {}
    for method in ("GRPO", "PPO"):
        of_seeds = rows[f"{method}, 0 %"]["accuracy"]
        steps[method] = [list(enumerate(means_of(one), WINDOW)) for one in of_seeds]
    ticks = {"xticks": range(len(RATES)), "xticklabels": RATES, "xlabel": "verdicts turned round"}
    curves(left, learned, marker="o", title="If verdicts are wrong, CPPO fails first", **ticks,
           ylabel="true accuracy, sampled, held-out", ylim=(0, 1))
    curves(middle, kept, marker="o", title="CPPO keeps the wrong verdicts", **ticks,
           ylabel="share of wrong verdicts", ylim=(0, None))
    curves(right, steps, title="Without noise: PPO starts later, with its critic", xlabel="step",
           ylabel=f"accuracy of the samples, mean of {WINDOW} steps", ylim=(0, 1))
    save(figure, folder / "noise.png", BAND)


def main(argv):
    options = parse(Options, argv)
    torch.set_num_threads(1)
    publish(options.output, "noise", {"rows": rows_of(STUDY)}, page, picture)


if __name__ == "__main__":
    run_program(main)
