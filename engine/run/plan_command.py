"""What `train.py --plan` prints: the memory of a run, and its peak with each of up to
five changes."""

from types import SimpleNamespace

import torch

from algorithms import ALGORITHMS
from engine.base.progress import count, note
from engine.model.networks import uses_ours
from engine.run.command_line import given
from engine.run.config import Config
from engine.run.plan import GB, USABLE, plan

TOKENS = 1024  # of the smaller micro-batches, at most


def print_plan(options, notes):
    """Print the plan of a run on GPUs. options: all of its options, as attributes. notes: sentences
    about it.

    Returns the exit code: 0: the run fits; 3: it does not fit.
    """
    p = plan(options)
    questions = count(p.questions, "question")
    note(f"{options.algorithm}, {options.model}: {p.trained:,} trained parameters")
    note(f"devices: {p.devices} of {p.device / GB:.3g} GB")
    note(f"a step on each device: {questions}, {p.at_once} sampled at a time, micro-batches of "
         f"{p.micro_batch_tokens} tokens")
    note("\nGB per device   generation      update")
    for name, moments in p.items.items():
        note(row(name, moments))
    note(row("peak", p.peaks))
    if not torch.cuda.is_available():
        note("note: this machine has no GPU. The plan is for GPUs, of 80 GB if --plan names no "
             "size.")
    if not uses_ours(options.sampler):
        note(f"note: --sampler {options.sampler} is counted as if it were the project's own. "
             "Memory that it keeps during the update is not counted.")
    for sentence in notes:
        note(f"note: {sentence}")
    room = f"a device has {USABLE * p.device / GB:.1f} GB for the peak."
    if max(p.peaks) < GB / 10:
        room = "every device has this much memory."
    note(f"\nIt {verdict(p)}: {room}")

    note("\nGB at the peak  generation      update   with one change")
    for words in levers(options, p):
        option, on, _ = words.partition(" on 2 devices")
        changes = given(Config, option.split())
        changed = plan(SimpleNamespace(**vars(options) | changes), 2 if on else None)
        note(f"{row(verdict(changed), changed.peaks)}   {words}")
    return 0 if p.fits else 3


def row(name, moments):
    """A line of the table. moments: bytes in the (generation, update)."""
    generation, update = moments
    return f"{name:14}{generation / GB:12.2f}{update / GB:12.2f}"


def verdict(p):
    return "fits" if p.fits else "does not fit"


def levers(o, p):
    """Yields what to type: each change that saves memory, alone.

    Left out is what the run already has or does not take. o: its options. p: its Plan.
    """
    smaller = min(TOKENS, p.micro_batch_tokens // 2)
    if smaller:
        yield f"--micro_batch_tokens {smaller}"
    if not o.gradient_checkpointing:
        yield "--gradient_checkpointing"
    if o.lora:
        return  # the reference takes no memory, and shards take no adapters
    if o.beta and not o.stop_kl:  # which needs the reference, too
        yield "--beta 0"
    if o.shard == "none":
        if uses_ours(o.sampler) and not ALGORITHMS[o.algorithm].critic:
            yield "--lora 16"
        yield "--shard full" if p.devices > 1 else "--shard full on 2 devices"
