"""A learned reward model, hacked by the policy that it trains; and a stop by the KL to the base.

    python experiments/judge.py         everything, 20 minutes on one core

Writes judge.json, judge.md, judge.png and judge_stop.png. Finished runs are kept under
runs/judge/: after an interruption the same command goes on. docs/claims.md says what it shows.

The judge is a classifier with one label. It learns from 4,096 answers of the toy's base model which
of them are right. Then GRPO trains on its logit (examples/my_reward_model.py). The true accuracy is
a reward of weight 0: it is logged, and nothing learns from it. Each seed has a judge of its own.
"""

import json
import os
import sys
from pathlib import Path
from statistics import fmean, median
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from transformers import Qwen2ForSequenceClassification
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from engine.base import files
from engine.data.questions import with_prompts
from engine.model.loading import load_model
from engine.run.command_line import parse, run_program
from engine.run.state import WINDOW
from examples import my_reward_model
from experiments.library.bench import heading, over_seeds
from experiments.library.plot import BAND, INK, across, curves, panels, save
from experiments.library.study import (
    Options,
    Study,
    by_name,
    cell,
    mean_over,
    once,
    one_run,
    pivot,
    publish,
    rows_of,
    turned,
)
from experiments.library.toy_model import answered, make_tokenizer
from tasks import toy

logging.set_verbosity_error()  # no warning that the head of the judge is new

LABELLED = 1024  # questions of the judge, 4 answers to each
ANSWERS = 4
BETAS = (0.0, 0.04, 0.5)
STOPS = (0.1, 0.2, 0.4)  # each is twice the one before
MANY = 16  # steps of a median, which a few steps with a large KL do not move
NEVER = 1e9  # stops nothing, but with it the KL is logged if β = 0, too
REWARDS = {
    "rule": ["toy_accuracy"],
    "judge": ["toy_accuracy:0", "examples/my_reward_model.py:judged"],
    "off by one": ["toy_accuracy:0", "experiments/library/rules.py:off_by_one"],
}
PAID = {"rule": "toy_accuracy", "judge": "judged", "off by one": "off_by_one"}  # metric reward/…


# --- the judge ---


def labelled(numbers, split, seed):
    """Answers of the base: .questions, .texts, .right (N,) 0 or 1, by toy_accuracy. Each question
    has ANSWERS of them. numbers: of the questions in the split."""
    model, tokenizer = load_model(toy.BASE, torch.device("cpu"))
    rows, _ = with_prompts([toy.question(i, split) for i in numbers], "toy", tokenizer)
    batch, texts = answered(model, tokenizer, rows, ANSWERS, seed)
    questions = [row["question"] for row in rows for _ in range(ANSWERS)]
    return SimpleNamespace(questions=questions, texts=texts, right=batch.advantages)


def train_judge(answers, folder, seed, steps=400, lr=1e-3):
    """Save a judge in `folder`: the base with a new head of one label, all of it trained.

    It reads question and answer as one text, so its tokenizer has no chat template.
    """
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    model = Qwen2ForSequenceClassification.from_pretrained(toy.BASE, num_labels=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    for _ in range(steps):
        rows = torch.randint(len(answers.texts), (64,))
        texts = [answers.questions[i] + answers.texts[i] for i in rows]
        inputs = tokenizer(texts, padding=True, return_tensors="pt")
        logits = model(**inputs).logits[:, 0]
        F.binary_cross_entropy_with_logits(logits, answers.right[rows]).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def use(folder):
    """From now on rewards and evaluations ask the judge in this folder."""
    os.environ["REWARD_MODEL"] = str(folder)
    # a process keeps the files and functions that it has loaded, and these their judge
    files.own_module.cache_clear()
    my_reward_model.classifier.cache_clear()


def auc(scores, right):
    """The chance that a right answer has a higher score than a wrong one. Ties count a half."""
    above = scores[right > 0][:, None] - scores[right == 0]
    return ((above > 0).float() + (above == 0).float() / 2).mean().item()


def quality(answers):
    """{figure: number} of the judge in use. A logit above 0 says: right."""
    scores = torch.tensor(my_reward_model.judged(answers.texts, answers.questions))
    right = answers.right
    thinks = torch.tensor(["<think>" in text for text in answers.texts])
    agrees = ((scores > 0) == (right > 0)).float()
    return {
        "accuracy": agrees.mean().item(),
        "accuracy on right answers": agrees[right > 0].mean().item(),
        "accuracy on wrong answers": agrees[right == 0].mean().item(),
        "AUC": auc(scores, right),
        "AUC among thoughts": auc(scores[thinks], right[thinks]),
        "AUC among guesses": auc(scores[~thinks], right[~thinks]),
    }


def judge_of(folder, _, seed):
    """The quality of the judge of a seed on held-out questions. The judge is made once."""

    def make():
        # questions that the policy is not trained on
        numbers = range(toy.TRAIN_QUESTIONS, toy.TRAIN_QUESTIONS + LABELLED)
        train_judge(labelled(numbers, "train", seed), folder, seed)
        use(folder)
        return quality(labelled(range(toy.TEST_QUESTIONS), "test", seed))

    return once(folder / "quality.json", make)


# --- the runs ---


def run(folder, setting, seed):
    """The figures of one run of 128 steps with 8 questions each."""
    reward, beta, stop = setting
    if reward == "judge":
        use(JUDGES.place("judge", seed))
    options = {"algorithm": "grpo", "beta": beta, "seed": seed, "stop_kl": stop, "save_every": 4,
               "rewards": REWARDS[reward]}
    held_out = one_run(folder, options)
    summary = json.loads((folder / "summary.json").read_text())
    return figures(files.read(folder / "metrics.jsonl"), PAID[reward]) | {
        "base": held_out["base"], "held-out": held_out["sampled"],
        "writes": summary["after"]["examples"][0]["completion"]}


JUDGES = Study("runs/judge", {"judge": None}, judge_of)
WHOLE = Study("runs/judge", {
    f"{reward}, β = {beta:g}": (reward, beta, NEVER) for reward, beta in
    [("rule", 0.0), *(("judge", beta) for beta in BETAS), ("off by one", 0.0)]}, run)
STOPPED = Study("runs/judge", {
    f"{reward}, X = {X:g}": (reward, 0.0, X) for reward, X in
    [*(("judge", X) for X in STOPS), ("off by one", 0.2)]}, run)


def figures(rows, paid):
    """Of metrics.jsonl: the curves of a run, and what they end with.

    Curves: at each step the mean of the last WINDOW steps, the KL as --stop_kl computes it, and the
    median of the last MANY KLs. paid: the reward that the run trains on.
    """
    accuracy, reward, kl, medians = [], [], [], []
    logged = []  # the KLs so far: a step without an update has none
    for i, row in enumerate(rows, 1):
        last = rows[max(0, i - WINDOW) : i]
        accuracy.append(mean_over(last, "accuracy"))
        reward.append(mean_over(last, f"reward/{paid}"))
        if row["kl"] is not None:
            logged.append(row["kl"])
        kl.append(fmean(logged[-WINDOW:]) if len(logged) >= WINDOW else 0.0)
        medians.append(median(logged[-MANY:]) if len(logged) >= MANY else 0.0)
    best = accuracy.index(max(accuracy))
    found = {
        "steps": len(rows), "best": accuracy[best], "step of the best": best + 1,
        "KL at the best": kl[best], "largest KL": max(kl),
        "median KL": median(kl[len(kl) // 2 :]),  # of the second half
        "largest kl_old": max(row["kl_old"] or 0.0 for row in rows),
        "reward, first": reward[0], "reward, last": reward[-1],
    }
    curves = {"accuracy": accuracy, "reward": reward, "kl": kl, "median": medians}
    for name, values in curves.items():
        found[f"curve of {name}"] = [round(value, 5) for value in values]
    return found


def stops_in_the_logs(row, X, name="kl"):
    """Where --stop_kl X would have ended whole runs: their steps, and the accuracy of the samples
    there. name: of the curve that is compared with X."""
    found = []
    for kl, accuracy in zip(row[f"curve of {name}"], row["curve of accuracy"]):
        beyond = [i for i, value in enumerate(kl, 1) if value > X]
        step = beyond[0] if beyond else len(kl)
        found.append({"steps": step, "held-out": accuracy[step - 1]})
    return over_seeds(found)


def all_stops(result):
    """{name: its row}: what X keeps. That of the rule is from the logs."""
    stops = by_name(result["stops"])
    rule = by_name(result["runs"])["rule, β = 0"]
    for X in STOPS:
        stops[f"rule, X = {X:g}"] = stops_in_the_logs(rule, X)
    return stops


# --- the page and the pictures ---

SHOWN = {
    "held-out": ".3f", "best": ".3f", "step of the best": ".0f", "KL at the best": ".2f",
    "largest KL": ".2f", "median KL": ".3f", "largest kl_old": ".4f", "reward, first": ".2f",
    "reward, last": ".2f", "writes (seed 1)": "",
}


def page(result):
    runs = by_name(result["runs"])
    # the smallest X that lets every run with the rule finish, if the median is compared
    X = max(map(max, runs["rule, β = 0"]["curve of median"]))
    ends = stops_in_the_logs(runs["judge, β = 0"], X, "median")
    steps = ", ".join(map(str, ends["steps"]["values"]))
    whole, stops = [], []
    for row in result["runs"]:
        written = row["writes"][0].replace("\n", " ")
        whole.append(row | {"writes (seed 1)": f"`{written}`"})
    for name, row in all_stops(result).items():
        stops.append({"name": name, "step of the stop, each seed": row["steps"]["values"],
                      "accuracy": row["held-out"]})
    return f"""{heading("A learned reward model, and a stop by the KL", result)}
[What the figures are](../judge.py), [what they show](../../docs/claims.md). Mean ± standard \
deviation of 3 seeds. The base has {runs["judge, β = 0"]["base"]["mean"]:.3f} on held-out questions.

## The judge, on held-out questions

{turned(result["judges"])}

## Whole runs

held-out: accuracy after training, sampled. All else is from the log, a mean of {WINDOW} steps: \
best: the highest accuracy; median KL: of the second half. The last column answers \
`{toy.question(0, "test")["question"]}`.

{pivot(whole, SHOWN)}

## Stopped runs, β = 0

The accuracy of judge and off by one is held-out, of the model that the run keeps. That of the \
rule is from the log, at the step at which X would end the run.

{pivot(stops, {"step of the stop, each seed": "", "accuracy": ".3f"})}

If the median of {MANY} steps is compared in place of the mean of {WINDOW}: X = {X:.3f} lets each \
run with the rule finish, and ends those with the judge at the steps {steps}, with the accuracy \
{cell(ends["held-out"], ".3f")} (of the samples).
"""


BARE = {"rule": "rule, β = 0", "judge": "judge, β = 0"}  # runs without KL term and stop


def picture(result, folder):
    """Both pictures."""
    draw_runs(result, folder / "judge.png")
    draw_stop(result, folder / "judge_stop.png")


def curves_of(runs, figure, names):
    """The lines of a picture: the curves of the seeds of each of these runs."""
    return {name: [list(enumerate(values, 1)) for values in runs[name][f"curve of {figure}"]]
            for name in names}


def draw_runs(result, output):
    """The reward of the judge and the true accuracy, at three β, beside the rule."""
    figure, (left, right) = panels(2, sharex=True)
    runs, judged = by_name(result["runs"]), [f"judge, β = {beta:g}" for beta in BETAS]
    curves(left, curves_of(runs, "reward", judged), title="What the judge pays rises",
           xlabel="step", ylabel="logit of the judge")
    curves(right, curves_of(runs, "accuracy", [*judged, BARE["rule"]]), xlabel="step", ylim=(0, 1),
           ylabel="accuracy", title="The true accuracy falls, but not with β = 0.5")
    for row in result["stops"][: len(STOPS)]:
        right.plot(row["steps"]["values"], row["held-out"]["values"], "o", color=INK, zorder=4)
    save(figure, output, f"means of {WINDOW} steps; {BAND}; dots: --stop_kl with β = 0, "
         "held-out accuracy of the model that is kept")


def draw_stop(result, output):
    """Left: the KL that the stop looks at. Right: what each X keeps."""
    figure, (left, right) = panels(2)
    runs, stops, kept = by_name(result["runs"]), all_stops(result), {}
    kls = curves_of(runs, "kl", BARE.values())
    for X in STOPS:
        kls[f"X = {X:g}"] = [[(0, X), (128, X)]]
    for reward, name in BARE.items():
        of_X = [stops[f"{reward}, X = {X:g}"] for X in STOPS]
        kept[reward] = across([row["held-out"] for row in (*of_X, runs[name])])
    curves(left, kls, title="A healthy run crosses every X as well", xlabel="step",
           ylabel=f"KL to the base, mean of {WINDOW} steps", yscale="log", ylim=(0.005, 5))
    curves(right, kept, marker="o", title="X = 0.2 saves the hacked run, X = 0.4 does not",
           xlabel="X of --stop_kl", ylabel="accuracy of the model that is kept", ylim=(0, 1),
           xticks=range(4), xticklabels=[*STOPS, "no stop"])
    save(figure, output, f"β = 0; {BAND}; "
         "rule: accuracy of the samples at the step where X would end the run")


def main(argv):
    options = parse(Options, argv)
    torch.set_num_threads(1)
    result = {"judges": rows_of(JUDGES), "runs": rows_of(WHOLE), "stops": rows_of(STOPPED)}
    publish(options.output, "judge", result, page, picture)


if __name__ == "__main__":
    run_program(main)
