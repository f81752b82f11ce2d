"""GRPO, CPPO and their controls on a real chat model: the same CPU seconds for each of them.

    python experiments/real.py --model DIR             all methods and seeds, and the page
    python experiments/real.py --model DIR --second    the second plan: the published code, and
                                                       sampling together
    python experiments/real.py --page                  only the page and the picture, of the runs
                                                       that are there

Writes real.json, real.md and real.png (real_second.*) in results/; PLAN (SECOND_PLAN) below is the
first part of the page. A finished run is one file in runs/real/ (runs/real_second/). To continue
after an interruption, run the same command again: an interrupted run begins anew. Several commands
with other --seeds or --methods may run at the same time.

A method that makes cheap steps makes more of them. The learning rate follows the seconds, so that
every method has a whole schedule. Evaluation does not count.
"""

import json
import math
import random
import statistics
import sys
import time
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from engine.base import files
from engine.base.errors import UserError
from engine.data.questions import load_questions, take
from engine.model.networks import build
from engine.run.command_line import option, parse, run_program
from engine.run.config import config_of
from engine.run.curves import DPI, FAILS
from engine.run.state import learning_rate
from engine.scoring.score import load_rewards
from eval import examine
from experiments.library.bench import heading, markdown_table, pm, report, spread
from experiments.library.plot import (
    OTHER,
    STYLES,
    band,
    colour,
    foot,
    in_words,
    name_lines,
    panels,
    plain,
)
from experiments.reproduce import RULES, curve, name_of
from tasks.table import base_model
from train import train_step
from update import Limits

SETTING = {
    "dataset": "arithmetic", "questions_per_step": 4, "group_size": 16, "mu": 1, "beta": 0.0,
    "dtype": "float32",
}
LR = 3e-5
AT = (240, 480)  # seconds
EVAL_QUESTIONS = 256
REACHED = 0.5  # the accuracy to which the seconds are counted
LONGER = 2  # times the learning rate
LOGGED = (
    "questions", "completions", "kept", "accuracy", "length", "no_signal", "entropy", "grad_norm",
    "loss",
)  # of a step, in the file of a run


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

**Question.** CPPO says: GRPO's accuracy in a fraction of its time. Is that so on a real model, and
if it is, what makes it so?

**Setting.** SmolLM2-135M-Instruct, all weights, `--dataset arithmetic`: word problems of one step
(four of five) and two. G = 16, T = 1, μ = 1, no reference (β = 0), at most 16 tokens, the reward is
1 if the answer is right. GRPO takes 4 questions a step, so it trains on 64 completions; every
method with allocation trains on about as many. Each run gets {AT[-1]} CPU seconds of one thread in
float32. Evaluation does not count. The learning rate warms up over the first tenth of the seconds
and then falls along a cosine; an update takes the value of its moment. So every method has a whole
schedule, however many steps it makes. Two runs are made at the same time, on two cores.

**Learning rate.** {LR:g} for all, at the top of the schedule, chosen with GRPO alone, on seed 0,
which is not used below: with 1e-5 the accuracy on training questions was 0.19 after 140 s (the run
was stopped there), with 3e-5 0.50 after 130 s and 0.67 on held-out questions after 500 s, with 1e-4
it fell to 0.00. (A first version of this program measured this; it set the rate at the start of a
step.)

"Longer steps" have {LONGER} times this learning rate. Before training, on the same 8 questions,
GRPO's gradient has length 1.5, CPPO's with P = 0.875 6.3, and that of random pruning 3.5, because
the mean of fewer completions is noisier. Four times the learning rate is more than GRPO bears, so
it is {LONGER} times. AdamW divides a gradient by the size of earlier ones: a longer gradient is not
by itself a longer step.

**Evaluation.** After {AT[0]} and {AT[1]} s, {EVAL_QUESTIONS} held-out questions, greedy and sampled
once at T = 1, by the newest weights of that moment: a step that is not over yet does not count. And
the seconds until the accuracy on training questions, all of them new, is {REACHED} over the last 64
questions, or over as many as a quarter of the run's, if these are fewer.

**What counts as a difference.** Three seeds each. One method is better than another if each of its
seeds is above each seed of the other. By chance this happens in 1 of 20 comparisons in a given
direction. Everything else is called no difference.

**Methods.**

| | what it separates |
|---|---|
| GRPO | the baseline |
| CPPO, P = 0.5, 0.75, 0.875 | the claim: 8, 16, 32 questions a step |
| CPPO, P = 0.875, no allocation | pruning alone: 4 questions a step |
| GRPO, 32 questions | larger batches alone: trains on 512 completions |
| GRPO, G=2, 32 questions | does one need large groups at all? (2510.00977) trains on 64 \
completions |
| random, P = 0.875 | is it the choice? |
| one of each kind, P = 0.875 | is it the diversity? one right and one wrong completion \
(2609.36932) |
| GRPO and CPPO, longer steps | is it the length of the step? |
| Dr. GRPO, P = 0.875 | is it the bias of 1/\\|o\\| (gradients.md)? the sum over tokens, no \
division by the std |
"""
SECOND_PLAN = f"""
## Second plan, written on 2026-11-23, before its runs

**Questions.** The first plan has the loss and the choice of the paper's formula. The published code
has a token mean and keeps the largest \\|A\\| of the whole step (`cppo_published`): is it another
method on a real model? And how much of CPPO's gain is sampling together? GRPO can have this, too:
it samples as many questions together as CPPO with P = 0.75, 16, and trains on them in 4
mini-batches of its 4.

**Setting.** That of the first plan (real.md): SmolLM2-135M-Instruct, `--dataset arithmetic`, G =
16, μ = 1, β = 0, {AT[-1]} CPU seconds of one thread, learning rate {LR:g}, evaluation after {AT[0]}
and {AT[-1]} s, seeds 1, 2 and 3, and the same rule for what counts as a difference. The processor
is another one, so GRPO and CPPO with P = 0.75, the best method of the first plan, run again beside
the new methods. Only figures of one page may be compared.
"""
PLANS = {"real": (METHODS, PLAN), "real_second": (SECOND, SECOND_PLAN)}


@dataclass
class Options:
    model: str = option(
        "HuggingFaceTB/SmolLM2-135M-Instruct", "hub name or folder of a chat model"
    )
    methods: list[str] | None = option(None, "which methods, by their names; none: all")
    seeds: list[int] | None = option(None, "none: 1 2 3")
    second: bool = option(False, "the second plan")
    page: bool = option(False, "train nothing; write the page of the runs that are there")
    folder: str | None = option(
        None, "folder of the finished runs; none: runs/real, or runs/real_second"
    )
    output: str = option("experiments/results", "folder of the page and of the picture")


# --- one run ---


def train_for(config, algorithm, label):
    """Train for AT[-1] CPU seconds of one thread. Returns {steps, evaluations}, lists with a dict
    for each."""
    data, sampling, per_step = config.data, config.sampling, algorithm.questions_per_step
    source = base_model(data.model, data.dataset)
    networks = build(config, algorithm, source, torch.device("cpu"))
    torch.set_num_threads(1)
    prompts = {"tokenizer": networks.tokenizer, "system_prompt": data.system_prompt}
    questions, _ = load_questions(data.dataset, **prompts)
    test, _ = load_questions(data.dataset, split="test", limit=EVAL_QUESTIONS, **prompts)
    rewards, steps, evaluations, seconds = load_rewards(data.rewards), [], [], 0.0

    def schedule(optimizer, *_):  # the learning rate at the moment of the update
        now = min(1.0, (seconds + time.process_time() - begin) / AT[-1])
        optimizer.param_groups[0]["lr"] = learning_rate(now, config.update.lr, warmup=0.1)

    networks.optimizer.register_step_pre_hook(schedule)
    bar = tqdm(total=AT[-1], desc=label, unit="s")
    while len(evaluations) < len(AT):
        before, begin = deepcopy(networks.model.state_dict()), time.process_time()
        asked = take(questions, len(steps) * per_step, per_step, config.run.seed)
        rng = random.Random(f"{config.run.seed} {len(steps) + 1}")
        metrics, rollout, *_ = train_step(
            networks, algorithm, rewards, sampling, Limits(), asked, rng
        )
        last = time.process_time() - begin
        while len(evaluations) < len(AT) and seconds + last > AT[len(evaluations)]:
            found = evaluate(networks, before, test, rewards[0].function, sampling)
            evaluations.append({"at": AT[len(evaluations)]} | found)
        seconds += last
        steps.append({key: metrics[key] for key in LOGGED} | {
            "sampling": metrics["seconds/generate"] / metrics["seconds/total"],
            "text": rollout.texts[0],
            "seconds/total": last, "seconds": seconds,
        })
        bar.update(min(seconds, AT[-1]) - bar.n)
    bar.close()
    return {"steps": steps, "evaluations": evaluations}


def evaluate(networks, weights, questions, reward, sampling):
    """The accuracies of the model with these weights, which it has only meanwhile."""
    now = deepcopy(networks.model.state_dict())
    networks.model.load_state_dict(weights)
    scores = examine(
        networks.sampler, networks.tokenizer, questions, reward, sampling, seed=0, batch_size=128
    )
    networks.model.load_state_dict(now)
    return {
        how: {key: scores[how][key] for key in ("accuracy", "length", "truncated")}
        for how in ("greedy", "sampled")
    }


# --- all runs, and their figures ---


def rows(options, name):
    """Make the runs that are not there yet. Returns {method: its figures} of all runs that are
    there. A run is one file in the folder."""
    methods, folder = PLANS[name][0], Path(options.folder or f"runs/{name}")
    if unknown := set(options.methods or ()) - set(methods):
        raise UserError(f"unknown method '{unknown.pop()}': there are {'; '.join(methods)}.")
    folder.mkdir(parents=True, exist_ok=True)
    jobs = product(options.seeds or (1, 2, 3), options.methods or methods)
    for seed, method in () if options.page else jobs:
        if not (path := folder / f"{name_of(method, seed)}.json").exists():
            own = SETTING | methods[method]
            chosen = {"model": options.model, "seed": seed, "lr": LR} | own
            config, algorithm = config_of(chosen)
            run = {"method": method, "seed": seed, "lr": config.update.lr, "options": own}
            run |= train_for(config, algorithm, f"{method}, seed {seed}")
            files.write(path, json.dumps(run) + "\n")
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    if not runs:
        raise UserError(f"{folder} holds no finished run: leave out --page.")
    return {
        method: summary(own) for method in methods
        if (own := [run for run in runs if run["method"] == method])
    }


def summary(runs):
    """The figures of one method, over its seeds."""
    row = {
        "seeds": [run["seed"] for run in runs],
        "steps": statistics.fmean(len(run["steps"]) - 1 for run in runs),
        "length": statistics.fmean(run["evaluations"][-1]["sampled"]["length"] for run in runs),
        "curves": [curve(run["steps"]) for run in runs],
    }
    for (n, seconds), how in product(enumerate(AT), ("greedy", "sampled")):
        row[f"{how} {seconds}"] = spread([run["evaluations"][n][how]["accuracy"] for run in runs])
    row |= {
        name: statistics.fmean(sum(step[name] for step in run["steps"][:-1]) for run in runs)
        for name in ("questions", "completions")
    } | {
        name: statistics.fmean(step[name] for run in runs for step in run["steps"])
        for name in ("sampling", "no_signal")
    }
    within = (
        [s for s, _, accuracy in points if accuracy >= REACHED and s <= AT[-1]]
        for points in row["curves"]
    )
    return row | {"seconds": [min(seconds, default=None) for seconds in within]}


# --- the page ---


def table(rows):
    """The figures of all methods as a Markdown table."""
    head = [
        "", "seeds", "steps", "questions", "completions", f"greedy, {AT[0]} s", "sampled",
        f"greedy, {AT[1]} s", "sampled", "tokens long", f"seconds to {REACHED}, each seed",
        "share of sampling", "questions without signal",
    ]
    return markdown_table([head] + [
        [
            name, len(row["seeds"]),
            *(f"{row[key]:.0f}" for key in ("steps", "questions", "completions")),
            *(pm(row[f"{how} {when}"]) for when in AT for how in ("greedy", "sampled")),
            f"{row['length']:.1f}", ", ".join(f"{x:.0f}" if x else "–" for x in row["seconds"]),
            f"{row['sampling']:.0%}", f"{row['no_signal']:.0%}",
        ] for name, row in rows.items()
    ])


def differences(rows, how):
    """Whether each seed of a method is above (or below) each seed of another, as a Markdown table.
    how: greedy, sampled."""
    others = [name for name in ("GRPO", "CPPO, P=0.875", "CPPO, P=0.75") if name in rows][:2]
    shown = ["lowest and highest", *(f"beside {other}" for other in others)]
    lines = [["", *(f"{when} s, {what}" for when in AT for what in shown)]]
    for name in rows:
        lines.append([name])
        for when in AT:
            own, *theirs = (rows[one][f"{how} {when}"] for one in (name, *others))
            lines[-1] += ["{min:.3f}, {max:.3f}".format_map(own), *(beside(own, x) for x in theirs)]
    return markdown_table(lines)


def beside(own, other):
    """Of two spreads over the seeds."""
    return "above" if own["min"] > other["max"] else "below" if own["max"] < other["min"] else "–"


def page(result, name):
    rows = result["rows"]
    found = [
        f"What counts as a difference, {how} accuracy:\n\n{differences(rows, how)}\n"
        for how in ("sampled", "greedy")
    ]
    return "\n".join([
        heading("GRPO, CPPO and their controls on a real model", result) + PLANS[name][1],
        f"## Results\n\n{table(rows)}\n", *found, f"![Accuracy against seconds]({name}.png)\n",
    ])


TITLES = {  # what the two panels of curves show
    "real": ("CPPO leads at half time,\nnot at the end",
             "A random choice, larger batches\nand a larger rate for GRPO fall behind"),
    "real_second": ("CPPO, the paper's formula",
                    "CPPO as published is as good;\nGRPO in mini-batches falls behind"),
}


def picture(rows, output, titles):
    """Accuracy against seconds in two panels, and the seconds to an accuracy."""
    figure, axes = panels(3, 5.6, width=18, width_ratios=[1, 1, 1])
    own = [name for name in CLAIM if name in rows]
    others = ["GRPO", *(name for name in rows if name not in CLAIM)]
    for axis, names in zip(axes, (own, others)):
        axis.set(xlabel="CPU seconds of training", ylabel="accuracy, sampled (moving mean)",
                 xlim=(0, AT[-1]), ylim=(0, 0.85))
        lines, used = [], []
        for name in names:
            color = colour(name, other=OTHER)
            style = STYLES[used.count(color) % len(STYLES)]
            used.append(color)
            last = band(axis, rows[name]["curves"], 0, color, style, until=AT[-1])
            lines.append((last, in_words(name), color))
        name_lines(axis, lines)
    # the fastest above; a seed that has not reached it counts as the slowest
    order = sorted(
        rows, key=lambda name: statistics.median(x or math.inf for x in rows[name]["seconds"]))
    for y, name in enumerate(order):
        for x in rows[name]["seconds"]:
            axes[2].plot(x or AT[-1], y, "o" if x else ">", color=colour(name) if x else FAILS,
                         markersize=8)
    axes[2].set_yticks(range(len(rows)), [in_words(name) for name in order], fontsize=11)
    axes[2].invert_yaxis()
    axes[2].set_xlabel("dots: seeds; ▸ not reached in time")
    axes[2].set_xlim(0, AT[-1] * 1.05)
    for axis, title in zip(axes, (*titles, f"Seconds to an accuracy of {REACHED}")):
        axis.set_title(title, fontsize=13)
        plain(axis)
    foot(figure, "line: mean of the seeds; band: lowest to highest")
    figure.savefig(output, dpi=DPI)


def main(argv):
    options = parse(Options, argv)
    name = "real_second" if options.second else "real"
    result = {"setting": SETTING, "lr": LR, "rows": rows(options, name)}
    report(options, name, result, partial(page, name=name))
    picture(result["rows"], Path(options.output) / f"{name}.png", TITLES[name])


if __name__ == "__main__":
    run_program(main)
