"""A run of so many CPU seconds, whatever the method: the loop of real.py and fewer.py.

A method that makes cheap steps makes more of them. The learning rate follows the seconds, so that
every method has a whole schedule. Evaluation does not count. """

import json
import random
import re
import statistics
import time
from copy import deepcopy
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

import torch
from tqdm import tqdm

from engine.base import files
from engine.base.errors import UserError
from engine.model.networks import build
from engine.model.sampling import Sampling
from engine.run.config import check
from engine.run.options import option
from engine.run.state import learning_rate
from engine.scoring.score import choose
from engine.tasks.questions import base_model, load_questions, take
from eval import examine
from experiments.reproduce import curve, name_of, pm, spread
from experiments.setting import markdown_table
from train import train_step
from update import Limits

LOGGED = (
    "questions", "completions", "kept", "accuracy", "length", "no_signal", "entropy", "grad_norm",
    "loss",
)


@dataclass
class Runs:
    _argument_group_name = "which runs, and where the page goes"

    methods: list[str] | None = option(None, "which methods, by their names; none: all")
    seeds: list[int] | None = option(None, "none: 1 2 3")
    share: str = option("1/1", "I/N: only every N-th run, from the I-th on")
    page: bool = option(False, "train nothing; write the page of the runs that are there")
    output: str = option(
        "experiments/results", "folder of the page and of the picture, if there is one"
    )


def in_order(questions, seed, seen):
    """All questions in the order of the seed, again and again, each time in another order.

    seen: (question, mean reward) of each question so far; a method that chooses its questions looks
    at it. """
    for epoch in count():
        yield from take(questions, epoch * len(questions), len(questions), seed)


def train_for(config, at, eval_questions, label, step=train_step, order=in_order):
    """Train for at[-1] CPU seconds of one thread. Returns {steps, evaluations}, lists with a dict
    for each.

    at: the seconds of the evaluations, on `eval_questions` held-out questions. step: what
    `train_step` does. order(questions, seed, seen): which questions are asked, an iterator. """
    algorithm, device = check(config), torch.device("cpu")
    networks = build(
        base_model(config.model, config.dataset), device, config, config, lr=config.lr,
        critic_lr=config.critic_lr, beta=config.beta, seed=config.seed,
    )
    torch.set_num_threads(1)
    prompts = {"tokenizer": networks.tokenizer, "system_prompt": config.system_prompt}
    questions, _ = load_questions(config.dataset, **prompts)
    test, _ = load_questions(config.dataset, split="test", limit=eval_questions, **prompts)
    sampling, rewards = Sampling(config.max_new_tokens), choose(config.rewards)

    def evaluate(seconds):
        scores = examine(
            networks.sampler, networks.tokenizer, test, rewards[0].function, sampling, seed=0,
            batch_size=128,
        )
        kept = ("accuracy", "length", "truncated")
        return {
            "at": seconds,
            **{how: {key: scores[how][key] for key in kept} for how in ("greedy", "sampled")},
        }

    def schedule(optimizer, *_):  # the learning rate at the moment of the update
        now = min(1.0, (seconds + time.process_time() - begin) / at[-1])
        optimizer.param_groups[0]["lr"] = learning_rate(now, config.lr, warmup=0.1)

    networks.optimizer.register_step_pre_hook(schedule)
    steps, evaluations, seconds, seen = [], [], 0.0, []
    questions = order(questions, config.seed, seen)
    bar = tqdm(total=at[-1], desc=label, unit="s")
    while len(evaluations) < len(at):
        before = deepcopy(networks.model.state_dict())
        begin = time.process_time()
        asked = list(islice(questions, algorithm.questions_per_step))
        rng = random.Random(f"{config.seed} {len(steps) + 1}")
        metrics, sample, mean_rewards, _ = step(
            networks, algorithm, rewards, sampling, Limits(), lambda _: asked, rng
        )  # noqa: B023
        last = time.process_time() - begin
        while len(evaluations) < len(at) and seconds + last > at[len(evaluations)]:
            after = deepcopy(networks.model.state_dict())
            networks.model.load_state_dict(before)
            evaluations.append(evaluate(at[len(evaluations)]))
            networks.model.load_state_dict(after)
        seconds += last
        seen += zip(asked, mean_rewards)
        steps.append(logged(metrics, sample) | {"seconds/total": last, "seconds": seconds})
        bar.update(min(seconds, at[-1]) - bar.n)
        bar.set_postfix_str(f"accuracy {metrics['accuracy']:.2f}, length {metrics['length']:.0f}")
    bar.close()
    return {"steps": steps, "evaluations": evaluations}


def logged(metrics, sample):
    """What a finished run keeps of a step."""
    row = {key: metrics[key] for key in LOGGED} | {
        "sampling": metrics["seconds/generate"] / metrics["seconds/total"]
    }
    return row | {"text": sample["completions"][0]["completion"]}


def rows(options, methods, one_run, at, reached):
    """Make the runs that are not there yet. Returns {method: its figures} of all runs that are
    there.

    options: Runs, and the folder of the finished runs. one_run(method, seed, label, options) →
    dict, one file in it. """
    unknown = set(options.methods or ()) - set(methods)
    if unknown:
        raise UserError(f"unknown method '{unknown.pop()}': there are {'; '.join(methods)}.")
    jobs = [
        (seed, method)
        for seed in options.seeds or (1, 2, 3)
        for method in options.methods or methods
    ]
    share = re.fullmatch(r"(\d+)/(\d+)", options.share)
    if not share or not 1 <= int(share[1]) <= int(share[2]):
        raise UserError(f"--share must be I/N with I from 1 to N, as 1/2, not {options.share}.")
    first, step = int(share[1]), int(share[2])
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    for seed, method in [] if options.page else jobs[first - 1 :: step]:
        path = folder / f"{name_of(method, seed)}.json"
        if not path.exists():
            run = {"method": method, "seed": seed} | one_run(
                method, seed, f"{method}, seed {seed}", options
            )
            files.write(path, json.dumps(run) + "\n")
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    if not runs:
        raise UserError(f"{folder} holds no finished run: leave out --page.")
    return {
        name: summary(own, at, reached)
        for name in methods
        if (own := [run for run in runs if run["method"] == name])
    }


def summary(runs, at, reached):
    """The figures of one method, over its seeds. reached: the accuracy to which the seconds are
    counted."""
    row = {
        "seeds": [run["seed"] for run in runs],
        "steps": statistics.fmean(len(run["steps"]) - 1 for run in runs),
    }
    for n, seconds in enumerate(at):
        for how in ("greedy", "sampled"):
            row[f"{how} {seconds}"] = spread(
                [run["evaluations"][n][how]["accuracy"] for run in runs]
            )
    row["length"] = statistics.fmean(run["evaluations"][-1]["sampled"]["length"] for run in runs)
    for name in ("questions", "completions"):
        row[name] = statistics.fmean(sum(step[name] for step in run["steps"][:-1]) for run in runs)
    for name in ("sampling", "no_signal"):
        row[name] = statistics.fmean(step[name] for run in runs for step in run["steps"])
    row["curves"] = [curve(run["steps"]) for run in runs]
    within = (
        [seconds for seconds, _, accuracy in points if accuracy >= reached and seconds <= at[-1]]
        for points in row["curves"]
    )
    return row | {"seconds": [min(seconds, default=None) for seconds in within]}


def table(rows, at, reached):
    """The figures of all methods as a Markdown table."""
    lines = [
        [
            "", "seeds", "steps", "questions", "completions", f"greedy, {at[0]} s", "sampled",
            f"greedy, {at[1]} s", "sampled", "tokens long", f"seconds to {reached}, each seed",
            "share of sampling", "questions without signal",
        ]
    ]
    for name, row in rows.items():
        lines.append(
            [
                name, len(row["seeds"]),
                *(f"{row[key]:.0f}" for key in ("steps", "questions", "completions")),
                *(pm(row[f"{how} {seconds}"]) for seconds in at for how in ("greedy", "sampled")),
                f"{row['length']:.1f}", ", ".join(f"{x:.0f}" if x else "–" for x in row["seconds"]),
                f"{row['sampling']:.0%}", f"{row['no_signal']:.0%}",
            ]
        )
    return markdown_table(lines)
