"""GRPO, CPPO and their controls on a real chat model: the same seconds for each of them.

    python experiments/real.py --model DIR                     all methods and seeds, and the page
    python experiments/real.py --model DIR --share 1/2         every second run: start 2/2 on another core
    python experiments/real.py --page                          only the page and the pictures, of the runs that are there

SmolLM2-135M-Instruct learns the word problems of `--dataset arithmetic`. Each run gets the same CPU seconds of one
thread. Evaluation does not count. At the times of AT, held-out questions are answered by the newest weights of that
moment: a step that is not over yet does not count. The learning rate warms up over the first tenth of the seconds and
then falls along a cosine, so each method has a whole schedule, however many steps it makes.

A finished run is one file in runs/real/. To continue after an interruption, run the same command again: an interrupted
run begins anew.
"""

import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from engine.model.networks import build
from engine.model.sampling import Sampling
from engine.run import logs
from engine.run.config import Config, check
from engine.run.options import UserError, option, parse, run_program
from engine.run.state import learning_rate
from engine.scoring.score import choose
from engine.tasks.questions import load_questions, take
from eval import examine
from train import train_step
from update import Limits

SETTING = {"dataset": "arithmetic", "questions_per_step": 4, "group_size": 16, "mu": 1, "beta": 0.0, "dtype": "float32"}
LR = 3e-5
AT = (300, 600)  # seconds
EVAL_QUESTIONS = 256
LONGER = 2.0  # how much longer CPPO's gradient is than GRPO's


def cppo(rate, **options):
    return {"algorithm": "cppo", "pruning_rate": rate, **options}


METHODS = {  # options of train.py, on top of SETTING
    "GRPO": {"algorithm": "grpo"},
    "CPPO, P=0.875": cppo(0.875),
    "random, P=0.875": cppo(0.875, keep="random"),
    "CPPO, P=0.875, no allocation": cppo(0.875, allocation=False),
    "GRPO, 32 questions": {"algorithm": "grpo", "questions_per_step": 32},
    "GRPO, G=2, 32 questions": {"algorithm": "grpo", "group_size": 2, "questions_per_step": 32},
    "one of each kind, P=0.875": cppo(0.875, keep=f"{Path(__file__).parent / 'rules.py'}:distinct"),
    "GRPO, longer steps": {"algorithm": "grpo", "lr": LONGER * LR},
    "CPPO, P=0.75": cppo(0.75),
    "CPPO, P=0.5": cppo(0.5),
}


@dataclass
class Options:
    model: str = option("HuggingFaceTB/SmolLM2-135M-Instruct", "hub name or folder of the model")
    methods: list[str] | None = option(None, "which methods, by their names; none: all")
    seeds: list[int] | None = option(None, "none: 1 2 3")
    share: str = option("1/1", "I/N: only every N-th run, from the I-th on")
    lr: float = option(LR, "learning rate of every method that has none of its own")
    folder: str = option("runs/real", "folder of the finished runs")


def one_run(model, method, seed, lr, label):
    """Train for the seconds of AT. Returns what is known of the run: its steps, and the evaluations."""
    config = Config(model=model, seed=seed, **{"lr": lr, **SETTING, **METHODS[method]})
    algorithm, device = check(config), torch.device("cpu")
    networks = build(model, config, device)
    torch.set_num_threads(1)
    prompts = {"tokenizer": networks.tokenizer, "system_prompt": config.system_prompt}
    questions, _ = load_questions(config.dataset, **prompts)
    test, _ = load_questions(config.dataset, split="test", limit=EVAL_QUESTIONS, **prompts)
    sampling, rewards = Sampling(config.max_new_tokens), choose(config.rewards)

    def evaluate(seconds):
        scores = examine(networks.sampler, networks.tokenizer, test, rewards[0].function, sampling, seed=0, batch_size=128)
        kept = ("accuracy", "length", "truncated")
        return {"at": seconds, **{how: {key: scores[how][key] for key in kept} for how in ("greedy", "sampled")}}

    steps, evaluations, seconds, last, position = [], [], 0.0, 0.0, 0
    bar = tqdm(total=AT[-1], desc=label, unit="s")
    while len(evaluations) < len(AT):
        before = {name: p.detach().clone() for name, p in networks.model.named_parameters()}
        begin = time.process_time()
        now = min(1.0, (seconds + last / 2) / AT[-1])  # the middle of the step, if it takes as long as the one before
        networks.optimizer.param_groups[0]["lr"] = learning_rate(now, config.lr, warmup=0.1)
        asked = take(questions, position, algorithm.questions_per_step, seed)
        rng = random.Random(f"{seed} {len(steps) + 1}")
        metrics, sample = train_step(networks, algorithm, rewards, sampling, Limits(), lambda _: asked, rng)  # noqa: B023
        last = time.process_time() - begin
        while len(evaluations) < len(AT) and seconds + last > AT[len(evaluations)]:
            after = {name: p.detach().clone() for name, p in networks.model.named_parameters()}
            put(before, networks.model)
            evaluations.append(evaluate(AT[len(evaluations)]))
            put(after, networks.model)
        seconds, position = seconds + last, position + len(asked)
        keys = ("questions", "completions", "kept", "accuracy", "length", "no_signal", "entropy", "grad_norm", "loss")
        row = {key: metrics[key] for key in keys} | {name: metrics[name] for name in metrics if name.startswith("seconds/")}
        steps.append(row | {"seconds": seconds, "text": sample["completions"][0]["completion"]})
        bar.update(min(seconds, AT[-1]) - bar.n)
        bar.set_postfix_str(f"accuracy {metrics['accuracy']:.2f}, length {metrics['length']:.0f}")
    bar.close()
    made_with = {"method": method, "seed": seed, "lr": config.lr, "options": SETTING | METHODS[method]}
    return made_with | {"steps": steps, "evaluations": evaluations}


def put(weights, model):
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[name])


def main(argv):
    options = parse(Options, argv)
    unknown = set(options.methods or ()) - set(METHODS)
    if unknown:
        raise UserError(f"unknown method '{unknown.pop()}': there are {'; '.join(METHODS)}.")
    jobs = [(seed, method) for seed in options.seeds or (1, 2, 3) for method in options.methods or METHODS]
    first, step = map(int, options.share.split("/"))
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    for seed, method in jobs[first - 1 :: step]:
        path = folder / f"{method}, seed {seed}.json".replace(", ", "-").replace(" ", "-")
        if not path.exists():
            run = one_run(options.model, method, seed, options.lr, f"{method}, seed {seed}")
            logs.write(path, json.dumps(run) + "\n")


if __name__ == "__main__":
    run_program(main)
