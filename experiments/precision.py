"""float32 beside bfloat16 (`--dtype`) on the CPU of this machine: speed, memory, and how far apart
the numbers are.

    python experiments/precision.py                            SmolLM2-135M-Instruct; --model names
                                                               another

Writes precision.json and precision.md in experiments/results. Both dtypes take turns in one
process. Seconds are CPU seconds of one thread. A step is one of `--dataset arithmetic`: GRPO
samples 64 completions, CPPO samples 256, and both train on 64. Memory is the peak of a process of
its own that makes one step of GRPO. """

import multiprocessing
import random
import resource
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from tqdm import trange

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from engine.model.networks import build
from engine.model.precision import choose_dtype
from engine.model.sampling import Sampling
from engine.run.config import Config, check
from engine.run.options import option, parse, run_program
from engine.scoring.score import Reward
from engine.tasks.questions import load_questions
from experiments.setting import heading, setting, write
from experiments.step_memory import digits
from records import Batch
from train import train_step
from update import Limits

DTYPES, CPU = ("float32", "bfloat16"), torch.device("cpu")


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
        self.config = Config(algorithm="grpo", **self.options)
        check(self.config)
        self.networks = build(model, CPU, self.config, self.config, lr=1e-6, beta=0.04)
        torch.set_num_threads(1)
        self.questions, _ = load_questions(
            dataset, self.networks.tokenizer, system_prompt=self.config.system_prompt, limit=150
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
        self.networks.sampler.sample(
            [question["prompt"] for question in self.questions[:2]], 16, Sampling(16), seed=0
        )

    def step(self, name):
        """The metrics of a training step."""
        algorithm = check(Config(algorithm=name, **self.options))
        questions, sampling = (
            self.questions[: algorithm.questions_per_step], Sampling(self.config.max_new_tokens),
        )
        rewards, rng = [Reward("digits", digits)], random.Random(1)
        return train_step(
            self.networks, algorithm, rewards, sampling, Limits(), lambda _: questions, rng
        )[0]


def peak(*subject):
    Subject(*subject).step("grpo")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(options):
    """{figure: {dtype: number}}, the number of parameters, and the dtype that `auto` chooses."""
    figures = defaultdict(dict)
    for dtype in DTYPES:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            figures["peak memory, MiB"][dtype] = pool.apply(
                peak, (options.model, options.dataset, dtype)
            )
    subjects, seconds = (
        {dtype: Subject(options.model, options.dataset, dtype) for dtype in DTYPES},
        defaultdict(list),
    )
    # before the steps, which train the two models
    logps = {dtype: subject.score(1, 1500, 50) for dtype, subject in subjects.items()}
    for dtype, logp in logps.items():
        gap = (logp - logps["float32"]).abs()
        figures["log-probabilities after 1,500 tokens, mean difference from float32's"][dtype] = (
            gap.mean().item()
        )
        figures["largest difference"][dtype] = gap.max().item()
    kinds = {
        "score 1,024 tokens, s": lambda subject: subject.score(4, 192, 64),
        "forward and backward, s": lambda subject: subject.score(4, 192, 64, backward=True),
        "sample 32 × 16 tokens, s": lambda subject: subject.sample(),
        "a step of CPPO, P = 0.75, s": lambda subject: subject.step("cppo"),
        "a step of GRPO, s": lambda subject: subject.step("grpo"),
    }
    for _ in trange(options.rounds):
        for kind, work in kinds.items():
            for dtype, subject in subjects.items():
                begin = time.process_time()
                result = work(subject)
                seconds[kind, dtype].append(time.process_time() - begin)
                figures[kind][dtype] = median(seconds[kind, dtype])
                for name in (
                    ("ratio_max", "sampler_gap", "sampler_gap_max") if "GRPO" in kind else ()
                ):
                    figures[f"{name} of this step"][dtype] = result[name]
    parameters = subjects["float32"].networks.model.num_parameters()
    return {
        "figures": figures, "parameters": parameters,
        "auto": str(choose_dtype("auto", CPU, parameters)).removeprefix("torch."),
    }


def page(result):
    has = [
        name
        for name in ("avx2", "avx512_f", "avx512_bf16", "amx_bf16")
        if torch.cpu.get_capabilities().get(name)
    ]
    lines = [
        heading("float32 beside bfloat16 on a CPU", result),
        f"{result['parameters']:,} parameters, one thread. This processor has {', '.join(has)}: "
        f"`--dtype auto` is {result['auto']}.\n",
        "| | float32 | bfloat16 | float32 / bfloat16 |\n|---|---|---|---|",
    ]
    for name, of in result["figures"].items():
        exact, rounded = (of[dtype] for dtype in DTYPES)
        ratio = f"{exact / rounded:.2f}" if name.endswith((", s", "MiB")) else ""
        shown = [
            f"{x:,.0f}" if x > 100 else f"{x:.2g}" if x < 1 else f"{x:.3g}"
            for x in (exact, rounded)
        ]
        lines.append(f"| {name} | {' | '.join(shown)} | {ratio} |")
    return "\n".join(lines) + "\n"


def main(argv):
    options = parse(Options, argv)
    result = setting(["torch", "transformers"]) | measure(options)
    write(options.output, "precision", result, page(result))
    print(page(result))


if __name__ == "__main__":
    run_program(main)
