"""Two rewards that trade off: the sum of GRPO beside GDPO, which compares each reward by itself.

    python experiments/tradeoff.py      15 minutes; writes tradeoff.json, .md and .png in results/

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
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from engine.run.command_line import option, parse, run_program
from engine.run.curves import CPPO, DPI, GRPO
from experiments.claims import NAMES, SEEDS, STAGES, G, model_of, sampled
from experiments.library.bench import heading, markdown_table, over_seeds, pm, report
from experiments.library.plot import foot, name_lines, panels, plain
from experiments.reproduce import PROTOCOL, one_run, own
from family.gdpo import decoupled_advantages
from grpo import group_advantages

WEIGHTS = (0.5, 0.75, 1.0)  # of `short`; toy_accuracy has 1
KINDS = {  # kind: what it earns of toy_accuracy and of short
    "lucky guess": (1, 1), "wrong guess": (0, 1), "right thought": (1, 0), "wrong thought": (0, 0),
}
COLOURS = {"grpo": GRPO, "gdpo": CPPO}
TITLES = ("The base: both pay nearly alike", "Later GDPO pays a rare guess more",
          "With 0.75 GDPO guesses …", "… and the sum is higher")


@dataclass
class Options:
    questions: int = option(64, "questions of a set", limits="[2, ∞)")
    output: str = option("experiments/results", "folder of the results")


def short(completions, **columns):
    """1.0 for at most 20 characters, else 0.0. `<answer>19</answer>` has 19, a whole thought 58 or
    more."""
    return [float(len(text) <= 20) for text in completions]


# --- the advantages of the four kinds ---


def rewards_of(stage, seed, count):
    """What the completions of set `seed` earn: (2, groups, G), toy_accuracy and short."""
    model, tokenizer = model_of(stage, seed)
    batch, right, _ = sampled(model, tokenizer, seed, count)
    texts = tokenizer.batch_decode(batch.tokens, skip_special_tokens=True)
    return torch.stack([right, torch.tensor(short(texts))]).view(2, -1, G)


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


def kinds(stage, seed, count):
    """{figure: number}"""
    rewards = rewards_of(stage, seed, count)
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


def run_of(name, weight, seed):
    """{figure: number} of one run."""
    rewards = ["toy_accuracy", f"{__file__}:short:{weight:g}"]
    options = PROTOCOL | own(name).options | {
        "rewards": rewards, "seed": seed, "epochs": 0.5, "save_every": 500}
    run = one_run(Path(f"runs/tradeoff/{name}-{weight:g}-{seed}"), options)
    right, is_short = run["course"]["reward/toy_accuracy"], run["course"]["reward/short"]
    return {
        "accuracy": run["sampled"], "tokens": run["length"], "short, last quarter": is_short[-1],
        "right, last quarter": right[-1], "sum, last quarter": right[-1] + weight * is_short[-1],
    }


# --- the page and the picture ---


def measure(options):
    advantages, runs = {}, {}
    for stage in STAGES:
        of_seeds = [kinds(stage, seed, options.questions) for seed in SEEDS]
        advantages[stage] = over_seeds(of_seeds)
    for seed, weight, name in tqdm(list(product(SEEDS, WEIGHTS, COLOURS)), "runs"):
        found = runs.setdefault(f"{name}, {weight:g}", [])
        found.append(run_of(name, weight, seed))
    return {
        "kinds": advantages, "runs": {name: over_seeds(found) for name, found in runs.items()},
    }


def table_of_kinds(figures):
    """Of one stage: a row for each kind, a column for each algorithm and weight."""
    ways = [f"{name}, {weight:g}" for weight, name in product(WEIGHTS, COLOURS)]
    lines = [["", "share", *ways]]
    for kind in KINDS:
        means = [pm(figures[f"{way}: A of a {kind}"], 2) for way in ways]
        lines.append([kind, pm(figures[f"share: {kind}"]), *means])
    for name in ("different A in a group", "different groups", "sum of the rewards"):
        whole = pm(figures[name], 2) if name in figures else ""
        lines.append([name, whole, *(pm(figures[f"{way}: {name}"], 2) for way in ways)])
    return markdown_table(lines)


def page(result):
    text = heading("Two rewards that trade off: GRPO and GDPO", result)
    text += "\n[What the figures are](../tradeoff.py). Mean ± standard deviation over 3 seeds. "
    text += "A number after a name is the weight of `short`.\n"
    for stage in STAGES:
        text += f"\nThe mean advantage of each kind, {NAMES[stage]}:\n\n"
        text += table_of_kinds(result["kinds"][stage]) + "\n"
    lines = [["", *result["runs"]["grpo, 1"]]]
    for name, figures in result["runs"].items():
        lines.append([name, *(pm(figure) for figure in figures.values())])
    return text + f"\nThe runs:\n\n{markdown_table(lines)}\n\n![Both](tradeoff.png)\n"


def draw_kinds(axis, figures):
    """The mean advantage of each kind against the weight."""
    ends = []
    for (name, colour), kind in product(COLOURS.items(), KINDS):
        means = [figures[f"{name}, {weight:g}: A of a {kind}"]["mean"] for weight in WEIGHTS]
        axis.plot(means, "o-", color=colour, linewidth=2)
        if name == "gdpo":
            ends.append((means[-1], kind, "black"))
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set_ylabel("mean advantage")
    name_lines(axis, ends)


def draw_runs(axis, runs, figure):
    for name, colour in COLOURS.items():
        spreads = [runs[f"{name}, {weight:g}"][figure] for weight in WEIGHTS]
        axis.plot([x["mean"] for x in spreads], "-", color=colour, linewidth=2, label=name.upper())
        for i, x in enumerate(spreads):
            axis.plot([i] * len(x["values"]), x["values"], "o", color=colour, alpha=0.7)
    axis.set_ylim(bottom=0)
    axis.set_ylabel(figure)


def picture(result, output):
    figure, axes = panels(4, 4.8, width=18)
    draw_kinds(axes[0], result["kinds"]["base"])
    draw_kinds(axes[1], result["kinds"]["later"])
    draw_runs(axes[2], result["runs"], "accuracy")
    draw_runs(axes[3], result["runs"], "sum, last quarter")
    axes[2].legend(frameon=False)
    for axis, title in zip(axes, TITLES):
        axis.set_title(title, fontsize=13)
        axis.set_xticks(range(len(WEIGHTS)), WEIGHTS)
        axis.set_xlabel("weight of the reward for short answers")
        plain(axis)
    foot(figure, "grey: GRPO, blue: GDPO; mean of 3 seeds; in the two right panels a dot is a seed")
    figure.savefig(output, dpi=DPI)


def main(argv):
    options = parse(Options, argv)
    result = measure(options)
    report(options, "tradeoff", result, page)
    picture(result, Path(options.output, "tradeoff.png"))


if __name__ == "__main__":
    run_program(main)
