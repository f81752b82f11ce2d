"""One GPU: what it does in sampling, in updates and in whole steps, beside what it could do.

    python experiments/gpu.py --output experiments/results     six minutes on one GPU, without a hub
    python experiments/gpu.py --parts sampling update          only these parts
    python experiments/gpu.py --quick                          every part with a tiny model, in less
                                                               than a minute, on any machine

The models have published shapes and random weights. Prompts are random tokens, every second
completion is right, and no completion ends early. So the seconds do not depend on what a model has
learned. A part has a limit of seconds, and says what it leaves out. Both files are written again
after every row, so a run that is stopped keeps what it has.

Where git is missing, the variable GIT_COMMIT says which commit is measured.
"""

import gc
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from engine.base import files
from engine.base.errors import UserError, one_line
from engine.model.contract import Completions, Sampling
from engine.model.logprobs import Policy, completion_mask
from engine.model.precision import choose_dtype
from engine.model.vllm import VLLM
from engine.run.command_line import option, parse, run_program
from engine.run.config import config_of
from engine.run.metrics import Clock
from engine.run.plan import plan
from engine.run.shapes import widths
from engine.scoring.score import Reward
from experiments.library import toy_model
from experiments.library.bench import (
    ROOT,
    every_second,
    markdown_table,
    published,
    seconds_of,
    setting,
    this_device,
)
from experiments.library.study import cell
from experiments.memory import networks_of
from experiments.plan import Tracker, longest_steps
from experiments.vs_trl import NAMES, PER_STEP
from train import train_step
from update import Limits

G = 16
USUAL = {  # of a step
    "dataset": "toy", "group_size": G, "questions_per_step": 1, "minibatches": 1, "beta": 0.04,
    "lr": 1e-6, "plan": 0.0,
}
CPPO = {"algorithm": "cppo", "pruning_rate": 0.875}
TOGETHER = 16  # questions that P = 0.9375 samples together
METHODS = {
    "GRPO": {"algorithm": "grpo"},
    **{f"CPPO, P = {P}": CPPO | {"pruning_rate": P} for P in (0.5, 0.75, 0.875, 0.9375)},
    f"GRPO, {TOGETHER} questions together": {
        "algorithm": "grpo", "questions_per_step": TOGETHER, "minibatches": TOGETHER},
}
ALONE, *_, FAIR = METHODS
BEFORE = ROOT / "experiments/results/gpu_before.json"


@dataclass
class Sizes:
    shapes: tuple  # all are sampled from, the last one is trained, too
    prompt: tuple  # tokens of the shortest and of the longest
    rows: tuple  # completions that are sampled together
    sampled: int  # tokens of each
    micro_batches: tuple  # tokens
    updated: int  # tokens of the longest completion of an update, which has 4 questions
    trained: int  # tokens of a completion in the paper's protocol
    longest: tuple  # (prompt, completion) of the memory
    product: int  # rows and columns of the matrices that are multiplied
    copy: int  # float32 numbers that are copied
    first: tuple  # options of train.py
    trl: tuple  # shape, tokens of a completion and of a prompt


FULL = Sizes(
    ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-1.5B"), (100, 200), (16, 64, 128), 128,
    (2048, 4096, 8192, 16384), 384, 200, (512, 256), 8192, 2**29, ("--steps", "12"),
    ("Qwen/Qwen2.5-0.5B", 128, 150),
)
QUICK = Sizes(
    ("toy",), (5, 9), (16, 32, 64), 4, (32, 64, 128, 256), 8, 6, (12, 6), 128, 2**16,
    ("--steps", "2", "--eval_questions", "8", "--questions_per_step", "2"),
    ("toy", 4, 12),
)


class Skipped(Exception):
    """A part that cannot be measured here, and why."""


class OutOfTime(BaseException):
    """No library takes it for an error of its own."""


# --- what the parts share ---


class Lab:
    """The device and the networks of one shape, which are built once."""

    def __init__(self, sizes, device):
        self.sizes, self.device = sizes, device
        self.shape = self.networks = None

    def settings(self, tokens, **options):
        """(Config, Algorithm) of steps of the shape that is trained."""
        usual = USUAL | {"model": self.sizes.shapes[-1], "max_prompt_tokens": self.sizes.prompt[1]}
        return config_of(usual | {"max_new_tokens": tokens} | options)

    def load(self, shape):
        """The Networks of a shape. No token ends a completion."""
        if shape != self.shape:
            self.forget()
            model, tokenizer = published(shape, self.device), toy_model.make_tokenizer()
            policy = Policy(model, choose_dtype("auto", self.device, model.num_parameters()))
            networks = networks_of(policy, tokenizer, *self.settings(1, algorithm="grpo"))
            networks.sampler.stop_ids = [-1]
            self.shape, self.networks = shape, networks
        return self.networks

    def forget(self):
        """Free the memory of the networks, for another shape or another process."""
        self.shape = self.networks = None
        gc.collect()
        torch.cuda.empty_cache()

    def questions(self, n, seed=0):
        """Random tokens as prompts."""
        rng = random.Random(seed)
        vocabulary = self.networks.model.config.vocab_size
        prompts = [rng.choices(range(5, vocabulary), k=rng.randint(*self.sizes.prompt))
                   for _ in range(n)]
        return [{"question": "?", "answer": "1", "prompt": prompt} for prompt in prompts]

    def step(self, tokens, seed=0, micro_batch=None, sampler=None, **options):
        """The metrics of a step of the shape that is trained, with its peak memory in GB."""
        config, algorithm = self.settings(tokens, **options)
        networks = self.load(self.sizes.shapes[-1])
        limits = Limits(micro_batch or self.largest_micro_batch(config))
        questions = self.questions(algorithm.questions_per_step, seed)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        step = train_step(
            replace(networks, sampler=sampler or networks.sampler), algorithm,
            [Reward("every second", every_second)], config.sampling, limits, questions,
            random.Random(seed))
        return step.metrics | {"micro_batch": limits.micro_batch_tokens, "peak": self.peak()}

    def peak(self):
        """GB since the last reset; a CPU does not tell."""
        return torch.cuda.max_memory_allocated() / 1e9 if self.device.type == "cuda" else None

    def largest_micro_batch(self, config):
        """The largest one that the memory plan says fits."""
        options, fitting = vars(config.options), self.sizes.micro_batches[:1]
        for tokens in self.sizes.micro_batches:
            if plan(SimpleNamespace(**options | {"micro_batch_tokens": tokens})).fits:
                fitting = (tokens,)
        return fitting[0]


def seconds_when_warm(function):
    """The median of one to five calls in two seconds. The call before them does not count."""
    function()
    spent = []
    while not spent or sum(spent) < 2 and len(spent) < 5:
        spent.append(seconds_of(function))
    return median(spent)


def ceilings(sizes, device):
    """What this card reaches in a large product and in a large copy, which reads and writes."""
    half = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.randn(sizes.product, sizes.product, dtype=half, device=device)
    numbers = torch.zeros(sizes.copy, device=device)
    product = seconds_when_warm(lambda: [x @ x for _ in range(10)]) / 10
    copy = seconds_when_warm(numbers.clone)
    return {"tflops": 2e-12 * sizes.product**3 / product, "gb_a_second": 8e-9 * sizes.copy / copy}


def child(*words):
    """Run a program of the project in a process of its own, which is killed with this part."""
    torch.cuda.empty_cache()  # it shares the card
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{words[0]} ended with {done.returncode}: {done.stderr[-300:]}")


def needed(package):
    if find_spec(package) is None:
        raise Skipped(f"{package} is not installed")


# --- the parts: each yields its rows ---


def sampling(lab, card):
    for shape in lab.sizes.shapes:
        networks = lab.load(shape)
        for row in sampled(lab, networks.sampler):
            config, size = networks.model.config, networks.policy.dtype.itemsize
            # of each token in the cache, all layers' keys and values
            cache = 2 * size * widths(config)[2] * config.num_hidden_layers
            context = sum(lab.sizes.prompt) / 2 + lab.sizes.sampled / 2
            read = size * networks.model.num_parameters() + row["rows"] * context * cache
            floor = 1e-6 * read / card["gb_a_second"]
            yield {"shape": shape} | row | {"floor": floor, "times": row["ms"] / floor}


def sampled(lab, sampler):
    """Yields the milliseconds of a token by the number of rows."""
    tokens = lab.sizes.sampled
    for rows in lab.sizes.rows:
        prompts = [question["prompt"] for question in lab.questions(rows // G)]
        seconds = seconds_when_warm(
            partial(sampler.sample, prompts, G, Sampling(tokens), seed=0))
        yield {"rows": rows, "tokens": tokens, "ms": 1e3 * seconds / tokens}


class MadeUp:
    """A sampler that draws random tokens at once: sampling is not what an update's part measures.
    A completion has a quarter of the longest one's tokens, or more."""

    def __init__(self, sampler, vocabulary, device):
        self.refresh, self.free_memory = sampler.refresh, sampler.free_memory
        self.dtype, self.vocabulary, self.device = sampler.dtype, vocabulary, device

    def sample(self, prompts, group_size, sampling, seed, places=None):
        shape = len(prompts) * group_size, sampling.max_new_tokens
        rng = torch.Generator().manual_seed(seed % 2**31)
        tokens = torch.randint(self.vocabulary, shape, generator=rng).to(self.device)
        lengths = torch.randint(shape[1] // 4, shape[1] + 1, shape[:1], generator=rng)
        mask = completion_mask(tokens, lengths.to(self.device))
        logp = torch.zeros(shape, device=self.device)
        return Completions(tokens, lengths.to(self.device), lengths < 0, logp, mask)


def update(lab, card):
    model = lab.load(lab.sizes.shapes[-1]).model
    sampler = MadeUp(lab.networks.sampler, model.config.vocab_size, lab.device)
    options = {"algorithm": "grpo", "questions_per_step": 4, "mu": 1}
    for size in lab.sizes.micro_batches:
        rows = []
        for seed in range(3):
            try:
                step = lab.step(lab.sizes.updated, seed, size, sampler, **options)
            except torch.OutOfMemoryError:
                step = {"micro_batch": 0}
            if step["micro_batch"] < size:  # `update` goes on with half of it
                yield {"micro_batch": size, "update": "out of memory"}
                lab.forget()
                return
            tokens = step["tokens_trained"]  # and a prompt is needed once
            tokens += sum(len(question["prompt"]) for question in lab.questions(4, seed))
            # a weight takes 2 operations in a forward pass, and 4 in a backward pass
            work = 2e-12 * model.num_parameters() * tokens
            row = {"update": 3 * work / step["seconds/update"],
                   "reference": work / step["seconds/logprobs"], "peak": step["peak"]}
            rows.append(row)
        found = {figure: rows[-1]["peak"] if figure == "peak" else
                 median(row[figure] for row in rows[1:]) for figure in row}
        yield {"micro_batch": size} | found | {
            f"{figure}_share": found[figure] / card["tflops"] for figure in ("update", "reference")}


def protocol(lab, card):
    for number in range(3):
        for name, options in METHODS.items():
            step = lab.step(lab.sizes.trained, number, mu=2, **options)
            yield {"name": name, "round": number} | {
                figure: step[figure] for figure in step
                if figure.startswith("seconds/") or figure in ("questions", "peak", "micro_batch")}


def first_command(lab, card):
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        whole = seconds_of(lambda: child("train.py", "--output_dir", run, *lab.sizes.first))
        steps = [row["seconds/total"] for row in files.read(run / "metrics.jsonl")]
        summary = json.loads((run / "summary.json").read_text())
    before, after = (summary[when]["greedy"]["accuracy"] for when in ("before", "after"))
    yield {
        "steps": len(steps), "seconds": whole, "first": steps[0], "step": median(steps[1:]),
        "before": before, "after": after,
    }


def trl(lab, card):
    needed("trl")
    shape, tokens, prompt = lab.sizes.trl
    config, _ = lab.settings(tokens, algorithm="grpo", model=shape, questions_per_step=8)
    micro_batch = lab.largest_micro_batch(config)
    lab.forget()
    with tempfile.TemporaryDirectory() as folder:
        child("experiments/vs_trl.py", "--output", folder, "--shape", shape, "--tokens", tokens,
              "--prompt", prompt, "--micro_batch_tokens", micro_batch, "--beside", "grpo", "cppo",
              "--warmup", 1, "--rounds", 2, "--seconds", 80)
        [file] = Path(folder).glob("*.json")
        found = json.loads(file.read_text())["seconds"]
    theirs = None
    for name, steps in found.items():
        total, generate = (median(step[key] for step in steps) for key in ("total", "generate"))
        question = total / PER_STEP[name]
        theirs = theirs or question
        yield {"name": NAMES[name], "total": total, "generate": generate, "question": question,
               "speedup": theirs / question}


def memory(lab, card):
    networks = lab.load(lab.sizes.shapes[-1])
    prompt, tokens = lab.sizes.longest
    for name in (ALONE, "CPPO, P = 0.875"):
        for size in (None, lab.sizes.micro_batches[0]):
            options = METHODS[name] | {"mu": 2, "max_prompt_tokens": prompt}
            config, algorithm = lab.settings(tokens, **options)
            size = size or lab.largest_micro_batch(config)
            config, algorithm = lab.settings(tokens, **options, micro_batch_tokens=size)
            planned = dict(zip(("generation", "update"), plan(config.options).peaks))
            row = {"name": name, "micro_batch": size, "tokens": prompt + tokens}
            row |= {f"{phase}_planned": bytes / 1e9 for phase, bytes in planned.items()}
            if lab.device.type == "cuda":
                peaks = held(networks, config, algorithm)
                row |= {phase: peaks[phase] / 1e9 for phase in planned}
            yield row


def held(networks, config, algorithm):
    """{phase: the most bytes that tensors held} of two steps that are as long as allowed."""
    tracker = Tracker()
    tracker.before = 0
    with patch.object(Clock, "phase", lambda clock, name: tracker.phase(name)):
        list(longest_steps(networks, config, algorithm))
    return tracker.peaks


def waits(lab, card):
    if lab.device.type == "cpu":
        raise Skipped("not measured: a host waits for a GPU only")
    tokens = lab.sizes.trained
    lab.step(tokens, mu=2, **CPPO)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            lab.step(tokens, mu=2, **CPPO)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    places = Counter(
        f"{Path(one.filename).relative_to(ROOT)}:{one.lineno}"
        if Path(one.filename).is_relative_to(ROOT) else Path(one.filename).name
        for one in told if "synchronizing CUDA" in str(one.message))
    yield {"place": "all", "times": places.total(), "tokens": tokens}
    for place, times in places.most_common(12):
        yield {"place": place, "times": times, "tokens": tokens}


def vllm(lab, card):
    needed("vllm")
    networks = lab.load(lab.sizes.shapes[-1])
    longest = lab.sizes.prompt[1] + lab.sizes.sampled
    config, _ = lab.settings(lab.sizes.sampled, algorithm="grpo", vllm_share=0.5)
    with tempfile.TemporaryDirectory() as folder:
        networks.model.save_pretrained(folder)
        engine = VLLM(folder, networks.tokenizer, networks.policy.dtype, config.sampling,
                      stop_ids=[], longest=longest, seed=0)
        yield from sampled(lab, engine)


PARTS = {  # what is worth most comes first: (function, limit in seconds)
    "sampling": (sampling, 70), "update": (update, 70), "protocol": (protocol, 120),
    "first_command": (first_command, 60), "trl": (trl, 150), "memory": (memory, 50),
    "waits": (waits, 30), "vllm": (vllm, 100),
}


@dataclass
class Options:
    parts: list[str] | None = option(None, f"which: {', '.join(PARTS)}; none: all")
    seconds: int = option(360, "all parts end after so many seconds", limits="[1, ∞)")
    quick: bool = option(False, "a tiny model in place of the published shapes")
    output: str = option("runs/results", "folder of gpu.json and gpu.md")


# --- the page ---

TABLES = {  # of a part: title, the figures that name a row, {column: (figure, form)}, what to see
    "sampling": ("A sampled token", {"shape": "shape", "completions": "rows"}, {
        "ms a token": ("ms", ".1f"), "floor, ms": ("floor", ".2f"),
        "times the floor": ("times", ".1f"),
    }, "Reading the prompts is included. The floor is the time in which the card's copy reads all "
       "weights and the cache once. If 128 completions take little longer than 16, sampling more "
       "questions is nearly free."),
    "update": ("An update and its reference", {"tokens in a micro-batch": "micro_batch"}, {
        "update, TFLOP/s": ("update", ".0f"), "of the product": ("update_share", ".0%"),
        "reference, TFLOP/s": ("reference", ".0f"), "of it": ("reference_share", ".0%"),
        "peak, GB": ("peak", ".1f"),
    }, "64 completions of 4 questions, μ = 1; a prompt counts once. A rate that rises with the "
       "micro-batch means that the host, which starts the kernels, is the limit."),
    "protocol": ("The paper's protocol", {"": "name"}, {
        "tokens in a micro-batch": ("micro_batch", "d"), "a step, s": ("seconds/total", ".2f"),
        "sampling": ("seconds/generate", ".2f"), "reference": ("seconds/logprobs", ".2f"),
        "update": ("seconds/update", ".2f"),
        "a question, s": ("question", ".3f"), "speed-up": ("speedup", ".2f"),
        f"beside {FAIR}": ("fair", ".2f"),
    }, "Every step but the first, μ = 2, medians. The last column is the fair one: that GRPO "
       "samples as many questions at once as P = 0.9375, and trains on them in mini-batches. "
       "Micro-batches are the largest that `--plan` says fit."),
    "first_command": ("The first command", {"steps": "steps"}, {
        "whole program, s": ("seconds", ".1f"), "first step, s": ("first", ".2f"),
        "a later step, s": ("step", ".2f"), "greedy before": ("before", ".3f"),
        "greedy after": ("after", ".3f"),
    }, "`torchrun train.py` trains the toy: it must learn, and a step should take no longer than "
       "on a CPU."),
    "trl": ("Beside TRL's GRPOTrainer", {"": "name"}, {
        "a step, s": ("total", ".2f"), "sampling": ("generate", ".2f"),
        "a question, s": ("question", ".3f"), "speed-up": ("speedup", ".2f"),
    }, "The shape of Qwen2.5-0.5B, 128 tokens, μ = 1, β = 0.04. GRPO takes 8 questions a step, "
       "CPPO 64. Above 1, ours is faster."),
    "memory": ("Memory, planned and held", {
        "": "name", "tokens in a micro-batch": "micro_batch", "prompt and completion": "tokens",
    }, {
        "sampling planned, GB": ("generation_planned", ".1f"), "held": ("generation", ".1f"),
        "update planned, GB": ("update_planned", ".1f"), "held there": ("update", ".1f"),
    }, "All prompts and completions are as long as allowed. `--plan` should say no less than what "
       "is held, and not much more."),
    "waits": ("Waits of the host", {"line": "place"}, {"times in a step": ("times", "d")},
              "A step of CPPO with P = 0.875. Each wait leaves the card without work. A line that "
              "waits for every token or for every micro-batch is one too many."),
    "vllm": ("vLLM", {"completions": "rows"}, {"ms a token": ("ms", ".1f")},
             "The same sampling, by `--sampler vllm`: compare with the first table."),
}


def by_method(rows):
    """The medians of each method's steps, without the first one, which is not warm."""
    found = {}
    for row in rows:
        if row["round"]:
            found.setdefault(row["name"], []).append(row)
    medians = []
    for name, steps in found.items():
        of = {figure: median(step[figure] for step in steps)
              for figure in steps[0] if figure.startswith("seconds/")}
        question = of["seconds/total"] / steps[0]["questions"]
        medians.append({"name": name, "question": question} | steps[-1] | of)
    costs = {row["name"]: row["question"] for row in medians}
    for row in medians:
        for figure, other in (("speedup", ALONE), ("fair", FAIR)):
            if other in costs:
                row[figure] = costs[other] / row["question"]
    return medians


def table(part, now, before):
    """The figures of now as Markdown, with those of before in brackets."""
    _, keys, columns, _ = TABLES[part]
    if part == "protocol":
        now, before = by_method(now), by_method(before)
    now, before = ({tuple(row[key] for key in keys.values()): row for row in rows}
                   for rows in (now, before))
    lines = [[*keys, *columns]]
    for key in dict.fromkeys([*now, *before]):
        lines.append(list(key))
        for figure, form in columns.values():
            text, earlier = (
                cell(rows.get(key, {}).get(figure), form) for rows in (now, before))
            lines[-1].append(text if earlier == "–" else f"{text} ({earlier})")
    return markdown_table(lines)


def where(title, of):
    """When, on what and with what a result was measured."""
    versions = ", ".join(f"{name} {number}" for name, number in of["versions"].items())
    return (
        f"**{title}:** {of['date']}, commit {of['commit']}, {of['card']} (driver {of['driver']}), "
        f"host {of['processor']}, {versions}. A large product reaches {of['tflops']:.0f} TFLOP/s, "
        f"a copy {of['gb_a_second']:,.0f} GB/s.\n")


def page(now, before):
    """The results as Markdown. now: None, or what was measured; before: an earlier result."""
    lines = ["# One GPU\n"]
    if now:
        lines += [f"`{now['command']}`\n", where("Now", now)]
    else:
        lines.append("`python experiments/gpu.py` has not run on a GPU yet. All figures are "
                     "those of *before*.\n")
    lines += [where("Before (in brackets)", before), before["note"] + "\n"]
    empty = {"rows": [], "told": "not measured"}
    for part, (title, _, _, see) in TABLES.items():
        parts = [result["parts"].get(part, empty) if result else empty for result in (now, before)]
        rows = [one["rows"] for one in parts]
        lines.append(f"## {title}\n\n{see}\n")
        if any(rows):
            lines.append(table(part, *rows) + "\n")
        if now and parts[0]["told"]:
            lines.append(f"*Note: {parts[0]['told'].rstrip('.')}.*\n")
    return "\n".join(lines)


# --- the program ---


def out_of_time(*_):
    raise OutOfTime


def interrupt(*_):
    raise KeyboardInterrupt


def said(*words):
    """What another program prints, or None."""
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    except OSError:  # there is no such program
        return None
    return done.stdout.strip() or None


def circumstances(device):
    """Where, when, with what and at which commit this run measures."""
    card = torch.cuda.get_device_name() if device.type == "cuda" else "no GPU"
    driver = said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    installed = [name for name in ("peft", "trl", "vllm") if find_spec(name)]
    commit = os.environ.get("GIT_COMMIT") or said("git", "rev-parse", "--short=7", "HEAD")
    return setting(*installed) | {"card": card, "driver": driver, "commit": commit}


def measure(part, lab, card, entry, limit, save):
    """Add a part's rows to `entry`, and say in it why the part ended early. save(): after each
    row."""
    function, _ = PARTS[part]
    try:
        signal.setitimer(signal.ITIMER_REAL, limit)
        for row in function(lab, card):
            entry["rows"].append(row)
            print(part, row, flush=True)
            save()
        entry["told"] = None
    except Skipped as reason:
        entry["told"] = str(reason)
    except OutOfTime:
        entry["told"] = f"stopped after {limit:.0f} seconds"
    except Exception as error:
        traceback.print_exc()
        entry["told"] = f"failed: {one_line(error)}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if entry["told"]:
        lab.forget()  # a step may have ended in the middle


def main(argv):
    options = parse(Options, argv)
    parts = options.parts or list(PARTS)
    if unknown := set(parts) - set(PARTS):
        raise UserError(f"--parts does not know {unknown.pop()}: there are {', '.join(PARTS)}.")
    if not options.quick and not torch.cuda.is_available():
        raise UserError("this machine has no GPU: --quick runs every part with a tiny model.")
    signal.signal(signal.SIGALRM, out_of_time)
    signal.signal(signal.SIGTERM, interrupt)
    lab = Lab(QUICK if options.quick else FULL, this_device())
    begin = time.perf_counter()
    card = ceilings(lab.sizes, lab.device)
    result = circumstances(lab.device) | card | {"parts": {}}
    before, folder = json.loads(BEFORE.read_text(encoding="utf-8")), Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)

    def save():
        files.write(folder / "gpu.json", files.as_json(result))
        files.write(folder / "gpu.md", page(result, before))

    try:
        for part in parts:
            entry = result["parts"][part] = {"rows": [], "told": "stopped by hand"}
            start = time.perf_counter()
            limit = min(PARTS[part][1], begin + options.seconds - start)
            if limit > 0:
                measure(part, lab, card, entry, limit, save)
            else:
                entry["told"] = "no time was left"
            entry["seconds"] = time.perf_counter() - start
    finally:
        save()
    print(page(result, before))


if __name__ == "__main__":
    run_program(main)
