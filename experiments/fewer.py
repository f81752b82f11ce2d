"""Sampling fewer completions, which is what is left to save after pruning: two ideas, measured.

    python experiments/fewer.py                                the toy; writes fewer.json and
                                                               fewer.md in experiments/results
    python experiments/fewer.py --model DIR                    a chat model, set up as in real.py;
                                                               writes fewer_real.*
    python experiments/fewer.py --share 1/2                    every second run: start 2/2 on
                                                               another core

- Until a signal: a question is answered in rounds of 4 completions, until there is a right and a
wrong one or there are
  G (Reinforce-Ada, 2510.04996). The advantages compare the completions that were drawn. Then a step
  goes on as usual.
- Skipping: a question that had no signal in its last z turns is skipped with probability 1 − p^z.
There is a p for
  questions that were too easy, and one for those that were too hard. After each step p falls by
  0.01 if more such questions were met than wanted, or else it rises (GRESO, 2506.02177). This takes
  more than one pass over the questions.

Every run of a task has the same CPU seconds. Finished runs are kept in runs/fewer/ and
runs/fewer_real/. CPPO's runs on the real model are those of real.py: to save an hour, copy them
from runs/real/. """

import math
import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

import rollout as rollout_module
from engine.run.config import Config
from engine.run.options import option, parse, run_program
from experiments import real, same_seconds
from experiments.reproduce import PROTOCOL, RULES
from experiments.same_seconds import in_order
from experiments.setting import heading, markdown_table, setting, write
from family.dapo import has_signal
from grpo import group_advantages
from train import train_step

ROUND = 4  # completions that a question gets at a time


# --- until a signal ---


def until_a_signal(questions, algorithm, roll_out=rollout_module.roll_out, **options):
    """`roll_out` in rounds. Returns a Rollout of Q·G places; `trainable` says which of them hold a
    completion."""
    Q, G, whole = len(questions), algorithm.group_size, None
    open_ = torch.arange(Q)  # the questions without a signal so far
    for drawn in range(0, G, ROUND):
        asked = [questions[q] for q in open_]
        part = roll_out(asked, algorithm=replace(algorithm, group_size=ROUND), **options)
        if whole is None:
            whole = with_places(part, questions, G, options["sampling"].max_new_tokens)
        places = torch.arange(drawn, drawn + ROUND)
        rows = (open_[:, None] * G + places).flatten()
        for of_whole, of_part in ((whole.tokens, part.tokens), (whole.logp, part.logp)):
            of_whole[rows, : of_part.shape[1]] = of_part
        for row, text in zip(rows, part.texts):
            whole.texts[row] = text
        at = (open_[:, None], places)
        whole.lengths[at], whole.truncated[at], whole.trainable[at] = (
            part.lengths, part.truncated, True,
        )
        whole.rewards[:, *at] = part.rewards
        open_ = open_[
            [not has_signal(whole.total[q : q + 1, : drawn + ROUND]).item() for q in open_]
        ]
        if not len(open_):
            break
    return whole


def with_places(part, questions, G, longest):
    """A Rollout like `part`, with a free place for each completion of the questions."""
    Q = len(questions)
    return replace(
        part, questions=questions, texts=[""] * (Q * G), tokens=part.tokens.new_zeros(Q * G, longest),
        logp=part.logp.new_zeros(Q * G, longest), lengths=torch.zeros(Q, G, dtype=torch.long),
        truncated=torch.zeros(Q, G, dtype=torch.bool), trainable=torch.zeros(Q, G, dtype=torch.bool),
        rewards=torch.zeros(len(part.rewards), Q, G))  # fmt: skip


def advantages_of_the_drawn(rollout):
    """A_i over the completions that were drawn for a question, 0 in the free places."""
    A = torch.zeros(rollout.lengths.shape)
    for q, drawn in enumerate(rollout.trainable):
        A[q, drawn] = group_advantages(rollout.total[q : q + 1, drawn])[0]
    return A


def step_until_a_signal(networks, algorithm, *rest):
    """`train_step`, drawn in rounds. The accuracy is that of the first rounds: later ones leave out
    what has a signal."""
    rollouts = []

    def in_rounds(questions, **options):
        rollouts.append(until_a_signal(questions, **options))
        return rollouts[-1]

    with mock.patch.object(rollout_module, "roll_out", in_rounds):
        of_step = train_step(
            networks, replace(algorithm, advantages=advantages_of_the_drawn), *rest
        )
    [drawn] = rollouts
    completions = int(drawn.trainable.sum())
    accuracy = (drawn.rewards[0, :, :ROUND] > 0).float().mean().item()
    # train_step counts the free places, too
    right = {
        "completions": completions, "accuracy": accuracy,
        "length": drawn.lengths.sum().item() / completions,
    }
    return of_step._replace(metrics=of_step.metrics | right)


# --- skipping ---


def skipping(questions, seed, seen):
    """GRESO: in order, without the questions that have probably no signal."""
    rng, last, done = random.Random(f"skip {seed}"), {}, 0
    # mean reward 0: too hard; 1: too easy
    p, wanted = {0.0: 0.5, 1.0: 0.5}, {0.0: 1 / 6, 1.0: 1 / 12}
    for question in in_order(questions, seed, seen):
        new, done = seen[done:], len(seen)  # what the last step has asked
        for asked, mean in new:
            _, z = last.get(asked["question"], (mean, 0))
            last[asked["question"]] = mean, z + 1 if mean in p else 0
        for kind in p if new else ():
            share = sum(mean == kind for _, mean in new) / len(new)
            p[kind] = min(max(p[kind] + (0.01 if share < wanted[kind] else -0.01), 0.05), 0.95)
        kind, z = last.get(question["question"], (None, 0))
        if z == 0 or rng.random() < p[kind] ** z:
            yield question


def first(count, order):
    """The same order, of the first questions only, so that a run passes over them several times."""
    return lambda questions, seed, seen: order(questions[:count], seed, seen)


# --- what stopping changes: the weight of a question ---


def weight(p, G, n=ROUND, std_eps=1e-4):
    """(weight of a question in the step, completions drawn for it), if a completion is right with
    probability p.

    A step moves along w · (E[∇ log π | right] − E[∇ log π | wrong]) of a question. Stopping does
    not look at the completions of a kind, so this direction stays. The weight is, for a right and b
    wrong completions,

        w = E[a/(a + b) · A(right)],  with A(right) = b/(a + b) / (std + ε)
    """
    w = completions = 0.0
    for (a, b), probability in groups(p, G, n).items():
        m = a / (a + b)
        std = math.sqrt((a + b) / (a + b - 1) * m * (1 - m))
        w += probability * m * (1 - m) / (std + std_eps)
        completions += probability * (a + b)
    return w, completions


def groups(p, G, n):
    """{(right, wrong): probability} of the group of a question. n = G: without stopping."""
    done, open_ = {}, {(0, 0): 1.0}
    for drawn in range(n, G + 1, n):
        now = {}
        for (a, b), before in open_.items():
            for right in range(n + 1):
                group = a + right, b + n - right
                chance = math.comb(n, right) * p**right * (1 - p) ** (n - right)
                part = done if all(group) or drawn == G else now
                part[group] = part.get(group, 0.0) + before * chance
        open_ = now
    return done


# --- the table ---


class Task(NamedTuple):
    name: str
    title: str
    setting: dict  # options of train.py
    at: tuple[int, int]  # seconds
    eval_questions: int
    reached: float  # the accuracy to which the seconds are counted
    methods: dict  # name: (options of train.py on top of the setting, options of train_for)


PRUNED = {"algorithm": "cppo", "pruning_rate": 0.875}
KINDS = PRUNED | {"keep": f"{RULES}:distinct"}
STOPPED = {"step": step_until_a_signal}


def passes(few):
    """Several passes over a few questions, with and without skipping."""
    return {
        f"CPPO, P=0.875, {few} questions": (PRUNED, {"order": first(few, in_order)}),
        f"CPPO, P=0.875, {few} questions, skipping": (PRUNED, {"order": first(few, skipping)}),
    }


TOY = Task("fewer", "Sampling fewer completions: the toy", PROTOCOL | {"dtype": "float32"}, (15, 30), 512, 0.85, {
    "GRPO": ({"algorithm": "grpo"}, {}),
    "CPPO, P=0.875": (PRUNED, {}),
    "one of each kind, P=0.875": (KINDS, {}),
    "until a signal, all": ({"algorithm": "grpo", "questions_per_step": 8}, STOPPED),
    "until a signal, P=0.875": (PRUNED, STOPPED),
    "until a signal, one of each kind": (KINDS, STOPPED),
    "CPPO, P=0.875, 32 questions a step": (PRUNED | {"questions_per_step": 4}, {}),
    "until a signal, P=0.875, 32 questions a step": (PRUNED | {"questions_per_step": 4}, STOPPED),
} | passes(256))  # fmt: skip
REAL = Task(
    "fewer_real", "Sampling fewer completions: a real model", real.SETTING | {"lr": real.LR},
    real.AT, real.EVAL_QUESTIONS, real.REACHED,
    {"CPPO, P=0.875": (PRUNED, {}), "until a signal, P=0.875": (PRUNED, STOPPED)} | passes(64),
)
RIGHT = (0.03, 0.06, 0.12, 0.25, 0.5, 0.75, 0.88, 0.94, 0.97)


@dataclass
class Model:
    _argument_group_name = "the model"

    model: str = option("toy", "hub name or folder of a chat model; toy: the toy's base model")
    folder: str | None = option(
        None, "folder of the finished runs; none: runs/fewer or runs/fewer_real"
    )


@dataclass
class Options(same_seconds.Runs, Model):
    pass


def page(task, about, rows):
    lines = [
        [
            "probability of a right completion", "completions drawn", "weight in GRPO",
            "weight until a signal", "ratio",
        ]
    ]
    for p in RIGHT:
        (all_, _), (stopped, drawn) = weight(p, 16, n=16), weight(p, 16)
        lines.append([p, f"{drawn:.1f}", f"{all_:.3f}", f"{stopped:.3f}", f"{stopped / all_:.2f}"])
    table = same_seconds.table(rows, task.at, task.reached)
    stopping = (
        f"What stopping changes, for G = 16 and rounds of {ROUND}:\n\n{markdown_table(lines)}"
    )
    return f"{heading(task.title, about)}\n{table}\n\n{stopping}\n"


def main(argv):
    options = parse(Options, argv)
    task = TOY if options.model == "toy" else REAL
    options.folder = options.folder or f"runs/{task.name}"

    def one_run(method, seed, label, options):
        own, how = task.methods[method]
        config = Config(model=options.model, seed=seed, **{**task.setting, **own})
        return same_seconds.train_for(config, task.at, task.eval_questions, label, **how)

    rows = same_seconds.rows(options, task.methods, one_run, task.at, task.reached)
    about = setting(["torch", "transformers"]) | {"setting": task.setting}
    figures = {
        name: {key: value for key, value in row.items() if key != "curves"}
        for name, row in rows.items()
    }
    write(options.output, task.name, about | {"rows": figures}, page(task, about, rows))


if __name__ == "__main__":
    run_program(main)
