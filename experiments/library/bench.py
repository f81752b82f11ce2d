"""What the programs of this folder share.

A random model, rounds in which several ways take turns, points that have a process of their own, a
spread over seeds, and the first lines of a page of results.
"""

import ctypes
import multiprocessing
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from copy import deepcopy
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import Qwen2Config, Qwen2ForCausalLM

from engine.data.questions import numbers_of
from engine.model.networks import add_optimizer, networks_around
from engine.run.shapes import skeleton
from tasks.table import task_of

ROOT = Path(__file__).parents[2]  # the project's


# --- what is measured ---


def qwen(**shape):
    """A Qwen2 of this shape with random weights, which are the same each time."""
    torch.manual_seed(0)
    usual = {"tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None}
    return Qwen2ForCausalLM(Qwen2Config(**usual | shape)).eval()


def published(name, device):
    """A Qwen2 of a published shape with random weights, on the device. name: of
    engine/run/shapes.json."""
    torch.manual_seed(0)
    with device:
        return Qwen2ForCausalLM(deepcopy(skeleton(name).config)).eval()


def networks_of(policy, tokenizer, config, algorithm):
    """The Networks of a policy that no run has."""
    networks = networks_around(policy, tokenizer, algorithm.critic, bool(algorithm.beta))
    add_optimizer(networks, config.update, task_of(config.data.dataset).critic_lr)
    return networks


def every_second(completions, **columns):
    """A reward that differs within each group: 0, 1, 0, 1, …"""
    return [float(i % 2) for i in range(len(completions))]


def questions_of_step(questions, steps_done, per_step, seed):
    """The questions of the next step, in the order of a run with this seed."""
    numbers = numbers_of(steps_done * per_step, per_step, len(questions), seed)
    return [questions[number] for number in numbers]


# --- how it is measured ---


def this_device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def finish():
    """Wait until a GPU has done what it was told."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(function):
    """The seconds of a call."""
    finish()
    begin = time.perf_counter()
    function()
    finish()
    return time.perf_counter() - begin


def in_turn(ways, rounds, most):
    """{name: seconds in each round}. ways: {name: function}. In a round each way is called once.

    If the machine is slow for a while, it is slow for all ways. No round begins after `most`
    seconds.
    """
    found, begin = {name: [] for name in ways}, time.perf_counter()
    for _ in tqdm(range(rounds), "rounds"):
        if time.perf_counter() - begin > most:
            break
        for name, way in ways.items():
            found[name].append(seconds_of(way))
    return found


def alone(function, points, start):
    """function(point) of each point, in a process of its own: it finds no memory that is in use."""
    with multiprocessing.get_context(start).Pool(1, maxtasksperchild=1) as pool:
        return list(tqdm(pool.imap(function, points, chunksize=1), "points", len(points)))


def resident(name):
    """The memory of this process in bytes. name: VmRSS (held now) or VmHWM (the most held since the
    last reset)."""
    found = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    return 1024 * int(found.group(1))


def growth(step, device):
    """The peak memory during `step()`, minus the memory before it, in bytes."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = resident("VmRSS")
    step()
    return resident("VmHWM") - before


def return_what_is_freed():
    """Return freed memory to the system at once, so that the process holds only tensors that
    exist."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-3, 2**16)  # M_MMAP_THRESHOLD
        libc.malloc_trim(0)  # and what was freed before


def spread(values):
    """Of one figure over the seeds."""
    std = statistics.stdev(values) if len(values) > 1 else 0.0
    return {
        "mean": statistics.fmean(values), "std": std, "min": min(values), "max": max(values),
        "values": values,
    }


def over_seeds(found):
    """{figure: its spread}. found: a dict {figure: number} of each seed. What is no number, as a
    curve, becomes the list of all seeds' ones."""
    figures = {}
    for name, first in found[0].items():
        values = [one[name] for one in found]
        figures[name] = spread(values) if isinstance(first, (int, float)) else values
    return figures


def ahead(own, other, by=0.0):
    """Of two spreads: each seed of one is above each seed of the other, and the means differ by so
    much."""
    if own["min"] > other["max"] and own["mean"] - other["mean"] >= by:
        return "ahead"
    if own["max"] < other["min"] and other["mean"] - own["mean"] >= by:
        return "behind"
    return "–"


# --- the first lines of a page: where, when and with what it was made ---


def processor():
    """The processor's name, from Linux if possible, otherwise from Python."""
    cpuinfo = Path("/proc/cpuinfo")
    name = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return name[1] if name else platform.processor() or platform.machine()


def said(*words):
    """What another program prints, or None."""
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    except OSError:  # there is no such program
        return None
    return done.stdout.strip() or None


def commit():
    """Of what is measured. If there is no git, the variable GIT_COMMIT says it."""
    return os.environ.get("GIT_COMMIT") or said("git", "rev-parse", "--short=7", "HEAD")


def setting(*packages):
    """Date, command, versions and processor of this run."""
    versions = {name: version(name) for name in ("torch", "transformers", *packages)}
    return {
        "date": date.today().isoformat(),
        "command": shlex.join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]),
        "versions": {"python": platform.python_version()} | versions,
        "processor": processor(),
    }


def heading(title, where):
    """The first lines of a results page."""
    versions = ", ".join(f"{name} {number}" for name, number in where["versions"].items())
    return (
        f"# {title}\n\n`{where['command']}`\n\n{where['date']}, {where['processor']}, {versions}.\n"
    )


def markdown_table(lines):
    """Lines of cells as a Markdown table; the first line is its head. A | within a cell, as in |A|,
    is escaped."""
    lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines
    )
