"""Memory report of `train.py --plan`: what a run needs, and what makes it fit if it does not."""

from types import SimpleNamespace

import torch

from algorithms import ALGORITHMS
from engine.base.progress import count, note
from engine.model.networks import uses_builtin
from engine.options.command_line import command, parse_words, parser_of
from engine.options.config import Config, algorithm_of
from engine.run.plan import GB, USABLE, plan

TOKENS = 1024  # of the smaller micro-batches, at most
MOST_DEVICES = 64  # that are tried


def print_plan(options, notes, argv):
    """Print the plan of a run on GPUs. options: all of its options, as attributes. notes: sentences
    about it. argv: what was typed.

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
        if max(moments) >= GB / 200:  # else it is 0.00
            note(row(name, moments))
    note(row("peak", p.peaks))
    if not torch.cuda.is_available():
        note("note: this machine has no GPU. The plan is for GPUs, of 80 GB if --plan names no "
             "size.")
    if not uses_builtin(options.sampler):
        note(f"note: --sampler {options.sampler} is counted as if it were the project's own. "
             "Memory that it keeps during the update is not counted.")
    if any(".py:" in word for word in options.rewards):
        note("note: if a reward of your own asks a model, add 2 bytes for each of its parameters, "
             "or 4 in float32.")
    usual = algorithm_of(options).questions_per_step
    if p.questions < usual:
        note(f"note: a step takes {questions} on each device, not {usual}: the data set has no "
             "more.")
    for sentence in notes:
        note(f"note: {sentence}")
    note(f"\nIt {fits_or_not(p)}: a device has {USABLE * p.device / GB:.1f} GB for the peak.")

    if p.fits:
        return 0
    if options.shard == "full":
        more = range(p.devices + 1, MOST_DEVICES + 1)
        devices = next((n for n in more if plan(options, n).fits), None)
        if devices:  # else it does not fit on any number of them
            note(f"As it is, it needs {devices} devices or more: "
                 f"torchrun --nproc-per-node {devices}.")
    print_changes(options, p, argv)
    return 3


def print_changes(options, p, argv):
    """Print the peak with one more change in each line, until the run fits. Then print the
    command."""
    note("\nGB at the peak  generation      update   with these changes, one more in each line")
    for label, chosen, devices in memory_savers(options, p):
        changed = plan(SimpleNamespace(**vars(options) | chosen), devices)
        note(f"{row(fits_or_not(changed), changed.peaks)}   {label}")
        if changed.fits:
            typed = parse_words(parser_of(Config), argv)
            typed.pop("plan", None)  # a recipe may have it
            note(f"\nThe first that fits:\n\n    {command(typed | chosen, devices)}")
            return
    note("\nNone of these fits: take a smaller model, or fewer --max_new_tokens.")


def row(name, moments):
    """A line of the table. moments: bytes in the (generation, update)."""
    generation, update = moments
    return f"{name:14}{generation / GB:12.2f}{update / GB:12.2f}"


def fits_or_not(p):
    return "fits" if p.fits else "does not fit"


def memory_savers(o, p):
    """Yields (label, {option: value}, devices): changes that save memory, each with those before.

    Left out is what the run already has or does not take. Adapters and shards exclude each other.
    o: its options. p: its Plan.
    """
    chosen = {}
    smaller = min(TOKENS, p.micro_batch_tokens // 2)
    if smaller:
        chosen["micro_batch_tokens"] = smaller
        yield f"--micro_batch_tokens {smaller}", chosen, p.devices
    if not o.gradient_checkpointing:
        chosen["gradient_checkpointing"] = True
        yield "--gradient_checkpointing", chosen, p.devices
    if o.lora:
        return  # the reference takes no memory, and shards take no adapters
    if o.beta and not o.stop_kl:  # which needs the reference, too
        chosen["beta"] = 0.0
        yield "--beta 0", chosen, p.devices
    in_place = ""
    if o.shard == "none" and uses_builtin(o.sampler) and not ALGORITHMS[o.algorithm].critic:
        in_place = ", in place of --lora 16"
        yield "--lora 16", chosen | {"lora": 16}, p.devices
    for devices in (2, 4, 8):
        if devices > p.devices or (devices == p.devices and o.shard == "none"):
            label = f"--shard full on {devices} devices{in_place}"
            yield label, chosen | {"shard": "full"}, devices
