"""Sampling fewer completions, which is what is left to save after pruning: two ideas, measured.

    python experiments/fewer.py                    the toy; writes fewer.json and fewer.md in
                                                   results/
    python experiments/fewer.py --model DIR        a chat model, set up as in real.py; writes
                                                   fewer_real.*

- Until a signal: a question is answered in rounds of 4 completions, until there is a right and a
  wrong one or there are G (Reinforce-Ada, 2510.04996). The advantages compare the completions that
  were drawn. Then a step goes on as usual.
- Skipping: a question that had no signal in its last z turns is skipped with probability 1 − p^z.
  There is a p for questions that were too easy, and one for those that were too hard. After each
  step p falls by 0.01 if more such questions were met than wanted, or else it rises (GRESO,
  2506.02177). This takes more than one pass over the questions.

Every run of a task has the same CPU seconds. Finished runs are kept in runs/fewer/ and
runs/fewer_real/. CPPO's runs on the real model are those of real.py: to save an hour, copy them
from runs/real/.
"""

import random
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

import rollout as rollout_module
from engine.run.options import parse, run_program
from experiments.bench import heading, report
from experiments.real import Runs, Task, in_order, rows, table
from experiments.reproduce import PROTOCOL, RULES
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
        at = (open_[:, None], torch.arange(drawn, drawn + ROUND))
        rows = (at[0] * G + at[1]).flatten()
        longest = part.tokens.shape[1]
        for name in ("tokens", "logp", "mask"):
            getattr(whole, name)[rows, :longest] = getattr(part, name)
        for row, text in zip(rows, part.texts):
            whole.texts[row] = text
        whole.lengths[at], whole.truncated[at], whole.trainable[at] = (
            part.lengths, part.truncated, True,
        )
        whole.rewards[:, *at] = part.rewards
        so_far = whole.total[open_, : drawn + ROUND]
        open_ = open_[~has_signal(so_far)]
        if not len(open_):
            break
    return whole


def with_places(part, questions, G, longest):
    """A Rollout like `part`, with a free place for each completion of the questions."""
    Q = len(questions)
    no = torch.zeros(Q, G, dtype=torch.bool)
    return replace(
        part, questions=questions, texts=[""] * (Q * G), truncated=no, trainable=no.clone(),
        tokens=part.tokens.new_zeros(Q * G, longest), logp=part.logp.new_zeros(Q * G, longest),
        mask=part.mask.new_zeros(Q * G, longest),
        lengths=no.long(), rewards=torch.zeros(len(part.rewards), Q, G),
    )


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


# --- the table ---


PRUNED = {"algorithm": "cppo", "pruning_rate": 0.875}
LARGER = PRUNED | {"questions_per_step": 4}
KINDS = PRUNED | {"keep": f"{RULES}:distinct"}
STOPPED = {"step": step_until_a_signal}


def passes(few):
    """Several passes over a few questions, with and without skipping."""
    return {
        f"CPPO, P=0.875, {few} questions": (PRUNED, {"order": first(few, in_order)}),
        f"CPPO, P=0.875, {few} questions, skipping": (PRUNED, {"order": first(few, skipping)}),
    }


TOY = Task(
    "fewer", "Sampling fewer completions: the toy",
    {
        "GRPO": ({"algorithm": "grpo"}, {}),
        "CPPO, P=0.875": (PRUNED, {}),
        "one of each kind, P=0.875": (KINDS, {}),
        "until a signal, all": ({"algorithm": "grpo", "questions_per_step": 8}, STOPPED),
        "until a signal, P=0.875": (PRUNED, STOPPED),
        "until a signal, one of each kind": (KINDS, STOPPED),
        "CPPO, P=0.875, 32 questions a step": (LARGER, {}),
        "until a signal, P=0.875, 32 questions a step": (LARGER, STOPPED),
    } | passes(256),
    PROTOCOL | {"dtype": "float32"}, (15, 30), eval_questions=512, reached=0.85, model="toy",
)
REAL = Task(
    "fewer_real", "Sampling fewer completions: a real model",
    {"CPPO, P=0.875": (PRUNED, {}), "until a signal, P=0.875": (PRUNED, STOPPED)} | passes(64),
)


def page(result, task):
    return f"{heading(task.title, result)}\n{table(result['rows'], task)}\n"


def main(argv):
    options = parse(Runs, argv)
    task = REAL if options.model else TOY
    found = rows(task, options)
    for row in found.values():
        del row["curves"]
    report(options, task.name, {"setting": task.setting, "rows": found}, partial(page, task=task))


if __name__ == "__main__":
    run_program(main)
