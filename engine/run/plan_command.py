"""What `train.py --plan` prints: the memory of a run; and for one GPU, several, and two machines a
command that fits, its steps and updates, and how long they take."""

import re
import shlex
from types import SimpleNamespace

import torch

from algorithms import ALGORITHMS
from engine.base import ranks
from engine.base.errors import UserError
from engine.base.progress import count, duration
from engine.data.rows import read_rows
from engine.run.duration import SHARES, gpus_of, length_of_run, step_seconds
from engine.run.plan import GB, USABLE, plan
from tasks.table import task_of

TOKENS = 1024  # of the micro-batches that are proposed
SEVERAL = 8  # devices of a machine, if torchrun has started one process
TIMES = """
What to type, and how long it takes if every prompt and completion is as long as allowed (in
brackets: a quarter as long). Calculated from 25 to 45 % of a GPU's published speed, and not
measured:"""
NO_GPU = (
    "this machine has no GPU. The plan is for GPUs, of 80 GB if --plan names no size. How long the "
    "run takes on this CPU is not planned: start it, and see the time left in its progress bar.")


def print_plan(config, argv, notes):
    """Print the plan of a run on GPUs. argv: its command line. notes: sentences about it.

    Returns the exit code: 0: it fits; 3: another command fits. Raises UserError if no command was
    found that fits.
    """
    o = config.options
    p = plan(o)
    verdict = "It fits" if p.fits else "It does not fit"
    if not torch.cuda.is_available():
        notes = [NO_GPU, *notes]
    lines = table(p) + [f"note: {note}" for note in notes]
    lines += [f"\n{verdict}: a device has {USABLE * p.device / GB:.1f} GB for the peak.", TIMES]
    questions = task_of(o.dataset).train_questions or len(read_rows(o.dataset))
    several = p.devices if p.devices > 1 else SEVERAL
    for machines, each in ((1, 1), (1, several), (2, several)):
        lines += way(argv, plan(o, machines * each), machines, questions)
    if ranks.rank() == 0:
        print("\n".join(lines), flush=True)
    if not mildest(p):
        raise UserError(
            "the run does not fit, and no command was found that fits: plan it for more devices "
            "(torchrun --nproc-per-node 4 train.py --plan --shard full), or use a smaller model.")
    return 0 if p.fits else 3


def table(p):
    """Lines: what a step holds, and the memory of each item."""
    o = p.options
    lines = [
        f"{o.algorithm}, {o.model}: {p.trained:,} trained parameters",
        f"devices: {p.devices} of {p.device / GB:.3g} GB",
        f"a step on each device: {count(p.questions, 'question')}, {p.at_once} sampled at a time",
        "\nGB per device   generation      update",
    ]
    for name, (generation, update) in (p.items | {"peak": p.peaks}).items():
        lines.append(f"{name:14}{generation / GB:12.2f}{update / GB:12.2f}")
    return lines


# --- a command that fits, and its time ---


def way(argv, p, machines, questions):
    """Lines: a command that fits on the devices of these machines, and what it takes. questions: of
    an epoch."""
    where = count(p.devices, "GPU")
    if machines > 1:
        where += f" of {machines} machines, the command on each"
    fitting = mildest(p)
    if not fitting:
        return [f"\n{where}: no command was found that fits"]
    per_step = fitting.questions * p.devices
    o = fitting.options
    steps = length_of_run(o, questions, per_step)
    updates = steps * o.mu * o.minibatches
    lines = [f"\n{where}: {count(steps, 'step')} of {count(per_step, 'question')}, at most "
             f"{updates:,} updates", f"    {command(argv, p, fitting, machines)}"]
    for gpu in gpus_of(p.device):
        spans = []
        for length in (1, 1 / 4):
            seconds = [steps * step_seconds(fitting, gpu, share, length) for share in SHARES]
            spans.append(" to ".join(dict.fromkeys(map(duration, seconds))))
        lines.append("    {}: {} ({})".format(gpu.name, *spans))
    return lines


def ladder(p):
    """Changes of the run, the mildest first: {option: value} each. p: the run's Plan."""
    o = p.options
    smaller = {"micro_batch_tokens": min(TOKENS, o.micro_batch_tokens)}
    least = smaller | {"gradient_checkpointing": True}
    changes = [{}, smaller, least]
    if p.devices > 1 and not o.lora:
        least = least | {"shard": "full"}
        changes += [{"shard": "full"}, least]
    # from here on, the training changes
    changes.append(least | {"beta": 0.0})
    if o.rollout != "vllm" and not o.lora and not ALGORITHMS[o.algorithm].critic:
        lora = {"shard": "none", "lora": 16, "lr": float(f"{10 * o.lr:g}")}
        changes += [lora, least | lora]
    return changes


def mildest(p):
    """The Plan with the mildest changes with which a run fits on its devices. None: nothing
    helps."""
    for changes in ladder(p):
        changed = plan(SimpleNamespace(**vars(p.options) | changes), p.devices)
        if changed.fits:
            return changed


def command(argv, p, fitting, machines=1):
    """The command line `argv` with the changes from a Plan to one that fits, to paste into a shell.
    Of an option that is given twice, the last value holds."""
    start = f"torchrun --nproc-per-node {p.devices // machines}"
    if p.devices == 1 and fitting.options.shard == "none":
        start = "python"
    if machines > 1:
        start += f" --nnodes {machines} --rdzv-backend c10d --rdzv-endpoint NODE0:29500"
        start += " --rdzv-id 1"
    given = re.sub(r" --plan\b[^-]*", " ", f" {shlex.join(argv)}").rstrip()
    line = f"{start} train.py{given}"
    before = vars(p.options)
    for name, value in vars(fitting.options).items():
        if value != before[name]:
            line += f" --{name} {value}"
    return line
