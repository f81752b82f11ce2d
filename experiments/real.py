"""GRPO, CPPO and their controls on a real chat model: the same CPU seconds for each of them.

    python experiments/real.py --model DIR             all methods and seeds, and the page
    python experiments/real.py --model DIR --second    the second plan: the published code, and
                                                       sampling together

Writes real.json, real.md and real.png (real_second.*) in runs/results/. The first part of the page
is results/real_plan.md (real_second_plan.md), which was written before the runs. A finished run is
one file in runs/real/ (runs/real_second/). To continue after an interruption, run the same command
again: an interrupted run begins anew. Several commands with other --seeds may run at the same time;
then the same command without --seeds writes the page of all runs.

A method that makes cheap steps makes more of them. The learning rate follows the seconds, so that
every method has a whole schedule. Evaluation does not count.
"""

import random
import sys
import time
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, median

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from engine.data.questions import load_questions, take
from engine.model.networks import build
from engine.run.command_line import option, parse, run_program
from engine.run.config import config_of
from engine.run.state import learning_rate
from engine.scoring.score import load_rewards
from eval import examine
from experiments.library.bench import heading
from experiments.library.plot import curves, dots, panels, save
from experiments.library.study import (
    RESULTS,
    Study,
    curve,
    once,
    pivot,
    publish,
    rows_of,
)
from experiments.reproduce import RULES
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
CLAIM = (
    "GRPO", "CPPO, P=0.875", "CPPO, P=0.875, no allocation", "CPPO, P=0.75", "CPPO, P=0.5",
)
# a page compares all its methods with the first two of these that it has
OTHERS = ("GRPO", "CPPO, P=0.875", "CPPO, P=0.75")
STUDIES = {"real": METHODS, "real_second": SECOND}
PLANS = Path(__file__).parent / "results"


@dataclass
class Options:
    model: str = option("HuggingFaceTB/SmolLM2-135M-Instruct", "hub name or folder of a chat model")
    seeds: list[int] | None = option(None, "none: 1 2 3")
    second: bool = option(False, "the second plan")
    output: str = option(RESULTS, "folder of the page and of the picture")


# --- one run ---


def train_for(config, algorithm):
    """Train for AT[-1] CPU seconds of one thread. Returns the figures of this run. curves: rows of
    (seconds, completions, accuracy)."""
    data, sampling, per_step = config.data, config.sampling, algorithm.questions_per_step
    source = base_model(data.model, data.dataset)
    networks = build(config, algorithm, source, torch.device("cpu"))
    torch.set_num_threads(1)
    prompts = {"tokenizer": networks.tokenizer, "system_prompt": data.system_prompt}
    questions, _ = load_questions(data.dataset, **prompts)
    test, _ = load_questions(data.dataset, split="test", limit=EVAL_QUESTIONS, **prompts)
    rewards = load_rewards(data.rewards)
    steps, figures, seconds = [], {}, 0.0

    def schedule(optimizer, *_):  # the learning rate at the moment of the update
        now = min(1.0, (seconds + time.process_time() - begin) / AT[-1])
        optimizer.param_groups[0]["lr"] = learning_rate(now, config.update.lr, warmup=0.1)

    networks.optimizer.register_step_pre_hook(schedule)
    while seconds <= AT[-1]:
        before, begin = deepcopy(networks.model.state_dict()), time.process_time()
        number = len(steps)
        asked = take(questions, number * per_step, per_step, config.run.seed)
        rng = random.Random(f"{config.run.seed} {number + 1}")
        metrics, *_ = train_step(networks, algorithm, rewards, sampling, Limits(), asked, rng)
        last = time.process_time() - begin
        for at in AT:
            if seconds <= at < seconds + last:
                figures |= evaluate(networks, before, test, rewards[0].function, sampling, at)
        seconds += last
        share = metrics["seconds/generate"] / metrics["seconds/total"]
        steps.append(metrics | {"seconds/total": last, "sampling": share})
    figures["steps"] = len(steps) - 1  # the last one is over too late
    figures["questions"] = sum(step["questions"] for step in steps[:-1])
    figures["sampling"] = fmean(step["sampling"] for step in steps)
    figures["curves"] = curve(steps)
    return figures


def evaluate(networks, weights, questions, reward, sampling, at):
    """The figures, after `at` seconds, of the model with these weights, which it has only
    meanwhile."""
    now = deepcopy(networks.model.state_dict())
    networks.model.load_state_dict(weights)
    scores = examine(
        networks.sampler, networks.tokenizer, questions, reward, sampling, seed=0, batch_size=128
    )
    networks.model.load_state_dict(now)
    greedy, sampled = scores["greedy"], scores["sampled"]
    return {
        f"greedy {at}": greedy["accuracy"], f"sampled {at}": sampled["accuracy"],
        "length": sampled["length"],
    }


# --- all runs ---


def study_of(name, model, seeds):
    """A run is one file in the study's folder."""

    def measure(folder, more, seed):
        usual = SETTING | {"model": model, "seed": seed, "lr": LR}
        return once(Path(f"{folder}.json"), lambda: train_for(*config_of(usual | more)))

    return Study(f"runs/{name}", STUDIES[name], measure, seeds)


def reached(row):
    """The seconds after which each run first has the accuracy REACHED; None if not in time."""
    found = []
    for points in row["curves"]:
        seconds = [at for at, _, accuracy in points if accuracy >= REACHED and at <= AT[-1]]
        found.append(seconds[0] if seconds else None)
    return found


# --- the page ---

COLUMNS = {
    "steps": ".0f", "questions": ".0f", "tokens long": ("length", ".1f"),
    "share of sampling": ("sampling", ".0%"),
    f"seconds to {REACHED}, each seed": ("reached", ".0f"),
}


def differences(rows, figure):
    """An accuracy of each method, and whether each of its seeds is above (or below) each seed of
    two other methods, as a Markdown table."""
    others = [row for row in rows if row["name"] in OTHERS][:2]
    lines = []
    for row in rows:
        own = row[figure]
        line = {"name": row["name"], "mean ± std": own}
        line |= {"lowest": own["min"], "highest": own["max"]}
        for other in others:
            line[f"beside {other['name']}"] = beside(own, other[figure])
        lines.append(line)
    return pivot(lines, ".3f")


def beside(own, other):
    """Of two spreads over the seeds."""
    if own["min"] > other["max"]:
        return "above"
    return "below" if own["max"] < other["min"] else "–"


def page(result):
    name, rows = result["study"], result["rows"]
    text = heading("GRPO, CPPO and their controls on a real model", result) + "\n"
    text += (PLANS / f"{name}_plan.md").read_text(encoding="utf-8")
    shown = [row | {"reached": reached(row)} for row in rows]
    text += f"\n## Results\n\n{pivot(shown, COLUMNS)}\n\n![Accuracy against seconds]({name}.png)\n"
    for how, at in product(("sampled", "greedy"), AT):
        text += f"\nAccuracy after {at} s, {how}:\n\n{differences(rows, f'{how} {at}')}\n"
    return text


TITLES = {  # what the panels show
    "real": ("CPPO leads at half time,\nnot at the end",
             "A random choice, larger batches\nand a larger rate for GRPO fall behind",
             "CPPO is the first to reach 0.5\n(median of the seeds)"),
    "real_second": ("The paper's formula has the higher\nmean after 240 and after 480 s",
                    "CPPO as published is as good;\nGRPO in mini-batches falls behind",
                    "GRPO reaches 0.5 as soon\nas most rows of CPPO"),
}


def picture(result, folder):
    """Accuracy against seconds in two panels, and the seconds to an accuracy."""
    name, rows = result["study"], result["rows"]
    figure, axes = panels(3, 5.6, width=18)
    of_claim = [row for row in rows if row["name"] in CLAIM]
    others = [row for row in rows if row["name"] == "GRPO" or row not in of_claim]
    for axis, own, title in zip(axes, (of_claim, others), TITLES[name]):
        curves(axis, {row["name"]: row["curves"] for row in own}, height=2, title=title,
               xlabel="CPU seconds of training", ylabel="accuracy, sampled (moving mean)",
               xlim=(0, AT[-1]), ylim=(0, 0.85))
    found = []
    for row in rows:
        values = [seconds or AT[-1] for seconds in reached(row)]
        spread = {"mean": median(values), "std": 0, "values": values}
        found.append({"name": row["name"], "reached": spread})
    found.sort(key=lambda row: row["reached"]["mean"])
    dots(axes[2], found, "reached", TITLES[name][2])
    save(figure, folder / f"{name}.png", "line: mean of the seeds; band: lowest to highest; "
         f"dots: seeds, their median, and at {AT[-1]} s those that are too late")


def main(argv):
    options = parse(Options, argv)
    name = "real_second" if options.second else "real"
    study = study_of(name, options.model, options.seeds or (1, 2, 3))
    result = {"study": name, "setting": SETTING, "lr": LR, "rows": rows_of(study)}
    publish(options.output, name, result, page, picture)


if __name__ == "__main__":
    run_program(main)
