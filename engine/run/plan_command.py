"""What `train.py --plan` prints: the plan of a run and, if the run does not fit, one command that
fits."""

import re
import shlex
from types import SimpleNamespace

from algorithms import ALGORITHMS
from engine.base import ranks
from engine.base.errors import UserError
from engine.run.plan import GB, USABLE, plan

TOKENS = 1024  # of the micro-batches that are proposed


def print_plan(config, argv, notes):
    """Print the plan of a run on GPUs. argv: its command line. notes: sentences about it.

    Returns the exit code: 0: it fits; 3: another command fits. Raises UserError if no command was
    found that fits.
    """
    p = plan(config.options)
    changes = [] if p.fits else cure(p)
    lines = table(p) + [f"note: {note}" for note in notes]
    verdict = "It fits" if p.fits else "It does not fit"
    lines.append(f"\n{verdict}: a device has {USABLE * p.device / GB:.1f} GB for the peak.")
    if changes:
        lines.append(f"This command fits:\n\n    {command(argv, p.devices, changes)}")
    if ranks.rank() == 0:
        print("\n".join(lines), flush=True)
    if not (p.fits or changes):
        raise UserError(
            "the run does not fit, and no command was found that fits: plan it for more devices "
            "(torchrun --nproc-per-node 4 train.py --plan --shard full), or use a smaller model.")
    return 3 if changes else 0


def table(p):
    """Lines: what a step holds, and the memory of each item."""
    o = p.options
    lines = [
        f"{o.algorithm}, {o.model}: {p.trained:,} trained parameters",
        f"devices: {p.devices} of {p.device / GB:.3g} GB",
        f"a step on each device: {p.questions} questions, {p.at_once} sampled at a time",
    ]
    lines.append("\nGB per device   generation      update")
    for name, sizes in [*p.items.items(), ("peak", p.peaks)]:
        generation, update = [f"{size / GB:.2f}" if size else "-" for size in sizes]
        lines.append(f"{name:14}{generation:>12}{update:>12}")
    return lines


# --- a command that fits ---


def ladder(p):
    """Changes of the run, the mildest first: {option: value} each. p: the run's Plan."""
    o = p.options
    smaller = {"micro_batch_tokens": min(TOKENS, o.micro_batch_tokens)}
    least = smaller | {"gradient_checkpointing": True}
    changes = [smaller, least]
    if p.devices > 1 and not o.lora:
        least = least | {"shard": "full"}
        changes += [{"shard": "full"}, least]
    # from here on, the training changes
    changes.append(least | {"beta": 0.0})
    if o.rollout == "own" and not o.lora and not ALGORITHMS[o.algorithm].critic:
        lora = {"shard": "none", "lora": 16, "lr": float(f"{10 * o.lr:g}")}
        changes += [lora, least | lora]
    return changes


def cure(p):
    """The mildest changes with which a run fits on its devices: {option: value}. Empty: nothing
    helps."""
    options = vars(p.options)
    for changes in ladder(p):
        if plan(SimpleNamespace(**options | changes)).fits:
            return {name: changes[name] for name in changes if changes[name] != options[name]}
    return {}


def command(argv, devices, changes):
    """The command line `argv` with these changes, to paste into a shell. Of an option that is given
    twice, the last value holds."""
    start = "python" if devices == 1 else f"torchrun --nproc-per-node {devices}"
    given = re.sub(r"--plan\b[^-]*", "", shlex.join(argv))
    words = [start, "train.py", given.strip()]
    for name, value in changes.items():
        words.append(f"--{name} {value}")
    return " ".join(words)
