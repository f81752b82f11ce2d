"""When does GRPO collapse, and which guard moves the edge? On the toy, one guard at a time.

    python experiments/collapse.py       all runs, the page and the picture: half an hour or more

The bare setting has 8 completions of one question in a step, μ = 4, no KL, no clip of the ratio,
and no limit on the gradient's norm. Each other row adds one guard to it, or changes one number.
Every row runs at six learning rates, with 3 seeds. A run has collapsed if it is less accurate than
the base, both sampled on the same held-out questions.

Then the collapsed runs of the bare setting go on in a healthy one, and at a small learning rate.
Finished runs are kept under runs/collapse/. To continue after an interruption, run the same command
again.
"""

import json
import math
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

import train
from engine.base import files
from engine.run.command_line import option, parse, run_program
from engine.run.curves import CPPO, DPI, FAILS
from experiments.library.bench import markdown_table, pm, report, spread
from experiments.library.plot import OTHER, PALER, name_lines, panels, plain
from experiments.reproduce import mean_over, name_of, one_run
from update import Limits

SEEDS = (1, 2, 3)
RATES = (1e-4, 2e-4, 3e-4, 4e-4, 6e-4, 1e-3)
STEPS = 96
FOLDER = Path("runs/collapse")
# a ratio is never below 1 − 1e9, and not above 1 + 1e9 here: so the loss has no clip
BARE = {
    "algorithm": "grpo", "questions_per_step": 1, "group_size": 8, "minibatches": 1, "mu": 4,
    "beta": 0, "clip_low": 1e9, "clip_high": 1e9, "steps": STEPS,
}
GRADIENT_CLIP = "gradient clip 1"
GUARDS = {  # what each row changes
    "bare": {},
    GRADIENT_CLIP: {},  # train.py always has it; the other rows lift it
    "KL, β = 0.04": {"beta": 0.04},
    "target_kl 0.01": {"target_kl": 0.01},
    "ratio clip 0.2": {"clip_low": 0.2, "clip_high": 0.2},
    "4 questions, as many updates": {"questions_per_step": 4},
    "4 questions, as many completions": {"questions_per_step": 4, "steps": STEPS // 4},
    "μ = 1": {"mu": 1},
}
COLLAPSED = (4e-4, 1e-3)  # the learning rates of the bare runs that go on
BACK = {  # how they go on
    # as `train.py --algorithm grpo` trains the base. There is no KL term: its reference would be
    # the collapsed model
    "healthy": {"algorithm": "grpo", "beta": 0, "steps": 64},
    "bare, 0.0001": BARE | {"lr": 1e-4},
}
LOGGED = ("accuracy", "entropy", "all_wrong", "all_right", "length")


@dataclass
class Options:
    output: str = option("experiments/results", "folder of collapse.json, .md and .png")


def without_gradient_clip():
    """train.py makes its Limits without a limit on the gradient's norm."""
    return mock.patch.object(train, "Limits", partial(Limits, max_grad_norm=math.inf))


def has_collapsed(run):
    """Whether a run is less accurate than the base."""
    return run["sampled"] < run["base"]


def train_or_read(folder, options, clipped):
    """The figures of a run. clipped: whether its gradients are."""
    with nullcontext() if clipped else without_gradient_clip():
        run = one_run(folder, options)
    rows = files.read(folder / "metrics.jsonl")
    quarters = [rows[: len(rows) // 4], rows[-(len(rows) // 4) :]]
    logged = {name: [mean_over(part, name) for part in quarters] for name in LOGGED}
    return {name: run[name] for name in ("base", "greedy", "sampled", "length")} | logged


def folder_of(guard, rate, seed):
    return FOLDER / name_of(f"{guard}, {rate:g}", seed)


def of_guard(guard, rate, seed):
    options = BARE | GUARDS[guard] | {"lr": rate, "seed": seed}
    return train_or_read(folder_of(guard, rate, seed), options, clipped=guard == GRADIENT_CLIP)


def of_back(way, rate, seed):
    """A collapsed run goes on. `base` is the toy's base here, too; `before` is the collapsed model.
    """
    base = of_guard("bare", rate, seed)["base"]
    options = BACK[way] | {"model": str(folder_of("bare", rate, seed)), "seed": seed}
    folder = FOLDER / name_of(f"back, {way}, {rate:g}", seed)
    run = train_or_read(folder, options, clipped=way == "healthy")
    return run | {"base": base, "before": run["base"]}


def answer_of(folder):
    """A sampled answer of a finished run to a held-out question: {"question": …, "answer": …,
    "completion": …, …}."""
    return json.loads((folder / "summary.json").read_text())["after"]["examples"][-1]


def measure():
    """{"rows": {guard: {rate: runs}}, "back": {way: {rate: runs}}, "answer": of a collapsed run}"""
    rows, back = {}, {}
    for guard in tqdm(GUARDS, "guards"):
        rows[guard] = {
            f"{rate:g}": [of_guard(guard, rate, seed) for seed in SEEDS] for rate in RATES}
    for way in tqdm(BACK, "collapsed runs go on"):
        back[way] = {
            f"{rate:g}": [of_back(way, rate, seed) for seed in SEEDS] for rate in COLLAPSED}
    answer = answer_of(folder_of("bare", COLLAPSED[-1], SEEDS[0]))
    return {"rows": rows, "back": back, "answer": answer}


def edge(of_rates):
    """The largest learning rate up to which no run has collapsed, in words. of_rates: {rate: runs}
    """
    safe = "none"
    for rate, runs in of_rates.items():
        if any(map(has_collapsed, runs)):
            break
        safe = rate
    return safe


# --- the page and the picture ---


def seeds_of(runs):
    """The sampled accuracy of each seed; that of a collapsed run is bold."""
    marks = ["**" if has_collapsed(run) else "" for run in runs]
    return " · ".join(f"{mark}{run['sampled']:.2f}{mark}" for mark, run in zip(marks, runs))


def mean(runs, name, part):
    """Of a logged metric. part: 0 for the first quarter of a run, 1 for the last."""
    return pm(spread([run[name][part] for run in runs]), 2)


def page(result):
    rows = result["rows"]
    rates = list(rows["bare"])
    first = [["", *rates, "no collapse up to"]]
    first += [[guard, *map(seeds_of, of_rates.values()), edge(of_rates)]
              for guard, of_rates in rows.items()]
    second = [["learning rate of the bare setting", *LOGGED]]
    third = [["learning rate that collapsed", "how it goes on", "before", "after"]]
    for rate, runs in rows["bare"].items():
        second.append(
            [rate, *(f"{mean(runs, name, 0)} → {mean(runs, name, 1)}" for name in LOGGED)])
    for way, of_rates in result["back"].items():
        for rate, runs in of_rates.items():
            before = " · ".join(f"{run['before']:.2f}" for run in runs)
            third.append([rate, way, before, seeds_of(runs)])
    answer = result["answer"]
    base = spread([run["base"] for run in rows["bare"][rates[0]]])
    return f"""# Collapse

`{result['command']}`, {result['date']}, {result['processor']}

Sampled accuracy on 512 held-out questions, of each seed. Bold: the run has collapsed, so it is \
below the base ({pm(base)}).

{markdown_table(first)}

Means of the first quarter of a run → means of the last quarter:

{markdown_table(second)}

Does a collapsed run of the bare setting come back? Bold: it is still below the base.

{markdown_table(third)}

An answer of a collapsed run. {answer['question']} (right: {answer['answer']})

    {answer['completion'].replace(chr(10), chr(10) + '    ')}
"""


COLOURS = ("#0e2c53", CPPO, PALER["P=0.75"], PALER["P=0.5"])
HALVES = {  # the two panels: what they show, and the rows besides the bare setting
    "A clip of the gradient does not help, of the ratio it does": tuple(GUARDS)[1:5],
    "A larger batch helps a little, fewer updates more": tuple(GUARDS)[5:],
}


def picture(result, output):
    figure, axes = panels(2, 6.4, sharey=True)
    rows = result["rows"]
    base = spread([run["base"] for run in rows["bare"][f"{RATES[0]:g}"]])["mean"]
    for axis, (title, guards) in zip(axes, HALVES.items()):
        axis.set_ylim(0, 1)
        axis.axhline(base, color=OTHER, linewidth=1, linestyle=":")
        lines = []
        for guard, colour in zip(("bare", *guards), (FAILS, *reversed(COLOURS))):
            values = [[run["sampled"] for run in runs] for runs in rows[guard].values()]
            means = [sum(seeds) / len(seeds) for seeds in values]
            axis.plot(means, "o-", color=colour, linewidth=2.5)
            axis.plot(values, "o", color=colour, markersize=3, alpha=0.5)
            lines.append((means[-1], guard, colour))
        axis.set_xticks(range(len(RATES)), [f"{rate:g}" for rate in RATES])
        axis.set_xlabel("learning rate")
        axis.set_title(title, fontsize=13)
        plain(axis)
        name_lines(axis, lines)
    axes[0].text(0, base - 0.01, "the base", va="top", color=OTHER, fontsize=11)
    axes[0].set_ylabel("sampled accuracy after training: mean of 3 seeds, and seeds")
    answer = result["answer"]
    figure.supxlabel(
        "a collapsed run answers "
        f"{answer['question']} (right: {answer['answer']}) with\n{answer['completion']}",
        fontsize=11, color=FAILS)
    figure.savefig(output, dpi=DPI)


def main(argv):
    options = parse(Options, argv)
    result = measure()
    report(options, "collapse", result, page)
    picture(result, Path(options.output, "collapse.png"))


if __name__ == "__main__":
    run_program(main)
