"""Two rewards that trade off: the sum of GRPO beside GDPO, which compares each reward by itself.

    python experiments/tradeoff.py      15 minutes; writes tradeoff.json, .md and .png

The rewards of the toy: `toy_accuracy` pays 1 for a right answer, and `short` below pays a weight
for a completion of at most 20 characters. So a guess is short, and a thought is not: there are four
kinds of completion. (All that is not short counts as a thought.) The weights 0.5 and 1 came first.
In seed 1 they ended in thoughts and in guesses, so 0.75 was added between them.

First the advantages of the four kinds, on the sets of questions of claims.py: 3 sets of 64
questions, each answered 64 times in groups of 16. "base": the toy's base model. "later": runs of
GRPO with `toy_accuracy` alone, each after 100 steps. GDPO's batch is a whole set here.

Then runs of GRPO and GDPO with both rewards, as those of the table `family` of reproduce.py: 1,024
questions, 4 a step, seeds 1 to 3. They are kept under runs/tradeoff/. To continue after an
interruption, run the same command again.
"""

import sys
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from engine.run.command_line import parse, run_program
from engine.run.curves import CPPO, GRPO
from experiments.claims import NAMES, STAGES, G, model_of, sampled
from experiments.library.bench import heading
from experiments.library.plot import across, curves, panels, save
from experiments.library.study import (
    Options,
    Study,
    by_name,
    one_run,
    pivot,
    publish,
    rows_of,
    turned,
)
from experiments.reproduce import PROTOCOL, own
from family.gdpo import decoupled_advantages
from grpo import group_advantages

WEIGHTS = (0.5, 0.75, 1.0)  # of `short`; toy_accuracy has 1
KINDS = {  # kind: what it earns of toy_accuracy and of short
    "lucky guess": (1, 1), "wrong guess": (0, 1), "right thought": (1, 0), "wrong thought": (0, 0),
}
ALGORITHMS = {"grpo": GRPO, "gdpo": CPPO}  # and their colours
TITLES = ("The base: both pay nearly alike", "Later GDPO pays a rare guess more",
          "With 0.75 GDPO guesses …", "… and the sum is higher")


def short(completions, **columns):
    """1.0 for at most 20 characters, else 0.0. `<answer>19</answer>` has 19, a whole thought 58 or
    more."""
    return [float(len(text) <= 20) for text in completions]


# --- the advantages of the four kinds ---


def rewards_of(stage, seed):
    """What the completions of set `seed` earn: (2, groups, G), toy_accuracy and short."""
    batch, texts = sampled(*model_of(stage, seed), seed)
    both = torch.stack([batch.advantages, torch.tensor(short(texts))])
    return both.view(2, -1, G)


def advantages_of(rewards, weight):
    """{algorithm: advantages (groups, G)}. rewards: (2, groups, G)."""
    return {
        "grpo": group_advantages(rewards[0] + weight * rewards[1]),
        "gdpo": decoupled_advantages(rewards, weights=[1.0, weight]),
    }


def of_kind(rewards, kind):
    """Which completions are of this kind: (groups, G) bool."""
    right, is_short = KINDS[kind]
    return (rewards[0] == right) & (rewards[1] == is_short)


def different(A):
    """How many different groups there are; two groups are one if they have the same advantages in
    some order."""
    return len({tuple(row) for row in A.sort(1).values.mul(1000).round().int().tolist()})


def kinds(folder, stage, seed):
    """{figure: number}"""
    rewards = rewards_of(stage, seed)
    figures = {f"share: {kind}": of_kind(rewards, kind).float().mean().item() for kind in KINDS}
    figures["different groups"] = different(10 * rewards[0] + rewards[1])
    for weight in WEIGHTS:
        for name, A in advantages_of(rewards, weight).items():
            for kind in KINDS:
                mean = A[of_kind(rewards, kind)].mean().item()
                figures[f"{name}, {weight:g}: A of a {kind}"] = mean
            values = [len(row.mul(1000).round().unique()) for row in A]
            figures[f"{name}, {weight:g}: different A in a group"] = sum(values) / len(values)
            figures[f"{name}, {weight:g}: different groups"] = different(A)
            total = rewards[0] + weight * rewards[1]
            figures[f"{name}, {weight:g}: sum of the rewards"] = total.mean().item()
    return figures


# --- the runs ---


def run_of(folder, setting, seed):
    """{figure: number} of one run."""
    name, weight = setting
    rewards = ["toy_accuracy", f"{__file__}:short:{weight:g}"]
    options = PROTOCOL | own(name).options | {
        "rewards": rewards, "seed": seed, "epochs": 0.5, "save_every": 500}
    run = one_run(folder, options)
    right, is_short = run["course"]["reward/toy_accuracy"], run["course"]["reward/short"]
    return {
        "accuracy": run["sampled"], "tokens": run["length"], "short, last quarter": is_short[-1],
        "right, last quarter": right[-1], "sum, last quarter": right[-1] + weight * is_short[-1],
    }


def named(name, weight):
    return f"{name}, {weight:g}"


KINDS_OF = Study("runs/tradeoff", {stage: stage for stage in STAGES}, kinds)
RUNS = Study("runs/tradeoff", {
    named(*setting): setting for setting in product(ALGORITHMS, WEIGHTS)}, run_of)


# --- the page and the picture ---


def page(result):
    return f"""{heading("Two rewards that trade off: GRPO and GDPO", result)}
[What the figures are](../tradeoff.py). Mean ± standard deviation over 3 seeds. A number after a \
name is the weight of `short`; A is the mean advantage of a kind.

{turned(result["kinds"], ".2f")}

The runs:

{pivot(result["runs"], ".3f")}

![Both](tradeoff.png)
"""


def picture(result, folder):
    figure, axes = panels(4, 4.8, width=18)
    ticks = {"xlabel": "weight of the reward for short answers", "xticks": range(3),
             "xticklabels": WEIGHTS}
    stages, runs = by_name(result["kinds"]), by_name(result["runs"])
    for axis, stage, title in zip(axes, STAGES, TITLES):
        axis.axhline(0, color="black", linewidth=0.8)
        lines = {}
        for (name, colour), kind in product(ALGORITHMS.items(), KINDS):
            means = [stages[stage][f"{named(name, weight)}: A of a {kind}"] for weight in WEIGHTS]
            lines[f"{name.upper()}: {kind}"] = across(means), colour, "o-"
        curves(axis, lines, title=title, ylabel=f"mean advantage, {NAMES[stage]}", **ticks)
    for axis, of, title in zip(axes[2:], ("accuracy", "sum, last quarter"), TITLES[2:]):
        lines = {name.upper(): (across([runs[named(name, weight)][of] for weight in WEIGHTS]),
                                colour, "o-") for name, colour in ALGORITHMS.items()}
        curves(axis, lines, title=title, ylabel=of, ylim=(0, None), **ticks)
    save(figure, folder / "tradeoff.png", "line and band: mean and range of 3 seeds")


def main(argv):
    options = parse(Options, argv)
    result = {"kinds": rows_of(KINDS_OF), "runs": rows_of(RUNS)}
    publish(options.output, "tradeoff", result, page, picture)


if __name__ == "__main__":
    run_program(main)
