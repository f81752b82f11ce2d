"""One GPU: how fast it samples, updates and trains, beside what the card could do.

    python experiments/gpu.py --output experiments/results     six minutes on one GPU, without a hub
    python experiments/gpu.py --parts sampling update          only these parts
    python experiments/gpu.py --quick                          every part with a tiny model, in less
                                                               than a minute, without a GPU, too

The models have published shapes and random weights. Prompts are random tokens, every second
completion is right, and no completion ends early. So the seconds do not depend on what a model has
learned. Each part has a limit of seconds, and says what it leaves out. Both files are written again
after each step of a part, so a run that is stopped keeps what it has.

If there is no git, the variable GIT_COMMIT says what is measured.
"""

import gc
import inspect
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from engine.base import files
from engine.base.errors import UserError, one_line
from engine.base.program import run_program
from engine.model.loading import fewer_kernels
from engine.model.logprobs import Policy, completion_mask
from engine.model.precision import choose_dtype
from engine.model.sampler_interface import Completions, Sampling
from engine.options.command_line import option, parse
from engine.options.config import config_of
from engine.run.plan import plan
from engine.run.shapes import widths
from engine.scoring.score import Reward
from examples.vllm_sampler import VLLM
from experiments import vs_trl
from experiments.library import toy_model
from experiments.library.bench import (
    ROOT,
    commit,
    every_second,
    heading,
    markdown_table,
    networks_of,
    published,
    said,
    seconds_of,
    setting,
    this_device,
)
from loop.records import Parts
from loop.update import Limits
from train import train_step

G = 16
GRPO = {"algorithm": "grpo"}
METHODS = {"GRPO": GRPO, "GRPO, 16 together": GRPO | {"questions_per_step": 16, "minibatches": 16}}
for P in (0.5, 0.75, 0.875, 0.9375):
    METHODS[f"CPPO, P = {P}"] = {"pruning_rate": P}
TRL_ROWS = {  # of vs_trl.py: what the page calls them
    "trl": "TRL, transformers' sampling, GRPO", "grpo": "ours, GRPO",
    "cppo": "ours, CPPO, P = 0.875", "trl_cppo": "TRL, transformers' sampling, CPPO, P = 0.875"}
PHASES = {"a step, s": "total", "sampling": "generate", "reference": "logprobs", "update": "update"}
READ = (
    "How to read it: models with random weights, the median of two steps or more. Every second "
    "completion is right, and all have the same length, so nobody waits for a long one. This is "
    "speed; what is learned in a second is measured by [learning.py](../learning.py).")


class Full:
    """What is measured on a GPU."""

    shapes = "Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-1.5B"  # the last one is trained, too
    prompt = 100, 200  # tokens of the shortest and of the longest
    tokens = 200  # of a completion
    micro_batches = 2048, 4096, 8192, 16384  # tokens
    product = 8192  # rows of a large matrix
    first = "--steps", "12"  # options of train.py
    trl = "Qwen/Qwen2.5-0.5B", 128, 150  # shape, tokens of a completion and of a prompt


class Quick:
    shapes = ("toy",)
    prompt = 5, 9
    tokens = 6
    micro_batches = 32, 64, 128, 256
    product = 128
    first = "--steps", "2", "--eval_questions", "8", "--questions_per_step", "2"
    trl = "toy", 4, 12


class Skipped(Exception):
    """A part that cannot be measured here, and why."""


# --- what the parts share ---


class Lab:
    """The device, and the networks of one shape at a time."""

    def __init__(self, sizes):
        self.sizes, self.device = sizes, this_device()
        self.shape = self.networks = None
        # what the card reaches in a large product, and in a large copy, which reads and writes
        half = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        x = torch.randn(sizes.product, sizes.product, dtype=half, device=self.device)
        self.tflops = 2e-11 * sizes.product**3 / when_warm(lambda: [x @ x for _ in range(10)])
        numbers = torch.zeros(8 * sizes.product**2, device=self.device)
        self.tb_a_second = 2e-12 * numbers.nbytes / when_warm(numbers.clone)

    def settings(self, **options):
        """(Config, Algorithm) of steps of the shape that is trained."""
        usual = {
            "model": self.sizes.shapes[-1], "dataset": "toy", "group_size": G, "beta": 0.04,
            "questions_per_step": 1, "minibatches": 1, "mu": 2, "lr": 1e-6, "plan": 0.0,
            "max_prompt_tokens": self.sizes.prompt[1], "max_new_tokens": self.sizes.tokens,
        }
        return config_of(usual | options)

    def load(self, shape):
        """The Networks of a shape."""
        if shape != self.shape:
            self.forget()
            model = published(shape, self.device)
            fewer_kernels(model, self.device)
            policy = Policy(model, choose_dtype("auto", self.device, model.num_parameters()))
            networks = networks_of(policy, toy_model.make_tokenizer(), *self.settings())
            networks.sampler.stop_ids = [-1]  # no token ends a completion
            self.shape, self.networks = shape, networks
        return self.networks

    def forget(self):
        self.shape = self.networks = None
        gc.collect()
        torch.cuda.empty_cache()

    def prompts(self, n, seed=0):
        rng, vocabulary = random.Random(seed), self.networks.model.config.vocab_size
        lengths = [rng.randint(*self.sizes.prompt) for _ in range(n)]
        return [rng.choices(range(5, vocabulary), k=length) for length in lengths]

    def step(self, seed, micro_batch=None, **options):
        """The metrics of a step, with the GB that were planned and held, and the micro-batch."""
        config, algorithm = self.settings(**options)
        networks = self.load(self.sizes.shapes[-1])
        config.devices.micro_batch_tokens = micro_batch  # None: what the plan says fits
        planned = plan(config.options)
        limits = Limits(planned.micro_batch_tokens)
        questions = [{"question": "?", "answer": "1", "prompt": prompt}
                     for prompt in self.prompts(algorithm.questions_per_step, seed)]
        gpu = self.device.type == "cuda"
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        reward = Reward("every second", every_second)
        parts = Parts(networks, algorithm, [reward], config.sampling, limits)
        step = train_step(parts, questions, random.Random(seed))
        return step.metrics | {
            "micro-batch": limits.micro_batch_tokens, "planned, GB": max(planned.peaks) / 1e9,
            "held, GB": torch.cuda.max_memory_allocated() / 1e9 if gpu else None,
        }


def when_warm(function):
    """The median seconds of one to five calls. The first call does not count."""
    function()
    spent = []
    while not spent or sum(spent) < 2 and len(spent) < 5:
        spent.append(seconds_of(function))
    return median(spent)


def child(*words):
    """Run a program of the project in a process of its own, which ends with this part."""
    torch.cuda.empty_cache()  # it shares the card
    command = [sys.executable, *map(str, words)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def needed(package):
    if find_spec(package) is None:
        raise Skipped(f"{package} is not installed")


def with_speedups(rows, *titles):
    """Each row is compared with the first row, then with the second one …"""
    for row in rows:
        for title, other in zip(titles, rows):
            row[title] = other["a question, s"] / row["a question, s"]
    return rows


# --- the parts: each yields its table so far. The page quotes what is said of it here ---


def sampling(lab):
    """A sampled token

    Milliseconds of a token, reading the prompts included. The floor is the time in which the card's
    own copy would read all weights and the cache once. If 128 completions take little longer than
    16, sampling more questions is nearly free.
    """
    rows = []
    for shape in lab.sizes.shapes:
        networks = lab.load(shape)
        config, size = networks.model.config, networks.policy.dtype.itemsize
        # of each token in the cache: keys and values of all layers
        cache = 2 * widths(config)[2] * config.num_hidden_layers
        for n, ms in sampled(lab, networks.sampler):
            seen = (sum(lab.sizes.prompt) + lab.sizes.tokens) / 2
            read = size * (networks.model.num_parameters() + n * seen * cache)
            floor = 1e-9 * read / lab.tb_a_second
            rows.append({"": f"{shape}, {n} completions", "ms a token": ms, "floor": floor,
                         "times the floor": ms / floor})
            yield rows


def sampled(lab, sampler):
    """Yields (completions sampled together, milliseconds of a token)."""
    for n in (16, 64, 128):
        sample = partial(
            sampler.sample, lab.prompts(n // G), G, Sampling(lab.sizes.tokens), seed=0)
        yield n, 1e3 * when_warm(sample) / lab.sizes.tokens


def drawn_at_once(prompts, group_size, sampling, seed, places=None):
    """Random tokens in place of a sampler's, because the update is measured. A completion has a
    quarter of the tokens that are allowed, or more."""
    device, rng = this_device(), torch.Generator().manual_seed(seed)
    N, T = len(prompts) * group_size, sampling.max_new_tokens
    tokens = torch.randint(5, 20, (N, T), generator=rng).to(device)
    lengths = torch.randint(T // 4, T + 1, (N,), generator=rng).to(device)
    logp = torch.zeros(N, T, device=device)
    return Completions(tokens, lengths, lengths < 0, logp, completion_mask(tokens, lengths))


def update(lab):
    """An update, and its reference

    TFLOP/s of 64 completions of 4 questions, μ = 1; a prompt counts once. If a rate rises with the
    tokens of a micro-batch, the host is the limit, because it starts the kernels. "Of the product":
    of what the card reaches in a large product of matrices.
    """
    networks, rows = lab.load(lab.sizes.shapes[-1]), []
    # a weight takes 2 operations of a token in a forward pass, and 4 in a backward pass
    work = 2e-12 * networks.model.num_parameters()
    options = GRPO | {"questions_per_step": 4, "mu": 1, "max_new_tokens": 2 * lab.sizes.tokens}
    for size in lab.sizes.micro_batches:
        rates = []
        for seed in range(3):
            with patch.object(networks.sampler, "sample", drawn_at_once):
                step = lab.step(seed, size, **options)
            if step["micro-batch"] < size:  # memory ran out, and `update` went on
                raise Skipped(f"micro-batches of {size} tokens do not fit")
            tokens = step["tokens_trained"] + sum(map(len, lab.prompts(4, seed)))
            rates.append(
                [3 * work * tokens / step["seconds/update"],
                 work * tokens / step["seconds/logprobs"]])
        updates, references = zip(*rates[1:])
        rows.append({
            "": f"{size} tokens", "update": median(updates), "reference": median(references),
            "of the product": median(updates) / lab.tflops, "held, GB": step["held, GB"],
        })
        yield rows


def protocol(lab):
    """The paper's protocol

    μ = 2, the median of the steps without the first. GRPO has one question a step. CPPO has so many
    that it keeps 16 completions. The last column is the fair comparison: this GRPO samples 16
    questions together, as CPPO with P = 0.9375 does, and trains on one after the other. The
    micro-batch is the largest that fits, as `--plan` says. The planned memory should be a little
    more than the memory that was held.
    """
    steps = {name: [] for name in METHODS}
    for number in range(3):
        for name, options in METHODS.items():
            steps[name].append(lab.step(number, **options))
            if number:
                yield medians(steps)


def medians(steps):
    """The table of the steps of each method."""
    rows = []
    for name, (_, *warm) in steps.items():
        if warm:
            row = {"": name}
            for title, phase in PHASES.items():
                row[title] = median(step[f"seconds/{phase}"] for step in warm)
            row["a question, s"] = row["a step, s"] / warm[0]["questions"]
            for title in ("micro-batch", "planned, GB", "held, GB"):
                row[title] = warm[-1][title]
            rows.append(row)
    return with_speedups(rows, "speed-up", "beside GRPO, 16 together")


def first_command(lab):
    """The first command

    `torchrun train.py` trains the toy. It must learn, and a step should take no longer than on a
    CPU. The first step counts here: it loads the kernels.
    """
    with tempfile.TemporaryDirectory() as folder:
        child("train.py", "--output_dir", f"{folder}/run", *lab.sizes.first)
        summary = json.loads(Path(folder, "run/summary.json").read_text())
    steps, seconds = summary["step"], summary["phases"]["total"]
    row = {"": f"{steps} steps", "a step, s": seconds / steps}
    for when in ("before", "after"):
        row[f"greedy accuracy {when}"] = summary[when]["greedy"]["accuracy"]
    yield [row]


def trl(lab):
    """TRL's GRPOTrainer beside ours

    The shape of Qwen2.5-0.5B, completions of 128 tokens, μ = 1, β = 0.04. GRPO takes 8 questions a
    step, CPPO 64. TRL samples with transformers here, not with vLLM, which is its fast path. CPPO
    in TRL is examples/cppo_in_trl.py. The last columns say how many times as fast a question is.
    """
    needed("trl")
    lab.forget()
    shape, tokens, prompt = lab.sizes.trl
    with tempfile.TemporaryDirectory() as folder:
        child("experiments/vs_trl.py", "--output", folder, "--shape", shape, "--tokens", tokens,
              "--prompt", prompt, "--micro_batch_tokens", lab.sizes.micro_batches[2],
              "--beside", *TRL_ROWS, "--warmup", 1, "--rounds", 2, "--seconds", 80)
        [file] = Path(folder).glob("*.json")
        found = json.loads(file.read_text())["seconds"]
    rows = []
    for name, title in TRL_ROWS.items():
        total, part = (median(step[key] for step in found[name]) for key in ("total", "generate"))
        rows.append({"": title, "a step, s": total, "sampling": part,
                     "a question, s": total / vs_trl.PER_STEP[name]})
    yield with_speedups(rows, "beside TRL's GRPO", "beside our GRPO")


def waits(lab):
    """Where the host waits for the device

    Lines that made it wait in a step of CPPO with P = 0.875, and how often. A line that waits for
    each token or each micro-batch is one too many.
    """
    if lab.device.type == "cpu":
        raise Skipped("not measured, because there is no GPU to wait for")
    lab.step(0, pruning_rate=0.875)
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        lab.step(1, pruning_rate=0.875)
    torch.cuda.set_sync_debug_mode("default")
    places = Counter()
    for one in told:
        if "synchronizing CUDA" in str(one.message):
            file = one.filename.removeprefix(f"{ROOT}/").split("/site-packages/")[-1]
            places[f"{file}:{one.lineno}"] += 1
    counts = [("all", places.total()), *places.most_common(12)]
    yield [{"": place, "times": times} for place, times in counts]


class Half(VLLM):
    share = 0.5


def vllm(lab):
    """vLLM

    The same sampling by `--sampler examples/vllm_sampler.py:VLLM`: compare with the first table.
    """
    needed("vllm")
    networks = lab.load(lab.sizes.shapes[-1])
    config, _ = lab.settings()
    with tempfile.TemporaryDirectory() as folder:
        networks.model.save_pretrained(folder)
        engine = Half(
            folder, networks.tokenizer, networks.policy.dtype, config.sampling, stop_ids=[],
            longest=lab.sizes.prompt[1] + lab.sizes.tokens, seed=0)
        yield [{"": f"{lab.shape}, {n} completions", "ms a token": ms}
               for n, ms in sampled(lab, engine)]


PARTS = {  # {part: its limit in seconds}: what is worth most comes first
    sampling: 70, update: 70, protocol: 120, first_command: 75, trl: 150, waits: 30, vllm: 100,
}
NAMES = {part.__name__: part for part in PARTS}


@dataclass
class Options:
    parts: list[str] | None = option(None, "which; none: all", choices=tuple(NAMES))
    seconds: int = option(360, "all parts end after so many seconds", limits="[1, ∞)")
    quick: bool = option(False, "a tiny model in place of the published shapes")
    output: str = option("runs/results", "folder of gpu.json and gpu.md")


# --- the page ---


def cell(value):
    if value is None:
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def table(rows):
    lines = [list(rows[0])]
    for row in rows:
        lines.append([cell(value) for value in row.values()])
    return markdown_table(lines) + "\n"


def page(result):
    """The results as Markdown."""
    lines = [heading("One GPU", result), READ + "\n", table(result["card"])]
    for name, part in NAMES.items():
        title, _, see = inspect.getdoc(part).partition("\n\n")
        entry = result["parts"].get(name, {"rows": [], "told": "not measured"})
        lines.append(f"## {title}\n\n{see}\n")
        if entry["rows"]:
            lines.append(table(entry["rows"]))
        if entry["told"]:
            lines.append(f"*Note: {entry['told'].rstrip('.')}.*\n")
    return "\n".join(lines)


# --- the program ---


def measure(part, lab, entry, limit, save):
    """Fill the `entry` of a part: its rows so far, and why it ended early. save(): at each step."""
    begin = time.perf_counter()
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        for rows in part(lab):
            entry["rows"] = rows
            print(part.__name__, rows[-1], flush=True)
            save()
        entry["told"] = None
    except Skipped as reason:
        entry["told"] = str(reason)
    except KeyboardInterrupt:
        if time.perf_counter() - begin < 0.99 * limit:
            raise
        entry["told"] = f"stopped after {limit:.0f} seconds"
    except Exception as error:
        traceback.print_exc()
        entry["told"] = f"failed: {one_line(error)}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    entry["seconds"] = time.perf_counter() - begin
    if entry["told"]:
        lab.forget()  # a step may have ended in the middle


def main(argv):
    options = parse(Options, argv)
    gpu = torch.cuda.is_available()
    if not (gpu or options.quick):
        raise UserError("this machine has no GPU: --quick runs every part with a tiny model.")
    for number in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    end, lab = time.perf_counter() + options.seconds, Lab(Quick if options.quick else Full)
    card = {
        "": torch.cuda.get_device_name() if gpu else "no GPU",
        "driver": said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "commit": commit(),
        "a product, TFLOP/s": lab.tflops, "a copy, TB/s": lab.tb_a_second,
    }
    installed = [name for name in ("peft", "trl", "vllm") if find_spec(name)]
    result = setting(*installed) | {"card": [card], "parts": {}}
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)

    def save():
        files.write(folder / "gpu.json", files.as_json(result))
        files.write(folder / "gpu.md", page(result))

    try:
        for name in options.parts or NAMES:
            entry = result["parts"][name] = {"rows": [], "told": "stopped by hand"}
            part = NAMES[name]
            left = max(0.01, end - time.perf_counter())
            measure(part, lab, entry, min(PARTS[part], left), save)
    finally:
        save()
    print(page(result))


if __name__ == "__main__":
    run_program(main)
