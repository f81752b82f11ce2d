"""Training for a number of seconds: the core of a study that gives all methods the same time.

A method that makes cheap steps makes more of them. The learning rate follows the seconds, so that
every method has a whole schedule. Evaluations do not count.
"""

import random
import time
from copy import deepcopy
from statistics import fmean

import torch

from engine.data.questions import load_questions, take
from engine.model.networks import build
from engine.run.plan import choose_micro_batch_tokens
from engine.run.state import learning_rate
from engine.scoring.score import load_rewards
from eval import examine
from experiments.library.study import curve
from tasks.table import base_model
from train import train_step
from update import Limits


def train_for(config, algorithm, device, seconds, at=None, eval_questions=256):
    """Train a model for so many seconds. Returns the figures of this run.

    The seconds are those of `clock`. config, algorithm: as of `config_of`. at: the seconds at which
    the model is evaluated; None: at the end. eval_questions: how many held-out questions.

    Figures: "greedy S" and "sampled S", the accuracies after S seconds; "length", the tokens of a
    completion at the last evaluation; "steps" and "questions" that fit into the seconds;
    "sampling", its share of the time; "curves", rows of (seconds, completions, accuracy).
    """
    data, per_step = config.data, algorithm.questions_per_step
    networks = build(config, algorithm, base_model(data.model, data.dataset), device)
    prompts = {"tokenizer": networks.tokenizer, "system_prompt": data.system_prompt}
    questions, _ = load_questions(data.dataset, **prompts)
    test, _ = load_questions(data.dataset, split="test", limit=eval_questions, **prompts)
    rewards = load_rewards(data.rewards)
    tokens, _ = choose_micro_batch_tokens(config.options, device)
    limits, steps, figures, spent = Limits(tokens), [], {}, 0.0

    def schedule(*_):  # the learning rate at the moment of the update
        done = min(1.0, (spent + clock(device) - begin) / seconds)
        networks.follow(lambda peak: learning_rate(done, peak, config.update.warmup))

    networks.optimizer.register_step_pre_hook(schedule)
    while spent <= seconds:
        before, begin = deepcopy(networks.model.state_dict()), clock(device)
        asked = take(questions, len(steps) * per_step, per_step, config.run.seed)
        rng = random.Random(f"{config.run.seed} {len(steps) + 1}")
        step = train_step(networks, algorithm, rewards, config.sampling, limits, asked, rng)
        last = clock(device) - begin
        for moment in at or [seconds]:
            if spent <= moment < spent + last:  # the model is still the one before this step
                found = evaluate(networks, before, test, rewards[0].function, config.sampling)
                figures["length"] = found.pop("length")
                figures |= {f"{how} {moment}": accuracy for how, accuracy in found.items()}
        spent += last
        share = step.metrics["seconds/generate"] / step.metrics["seconds/total"]
        steps.append(step.metrics | {"seconds/total": last, "sampling": share})
    return figures | of_steps(steps)


def clock(device):
    """Seconds: of the processor, which other work does not slow down; on a GPU those that pass."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def evaluate(networks, weights, questions, reward, sampling):
    """{"greedy" and "sampled": accuracy, "length": of a sampled completion} of the policy with
    these weights, which it has only meanwhile."""
    now = deepcopy(networks.model.state_dict())
    networks.model.load_state_dict(weights)
    networks.refresh_sampler()
    scores = examine(
        networks.sampler, networks.tokenizer, questions, reward, sampling, seed=0, batch_size=128
    )
    networks.model.load_state_dict(now)
    networks.refresh_sampler()
    sampled = scores["sampled"]
    return {"greedy": scores["greedy"]["accuracy"], "sampled": sampled["accuracy"],
            "length": sampled["length"]}


def of_steps(steps):
    """The figures of a run that are in the metrics of its steps. The last step ends too late."""
    return {
        "steps": len(steps) - 1, "questions": sum(step["questions"] for step in steps[:-1]),
        "sampling": fmean(step["sampling"] for step in steps), "curves": curve(steps),
    }


def reached(row, accuracy, seconds):
    """The seconds after which each run first has this accuracy; None if not in so many seconds.
    row: of a study, with the curves of its seeds."""
    found = []
    for points in row["curves"]:
        times = [now for now, _, of_now in points if of_now >= accuracy and now <= seconds]
        found.append(times[0] if times else None)
    return found
