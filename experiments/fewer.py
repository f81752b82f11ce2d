"""Sampling fewer completions, which is what is left to save after pruning: two ideas, measured on the toy.

    python experiments/fewer.py                                writes fewer.json, fewer.md and fewer.png in experiments/results
    python experiments/fewer.py --share 1/2                    every second run: start 2/2 on another core

- Until a signal: a question is answered in rounds of 4 completions, until there is a right and a wrong one or there are
  G (Reinforce-Ada, 2510.04996). The advantages compare the completions that were drawn. Then a step goes on as usual.
- Skipping: a question that had no signal in its last z turns is skipped with probability 1 − p^z. There is a p for
  questions that were too easy, and one for those that were too hard. After each step p falls by 0.01 if more such
  questions were met than wanted, or else it rises (GRESO, 2506.02177). This takes more than one pass over the
  questions.

Every run has the same CPU seconds. Finished runs are kept in runs/fewer/.
"""

import math
import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

import rollout as rollout_module
from engine.run.config import Config
from engine.run.options import option, parse, run_program
from experiments import same_seconds
from experiments.reproduce import PROTOCOL, RULES
from experiments.setting import heading, markdown_table, setting, write
from family.dapo import has_signal
from grpo import group_advantages
from train import train_step

ROUND = 4  # completions that a question gets at a time
FEW = 256  # questions to pass over several times


# --- until a signal ---


def until_a_signal(questions, algorithm, roll_out=rollout_module.roll_out, **options):
    """`roll_out` in rounds. Returns a Rollout of Q·G places; `trainable` says which of them hold a completion."""
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
        whole.lengths[at], whole.truncated[at], whole.trainable[at] = part.lengths, part.truncated, True
        whole.rewards[:, *at] = part.rewards
        open_ = open_[[not has_signal(whole.total[q : q + 1, : drawn + ROUND]).item() for q in open_]]
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
    """`train_step`, drawn in rounds. The accuracy is that of the first rounds, for later ones are only of failures."""
    kept = {}

    def drawn(questions, **options):
        kept["rollout"] = until_a_signal(questions, **options)
        return kept["rollout"]

    with mock.patch.object(rollout_module, "roll_out", drawn):
        metrics, sample = train_step(networks, replace(algorithm, advantages=advantages_of_the_drawn), *rest)
    drawn = kept["rollout"]
    completions = int(drawn.trainable.sum())
    first = (drawn.rewards[0, :, :ROUND] > 0).float()
    right = {"completions": completions, "accuracy": first.mean().item(), "length": drawn.lengths.sum().item() / completions}
    return metrics | right, sample


# --- skipping ---


def skipping(questions, seed, seen):
    """GRESO on the first FEW questions: in order, without those that have probably no signal."""
    rng, last, done = random.Random(f"skip {seed}"), {}, 0
    p, wanted = {0.0: 0.5, 1.0: 0.5}, {0.0: 1 / 6, 1.0: 1 / 12}  # mean reward 0: too hard; 1: too easy
    for question in same_seconds.in_order(questions[:FEW], seed, seen):
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


def few(questions, seed, seen):
    return same_seconds.in_order(questions[:FEW], seed, seen)


# --- what stopping changes: the weight of a question ---


def weight(p, G, n=ROUND, std_eps=1e-4):
    """(weight of a question in the step, completions drawn for it), if a completion is right with probability p.

    A step moves along w · (E[∇ log π | right] − E[∇ log π | wrong]) of a question. Stopping does not look at the
    completions of a kind, so this direction stays. The weight is, for a right and b wrong completions,

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

TOY = PROTOCOL | {"dtype": "float32"}
PRUNED = {"algorithm": "cppo", "pruning_rate": 0.875}
KINDS = PRUNED | {"keep": f"{RULES}:distinct"}
METHODS = {  # options of train.py on top of the setting, step, order
    "GRPO": ({"algorithm": "grpo"}, {}),
    "CPPO, P=0.875": (PRUNED, {}),
    "one of each kind, P=0.875": (KINDS, {}),
    "until a signal, all": ({"algorithm": "grpo", "questions_per_step": 8}, {"step": step_until_a_signal}),
    "until a signal, P=0.875": (PRUNED, {"step": step_until_a_signal}),
    "until a signal, one of each kind": (KINDS, {"step": step_until_a_signal}),
    f"CPPO, P=0.875, {FEW} questions": (PRUNED, {"order": few}),
    f"CPPO, P=0.875, {FEW} questions, skipping": (PRUNED, {"order": skipping}),
}
AT, EVAL_QUESTIONS, REACHED = (15, 30), 512, 0.85
RIGHT = (0.03, 0.06, 0.12, 0.25, 0.5, 0.75, 0.88, 0.94, 0.97)


@dataclass
class Options:
    methods: list[str] | None = option(None, "which methods, by their names; none: all")
    seeds: list[int] | None = option(None, "none: 1 2 3")
    share: str = option("1/1", "I/N: only every N-th run, from the I-th on")
    folder: str = option("runs/fewer", "folder of the finished runs")
    page: bool = option(False, "train nothing; write the page of the runs that are there")
    output: str = option("experiments/results", "folder of the page and the picture")


def one_run(method, seed, label, options):
    own, how = METHODS[method]
    config = Config(seed=seed, **{**TOY, **own})
    return same_seconds.train_for(config, AT, EVAL_QUESTIONS, label, **how)


def page(about, rows):
    head, table = heading("Sampling fewer completions", about), same_seconds.table(rows, AT, REACHED)
    lines = [["probability of a right completion", "completions drawn", "weight in GRPO", "weight until a signal", "ratio"]]
    for p in RIGHT:
        (all_, _), (stopped, drawn) = weight(p, 16, n=16), weight(p, 16)
        lines.append([p, f"{drawn:.1f}", f"{all_:.3f}", f"{stopped:.3f}", f"{stopped / all_:.2f}"])
    return f"{head}\n{table}\n\nWhat stopping changes, for G = 16 and rounds of {ROUND}:\n\n{markdown_table(lines)}\n"


def main(argv):
    options = parse(Options, argv)
    rows = same_seconds.rows(options, METHODS, one_run, AT, REACHED)
    about = setting(["torch", "transformers"]) | {"setting": TOY}
    write(options.output, "fewer", about | {"rows": rows}, page(about, rows))


if __name__ == "__main__":
    run_program(main)
