"""GRPO, CPPO and their controls on a real chat model: the same seconds for each of them.

    python experiments/real.py --model DIR                     all methods and seeds, and the page
    python experiments/real.py --model DIR --second            the second plan: the published code,
                                                               and sampling together
    python experiments/real.py --model DIR --share 1/2         every second run: start 2/2 on
                                                               another core
    python experiments/real.py --page                          only the page and the picture, of the
                                                               runs that are there

Writes real.json, real.md and real.png (real_second.*) in experiments/results; PLAN (SECOND_PLAN)
below is the first part of the page. A finished run is one file in runs/real/ (runs/real_second/).
To continue after an interruption, run the same command again: an interrupted run begins anew. """

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from engine.run.config import Config
from engine.run.curves import above, plt, save
from engine.run.options import option, parse, run_program
from experiments import same_seconds
from experiments.plot import band
from experiments.reproduce import RULES
from experiments.setting import heading, markdown_table, setting, write

SETTING = {
    "dataset": "arithmetic", "questions_per_step": 4, "group_size": 16, "mu": 1, "beta": 0.0,
    "dtype": "float32",
}
LR = 3e-5
AT = (240, 480)  # seconds
EVAL_QUESTIONS = 256
REACHED = 0.5  # the accuracy to which the seconds are counted
LONGER = 2  # times the learning rate


def cppo(rate, **options):
    return {"algorithm": "cppo", "pruning_rate": rate} | options


METHODS = {  # options of train.py, on top of SETTING
    "GRPO": {"algorithm": "grpo"},
    "CPPO, P=0.875": cppo(0.875),
    "random, P=0.875": cppo(0.875, keep="random"),
    "CPPO, P=0.875, no allocation": cppo(0.875, allocation=False),
    "GRPO, 32 questions": {"algorithm": "grpo", "questions_per_step": 32},
    "GRPO, G=2, 32 questions": {"algorithm": "grpo", "group_size": 2, "questions_per_step": 32},
    "one of each kind, P=0.875": cppo(0.875, keep=f"{RULES}:distinct"),
    "GRPO, longer steps": {"algorithm": "grpo", "lr": LONGER * LR},
    "CPPO, P=0.75": cppo(0.75),
    "CPPO, P=0.5": cppo(0.5),
    "CPPO, P=0.875, longer steps": cppo(0.875, lr=LONGER * LR),
    "Dr. GRPO, P=0.875": cppo(0.875, algorithm="drgrpo", keep="largest_abs"),
}
SECOND = {
    "GRPO": METHODS["GRPO"],
    "CPPO, P=0.75": cppo(0.75),
    "published, P=0.75": cppo(0.75, algorithm="cppo_published"),
    "GRPO, 16 questions, 4 mini-batches": METHODS["GRPO"]
    | {"questions_per_step": 16, "minibatches": 4},
    "published, P=0.875": cppo(0.875, algorithm="cppo_published"),
    "published, P=0.5": cppo(0.5, algorithm="cppo_published"),
}
CLAIM = [
    name for name in METHODS if name == "GRPO" or name.startswith("CPPO") and "steps" not in name
]
PLAN = f"""
## Plan, written before the runs

**Question.** CPPO says: GRPO's accuracy in a fraction of its time. Is that so on a real model, and if it is, what makes it so?

**Setting.** SmolLM2-135M-Instruct, all weights, `--dataset arithmetic`: word problems of one step (four of five) and two. G = 16, T = 1,
μ = 1, no reference (β = 0), at most 16 tokens, the reward is 1 if the answer is right. GRPO takes 4 questions a step, so it trains on 64
completions; every method with allocation trains on about as many. Each run gets {AT[-1]} CPU seconds of one thread in float32. Evaluation
does not count. The learning rate warms up over the first tenth of the seconds and then falls along a cosine; an update takes the value
of its moment. So every method has a whole schedule, however many steps it makes. Two runs are made at the same time, on two cores.

**Learning rate.** {LR:g} for all, at the top of the schedule, chosen with GRPO alone, on seed 0, which is not used below: with 1e-5 the
accuracy on training questions was 0.19 after 140 s (the run was stopped there), with 3e-5 0.50 after 130 s and 0.67 on held-out questions
after 500 s, with 1e-4 it fell to 0.00. (A first version of this program measured this; it set the rate at the start of a step.)

"Longer steps" have {LONGER} times this learning rate. Before training, on the same 8 questions, GRPO's gradient has length 1.5, CPPO's with
P = 0.875 6.3, and that of random pruning 3.5, because the mean of fewer completions is noisier. Four times the learning rate is more than
GRPO bears, so it is {LONGER} times. AdamW divides a gradient by the size of earlier ones: a longer gradient is not by itself a longer step.

**Evaluation.** After {AT[0]} and {AT[1]} s, {EVAL_QUESTIONS} held-out questions, greedy and sampled once at T = 1, by the newest weights of
that moment: a step that is not over yet does not count. And the seconds until the accuracy on training questions, all of them new, is
{REACHED} over the last 64 questions, or over as many as a quarter of the run's, if these are fewer.

**What counts as a difference.** Three seeds each. One method is better than another if each of its seeds is above each seed of the other.
By chance this happens in 1 of 20 comparisons in a given direction. Everything else is called no difference.

**Methods.**

| | what it separates |
|---|---|
| GRPO | the baseline |
| CPPO, P = 0.5, 0.75, 0.875 | the claim: 8, 16, 32 questions a step |
| CPPO, P = 0.875, no allocation | pruning alone: 4 questions a step |
| GRPO, 32 questions | larger batches alone: trains on 512 completions |
| GRPO, G=2, 32 questions | does one need large groups at all? (2510.00977) trains on 64 completions |
| random, P = 0.875 | is it the choice? |
| one of each kind, P = 0.875 | is it the diversity? one right and one wrong completion (2609.36932) |
| GRPO and CPPO, longer steps | is it the length of the step? |
| Dr. GRPO, P = 0.875 | is it the bias of 1/\\|o\\| (gradients.md)? the sum over tokens, no division by the std |
"""
SECOND_PLAN = f"""
## Second plan, written on 2026-11-23, before its runs

**Questions.** The first plan has the loss and the choice of the paper's formula. The published code has a token mean and keeps the largest
\\|A\\| of the whole step (`cppo_published`): is it another method on a real model? And how much of CPPO's gain is sampling together? GRPO
can have this, too: it samples as many questions together as CPPO with P = 0.75, 16, and trains on them in 4 mini-batches of its 4.

**Setting.** That of the first plan (real.md): SmolLM2-135M-Instruct, `--dataset arithmetic`, G = 16, μ = 1, β = 0, {AT[-1]} CPU
seconds of one thread, learning rate {LR:g}, evaluation after {AT[0]} and {AT[-1]} s, seeds 1, 2 and 3, and the same rule for what counts
as a difference. The processor is another one, so GRPO and CPPO with P = 0.75, the best method of the first plan, run again beside the new
methods. Only figures of one page may be compared.
"""


@dataclass
class Model:
    _argument_group_name = "the model"

    model: str = option("HuggingFaceTB/SmolLM2-135M-Instruct", "hub name or folder of the model")
    lr: float = option(LR, "learning rate of every method that has none of its own")
    folder: str = option(
        "runs/real", "folder of the finished runs; the second plan's get _second at the end"
    )
    second: bool = option(False, "the second plan")


@dataclass
class Options(same_seconds.Runs, Model):
    pass


def one_run(method, seed, label, options):
    own = (METHODS | SECOND)[method]
    config = Config(model=options.model, seed=seed, **{"lr": options.lr, **SETTING, **own})
    made_with = {"lr": config.lr, "options": SETTING | own}
    return made_with | same_seconds.train_for(config, AT, EVAL_QUESTIONS, label)


# --- the page ---


def differences(rows, how):
    """Whether each seed of a method is above (or below) each seed of another, as a Markdown table.
    how: greedy, sampled."""
    others = [name for name in ("GRPO", "CPPO, P=0.875", "CPPO, P=0.75") if name in rows][:2]
    head = [""]
    for when in AT:
        head += [
            f"{when} s, lowest and highest",
            *(f"{when} s, beside {other}" for other in others),
        ]
    lines = [head]
    for name, row in rows.items():
        lines.append([name])
        for when in AT:
            key = f"{how} {when}"
            lines[-1] += [
                "{min:.3f}, {max:.3f}".format_map(row[key]),
                *(beside(row[key], rows[other][key]) for other in others),
            ]
    return markdown_table(lines)


def beside(own, other):
    """Of two spreads over the seeds."""
    return "above" if own["min"] > other["max"] else "below" if own["max"] < other["min"] else "–"


def page(about, rows, plan, picture):
    head, table = (
        heading("GRPO, CPPO and their controls on a real model", about),
        same_seconds.table(rows, AT, REACHED),
    )
    found = [
        f"What counts as a difference, {how} accuracy:\n\n{differences(rows, how)}\n"
        for how in ("sampled", "greedy")
    ]
    return "\n".join(
        [
            f"{head}{plan}\n## Results\n\n{table}\n",
            *found, f"![Accuracy against seconds]({picture})\n",
        ]
    )


def picture(rows, output):
    figure, axes = plt.subplots(1, 3, figsize=(15, 5), constrained_layout=True)
    for axis, names in [
        (axes[0], CLAIM), (axes[1], ["GRPO", *(name for name in rows if name not in CLAIM)]),
    ]:
        for i, name in enumerate(name for name in names if name in rows):
            band(axis, rows[name]["curves"], 0, i, name)
        axis.set(
            xlabel="CPU seconds of training", ylabel="accuracy, sampled (moving mean)", ylim=(0, 1),
            xlim=(0, AT[-1]),
        )
        axis.grid(alpha=0.3)
        above(axis, columns=2)
    for y, row in enumerate(rows.values()):
        for x in row["seconds"]:
            axes[2].plot(x or AT[-1], y, "ko" if x else "k>", fillstyle="full" if x else "none")
    axes[2].set_yticks(range(len(rows)), list(rows))
    axes[2].invert_yaxis()
    axes[2].set(
        xlabel=f"seconds to accuracy {REACHED}, each seed (arrow: not reached)",
        xlim=(0, AT[-1] * 1.05),
    )
    axes[2].grid(alpha=0.3)
    save(figure, output)


def main(argv):
    options = parse(Options, argv)
    name, plan, methods = (
        ("real_second", SECOND_PLAN, SECOND) if options.second else ("real", PLAN, METHODS)
    )
    if options.second:
        options.folder += "_second"
    rows = same_seconds.rows(options, methods, one_run, AT, REACHED)
    about = setting(["torch", "transformers"]) | {"setting": SETTING, "lr": LR}
    write(options.output, name, about | {"rows": rows}, page(about, rows, plan, f"{name}.png"))
    picture(rows, Path(options.output) / f"{name}.png")


if __name__ == "__main__":
    run_program(main)
