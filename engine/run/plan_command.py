"""What `train.py --plan` prints: the plan of a run and, if the run does not fit, one command that
fits.

`cure` climbs a ladder of changes until the run fits. The changes on the first rungs leave the
result as it is, those on the last rungs change the training. Then `cure` takes back as much as it
can, from the last rung to the first. """

import math
import shlex
import textwrap
from dataclasses import dataclass, replace

from engine.base import ranks
from engine.base.errors import UserError
from engine.model.folders import prompt_room
from engine.run import speed
from engine.run.config import algorithm_of, check, notes_of
from engine.run.plan import EVALUATED, GB, PHASES, USABLE, Plan, memory_of_device, plan
from engine.run.skeleton import skeleton
from engine.tasks.questions import read_jsonl
from engine.tasks.table import TASKS, task_of

MOST_DEVICES = 8  # as in one machine; a command for several machines needs their addresses, too
RANK = 16  # of the adapters that are proposed


def halves(value, least=1):
    """value / 2, value / 4, … as whole numbers, down to `least`."""
    return [value >> i for i in range(1, value.bit_length()) if value >> i >= least]


def ladder(config, p):
    """Rungs: (what it means, [changes, the mildest first]). A change is {option: value}. p: the
    run's Plan."""
    share = math.ceil(100 * p.vllm / memory_of_device(config)) / 100
    rungs = [
        ("a larger share of the device for vLLM", [] if p.vllm_starts else [{"vllm_share": share}]),
        (
            "the same update in more passes",
            [{"micro_batch_tokens": n} for n in halves(config.micro_batch_tokens, 256)],
        ),
        (
            "the same completions, sampled in parts",
            [{"sample_batch_size": n * config.group_size} for n in halves(p.questions)],
        ),
        ("the same update, a third slower", [{"gradient_checkpointing": True}]),
        (
            "the same update, divided among the devices",
            [{"shard": "full"}] if p.devices > 1 else [],
        ),
        # from here on, the training changes
        ("no KL term, so no reference model", [{"beta": 0.0}]),
        (
            "trains adapters only, which take ten times the learning rate",
            [{"lora": RANK, "lr": float(f"{10 * config.lr:g}"), "shard": "none"}],
        ),
        ("shorter completions", [{"max_new_tokens": n} for n in halves(config.max_new_tokens)[:2]]),
    ]
    return [(words, changes) for words, changes in rungs if changes]


def strongest(rungs):
    return [changes[-1] for _, changes in rungs]


def merged(changes):
    return {name: value for change in changes for name, value in change.items()}


def changed(config, model, changes):
    """The Plan of the run with some changes; None: the command line would refuse them."""
    candidate = replace(config, **merged(changes))
    try:
        check(candidate)
    except UserError:
        return None
    return plan(candidate, model=model)


def fits(p, config):
    return p is not None and p.vllm_starts and max(p.peaks) <= USABLE * memory_of_device(config)


def climb(config, model, full):
    """Take the strongest change of each rung, one on top of the other. Yields (rungs so far, Plan).

    Rungs that the command line would refuse are left out. full: stop before the rung that trains
    only adapters. """
    rungs, p = [], plan(config, model=model)
    yield rungs, p
    for words, changes in ladder(config, p):
        if full and "lora" in changes[-1]:
            return
        p = changed(config, model, [*strongest(rungs), changes[-1]])
        if p is not None:
            rungs = [*rungs, (words, changes)]
            yield rungs, p


@dataclass
class Cure:
    devices: int
    changes: list  # [(what it means, {option: value})]
    plan: Plan  # of the run with these changes


def cure(config, model, full=False):
    """The Cure of a run on the devices that it has; None: nothing helps."""
    rungs = next((rungs for rungs, p in climb(config, model, full) if fits(p, config)), None)
    if rungs is None:
        return None
    chosen = strongest(rungs)
    # the mildest with which the run still fits; {}: without this rung
    for i in reversed(range(len(rungs))):
        chosen[i] = next(
            change
            for change in [{}, *rungs[i][1]]
            if fits(changed(config, model, [*chosen[:i], change, *chosen[i + 1 :]]), config)
        )
    new = [
        {name: value for name, value in change.items() if value != getattr(config, name)}
        for change in chosen
    ]
    changes = [(words, change) for (words, _), change in zip(rungs, new) if change]
    return Cure(config.devices, changes, changed(config, model, new))


def cure_on_any(config, model, full=False):
    """The Cure of a run on the devices that it has or, if there is none, on the fewest on which
    there is one."""
    numbers = [config.devices, *(n for n in (2, 4, MOST_DEVICES) if n > config.devices)]
    cures = (cure(replace(config, devices=n), model, full) for n in numbers)
    return next((found for found in cures if found), None)


def as_options(change):
    values = {
        name: value if isinstance(value, str) else f"{value:g}" for name, value in change.items()
    }
    return " ".join(
        f"--{name}" if change[name] is True else f"--{name} {value}"
        for name, value in values.items()
    )


def with_options(found):
    return (
        " ".join(["with", *(as_options(change) for _, change in found.changes)])
        if found.changes
        else "as it is"
    )


def command(argv, found):
    """The command line `argv` with the changes of a Cure, to paste into a shell."""
    changes = [change for _, change in found.changes]
    left_out, words, skip = {"plan", "devices", "device_gb", *merged(changes)}, [], False
    for word in argv:
        if word.startswith("--"):  # what follows belongs to it
            skip = word[2:].split("=")[0].replace("-", "_") in left_out
        words += [] if skip else [word]
    start = "python" if found.devices == 1 else f"torchrun --nproc-per-node {found.devices}"
    return " ".join([start, "train.py", shlex.join(words), *map(as_options, changes)])


def gigabytes(p):
    return f"{max(p.peaks) / GB:.1f} GB in the {PHASES[p.peaks.index(max(p.peaks))]}"


def on_devices(devices, config):
    return f"{devices} device{'s' * (devices > 1)} of {memory_of_device(config) / GB:.3g} GB"


def shortage(config, p):
    """Why a run does not fit."""
    if not p.vllm_starts:
        share = p.items["vLLM"][0]
        return (
            "vLLM cannot start, because its weights and the keys and values of one completion need "
            f"{p.vllm / GB:.1f} GB, and --vllm_share {config.vllm_share:g} of a device is "
            f"{share / GB:.1f} GB"
        )
    device = memory_of_device(config) / GB
    return f"it needs {gigabytes(p)}, and a device of {device:.3g} GB has {USABLE * device:.1f} GB for it"


def does_not_fit(config, p, found):
    """One sentence. found: a Cure, or None."""
    advice = "no change of the options was found that helps: use a smaller model"
    if found:
        where = "it fits" if found.devices == p.devices else f"it fits {found.devices} devices"
        advice = f"{where} {with_options(found)}, which needs {max(found.plan.peaks) / GB:.1f} GB"
    return f"the run does not fit: {shortage(config, p)}; {advice}."


def fit(config):
    """(completions that an evaluation samples at a time, notes) of a run on a GPU.

    The plan's worst case may never come, so a run that does not fit gets a note and is not refused.
    So does a run whose model cannot be planned. """
    try:
        model = skeleton(config)
        p = plan(config, model=model)
    except UserError as error:
        return EVALUATED, [f"--plan: {error}"]
    config = replace(config, plan=True, devices=p.devices)
    return p.evaluated, [] if fits(p, config) else [
        f"--plan: {does_not_fit(config, p, cure_on_any(config, model))}"
    ]


def why_not_full(config, model):
    """Why the devices cannot train all weights, with the bytes of each item, and how many devices
    can."""
    *_, (rungs, least) = climb(config, model, full=True)
    phase, tried = least.peaks.index(max(least.peaks)), " ".join(map(as_options, strongest(rungs)))
    items = ", ".join(f"{'AdamW' if name == 'optimizer' else name} {row[phase] / GB:.1f}"
                      for name, row in least.items.items() if row[phase] > 0.05 * GB)
    more = cure_on_any(config, model, full=True)
    where = f" {on_devices(more.devices, config)} can, {with_options(more)}." if more else ""
    return (
        f"All weights cannot be trained on {on_devices(least.devices, config)}: even with {tried} "
        f"that needs {gigabytes(least)} ({items}).{where}"
    )


def head_room(config, model, found):
    """The largest powers of two of two options with which a Cure still fits, each by itself, as
    {option: value}."""
    changes, largest = [change for _, change in found.changes], {}
    config = replace(config, devices=found.devices, **merged(changes))
    for name in ("micro_batch_tokens", "questions_per_step"):
        value, before = 1 << getattr(config, name).bit_length(), found.plan
        # stop, too, if nothing changes any more: for example, one micro-batch holds all completions
        while (
            fits(after := changed(config, model, [{name: value}]), config)
            and after.items != before.items
        ):
            largest[name], value, before = value, 2 * value, after
    return largest


def print_plan(config, argv):
    """Print the plan of a run on GPUs. argv: its command line.

    Returns the exit code: 0: it fits; 3: another command fits. Raises UserError if no command was
    found that fits. """
    model = skeleton(config)
    p = plan(config, model=model)
    config = replace(config, plan=True, devices=p.devices)
    found = Cure(p.devices, [], p) if fits(p, config) else cure_on_any(config, model)
    if ranks.rank() == 0:
        print_table(config, model, p)
        if fits(p, config):
            print("It fits.")
        elif found:
            print(f"It does not fit: {shortage(config, p)}.")
            print_cure(config, model, argv, found)
        if larger := found and head_room(config, model, found):
            print(
                f"Room is left for "
                f"{' or for '.join(as_options({k: v}) for k, v in larger.items())}.",
                flush=True,
            )
    if not found:
        raise UserError(does_not_fit(config, p, None))
    return 0 if fits(p, config) else 3


def print_cure(config, model, argv, found):
    print(f"\nThis command fits. It needs {gigabytes(found.plan)}:\n\n    {command(argv, found)}\n")
    for words, change in found.changes:
        print(f"{as_options(change):40}{words}")
    if "lora" in merged(change for _, change in found.changes):
        print(textwrap.fill(why_not_full(config, model), 120, break_on_hyphens=False))


def print_table(config, model, p):
    device = memory_of_device(config)
    questions = task_of(config.dataset).train_questions or (
        None if config.dataset in TASKS else len(read_jsonl(config.dataset)))
    steps = (f"{math.ceil(questions / (p.questions * p.devices)):,} ({questions:,} questions)"
             if questions else "unknown")
    prompt = prompt_room(model, config.max_new_tokens, config.max_prompt_tokens)
    print(f"{config.algorithm}, {config.model} on {config.dataset}: "
          f"{p.devices} x {device / GB:.3g} GB, --shard {config.shard}\n"
          f"parameters {p.parameters:,}, trained {p.trained:,}\n"
          f"prompts of {prompt:,} tokens, completions of {config.max_new_tokens:,}, "
          f"micro-batches of {config.micro_batch_tokens:,}\n\n"
          f"{'in a step':18}{'per device':>16}{'all devices':>16}")
    for name in ("questions", "completions", "kept"):
        print(f"{name:18}{getattr(p, name):16,}{getattr(p, name) * p.devices:16,}")
    if p.evaluated:
        print(f"{'evaluated at once':18}{p.evaluated:16,}{p.evaluated * p.devices:16,}")
    print(
        f"{'steps per epoch':18}{steps}\n\n{'GB per device':18}"
        + "".join(f"{phase:>16}" for phase in PHASES)
    )
    for name, row in [*p.items.items(), ("peak", p.peaks)]:
        print(
            f"{name:18}" + "".join(f"{size / GB:16.2f}" if size else f"{'-':>16}" for size in row)
        )
    print(
        f"\nThe peak, in the {PHASES[p.peaks.index(max(p.peaks))]}, is {max(p.peaks) / GB:.1f} GB; "
        f"a device has {USABLE * device / GB:.1f} GB for it.",
        flush=True,
    )
    kept = config.save_total_limit
    print(
        f"A checkpoint takes {p.checkpoint / GB:.1f} GB of the disk. With --save_total_limit "
        f"{kept}, and one more while it is written: {(kept + 1) * p.checkpoint / GB:.1f} GB."
    )
    if questions:
        print_speed(config, model, p, questions)
    print(
        *(f"note: {note}\n" for note in notes_of(config, algorithm_of(config))), sep="", end="",
        flush=True,
    )


def print_speed(config, model, p, of_data):
    """Seconds of a step and hours of the run on the GPUs of `speed`, for this run and for one that
    keeps all completions."""
    ways = [
        (config.algorithm, p.questions, p.kept // p.questions),
        ("all kept", config.questions_per_step, config.group_size),
    ]
    print(
        f"\nSeconds of a step and hours of the run: calculated, not yet measured.\n{'':28}"
        + "".join(
            f"{title:>11}"
            for title in ("sampling", "with vLLM", "scoring", "update", "hours", "with vLLM")
        )
    )
    for gpu in speed.GPUS:
        for name, questions, k in ways[: 1 if ways[0][2] == config.group_size else 2]:
            own, vllm = (
                speed.seconds(config, model, p.parameters, questions, k, gpu, rollout)
                for rollout in ("own", "vllm")
            )
            total = [
                speed.hours(config, a_step, questions, p.devices, of_data) for a_step in (own, vllm)
            ]
            print(
                f"{gpu.name:16}{name:12}"
                + "".join(f"{x:11.1f}" for x in (own[0], vllm[0], *own[1:], *total))
            )
