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
from functools import partial
from itertools import product
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

import train
from engine.base import files
from engine.run.command_line import parse, run_program
from experiments.library.bench import heading, pm
from experiments.library.plot import OTHER, TINT, across, colour, curves, panels, save
from experiments.library.study import (
    Options,
    Study,
    by_name,
    figures,
    grid,
    mean_over,
    one_run,
    pivot,
    publish,
    rows_of,
)
from update import Limits

RATES = ("0.0001", "0.0002", "0.0003", "0.0004", "0.0006", "0.001")
STEPS = 96
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
COLLAPSED = ("0.0004", "0.001")  # the learning rates of the bare runs that go on
BACK = {  # how they go on
    # as `train.py --algorithm grpo` trains the base. There is no KL term: its reference would be
    # the collapsed model
    "healthy": {"algorithm": "grpo", "beta": 0, "steps": 64},
    "bare, 0.0001": BARE | {"lr": 1e-4},
}
LOGGED = ("accuracy", "entropy", "all_wrong", "all_right", "length")
QUARTERS = ("first quarter", "last quarter")


# --- the runs ---


def without_gradient_clip():
    """train.py makes its Limits without a limit on the gradient's norm."""
    return mock.patch.object(train, "Limits", partial(Limits, max_grad_norm=math.inf))


def train_or_read(folder, options, clipped):
    """The figures of a run. clipped: whether its gradients are."""
    with nullcontext() if clipped else without_gradient_clip():
        run = one_run(folder, options)
    rows = files.read(folder / "metrics.jsonl")
    parts = zip(QUARTERS, (rows[: len(rows) // 4], rows[-(len(rows) // 4) :]))
    logged = {f"{name}, {quarter}": mean_over(part, name)
              for (quarter, part), name in product(parts, LOGGED)}
    return {name: run[name] for name in ("base", "greedy", "sampled")} | logged


def of_guard(folder, setting, seed):
    guard, rate = setting
    options = BARE | GUARDS[guard] | {"lr": rate, "seed": seed}
    return train_or_read(folder, options, clipped=guard == GRADIENT_CLIP)


def of_back(folder, setting, seed):
    """A collapsed run goes on. `base` is the toy's base here, too; `before` is the collapsed model.
    """
    way, rate = setting
    collapsed = WITH_GUARDS.place(f"bare, {rate}", seed)
    run = train_or_read(
        folder, BACK[way] | {"model": str(collapsed), "seed": seed}, clipped=way == "healthy")
    return run | {"base": figures(collapsed)["base"], "before": run["base"]}


WITH_GUARDS = Study(
    "runs/collapse", {", ".join(of): of for of in product(GUARDS, RATES)}, of_guard)
GOING_ON = Study(
    "runs/collapse", {f"back, {', '.join(of)}": of for of in product(BACK, COLLAPSED)}, of_back)


def measure():
    """{"rows": …, "back": …, "answer": of a collapsed run to a held-out question}"""
    rows, back = rows_of(WITH_GUARDS), rows_of(GOING_ON)
    summary = json.loads((WITH_GUARDS.place("bare, 0.001", 1) / "summary.json").read_text())
    return {"rows": rows, "back": back, "answer": summary["after"]["examples"][-1]}


# --- the page and the picture ---


def collapsed(row):
    """Of each seed, whether its run is less accurate than the base."""
    return [own < base for own, base in zip(row["sampled"]["values"], row["base"]["values"])]


def edge(rows, guard):
    """The largest learning rate up to which no run has collapsed, in words."""
    safe = "none"
    for rate in RATES:
        if any(collapsed(rows[f"{guard}, {rate}"])):
            break
        safe = rate
    return safe


def seeds_of(row):
    """The sampled accuracy of each seed; that of a collapsed run is bold."""
    marks = ["**" if bad else "" for bad in collapsed(row)]
    values = row["sampled"]["values"]
    return " · ".join(f"{mark}{value:.2f}{mark}" for mark, value in zip(marks, values))


def page(result):
    rows, answer = by_name(result["rows"]), result["answer"]
    last = "no collapse up to"
    accuracies = grid("", GUARDS, [*RATES, last], lambda guard, rate: (
        edge(rows, guard) if rate == last else seeds_of(rows[f"{guard}, {rate}"])))
    bare = [rows[f"bare, {rate}"] for rate in RATES]
    logged = {f"{name}, {quarter}": ".2f" for name, quarter in product(LOGGED, QUARTERS)}
    back = pivot([row | {"after": seeds_of(row)} for row in result["back"]],
                 {"before": ".3f", "after": ""})
    text = answer["completion"].replace("\n", "\n    ")
    return f"""{heading("Collapse", result)}
Sampled accuracy on 512 held-out questions, of each seed. Bold: the run has collapsed, so it is \
below the base ({pm(bare[0]["base"])}).

{accuracies}

Means over the first and the last quarter of the bare runs:

{pivot(bare, logged)}

Does a collapsed run of the bare setting come back? Bold: it is still below the base.

{back}

An answer of a collapsed run. {answer["question"]} (right: {answer["answer"]})

    {text}
"""


HALVES = {  # the two panels: what they show, and the rows besides the bare setting
    "A clip of the gradient does not help, of the ratio it does": tuple(GUARDS)[1:5],
    "A larger batch helps a little, fewer updates more": tuple(GUARDS)[5:],
}


def look(guard):
    """The guards that do not help are pale."""
    return TINT if guard in (GRADIENT_CLIP, "KL, β = 0.04") else colour(guard)


def picture(result, folder):
    figure, axes = panels(2, 6.4, sharey=True)
    rows, answer = by_name(result["rows"]), result["answer"]
    base = rows["bare, 0.0001"]["base"]["mean"]
    for axis, (title, guards) in zip(axes, HALVES.items()):
        axis.axhline(base, color=OTHER, linewidth=1, linestyle=":")
        axis.text(0, base - 0.01, "the base", va="top", color=OTHER)
        lines = {}
        for guard in ("bare", *guards):
            lines[guard] = across([rows[f"{guard}, {rate}"]["sampled"] for rate in RATES])
        curves(axis, lines, look=look, marker="o", title=title, xlabel="learning rate", ylim=(0, 1),
               xticks=range(6), xticklabels=RATES)
    axes[0].set_ylabel("sampled accuracy after training: mean and range of 3 seeds")
    save(figure, folder / "collapse.png", f"a collapsed run answers {answer['question']} (right: "
         f"{answer['answer']}) with\n{answer['completion']}")


def main(argv):
    options = parse(Options, argv)
    publish(options.output, "collapse", measure(), page, picture)


if __name__ == "__main__":
    run_program(main)
