"""A sampler that computes otherwise than the trainer: without correction, with TIS, with IcePop.

    python experiments/mismatch.py            writes mismatch.json and mismatch.md in results/

On the toy both compute alike. Here the sampler errs: with a small probability it draws any token of
the vocabulary. It reports the log-probabilities that it has drawn with, as a sampler with other
kernels does. The accuracies are those of the trained policy, without the error. GRPO; finished runs
are kept under runs/mismatch/.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

import train
from engine.base import files
from engine.model import loading, sampling
from engine.run.options import option, parse, run_program
from engine.tasks import toy
from engine.tasks.questions import load_questions
from eval import examine
from experiments.bench import heading, markdown_table, pm, report, spread
from rewards import toy_accuracy

WAYS = {
    "the same sampler": {}, "no correction": {}, "TIS, C = 2": {"importance_cap": 2.0},
    "IcePop, 0.5 to 5": {"importance_low": 0.5, "importance_cap": 5.0},
}


@dataclass
class Options:
    error: float = option(0.05, "how often the sampler draws any token")
    questions: int = option(640, "of a run")
    seeds: int = option(3, "how many runs of each way")
    output: str = option("experiments/results", "folder of the two files")


def wrong_by(error, true=sampling.sample_token):
    """`sample_token` of the mixture (1 − error) π + error · uniform."""
    def sample_token(logits, how, u):
        p = (1 - error) * logits.float().softmax(-1) + error / logits.shape[-1]
        return true(p.log(), how, u)

    return sample_token


def one_run(folder, error, questions, **options):
    """The figures of one run: the policy at its end, and the sampler on the way."""
    options |= {
        "output_dir": folder, "algorithm": "grpo", "questions_per_step": 4, "minibatches": 1,
        "lr": 3e-4, "eval_questions": 1, "epochs": questions / toy.TRAIN_QUESTIONS,
    }
    if not (folder / "summary.json").exists():
        with mock.patch.object(sampling, "sample_token", wrong_by(error)):
            train.main([f"--{name}={value}" for name, value in options.items()])
    model, tokenizer = loading.load_model(folder, torch.device("cpu"))
    test, _ = load_questions("toy", tokenizer, split="test", limit=512)
    found = examine(
        sampling.Sampler(model, tokenizer), tokenizer, test, toy_accuracy, sampling.Sampling(48))
    rows = files.read(folder / "metrics.jsonl")
    return {part: found[part]["accuracy"] for part in ("sampled", "greedy")} | {
        "sampler": fmean(row["accuracy"] for row in rows[-len(rows) // 4 :]),
        "gap": fmean(row["sampler_gap"] or 0.0 for row in rows),
    }


def page(result):
    columns = {
        "sampled": "sampled", "greedy": "greedy", "sampler": "the sampler, last quarter of the run",
        "gap": "|log π_old − log π_sampler|",
    }
    lines = [["", *columns.values()]]
    lines += [[way, *(pm(own[name]) for name in columns)] for way, own in result["ways"].items()]
    return (
        f"{heading('A sampler that computes otherwise', result)}\nThe sampler draws any token "
        f"with probability {result['options']['error']:g}. "
        f"{result['options']['questions']} questions, {result['options']['seeds']} seeds: accuracy "
        f"on 512 held-out questions without the error.\n\n{markdown_table(lines)}\n")


def main(argv):
    options, runs = parse(Options, argv), {}
    for seed in range(1, options.seeds + 1):
        for i, (way, more) in enumerate(WAYS.items()):
            folder = Path(f"runs/mismatch/{options.error:g}-{options.questions}-{i}-{seed}")
            error = 0.0 if way == "the same sampler" else options.error
            runs.setdefault(way, []).append(
                one_run(folder, error, options.questions, seed=seed, **more))
            print(way, seed, json.dumps(runs[way][-1]), flush=True)
    ways = {
        way: {name: spread([run[name] for run in own]) for name in own[0]}
        for way, own in runs.items()
    }
    report(options, "mismatch", {"ways": ways}, page)


if __name__ == "__main__":
    run_program(main)
