"""GRPO, CPPO and their controls on a real chat model: the same CPU seconds for each of them.

    python experiments/real.py --model DIR             all methods and seeds, and the page
    python experiments/real.py --model DIR --second    the second plan: the published code, and
                                                       sampling together

Writes real.json, real.md and real.png (real_second.*) in runs/results/. The first part of the page
is results/real_plan.md (real_second_plan.md), which was written before the runs. A finished run is
one file in runs/real/ (runs/real_second/), and the page is of all that are there. To continue after
an interruption, run the same command again: an interrupted run begins anew. Several commands with
other --seeds may run at the same time.

A method that makes cheap steps makes more of them. The learning rate follows the seconds, so that
every method has a whole schedule. Evaluation does not count.
"""

import json
import random
import sys
import time
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, median

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from engine.base import files
from engine.data.questions import load_questions, take
from engine.model.networks import build
from engine.run.command_line import option, parse, run_program
from engine.run.config import config_of
from engine.run.curves import DPI
from engine.run.state import learning_rate
from engine.scoring.score import load_rewards
from eval import examine
from experiments.library.bench import heading, markdown_table, over_seeds, pm, report
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
from experiments.library.study import curve, name_of
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
RESULTS = Path(__file__).parent / "results"


@dataclass
class Options:
    model: str = option(
        "HuggingFaceTB/SmolLM2-135M-Instruct", "hub name or folder of a chat model"
    )
    seeds: list[int] | None = option(None, "none: 1 2 3")
    second: bool = option(False, "the second plan")
    output: str = option("runs/results", "folder of the page and of the picture")


# --- one run ---


def train_for(config, algorithm):
    """Train for AT[-1] CPU seconds of one thread. Returns {steps, a list with a dict for each;
    figures}."""
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
        steps.append(metrics | {"seconds/total": last, "seconds": seconds, "sampling": share})
    figures["steps"] = len(steps) - 1  # the last one is over too late
    figures["questions"] = sum(step["questions"] for step in steps[:-1])
    figures["sampling"] = fmean(step["sampling"] for step in steps)
    return {"steps": steps, "figures": figures}


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


# --- all runs, and their figures ---


def make_runs(options, name, folder):
    """Make the runs of a study that are not there yet. A run is one file in the folder."""
    jobs = list(product(options.seeds or (1, 2, 3), STUDIES[name].items()))
    for seed, (method, more) in tqdm(jobs, desc="runs"):
        path = folder / f"{name_of(method, seed)}.json"
        if not path.exists():
            usual = SETTING | {"model": options.model, "seed": seed, "lr": LR}
            run = {"method": method, "seed": seed, "options": usual | more}
            run |= train_for(*config_of(usual | more))
            files.write(path, json.dumps(run) + "\n")


def finished(name, folder):
    """{method: its figures} of all runs of a study that are in the folder."""
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    found = {}
    for method in STUDIES[name]:
        own = [run for run in runs if run["method"] == method]
        if own:
            found[method] = summary(own)
    return found


def summary(runs):
    """The figures of one method, over its seeds."""
    row = over_seeds([run["figures"] for run in runs])
    for name in ("length", "steps", "questions", "sampling"):
        row[name] = row[name]["mean"]
    row["seeds"] = [run["seed"] for run in runs]
    row["curves"] = [curve(run["steps"]) for run in runs]
    row["seconds"] = [seconds_to(REACHED, points) for points in row["curves"]]
    return row


def seconds_to(least, points):
    """The seconds after which a run first has an accuracy; None if it has not in time."""
    for seconds, _, accuracy in points:
        if accuracy >= least and seconds <= AT[-1]:
            return seconds


# --- the page ---


def table(rows):
    """What the methods did with their seconds, as a Markdown table."""
    lines = [["", "steps", "questions", "tokens long", "share of sampling",
              f"seconds to {REACHED}, each seed"]]
    for name, row in rows.items():
        facts = [round(row[name]) for name in ("steps", "questions")]
        seconds = [f"{one:.0f}" if one else "–" for one in row["seconds"]]
        share = f"{row['sampling']:.0%}"
        lines.append([name, *facts, f"{row['length']:.1f}", share, ", ".join(seconds)])
    return markdown_table(lines)


def differences(rows, figure):
    """An accuracy of each method, and whether each of its seeds is above (or below) each seed of
    two other methods, as a Markdown table."""
    others = [name for name in OTHERS if name in rows][:2]
    lines = [["", "mean ± std", "lowest", "highest", *(f"beside {name}" for name in others)]]
    for name, row in rows.items():
        own = row[figure]
        line = [name, pm(own), f"{own['min']:.3f}", f"{own['max']:.3f}"]
        for other in others:
            line.append(beside(own, rows[other][figure]))
        lines.append(line)
    return markdown_table(lines)


def beside(own, other):
    """Of two spreads over the seeds."""
    if own["min"] > other["max"]:
        return "above"
    return "below" if own["max"] < other["min"] else "–"


def page(result, name):
    rows = result["rows"]
    text = heading("GRPO, CPPO and their controls on a real model", result) + "\n"
    text += (RESULTS / f"{name}_plan.md").read_text(encoding="utf-8")
    text += f"\n## Results\n\n{table(rows)}\n\n![Accuracy against seconds]({name}.png)\n"
    for how, at in product(("sampled", "greedy"), AT):
        text += f"\nAccuracy after {at} s, {how}:\n\n{differences(rows, f'{how} {at}')}\n"
    return text


TITLES = {  # what the two panels of curves show
    "real": ("CPPO leads at half time,\nnot at the end",
             "A random choice, larger batches\nand a larger rate for GRPO fall behind"),
    "real_second": ("CPPO, the paper's formula",
                    "CPPO as published is as good;\nGRPO in mini-batches falls behind"),
}


def picture(rows, output, titles):
    """Accuracy against seconds in two panels, and the seconds to an accuracy."""
    figure, axes = panels(3, 5.6, width=18)
    of_claim = {name: row for name, row in rows.items() if name in CLAIM}
    others = {name: row for name, row in rows.items() if name not in of_claim}
    draw_curves(axes[0], of_claim)
    draw_curves(axes[1], {"GRPO": rows["GRPO"]} | others)
    draw_seconds(axes[2], rows)
    for axis, title in zip(axes, (*titles, f"Seconds to an accuracy of {REACHED}")):
        axis.set_title(title, fontsize=13)
        plain(axis)
    foot(figure, "line: mean of the seeds; band: lowest to highest")
    figure.savefig(output, dpi=DPI)


def draw_curves(axis, rows):
    """Accuracy against seconds. Lines of one colour differ in their style."""
    axis.set(xlabel="CPU seconds of training", ylabel="accuracy, sampled (moving mean)")
    axis.set(xlim=(0, AT[-1]), ylim=(0, 0.85))
    lines, used = [], []
    for name, row in rows.items():
        own = colour(name, other=OTHER)
        style = STYLES[used.count(own) % len(STYLES)]
        used.append(own)
        last = band(axis, row["curves"], 0, own, style, until=AT[-1])
        lines.append((last, in_words(name), own))
    name_lines(axis, lines)


def draw_seconds(axis, rows):
    """The seconds to an accuracy: a line for each method, a dot for each seed."""
    names = sorted(rows, key=lambda name: median(reached(rows[name])))
    for y, name in enumerate(names):
        dots = reached(rows[name])
        axis.plot(dots, [y] * len(dots), "o", color=colour(name), markersize=8)
    axis.set_yticks(range(len(names)), [in_words(name) for name in names], fontsize=11)
    axis.invert_yaxis()
    axis.set(xlim=(0, 1.05 * AT[-1]), xlabel=f"dots: seeds; at {AT[-1]} s: not reached in time")


def reached(row):
    """The seconds of each seed to an accuracy; all its seconds if it has not reached it."""
    return [seconds or AT[-1] for seconds in row["seconds"]]


def main(argv):
    options = parse(Options, argv)
    name = "real_second" if options.second else "real"
    folder = Path("runs", name)
    folder.mkdir(parents=True, exist_ok=True)
    make_runs(options, name, folder)
    result = {"setting": SETTING, "lr": LR, "rows": finished(name, folder)}
    report(options, name, result, partial(page, name=name))
    picture(result["rows"], Path(options.output) / f"{name}.png", TITLES[name])


if __name__ == "__main__":
    run_program(main)
