"""What `train.py --plan` prints: the plan of a run and, if the run does not fit, one command that
fits.

`cure` climbs a ladder of changes until the run fits. The changes on the first rungs leave the
result as it is, those on the last rungs change the training. Then `cure` takes back as much as it
can, from the last rung to the first.
"""

import re
import shlex
from types import SimpleNamespace

from algorithms import ALGORITHMS
from engine.base import ranks
from engine.base.errors import refuse
from engine.run.checkpoint import KEPT
from engine.run.plan import GB, PHASES, USABLE, plan

RANK = 16  # of the adapters that are proposed


def halves(name, value, least=1):
    """[{option: value / 2}, {option: value / 4}, …], whole numbers, down to `least`."""
    return [{name: value >> i} for i in range(1, value.bit_length()) if value >> i >= least]


def ladder(p):
    """Changes {option: value}, the mildest first. p: the run's Plan. What `config.check` would
    refuse is left out."""
    o, own_sampler, adapters = p.options, p.options.rollout == "own", p.options.lora
    critic = ALGORITHMS[o.algorithm].critic
    lora = {"lora": RANK, "lr": float(f"{10 * o.lr:g}"), "shard": "none"}
    rungs = [  # (whether they are allowed, changes)
        (True, halves("micro_batch_tokens", o.micro_batch_tokens, 256)),
        (True, [{"gradient_checkpointing": True}]),
        (p.devices > 1 and not adapters, [{"shard": "full"}]),
        # from here on, the training changes
        (True, [{"beta": 0.0}]),
        (own_sampler and not (adapters or critic), [lora]),
        (not o.overlong_cache, halves("max_new_tokens", o.max_new_tokens)[:2]),
    ]
    return [change for allowed, changes in rungs if allowed for change in changes]


def changed(p, changes):
    """The Plan of the run of a Plan with some changes."""
    values = {name: value for change in changes for name, value in change.items()}
    return plan(SimpleNamespace(**vars(p.options) | values))


def cure(p):
    """The least changes with which a run fits on its devices: {option: value}. None: nothing
    helps."""
    rungs = ladder(p)
    climb = (rungs[:n] for n in range(len(rungs) + 1))
    chosen = next((changes for changes in climb if changed(p, changes).fits), None)
    if chosen is None:
        return None
    for change in reversed(chosen):
        without = [other for other in chosen if other is not change]
        chosen = without if changed(p, without).fits else chosen
    return {name: value for change in chosen for name, value in change.items()
            if value != getattr(p.options, name)}


def command(argv, devices, changes):
    """The command line `argv` with these changes, to paste into a shell. Of an option that is given
    twice, the last value holds."""
    words = re.sub(r"--plan\b[^-]*", "", shlex.join(argv)).strip()
    start = "python" if devices == 1 else f"torchrun --nproc-per-node {devices}"
    return " ".join([
        start, "train.py", words,
        *(f"--{name}" if value is True
          else f"--{name} {value if isinstance(value, str) else format(value, 'g')}"
          for name, value in changes.items()),
    ])


def needs(p):
    """What a run needs, beside what there is."""
    most, device = max(p.peaks), p.device / GB
    return (f"it needs {most / GB:.1f} GB in the {PHASES[p.peaks.index(most)]}, and a device of "
            f"{device:.3g} GB has {USABLE * device:.1f} GB for it")


def print_plan(config, argv, notes):
    """Print the plan of a run on GPUs. argv: its command line. notes: sentences about it.

    Returns the exit code: 0: it fits; 3: another command fits. Raises UserError if no command was
    found that fits.
    """
    p = plan(config.options)
    changes = None if p.fits else cure(p)
    lines = [*table(p), *(f"note: {note}" for note in notes), ""]
    if p.fits:
        lines.append(f"It fits: {needs(p)}.")
    elif changes:
        lines += [f"It does not fit: {needs(p)}.", "This command fits:", "",
                  f"    {command(argv, p.devices, changes)}"]
    if ranks.rank() == 0:
        print(*lines, sep="\n", flush=True)
    refuse([(not p.fits and not changes,
             f"the run does not fit: {needs(p)}; no command was found that fits: plan it for more "
             "devices (torchrun --nproc-per-node 4 train.py --shard full), or use a smaller "
             "model.")])
    return 0 if p.fits else 3


def table(p):
    """Lines: what a step holds, the memory by phases, and the disk."""
    o, checkpoint, saved = p.options, p.checkpoint / GB, KEPT + 1
    lines = [
        f"{o.algorithm}, {o.model} on {o.dataset}: {p.devices} x {p.device / GB:.3g} GB, "
        f"--shard {o.shard}",
        f"parameters {p.parameters:,}, trained {p.trained:,}",
        f"prompts of {p.prompt:,} tokens, completions of {o.max_new_tokens:,}, "
        f"micro-batches of {o.micro_batch_tokens:,}",
        f"a checkpoint takes {checkpoint:.1f} GB of the disk; {KEPT} are kept, and there is one "
        f"more while it is written: {saved * checkpoint:.1f} GB\n",
        f"{'in a step':18}{'per device':>16}{'all devices':>16}",
        *(f"{name:18}{n:16,}{n * p.devices:16,}" for name, n in p.counts.items()),
        f"\n{'GB per device':18}" + "".join(f"{phase:>16}" for phase in PHASES),
    ]
    for name, sizes in [*p.items.items(), ("peak", p.peaks)]:
        cells = (f"{size / GB:16.2f}" if size else f"{'-':>16}" for size in sizes)
        lines.append(f"{name:18}" + "".join(cells))
    return lines
