"""What `train.py --plan` prints: the plan of a run and, if the run does not fit, one command that
fits.

`cure` climbs a ladder of changes until the run fits. The changes on the first rungs leave the
result as it is, those on the last rungs change the training. Then `cure` takes back as much as it
can, from the last rung to the first.
"""

import math
import shlex
from pathlib import Path
from types import SimpleNamespace

from algorithms import ALGORITHMS
from engine.base import ranks
from engine.base.errors import UserError, refuse
from engine.run.config import algorithm_of, notes_of
from engine.run.plan import EVALUATED, GB, PHASES, USABLE, plan
from engine.tasks.table import TASKS

RANK = 16  # of the adapters that are proposed


def halves(value, least=1):
    """value / 2, value / 4, … as whole numbers, down to `least`."""
    return [value >> i for i in range(1, value.bit_length()) if value >> i >= least]


def ladder(p):
    """Rungs: (what it means, [changes, the mildest first]). A change is {option: value}. p: the
    run's Plan. What `config.check` would refuse is left out. """
    options, own_sampler, parts = p.options, p.options.rollout == "own", halves(p.questions)
    adapters = {"lora": RANK, "lr": float(f"{10 * options.lr:g}"), "shard": "none"}
    critic, lengths = ALGORITHMS[options.algorithm].critic, halves(options.max_new_tokens)[:2]
    rungs = [  # (what it means, whether it is allowed, changes)
        ("the same update in more passes", True,
         [{"micro_batch_tokens": n} for n in halves(options.micro_batch_tokens, 256)]),
        ("the same completions, sampled in parts", own_sampler,
         [{"sample_batch_size": n * options.group_size} for n in parts]),
        ("the same update, a third slower", True, [{"gradient_checkpointing": True}]),
        ("the same update, divided among the devices", p.devices > 1 and not options.lora,
         [{"shard": "full"}]),
        # from here on, the training changes
        ("no KL term, so no reference model",
         not (options.stop_kl or options.refresh_reference), [{"beta": 0.0}]),
        ("trains adapters only, which take ten times the learning rate",
         own_sampler and not (options.lora or options.refresh_reference or critic), [adapters]),
        ("shorter completions", not options.overlong_cache,
         [{"max_new_tokens": n} for n in lengths]),
    ]
    return [(words, changes) for words, allowed, changes in rungs if allowed and changes]


def changed(p, changes):
    """The Plan of the run of a Plan with some changes."""
    values = {name: value for change in changes for name, value in change.items()}
    return plan(SimpleNamespace(**vars(p.options) | values))


def cure(p):
    """(Plan, [(what it means, {option: value})]): the least changes with which a run fits on its
    devices; None: nothing helps."""
    rungs = ladder(p)
    strongest = [changes[-1] for _, changes in rungs]
    climb = (strongest[:n] for n in range(len(rungs) + 1))
    chosen = next((changes for changes in climb if changed(p, changes).fits), None)
    if chosen is None:
        return None
    for i in reversed(range(len(chosen))):  # the mildest with which the run still fits; {}: none
        ways = [[*chosen[:i], change, *chosen[i + 1 :]] for change in ({}, *rungs[i][1])]
        chosen = next(changes for changes in ways if changed(p, changes).fits)
    new = [
        {name: value for name, value in change.items() if value != getattr(p.options, name)}
        for change in chosen
    ]
    return changed(p, new), [(words, change) for (words, _), change in zip(rungs, new) if change]


def as_options(change):
    return " ".join(
        f"--{name}" if value is True
        else f"--{name} {value if isinstance(value, str) else format(value, 'g')}"
        for name, value in change.items()
    )


def command(argv, devices, changes):
    """The command line `argv` with these changes, to paste into a shell."""
    left_out, words, skip = {"plan", "devices", "device_gb"}.union(*changes), [], False
    for word in argv:
        if word.startswith("--"):  # what follows belongs to it
            skip = word[2:].split("=")[0].replace("-", "_") in left_out
        words += [] if skip else [word]
    start = "python" if devices == 1 else f"torchrun --nproc-per-node {devices}"
    return " ".join([start, "train.py", shlex.join(words), *map(as_options, changes)])


def peak(p):
    most = max(p.peaks)
    return f"{most / GB:.1f} GB in the {PHASES[p.peaks.index(most)]}"


def shortage(p):
    """Why a run does not fit."""
    device, share = p.device / GB, p.options.vllm_share
    if p.vllm_starts:
        return (
            f"it needs {peak(p)}, and a device of {device:.3g} GB has {USABLE * device:.1f} GB "
            "for it"
        )
    return (
        "vLLM cannot start, because its weights and the keys and values of one completion need "
        f"{p.vllm / GB:.1f} GB, and --vllm_share {share:g} of a device is {share * device:.1f} GB"
    )


def eval_batch_size(config):
    """(completions that an evaluation samples at a time, notes) of a run on a GPU.

    The plan's worst case may never come, so a run that does not fit gets a note and is not refused.
    So does a run whose model cannot be planned.
    """
    try:
        p = plan(config.options)
    except UserError as error:
        return EVALUATED, [f"--plan: {error}"]
    return p.evaluated, [] if p.fits else [
        f"the run may not fit: {shortage(p)}; --plan prints a command that fits."
    ]


def print_plan(config, argv):
    """Print the plan of a run on GPUs. argv: its command line.

    Returns the exit code: 0: it fits; 3: another command fits. Raises UserError if no command was
    found that fits.
    """
    p = plan(config.options)
    found = None if p.fits else cure(p)
    lines = [*table(p), *(f"note: {n}" for n in notes_of(config, algorithm_of(config.row)))]
    if p.fits:
        lines.append("It fits.")
    if found:
        after, changes = found
        line = command(argv, p.devices, [change for _, change in changes])
        lines.append(f"It does not fit: {shortage(p)}.\n\n"
                     f"This command fits. It needs {peak(after)}:\n\n    {line}\n")
        lines += [f"{as_options(change):40}{words}" for words, change in changes]
    if ranks.rank() == 0:
        print(*lines, sep="\n", flush=True)
    more = "plan it for more devices (--devices 4 --shard full)"
    refuse([(not p.fits and not found,
             f"the run does not fit: {shortage(p)}; no command was found that fits: "
             f"{more if p.vllm_starts else 'raise --vllm_share'}, or use a smaller model.")])
    return 0 if p.fits else 3


def table(p):
    """Lines: what a step holds, the memory by phases, and the disk."""
    options, checkpoint = p.options, p.checkpoint / GB
    if options.dataset in TASKS:
        questions = TASKS[options.dataset].train_questions
    else:  # `config.check` has read every line
        lines = Path(options.dataset).read_text("utf-8-sig").split("\n")
        questions = sum(bool(line.strip()) for line in lines)
    steps = questions and math.ceil(questions / (p.questions * p.devices))
    counts = {
        "questions": p.questions, "completions": p.completions, "kept": p.kept,
        "evaluated at once": p.evaluated,
    }
    lines = [
        f"{options.algorithm}, {options.model} on {options.dataset}: "
        f"{p.devices} x {p.device / GB:.3g} GB, --shard {options.shard}",
        f"parameters {p.parameters:,}, trained {p.trained:,}",
        f"prompts of {p.prompt:,} tokens, completions of {options.max_new_tokens:,}, "
        f"micro-batches of {options.micro_batch_tokens:,}\n",
        f"{'in a step':18}{'per device':>16}{'all devices':>16}",
        *(f"{name:18}{n:16,}{n * p.devices:16,}" for name, n in counts.items()),
        "steps per epoch   " + (f"{steps:,} ({questions:,} questions)" if questions else "unknown"),
        f"\n{'GB per device':18}" + "".join(f"{phase:>16}" for phase in PHASES),
    ]
    for name, sizes in [*p.items.items(), ("peak", p.peaks)]:
        cells = (f"{size / GB:16.2f}" if size else f"{'-':>16}" for size in sizes)
        lines.append(f"{name:18}" + "".join(cells))
    most, kept = max(p.peaks), options.save_total_limit
    return [
        *lines,
        f"\nThe peak, in the {PHASES[p.peaks.index(most)]}, is {most / GB:.1f} GB; "
        f"a device has {USABLE * p.device / GB:.1f} GB for it.",
        f"A checkpoint takes {checkpoint:.1f} GB of the disk. With --save_total_limit {kept}, and "
        f"one more while it is written: {(kept + 1) * checkpoint:.1f} GB.",
    ]
