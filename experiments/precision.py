"""float32 beside bfloat16 (`--dtype`) on the CPU of this machine: speed, memory, and how far apart
the numbers are.

    python experiments/precision.py                SmolLM2-135M-Instruct; --model names another

Writes precision.json and precision.md in results/. Both dtypes take turns in one process. Seconds
are CPU seconds of one thread. A step is one of `--dataset arithmetic`: GRPO samples 64 completions,
CPPO samples 256, and both train on 64. Memory is the peak of a process of its own that makes one
step of GRPO.
"""

import random
import resource
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from engine.model.precision import choose_dtype
from engine.model.sampling import Sampling
from engine.run.config import Config, check
from engine.run.options import option, parse, run_program
from engine.scoring.score import Reward
from engine.tasks.questions import load_questions
from experiments.bench import alone, digits, heading, in_turn, markdown_table, report
from records import Batch
from train import networks_of, train_step
from update import Limits

DTYPES, CPU = ("float32", "bfloat16"), torch.device("cpu")
OF_A_STEP = ("ratio_max", "sampler_gap", "sampler_gap_max")  # metrics that the page shows


@dataclass
class Options:
    model: str = option("HuggingFaceTB/SmolLM2-135M-Instruct", "hub name or folder of a model")
    dataset: str = option("arithmetic", "the questions of the steps: arithmetic or toy")
    rounds: int = option(3, "how often the seconds are measured")
    output: str = option("experiments/results", "folder of precision.json and precision.md")


class Subject:
    """A model with all that its training needs."""

    def __init__(self, model, dataset, dtype):
        self.options = {
            "model": model, "dataset": dataset, "dtype": dtype, "questions_per_step": 4, "mu": 1,
            "minibatches": 1, "beta": 0.04, "lr": 1e-6,
        }
        self.config, algorithm = check(Config.of(algorithm="grpo", **self.options))
        self.networks = networks_of(self.config, algorithm, model, CPU)
        torch.set_num_threads(1)
        self.questions, _ = load_questions(
            dataset, self.networks.tokenizer, system_prompt=self.config.data.system_prompt,
            limit=150,
        )

    def score(self, rows, prompt, length, backward=False):
        """Log-probabilities of `rows` copies of `length` tokens behind `prompt` others."""
        text = sum((question["prompt"] for question in self.questions), [])
        tokens = torch.tensor([text[prompt : prompt + length]] * rows)
        batch = Batch([text[:prompt]] * rows, tokens, torch.full((rows,), length), torch.ones(rows))
        with torch.set_grad_enabled(backward):
            logp = batch.logprobs(self.networks.policy, 1.0)
        if backward:
            logp.sum().backward()
            self.networks.optimizer.zero_grad()
        return logp.detach()

    def sample(self):
        prompts = [question["prompt"] for question in self.questions[:2]]
        self.networks.sampler.sample(prompts, 16, Sampling(16), seed=0)

    def step(self, name):
        """A training step; its metrics are kept."""
        _, algorithm = check(Config.of(algorithm=name, **self.options))
        questions = self.questions[: algorithm.questions_per_step]
        self.metrics, *_ = train_step(
            self.networks, algorithm, [Reward("digits", digits)],
            self.config.sampling, Limits(), lambda _: questions, random.Random(1),
        )


def peak(subject):
    Subject(*subject).step("grpo")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(options):
    """{figure: {dtype: number}}, the number of parameters, and the dtype that `auto` chooses."""
    jobs = [(options.model, options.dataset, dtype) for dtype in DTYPES]
    figures = {"peak memory, MiB": dict(zip(DTYPES, alone(peak, jobs, start="spawn")))}
    subjects = {job[-1]: Subject(*job) for job in jobs}
    # before the steps, which train the two models
    logps = {dtype: subject.score(1, 1500, 50) for dtype, subject in subjects.items()}
    gaps = {dtype: (logp - logps["float32"]).abs() for dtype, logp in logps.items()}
    figures["log-probabilities after 1,500 tokens, mean difference from float32's"] = {
        dtype: gap.mean().item() for dtype, gap in gaps.items()
    }
    figures["largest difference"] = {dtype: gap.max().item() for dtype, gap in gaps.items()}
    kinds = {  # the step of GRPO is the last, so its metrics are those that are kept
        "score 1,024 tokens, s": lambda subject: subject.score(4, 192, 64),
        "forward and backward, s": lambda subject: subject.score(4, 192, 64, backward=True),
        "sample 32 × 16 tokens, s": lambda subject: subject.sample(),
        "a step of CPPO, P = 0.75, s": lambda subject: subject.step("cppo"),
        "a step of GRPO, s": lambda subject: subject.step("grpo"),
    }
    ways = {(kind, dtype): partial(work, subjects[dtype])
            for kind, work in kinds.items() for dtype in DTYPES}
    seconds = in_turn(ways, options.rounds, clock=time.process_time)
    for kind in kinds:
        figures[kind] = {dtype: median(seconds[kind, dtype]) for dtype in DTYPES}
    for name in OF_A_STEP:
        figures[f"{name} of this step"] = {
            dtype: subject.metrics[name] for dtype, subject in subjects.items()
        }
    parameters = subjects["float32"].networks.model.num_parameters()
    auto = str(choose_dtype("auto", CPU, parameters)).removeprefix("torch.")
    return {"figures": figures, "parameters": parameters, "auto": auto}


def page(result):
    units = ("avx2", "avx512_f", "avx512_bf16", "amx_bf16")
    has = [name for name in units if torch.cpu.get_capabilities().get(name)]
    lines = [["", *DTYPES, "float32 / bfloat16"]]
    for name, of in result["figures"].items():
        exact, rounded = (of[dtype] for dtype in DTYPES)
        ratio = f"{exact / rounded:.2f}" if name.endswith((", s", "MiB")) else ""
        shown = [
            f"{x:,.0f}" if x > 100 else f"{x:.2g}" if x < 1 else f"{x:.3g}"
            for x in (exact, rounded)
        ]
        lines.append([name, *shown, ratio])
    return (
        heading("float32 beside bfloat16 on a CPU", result)
        + f"\n{result['parameters']:,} parameters, one thread. This processor has "
        f"{', '.join(has)}: `--dtype auto` is {result['auto']}.\n\n" + markdown_table(lines) + "\n"
    )


def main(argv):
    options = parse(Options, argv)
    report(options, "precision", measure(options), page)


if __name__ == "__main__":
    run_program(main)
