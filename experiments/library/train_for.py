"""One run that is as long as a clock says. So methods whose steps cost more or less get the same
time.

The learning rate follows the clock, so every method has a whole schedule, however many steps it
makes. Evaluation does not count. The clock: on a CPU the CPU seconds of this process, so that
nothing else on the machine counts; on a GPU the seconds in which the device had finished.
"""

import random
import time
from copy import deepcopy
from statistics import fmean

from engine.data.questions import load_questions, take
from engine.model.networks import build
from engine.run.plan import choose_micro_batch_tokens
from engine.run.state import learning_rate
from engine.scoring.score import load_rewards
from eval import evaluate
from experiments.library.bench import finish
from experiments.library.study import curve
from tasks.table import base_model
from train import train_step
from update import Limits

WARMUP = 0.1  # of the time


def train_for(config, algorithm, device, seconds, at, eval_questions):
    """Train for so many seconds. Returns the figures of this run.

    config, algorithm: as `config_of` returns them. at: moments, in seconds, the last one at most
    `seconds`. At each, `held_out` has (the moment, completions sampled before it, accuracy): one
    sampled answer to each of `eval_questions` questions of the test split, by the newest weights of
    that moment. A step that is not over yet does not count. `curve` has the same points for the
    questions of training, which are all new.
    """
    data = config.data
    per_step = algorithm.questions_per_step
    networks = build(config, algorithm, base_model(data.model, data.dataset), device)
    prompts = {"tokenizer": networks.tokenizer, "system_prompt": data.system_prompt}
    questions, _ = load_questions(data.dataset, **prompts)
    test, _ = load_questions(data.dataset, split="test", limit=eval_questions, **prompts)
    rewards = load_rewards(data.rewards)
    tokens, _ = choose_micro_batch_tokens(config.options, device)
    limits = Limits(tokens)
    now = clock_of(device)
    steps, held_out = [], []
    spent = 0.0
    begin = 0.0

    def schedule(optimizer, *_):  # the learning rate at the moment of the update
        done = min(1.0, (spent + now() - begin) / seconds)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(done, config.update.lr, WARMUP)

    networks.optimizer.register_step_pre_hook(schedule)
    moments = list(at)
    while moments:
        before = deepcopy(networks.model.state_dict())
        number = len(steps)
        asked = take(questions, number * per_step, per_step, config.run.seed)
        rng = random.Random(f"{config.run.seed} {number + 1}")
        begin = now()
        metrics, *_ = train_step(
            networks, algorithm, rewards, config.sampling, limits, asked, rng)
        last = now() - begin
        while moments and moments[0] < spent + last:
            accuracy = accuracy_of(networks, before, test, rewards[0].function, config.sampling)
            completions = sum(step["completions"] for step in steps)
            held_out.append((moments.pop(0), completions, accuracy))
        spent += last
        share = metrics["seconds/generate"] / metrics["seconds/total"]
        steps.append(metrics | {"seconds/total": last, "sampling": share})
    steps.pop()  # it was over too late
    return {
        "steps": len(steps),
        "questions": sum(step["questions"] for step in steps),
        "completions": sum(step["completions"] for step in steps),
        "sampling": fmean(step["sampling"] for step in steps),
        "length": fmean(step["length"] for step in steps[-10:]),
        "held_out": held_out,
        "curve": curve(steps),
    }


def clock_of(device):
    """A function that returns seconds."""
    if device.type == "cpu":
        return time.process_time

    def now():
        finish()
        return time.perf_counter()

    return now


def accuracy_of(networks, weights, questions, reward, sampling):
    """The share of questions that the model with these weights answers right, one sampled answer
    each. The model has the weights only meanwhile."""
    own = deepcopy(networks.model.state_dict())
    networks.model.load_state_dict(weights)
    networks.refresh_sampler()
    records = evaluate(networks.sampler, networks.tokenizer, questions, reward, sampling, seed=0)
    networks.model.load_state_dict(own)
    networks.refresh_sampler()
    return fmean(record["correct"] for record in records)


def reached(points, accuracy):
    """The first moment of (moment, completions, accuracy) with this accuracy; None: not in time."""
    for moment, _, value in points:
        if value >= accuracy:
            return moment
    return None
