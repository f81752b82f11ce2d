"""Two rewards that trade off: the sum of GRPO beside GDPO, which compares each reward by itself.

    python experiments/tradeoff.py      15 minutes; writes tradeoff.json, .md and .png in results/

The rewards of the toy: `toy_accuracy` pays 1 for a right answer, and `short` below pays a weight
for a completion of at most 20 characters. So a guess is short, a thought is not, and there are four
kinds of completion. Nobody earns both by thinking.

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

from engine.data.questions import load_questions
from engine.model.contract import Sampling
from engine.model.sampling import Sampler
from engine.run.command_line import option, parse, run_program
from engine.run.curves import CPPO, DPI, GRPO
from experiments.bench import heading, markdown_table, pm, report, spread
from experiments.claims import NAMES, SAMPLED, SEEDS, STAGES, G, model_of
from experiments.plot import foot, panels, plain
from experiments.reproduce import PROTOCOL, one_run, own
from family.gdpo import decoupled_advantages
from grpo import group_advantages
from rewards import toy_accuracy
from tasks import toy

WEIGHTS = (0.5, 0.75, 1.0)  # of `short`; toy_accuracy has 1
KINDS = {  # kind: what it earns of toy_accuracy and of short
    "lucky guess": (1, 1), "wrong guess": (0, 1), "right thought": (1, 0), "wrong thought": (0, 0),
}
COLOURS = {"grpo": GRPO, "gdpo": CPPO}


@dataclass
class Options:
    questions: int = option(64, "questions of a set", limits="[2, ∞)")
    train_questions: int = option(1024, "questions of a run", limits="[16, ∞)")
    folder: str = option("runs/tradeoff", "folder of the runs")
    output: str = option("experiments/results", "folder of the results")


def short(completions, **columns):
    """1.0 for at most 20 characters, else 0.0. `<answer>19</answer>` has 19, a thought 50 or
    more."""
    return [float(len(text) <= 20) for text in completions]


# --- the advantages of the four kinds ---


def rewards_of(stage, seed, count):
    """What the completions of set `seed` earn: (2, groups, G), toy_accuracy and short."""
    model, tokenizer = model_of(stage, seed)
    questions = load_questions("toy", tokenizer, limit=seed * count)[0][-count:]
    prompts = [question["prompt"] for question in questions]
    drawn = Sampler(model, tokenizer).sample(prompts, SAMPLED, Sampling(toy.MAX_NEW_TOKENS), seed)
    texts = drawn.texts(tokenizer, questions)
    answers = [question["answer"] for question in questions for _ in range(SAMPLED)]
    return torch.tensor([toy_accuracy(texts, answer=answers), short(texts)]).view(2, -1, G)


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
    return figures


# --- the runs ---


def run_of(name, weight, seed, options):
    """{figure: number} of one run."""
    folder = Path(options.folder, f"{name}-{weight:g}-{seed}")
    run = one_run(folder, PROTOCOL | own(name).options | {
        "rewards": ["toy_accuracy", f"{__file__}:short:{weight:g}"], "seed": seed,
        "epochs": options.train_questions / toy.TRAIN_QUESTIONS, "save_every": 500})
    right, is_short = run["course"]["reward/toy_accuracy"], run["course"]["reward/short"]
    return {
        "accuracy": run["sampled"], "greedy": run["greedy"], "tokens": run["length"],
        "short, last quarter": is_short[-1], "right, last quarter": right[-1],
        "sum, last quarter": right[-1] + weight * is_short[-1],
    }


# --- the page and the picture ---


def over_seeds(found):
    """{figure: spread} of dicts, one of each seed."""
    return {name: spread([own[name] for own in found]) for name in found[0]}


def measure(options):
    jobs = tqdm(list(product(STAGES, SEEDS)), "advantages")
    found = {job: kinds(*job, options.questions) for job in jobs}
    runs = {(name, weight): [] for weight, name in product(WEIGHTS, COLOURS)}
    for seed, (name, weight) in tqdm(list(product(SEEDS, runs)), "runs"):
        runs[name, weight].append(run_of(name, weight, seed, options))
    return {
        "kinds": {stage: over_seeds([found[stage, seed] for seed in SEEDS]) for stage in STAGES},
        "runs": {f"{name}, {weight:g}": over_seeds(own) for (name, weight), own in runs.items()},
    }


def table_of_kinds(figures):
    """Of one stage: a row for each kind, a column for each algorithm and weight."""
    ways = [f"{name}, {weight:g}" for weight, name in product(WEIGHTS, COLOURS)]
    lines = [["", "share", *ways]]
    for kind in KINDS:
        means = [pm(figures[f"{way}: A of a {kind}"], 2) for way in ways]
        lines.append([kind, pm(figures[f"share: {kind}"]), *means])
    for name in ("different A in a group", "different groups"):
        lines.append([name, "", *(pm(figures[f"{way}: {name}"], 1) for way in ways)])
    lines[-1][1] = pm(figures["different groups"], 1)
    return markdown_table(lines)


def page(result):
    runs = result["runs"]
    columns = list(runs[f"grpo, {WEIGHTS[0]:g}"])
    lines = [["", *columns]]
    lines += [[name, *(pm(own[column]) for column in columns)] for name, own in runs.items()]
    text = heading("Two rewards that trade off: GRPO and GDPO", result)
    text += "\n[What the figures are](../tradeoff.py). Mean ± standard deviation over 3 seeds. "
    text += "A number after a name is the weight of `short`.\n"
    for stage in STAGES:
        text += f"\nThe mean advantage of each kind, {NAMES[stage]}:\n\n"
        text += f"{table_of_kinds(result['kinds'][stage])}\n"
    return text + f"\nThe runs:\n\n{markdown_table(lines)}\n\n![Both](tradeoff.png)\n"


def draw_kinds(axis, figures):
    """The mean advantage of each kind against the weight."""
    for (name, colour), kind in product(COLOURS.items(), KINDS):
        means = [figures[f"{name}, {weight:g}: A of a {kind}"]["mean"] for weight in WEIGHTS]
        axis.plot(means, "o-", color=colour, linewidth=2)
        if name == "gdpo":
            axis.annotate(kind, (0, means[0]), (0, 9), textcoords="offset points", fontsize=11)
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set_ylabel("mean advantage")


def draw_runs(axis, runs, figure):
    for name, colour in COLOURS.items():
        own = [runs[f"{name}, {weight:g}"][figure] for weight in WEIGHTS]
        axis.plot([x["mean"] for x in own], "-", color=colour, linewidth=2, label=name.upper())
        for i, x in enumerate(own):
            axis.plot([i] * len(x["values"]), x["values"], "o", color=colour, alpha=0.7)
    axis.set_ylim(bottom=0)


def picture(result, output):
    figure, axes = panels(4, 4.8, width=18)
    draw_kinds(axes[0], result["kinds"]["base"])
    draw_kinds(axes[1], result["kinds"]["later"])
    draw_runs(axes[2], result["runs"], "accuracy")
    draw_runs(axes[3], result["runs"], "sum, last quarter")
    axes[2].legend(frameon=False)
    titles = ("the base", "after 100 steps", "accuracy", "sum")
    for axis, title in zip(axes, titles):
        axis.set_title(title, fontsize=13)
        axis.set_xticks(range(len(WEIGHTS)), [f"{weight:g}" for weight in WEIGHTS])
        axis.set_xlabel("weight of the reward for short answers")
        plain(axis)
    foot(figure, "dots: 3 seeds")
    figure.savefig(output, dpi=DPI)


def main(argv):
    options = parse(Options, argv)
    result = measure(options)
    report(options, "tradeoff", result, page)
    picture(result, Path(options.output, "tradeoff.png"))


if __name__ == "__main__":
    run_program(main)
