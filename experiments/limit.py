"""How near the limit: the operations and seconds of each phase of a step, and what its matrix
products take alone.

    python experiments/limit.py                      the toy, GRPO and CPPO: a minute
    python experiments/limit.py --models toy DIR     and a real model, for example SmolLM2-135M

Writes limit.json, limit.md and limit.png in results/.

The learning rate is 0, so that the same seed makes the same step again and again. Each step is made
twice. One time its phases are timed. The other time a dispatch mode writes down each matrix product
and each attention with its shapes; torch's FlopCounterMode counts the products' operations. Then
each product is computed alone, as often as in the step, on tensors of the same shapes. So the table
says how a phase spends its seconds: in matrix products, in attention, and in all else (the
normalisations, small tensors, Python).

An operation is one addition or one multiplication. Useful operations are those of the completion
tokens that are sampled, or trained on: prompts and padding are not useful.
"""

import math
import random
import sys
import time
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

import train
from engine.data.questions import rows_of_run
from engine.run.begin import begin
from engine.run.command_line import option, parse, run_program
from engine.run.config import open_run
from engine.run.curves import DPI
from engine.run.metrics import Clock
from experiments.bench import heading, markdown_table, report
from experiments.plot import panels, plain
from update import Limits

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)
ATTENTION = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
# one question a step for GRPO, and eight for CPPO with P = 0.875: both train on 16 completions
STEP = ["--questions_per_step", "1", "--minibatches", "1"]
CPPO = ["--pruning_rate", "0.875"]
REAL = ["--dataset", "arithmetic"]
PARTS = {"products": "#6c93c0", "attention": "#a3bcd9", "all else": "#dfe3e8"}
WRITTEN = PARTS | {"all else": "#aeb6bf"}  # the same colours, dark enough for words
WORDS = """\
In products, in attention: the seconds that these calls take alone, on tensors of the same shapes, \
over the seconds of the phase. Useful: the operations that the tokens of completions need in \
matrix products, at the speed that the products reach alone, over the seconds of the phase; \
prompts, padding, attention and all else count as lost. Each product was computed alone with warm \
caches, so its share is a lower bound.
"""
PHASES = {"generate": "sampling", "logprobs": "log-probabilities", "update": "update"}


@dataclass
class Options:
    models: list[str] | None = option(None, "toy, or folders of models; none: the toy")
    steps: int = option(5, "steps that are measured of each algorithm", limits="[1, ∞)")
    output: str = option("experiments/results", "folder of limit.json, limit.md and limit.png")


class Calls(TorchDispatchMode):
    """Counts the products and attentions of each phase: {phase: {call: how often}}.

    A call is (function, arguments, named arguments), in which a description replaces a tensor.
    """

    def __init__(self):
        super().__init__()
        self.phase = None
        self.found = defaultdict(Counter)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in PRODUCTS + ATTENTION:
            named = tuple((name, description(value)) for name, value in kwargs.items())
            self.found[self.phase][function, tuple(map(description, args)), named] += 1
            return function(*args, **kwargs)
        # in inference mode a linear layer arrives whole: here it becomes a product
        with self:
            result = function.decompose(*args, **kwargs)
        return function(*args, **kwargs) if result is NotImplemented else result


@dataclass(frozen=True)
class Shape:
    """What is written down of a tensor."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def example(self):
        """A tensor of this shape with random numbers. A dimension of stride 0 is one number again
        and again."""
        stored = [1 if stride == 0 else size for size, stride in zip(self.sizes, self.strides)]
        tensor = torch.empty_strided(stored, self.strides, dtype=self.dtype)
        return tensor.normal_().expand(self.sizes)


def description(value):
    """A tensor's Shape; another value as it is."""
    if torch.is_tensor(value):
        return Shape(tuple(value.shape), value.stride(), value.dtype)
    return tuple(value) if isinstance(value, list) else value


def operations(call):
    """The additions and multiplications of a call."""
    function, args, _ = call
    shapes = [arg.sizes for arg in args if isinstance(arg, Shape)]
    if function in PRODUCTS:  # (…, n, m) times (…, m, l)
        *_, left, right = shapes
        return 2 * math.prod(left) * right[-1]
    backward = function is ATTENTION[1]
    query, key = shapes[1:3] if backward else shapes[:2]
    # two products of (queries, width) and (width, keys); the backward pass has five
    return (5 if backward else 2) * 2 * math.prod(query) * key[2]


def seconds_alone(call, least=0.005):
    """Seconds of one call, repeated for at least so long. The first call does not count."""
    function, args, named = call
    args = [arg.example() if isinstance(arg, Shape) else arg for arg in args]
    named = {name: v.example() if isinstance(v, Shape) else v for name, v in named}
    function(*args, **named)
    begin, times = time.perf_counter(), 0
    while time.perf_counter() - begin < least:
        function(*args, **named)
        times += 1
    return (time.perf_counter() - begin) / times


# --- a step, timed and counted ---


class Phases(Clock):
    """A Clock that tells `Calls` which phase has begun."""

    calls = None

    @contextmanager
    def phase(self, name):
        if self.calls:
            self.calls.phase = name
        with super().phase(name):
            yield


def measure(model, name, steps):
    """{phase: its figures}, added up over some steps of one algorithm."""
    argv = ["--model", model, "--algorithm", name, *STEP]
    argv += [] if model == "toy" else REAL
    argv += CPPO if name == "cppo" else []
    config, algorithm, _ = open_run(argv)
    device = torch.device("cpu")
    run, _ = begin(config, algorithm, device, rows_of_run(config.data))
    networks, rewards = run.networks, run.reward_functions
    for group in networks.optimizer.param_groups:
        group["lr"] = 0.0  # so that a step can be made again
    limits = Limits(config.devices.micro_batch_tokens)

    def step(seed, asked):
        return train.train_step(
            networks, algorithm, rewards, config.sampling, limits, asked,
            random.Random(seed)).metrics

    timed, calls = [], Calls()
    bar = tqdm(total=steps, desc=f"{Path(model).name}, {name}")
    while bar.n < steps:
        asked = run.next_questions(None)
        if step(bar.n, asked)["loss"] is None:  # no signal; else the first time warms up
            continue
        timed.append(step(bar.n, asked))
        with patch.object(Phases, "calls", calls), patch("train.Clock", Phases), calls:
            step(bar.n, asked)
        bar.update()
    layers = [m for m in networks.model.modules() if isinstance(m, torch.nn.Linear)]
    numbers = sum(layer.weight.numel() for layer in layers)
    # a token of a completion is multiplied with each weight, in a forward pass once and in a
    # backward pass twice
    passes = {"generate": 1, "logprobs": 1, "update": 3 * algorithm.mu}
    found = {}
    for phase in PHASES:
        counted = "tokens_generated" if phase == "generate" else "tokens_trained"
        tokens = sum(metrics[counted] for metrics in timed)
        seconds = sum(metrics[f"seconds/{phase}"] for metrics in timed)
        useful = 2 * numbers * tokens * passes[phase]
        found[phase] = figures(calls.found[phase]) | {"seconds": seconds, "useful": useful}
    return found


def figures(calls):
    """Seconds and operations of calls alone: those of products and those of attention."""
    alone, done = Counter(), Counter()
    for call, times in calls.items():
        kind = "products" if call[0] in PRODUCTS else "attention"
        alone[kind] += times * seconds_alone(call)
        done[kind] += times * operations(call)
    return {
        "product seconds": alone["products"], "product operations": done["products"],
        "attention seconds": alone["attention"], "attention operations": done["attention"],
    }


# --- the page and the picture ---


def page(result):
    lines = [["", "phase", "seconds a step", "in products", "in attention", "in all else",
              "GFLOP a step", "GFLOP/s of the phase", "of its products alone", "useful"]]
    for name, phases in result["found"].items():
        for phase, row in phases.items():
            lines.append([name, PHASES[phase], *cells(row, result["options"]["steps"])])
    return (
        heading("How near the limit", result)
        + "\n" + markdown_table(lines) + "\n\n" + WORDS)


def cells(row, steps):
    seconds, products = row["seconds"], row["product seconds"]
    attention = row["attention seconds"]
    reached = row["product operations"] / seconds
    alone = row["product operations"] / products
    return [
        f"{seconds / steps:.3f}", f"{products / seconds:.0%}", f"{attention / seconds:.0%}",
        f"{1 - (products + attention) / seconds:.0%}",
        f"{row['product operations'] / steps / 1e9:.2f}", f"{reached / 1e9:.1f}",
        f"{alone / 1e9:.1f}", f"{row['useful'] / seconds / alone:.2f}",
    ]


def picture(result, file):
    """A bar for each phase: its seconds a step, in products, in attention, in all else."""
    found, steps = result["found"], result["options"]["steps"]
    figure, axes = panels(len(found), 4.2, squeeze=False)
    for axis, (name, phases) in zip(axes[0], found.items()):
        rows = [phases[phase] for phase in reversed(PHASES)]
        left = [0.0] * len(rows)
        for part, colour in PARTS.items():
            widths = [part_seconds(row, part) / steps for row in rows]
            axis.barh(list(reversed(PHASES.values())), widths, left=left, color=colour)
            left = [start + width for start, width in zip(left, widths)]
        seconds = sum(row["seconds"] for row in rows)
        products = sum(row["product seconds"] for row in rows) / seconds
        axis.set_title(f"{name}:\n{100 * products:.0f} % in products", fontsize=13)
        axis.set_xlabel("seconds a step", fontsize=11)
        axis.tick_params(labelsize=11)
        plain(axis, "x")
        if axis is not axes[0][0]:
            axis.set_yticklabels([])
    axis = axes[0][0]
    for i, part in enumerate(PARTS):
        axis.text(0.98, 0.57 - 0.08 * i, f"{part} ■", color=WRITTEN[part], fontsize=13,
                  transform=axis.transAxes, ha="right")
    figure.savefig(file, dpi=DPI)


def part_seconds(row, part):
    if part != "all else":
        return row[f"{part.removesuffix('s')} seconds"]
    return max(0.0, row["seconds"] - row["product seconds"] - row["attention seconds"])


def main(argv):
    options = parse(Options, argv)
    torch.set_num_threads(1)
    found = {}
    for model in options.models or ["toy"]:
        for name in ("grpo", "cppo"):
            label = f"{Path(model).name}, {name.upper()}"
            found[label] = measure(model, name, options.steps)
    result = {"found": found}
    report(options, "limit", result, page)
    picture(result | {"options": {"steps": options.steps}}, Path(options.output, "limit.png"))


if __name__ == "__main__":
    run_program(main)
