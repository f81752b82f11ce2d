"""Training for a number of seconds: the core of a study that gives all methods the same time.

A method that makes cheap steps makes more of them. The learning rate follows the seconds, so that
every method has a whole schedule. Evaluations do not count.
"""

import random
import time
from copy import deepcopy
from statistics import fmean

import torch

from engine.data.questions import load_questions
from engine.model.networks import build
from engine.run.plan import choose_micro_batch_tokens
from engine.run.state import learning_rate
from engine.scoring.score import load_rewards
from eval import sample_and_judge
from experiments.library.bench import questions_of_step
from experiments.library.study import curve
from loop.records import Parts
from loop.update import Limits
from tasks.table import base_model
from train import train_step


def train_for(config, algorithm, device, seconds, at, eval_questions=256):
    """Train a model for so many seconds. Returns the figures of this run.

    The seconds are those of `clock`. config, algorithm: as of `config_of`. at: the seconds after
    which the model is evaluated, in order; with the last one the run ends. eval_questions: how many
    held-out questions.

    Figures: "steps", "questions" and "completions" that fit into the seconds; "sampling", its share
    of the time; "length", the tokens of a completion in the last steps; "held_out" and "curves",
    rows of (seconds, completions, accuracy): of held-out questions, and of those of training, which
    are all new.
    """
    data = config.data
    per_step = algorithm.questions_per_step
    networks = build(config, algorithm, base_model(data.model, data.dataset), device)
    prompts = {"tokenizer": networks.tokenizer, "system_prompt": data.system_prompt}
    questions, _ = load_questions(data.dataset, **prompts)
    test, _ = load_questions(data.dataset, split="test", limit=eval_questions, **prompts)
    rewards = load_rewards(data.rewards)
    tokens, _ = choose_micro_batch_tokens(config.options, device)
    parts = Parts(networks, algorithm, rewards, config.sampling, Limits(tokens))
    steps, held_out = [], []
    spent = begin = 0.0

    def schedule(*_):  # the learning rate at the moment of the update
        done = min(1.0, (spent + clock(device) - begin) / seconds)
        networks.set_learning_rate(lambda peak: learning_rate(done, peak, config.update.warmup))

    networks.optimizer.register_step_pre_hook(schedule)
    moments = list(at)
    while moments:
        before = deepcopy(networks.model.state_dict())
        begin = clock(device)
        asked = questions_of_step(questions, len(steps), per_step, config.run.seed)
        rng = random.Random(f"{config.run.seed} {len(steps) + 1}")
        step = train_step(parts, asked, rng)
        last = clock(device) - begin
        while moments and moments[0] < spent + last:  # the model was still that before this step
            accuracy = accuracy_of(networks, before, test, rewards[0].function, config.sampling)
            completions = sum(metrics["completions"] for metrics in steps)
            held_out.append((moments.pop(0), completions, accuracy))
        spent += last
        share = step.metrics["seconds/generate"] / step.metrics["seconds/total"]
        steps.append(step.metrics | {"seconds/total": last, "sampling": share})
    return of_steps(steps[:-1]) | {"held_out": held_out, "curves": curve(steps)}


def clock(device):
    """Seconds: of the processor, which other work does not slow down; on a GPU those that pass."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def accuracy_of(networks, weights, questions, accuracy_reward, sampling):
    """The share of right answers, one sampled for each question, of the policy with these weights,
    which it has only meanwhile."""
    now = deepcopy(networks.model.state_dict())
    networks.model.load_state_dict(weights)
    networks.sync_sampler()
    records = sample_and_judge(
        networks.sampler, networks.tokenizer, questions, accuracy_reward, sampling, seed=0)
    networks.model.load_state_dict(now)
    networks.sync_sampler()
    return fmean(record["correct"] for record in records)


def of_steps(steps):
    """The figures of a run that are in the metrics of its steps."""
    return {
        "steps": len(steps),
        "questions": sum(step["questions"] for step in steps),
        "completions": sum(step["completions"] for step in steps),
        "sampling": fmean(step["sampling"] for step in steps) if steps else 0.0,
        "length": fmean(step["length"] for step in steps[-10:]) if steps else 0.0,
    }


def reached(curves, accuracy, seconds):
    """The seconds after which each run first has this accuracy; None if not in so many seconds.
    curves: of each run, rows of (seconds, completions, accuracy)."""
    found = []
    for points in curves:
        times = [now for now, _, of_now in points if of_now >= accuracy and now <= seconds]
        found.append(times[0] if times else None)
    return found
