"""A learned reward model, hacked by the policy that it trains; and a stop by the KL to the base.

    python experiments/judge.py         everything, 20 minutes on one core

Writes judge.json, judge.md, judge.png and judge_stop.png in results/. Finished runs are kept under
runs/judge/: after an interruption the same command goes on. docs/claims.md says what it shows.

The judge is a classifier with one label. It learns from 4,096 answers of the toy's base model which
of them are right. Then GRPO trains on its logit (examples/my_reward_model.py). The true accuracy is
a reward of weight 0: it is logged, and nothing learns from it. Each seed has a judge of its own.
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import Qwen2ForSequenceClassification
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from engine.base import files
from engine.data.questions import with_prompts
from engine.model.loading import load_model
from engine.run.command_line import option, parse, run_program
from engine.run.curves import DPI, FAILS, GRPO
from engine.run.state import WINDOW
from examples import my_reward_model
from experiments.library.bench import heading, markdown_table, over_seeds, pm, setting, write
from experiments.library.plot import OTHER, foot, name_lines, panels, plain
from experiments.library.toy_model import answered, make_tokenizer
from experiments.reproduce import one_run
from tasks import toy

logging.set_verbosity_error()  # no warning that the head of the judge is new

FOLDER = Path("runs/judge")
SEEDS = (1, 2, 3)
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
WHOLE = [("rule", 0.0), *(("judge", beta) for beta in BETAS), ("off by one", 0.0)]
STOPPED = [*(("judge", X) for X in STOPS), ("off by one", 0.2)]
PAID = {"rule": "toy_accuracy", "judge": "judged", "off by one": "off_by_one"}  # metric reward/…


@dataclass
class Options:
    output: str = option("experiments/results", "folder of the results")


# --- the judge ---


def labelled(numbers, split, seed):
    """Answers of the base: .questions, .texts, .right (N,) 0 or 1, by toy_accuracy. Each question
    has ANSWERS of them. numbers: of the questions in the split."""
    model, tokenizer = load_model(toy.BASE, torch.device("cpu"))
    rows, _ = with_prompts([toy.question(i, split) for i in numbers], "toy", tokenizer)
    _, texts, right = answered(model, tokenizer, rows, ANSWERS, seed)
    questions = [row["question"] for row in rows for _ in range(ANSWERS)]
    return SimpleNamespace(questions=questions, texts=texts, right=right)


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


def judge_of(seed):
    """(folder of the judge of a seed, its quality on held-out questions). It is made once."""
    folder = FOLDER / f"judge-{seed}"
    stored = folder / "quality.json"
    if not stored.exists():
        # questions that the policy is not trained on
        numbers = range(toy.TRAIN_QUESTIONS, toy.TRAIN_QUESTIONS + LABELLED)
        train_judge(labelled(numbers, "train", seed), folder, seed)
        use(folder)
        found = quality(labelled(range(toy.TEST_QUESTIONS), "test", seed))
        stored.write_text(json.dumps(found))
    return folder, json.loads(stored.read_text())


# --- the runs ---


def run(reward, beta, seed, stop=NEVER):
    """The figures of one run of 128 steps with 8 questions each."""
    if reward == "judge":
        use(judge_of(seed)[0])
    folder = FOLDER / f"{reward}-{beta}-{stop:g}-{seed}".replace(" ", "-")
    options = {"algorithm": "grpo", "beta": beta, "seed": seed, "stop_kl": stop, "save_every": 4,
               "rewards": REWARDS[reward]}
    held_out = one_run(folder, options)
    summary = json.loads((folder / "summary.json").read_text())
    example = summary["after"]["examples"][0]
    return figures(files.read(folder / "metrics.jsonl"), PAID[reward]) | {
        "base": held_out["base"], "held-out": held_out["sampled"], "example": example}


def figures(rows, paid):
    """Of metrics.jsonl: the curves of a run, and what they end with.

    curves: at each step the mean of the last WINDOW steps, the KL as --stop_kl computes it, and the
    median of the last MANY KLs. paid: the reward that the run trains on.
    """
    accuracy, reward, kl, medians, recent = [], [], [], [], []
    for i, row in enumerate(rows):
        last = rows[max(0, i + 1 - WINDOW) : i + 1]
        accuracy.append(fmean(one["accuracy"] for one in last))
        reward.append(fmean(one[f"reward/{paid}"] for one in last))
        if row["kl"] is not None:  # the step made an update
            recent.append(row["kl"])
        kl.append(fmean(recent[-WINDOW:]) if len(recent) >= WINDOW else 0.0)
        medians.append(median(recent[-MANY:]) if len(recent) >= MANY else 0.0)
    best = max(range(len(rows)), key=lambda i: accuracy[i])
    return {
        "steps": len(rows), "best": accuracy[best], "step of the best": best + 1,
        "KL at the best": kl[best], "largest KL": max(kl), "last KL": kl[-1],
        "median KL": median(kl[len(kl) // 2 :]),  # of the second half
        "largest kl_old": max(row["kl_old"] or 0.0 for row in rows),
        "reward, first": reward[0], "reward, last": reward[-1],
        "curves": {"accuracy": rounded(accuracy), "reward": rounded(reward), "kl": rounded(kl),
                   "median": rounded(medians)},
    }


def rounded(values):
    return [round(value, 5) for value in values]


def stopped(curves, X, name="kl"):
    """(step at which --stop_kl X would end a run, its accuracy there), or of the last step. name:
    of the curve that is compared with X."""
    kl = curves[name]
    i = next((i for i, value in enumerate(kl) if value > X), len(kl) - 1)
    return i + 1, curves["accuracy"][i]


def measure():
    """All figures. A spread is over the seeds."""
    judges = [judge_of(seed)[1] for seed in SEEDS]
    whole = {}
    for reward, beta in tqdm(WHOLE, "whole runs"):
        whole[f"{reward}, β = {beta:g}"] = [run(reward, beta, seed) for seed in SEEDS]
    stops = {}
    for reward, X in tqdm(STOPPED, "stopped runs"):
        runs = over_seeds([run(reward, 0.0, seed, X) for seed in SEEDS])
        stops[f"{reward}, X = {X:g}"] = {key: runs[key] for key in ("steps", "held-out")}
    for X in STOPS:
        stops[f"rule, X = {X:g}"] = stops_in_the_logs(whole["rule, β = 0"], X)
    # the smallest X that lets every run with the rule finish, if the median is compared
    X = max(max(one["curves"]["median"]) for one in whole["rule, β = 0"])
    return {
        "judge": over_seeds(judges),
        "runs": {name: over_seeds(runs) for name, runs in whole.items()}, "stops": stops,
        "median": {"X": X} | stops_in_the_logs(whole["judge, β = 0"], X, "median"),
    }


def stops_in_the_logs(runs, X, name="kl"):
    """Where whole runs would have ended: {"steps": spread, "sampled": spread}."""
    found = [stopped(run["curves"], X, name) for run in runs]
    return over_seeds([{"steps": step, "sampled": accuracy} for step, accuracy in found])


# --- the page and the pictures ---

SHOWN = {"held-out": 3, "best": 3, "step of the best": 0, "KL at the best": 2, "largest KL": 2,
         "median KL": 3, "largest kl_old": 4, "reward, first": 2, "reward, last": 2}


def page(result):
    base = result["runs"]["judge, β = 0"]["base"]["mean"]
    text = heading("A learned reward model, and a stop by the KL", result)
    text += (
        "\n[What the figures are](../judge.py), [what they show](../../docs/claims.md). Mean ± "
        f"standard deviation of {len(SEEDS)} seeds. The base has {base:.3f} on held-out questions."
        "\n\n## The judge, on held-out questions\n\n")
    text += markdown_table([["figure", ""], *([name, pm(value)] for name, value in
                                            result["judge"].items())])
    text += (
        "\n\n## Whole runs\n\nheld-out: accuracy after training, sampled. All else is from the "
        f"log, a mean of {WINDOW} steps: best: the highest accuracy; median KL: of the second half."
        "\n\n")
    lines = [["trained on", *SHOWN]]
    for name, own in result["runs"].items():
        lines.append([name, *(pm(own[key], digits) for key, digits in SHOWN.items())])
    text += markdown_table(lines)
    text += (
        "\n\n## Stopped runs, β = 0\n\nThe accuracy of judge and off by one is held-out, of the "
        "model that the run keeps. That of the rule is from the log, at the step at which X would "
        "end the run.\n\n")
    lines = [["run", "step of the stop, each seed", "accuracy"]]
    for name, own in result["stops"].items():
        steps = ", ".join(map(str, own["steps"]["values"]))
        lines.append([name, steps, pm(own["held-out" if "held-out" in own else "sampled"])])
    own = result["median"]
    steps = ", ".join(map(str, own["steps"]["values"]))
    text += markdown_table(lines)
    text += (
        f"\n\nIf the median of {MANY} steps is compared in place of the mean of {WINDOW}: "
        f"X = {own['X']:.3f} lets each run with the rule finish, and ends those with the judge at "
        f"the steps {steps}, with the accuracy {pm(own['sampled'])} (of the samples)."
        "\n\n## What the policies write at the end\n\n")
    for name, own in result["runs"].items():
        for seed, example in zip(SEEDS, own["example"]):
            written = example["completion"].replace("\n", " ")
            text += f"- {name}, seed {seed}: `{example['question']}` `{written}`\n"
    return text


def draw_curve(axis, runs, curve, colour, style="-", name=None):
    """A curve: the mean over the seeds, and their range as a band. Returns its end for its name."""
    seeds = list(zip(*(curves[curve] for curves in runs["curves"])))
    steps = range(1, len(seeds) + 1)
    means = [fmean(step) for step in seeds]
    axis.plot(steps, means, style, color=colour, linewidth=2.5)
    axis.fill_between(steps, [min(step) for step in seeds], [max(step) for step in seeds],
                      color=colour, alpha=0.1, linewidth=0)
    return means[-1], name, colour


def draw(result, folder):
    """Both pictures."""
    draw_runs(result, Path(folder, "judge.png"))
    draw_stop(result, Path(folder, "judge_stop.png"))


def draw_runs(result, output):
    """The reward of the judge and the true accuracy, at three β, beside the rule."""
    figure, (left, right) = panels(2, sharex=True)
    runs, rewards, truths = result["runs"], [], []
    for beta, style in zip(BETAS, ("-", "--", ":")):
        own, name = runs[f"judge, β = {beta:g}"], f"judge, β = {beta:g}"
        rewards.append(draw_curve(left, own, "reward", FAILS, style, name))
        truths.append(draw_curve(right, own, "accuracy", FAILS, style, name))
    truths.append(draw_curve(right, runs["rule, β = 0"], "accuracy", GRPO, name="rule, β = 0"))
    for X in STOPS:
        own = result["stops"][f"judge, X = {X:g}"]
        right.plot(own["steps"]["values"], own["held-out"]["values"], "o", color="black",
                   markersize=5, zorder=4)
    left.set_title("What the judge pays rises", fontsize=13)
    right.set_title("The true accuracy falls, but not with β = 0.5", fontsize=13)
    left.set_ylabel("logit of the judge")
    right.set_ylabel("accuracy")
    right.set_ylim(0, 1)
    for axis in (left, right):
        axis.set_xlabel("step")
        plain(axis)
    name_lines(left, rewards)
    name_lines(right, truths)
    foot(figure, f"means of {WINDOW} steps; line and band: mean and range of {len(SEEDS)} seeds; "
                 "black dots: --stop_kl with β = 0, held-out accuracy of the model that is kept")
    figure.savefig(output, dpi=DPI)


def draw_stop(result, output):
    """Left: the KL that the stop looks at. Right: what each X keeps."""
    figure, (left, right) = panels(2)
    runs, ends = result["runs"], []
    for reward, colour in (("rule", GRPO), ("judge", FAILS)):
        own = runs[f"{reward}, β = 0"]
        for curves in own["curves"]:
            left.plot(range(1, len(curves["kl"]) + 1), curves["kl"], color=colour, linewidth=1.3)
        ends.append((own["last KL"]["mean"], reward, colour))
    for X in STOPS:
        left.axhline(X, color="black", linewidth=0.8, zorder=0)
        left.text(1, X * 1.05, f"X = {X:g}", fontsize=10)
    left.set_yscale("log")
    left.set_ylim(bottom=0.005)
    left.set_xlabel("step")
    left.set_ylabel(f"KL to the base, mean of {WINDOW} steps")
    left.set_title("A healthy run crosses every X as well", fontsize=13)
    for value, name, colour in ends:
        left.annotate(name, (128, value), (6, 0), textcoords="offset points", color=colour,
                      va="center", fontsize=11)
    for reward, colour, key in (("rule", GRPO, "sampled"), ("judge", FAILS, "held-out"),
                                ("off by one", OTHER, "held-out")):
        places = [x for x, X in enumerate(STOPS) if f"{reward}, X = {X:g}" in result["stops"]]
        own = [result["stops"][f"{reward}, X = {STOPS[x]:g}"][key] for x in places]
        places, own = [*places, len(STOPS)], [*own, runs[f"{reward}, β = 0"]["held-out"]]
        right.plot(places, [one["mean"] for one in own], color=colour, linewidth=2)
        for x, one in zip(places, own):
            right.plot([x] * len(one["values"]), one["values"], "o", color=colour, markersize=5)
        right.annotate(reward, (places[-1], own[-1]["mean"]), (8, 0), textcoords="offset points",
                       color=colour, va="center", fontsize=11)
    right.set_xticks(range(len(STOPS) + 1), [*map("{:g}".format, STOPS), "no stop"])
    right.set_xlabel("X of --stop_kl")
    right.set_ylabel("accuracy of the model that is kept")
    right.set_ylim(0, 1)
    right.set_title("X = 0.2 saves the hacked run, X = 0.4 does not", fontsize=13)
    for axis in (left, right):
        plain(axis)
    foot(figure, "β = 0; a line on the left and a dot on the right: one seed; "
                 "rule: accuracy of the samples at the step where X would end the run")
    figure.savefig(output, dpi=DPI)


def main(argv):
    options = parse(Options, argv)
    torch.set_num_threads(1)
    result = setting() | measure()
    write(options.output, "judge", result, page(result))
    draw(result, options.output)


if __name__ == "__main__":
    run_program(main)
