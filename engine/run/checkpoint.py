"""Checkpoints: a Hugging Face folder that also holds what a run needs to go on exactly where it was.

    checkpoint-000050/    model.safetensors, config.json, tokenizer …      what transformers loads
                          networks/         the optimizer's moments, PPO's critic, a refreshed reference: by
                                            torch.distributed.checkpoint, readable by any number of ranks
                          state.json        step, questions seen, and the like
                          checksums.json    SHA-256 of every other file

There is no random state to save: step s of rank r draws from a generator seeded by (seed, s, r), and the order of the
questions follows from the seed, so that the number of the step says it all. Nor is there a scheduler: the learning rate
is a function of the steps made and the questions taken. On several nodes all ranks must see the same run folder.
"""

import contextlib
import hashlib
import itertools
import json
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError

from engine.model import shards
from engine.model.folders import checkpoints
from engine.run import ranks
from engine.run.options import UserError

warnings.filterwarnings("ignore", ".*torch.distributed is disabled")  # of one process: it saves what it has


def save(run_dir, networks, state, others):
    """Write `run_dir/checkpoint-STEP`: first beside it under another name, then renamed, so that what bears a checkpoint's
    name is always whole. The one before it stays, should the new one be damaged later; older ones are removed last.

    Every rank calls this. others: {name: network}, saved beside the policy. Returns None; or, where it failed on any rank, as
    on a full disk, the reason: then the checkpoints before are still there.
    """
    import torch.distributed.checkpoint as dcp  # takes half a second to import, as all that is imported in a function here
    from torch.distributed.checkpoint import state_dict

    run_dir = Path(run_dir)
    final, unfinished = run_dir / f"checkpoint-{state['step']:06d}", run_dir / "unfinished-checkpoint"
    weights = None  # save_pretrained finds them by itself
    if shards.is_sharded(networks.model):
        # gathered from all ranks into the first one's memory
        whole = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = state_dict.get_model_state_dict(networks.model, options=whole)
        tied = {name for name, _ in networks.model.named_parameters(remove_duplicate=False)}
        for name in tied - {name for name, _ in networks.model.named_parameters()}:
            weights.pop(name, None)  # a tied head is no tensor of its own

    def export():
        shutil.rmtree(unfinished, ignore_errors=True)
        networks.model.save_pretrained(unfinished, state_dict=weights)
        networks.tokenizer.save_pretrained(unfinished)
        (unfinished / "state.json").write_text(json.dumps(state, ensure_ascii=False), encoding="utf-8")

    def finish():
        (unfinished / "checksums.json").write_text(json.dumps(checksums(unfinished), indent=2), encoding="utf-8")
        shutil.rmtree(final, ignore_errors=True)  # of a start that was given up
        unfinished.rename(final)
        for path in checkpoints(run_dir)[:-2]:
            shutil.rmtree(path)

    def share():
        dcp.save(sharded_state(networks, others), checkpoint_id=unfinished / "networks")

    for work, participants in [(export, 1), (share, ranks.world_size()), (finish, 1)]:
        problem = attempt(work, run_dir) if ranks.rank() < participants else None
        problem = next(filter(None, ranks.gather([problem])), None)
        if problem:
            if ranks.rank() == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            return problem
    return None


def attempt(work, folder):
    """None, or why it failed, and how much room is left in `folder`: torch's own words do not tell that a disk is full."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        work()
    except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:  # of files written by Python, torch, safetensors
        if isinstance(error, CheckpointException):
            error, _ = next(iter(error.failures.values()))  # what befell the first rank that failed
        room = ""
        with contextlib.suppress(OSError):  # the disk may be gone altogether
            room = f"; {shutil.disk_usage(folder).free / 1e6:.0f} MB are free there"
        return f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}{room}"


def sharded_state(networks, others):
    """What torch.distributed.checkpoint saves and loads, under names that do not depend on the number of ranks."""
    from torch.distributed.checkpoint import state_dict

    state = {name: state_dict.get_model_state_dict(network) for name, network in others.items()}
    if networks.optimizer.state:  # before the first update there is none
        state["optimizer"] = state_dict.get_optimizer_state_dict(torch.nn.ModuleList(networks.learners), networks.optimizer)
    return state


def restore(folder, networks, others):
    """Load what `save` wrote for `others` and the optimizer of `networks`, whatever the number of ranks was."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict

    reader = dcp.FileSystemReader(Path(folder) / "networks")
    names = {name.split(".")[0] for name in reader.read_metadata().state_dict_metadata}
    learners = torch.nn.ModuleList(networks.learners)
    state = {name: state_dict.get_model_state_dict(network) for name, network in others.items() if name in names}
    if "optimizer" in names:
        state["optimizer"] = state_dict.get_optimizer_state_dict(learners, networks.optimizer)
    dcp.load(state, storage_reader=reader)
    for name, loaded in state.items():
        if name == "optimizer":
            state_dict.set_optimizer_state_dict(learners, networks.optimizer, loaded)
        else:
            state_dict.set_model_state_dict(others[name], loaded)


def checksums(folder):
    """{file: SHA-256} of all files under `folder` but checksums.json."""
    def digest(path):
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    files = sorted(path for path in Path(folder).rglob("*") if path.is_file() and path.name != "checksums.json")
    with ThreadPoolExecutor() as pool:  # hashing leaves Python's lock free
        return {str(path.relative_to(folder)): found for path, found in zip(files, pool.map(digest, files))}


def damaged(folder):
    """The files of a checkpoint that are not as they were written; checksums.json itself where it is missing or cut off."""
    try:
        written = json.loads((folder / "checksums.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ["checksums.json"]
    there = checksums(folder)
    return [name for name in written if there.get(name) != written[name]]


def newest(run_dir):
    found = checkpoints(run_dir)
    if not found:
        raise UserError(f"nothing to resume: {run_dir} holds no checkpoint. Start a new run, without --resume and in another folder.")
    return found[-1]


def how_to_resume(run_dir):
    """How to go on after a run has ended early."""
    found = checkpoints(run_dir)
    return f"To go on from {found[-1].name}: --output_dir {run_dir} --resume" if found else "There was no checkpoint yet."


def resume(run_dir):
    """(folder, state, notes) of a run's newest checkpoint that is whole. Every rank calls this; the first one reads the files.

    Damaged newer ones are renamed: from here on the run's newest checkpoint is the one that is resumed.
    """
    newest(run_dir)
    folder, notes = None, []
    if ranks.rank() == 0:
        wrong = {}  # {checkpoint: its damaged files}, the newest first
        for path in reversed(checkpoints(run_dir)):
            if not (files := damaged(path)):
                folder = path
                break
            wrong[path] = files
        for path, files in wrong.items() if folder else []:
            aside = set_aside(path)
            notes.append(f"{path} is damaged ({', '.join(files)}) and was renamed to {aside.name}: the run goes on from {folder.name}.")
    folder, notes = ranks.from_first((folder, notes))
    if folder is None:
        raise UserError(f"nothing to resume: every checkpoint of {run_dir} is damaged. Start a new run in another folder.")
    return str(folder), json.loads((folder / "state.json").read_text(encoding="utf-8")), notes


def set_aside(path):
    """Rename a damaged checkpoint, so that it is no longer one of the run's; none of its files is deleted. Returns the new path."""
    name = f"damaged-{path.name}"
    names = itertools.chain([name], (f"{name}-{n}" for n in itertools.count(2)))
    return path.rename(next(free for free in map(path.with_name, names) if not free.exists()))


def agreed(run_dir, saved, state):
    """The saved state, which must come from the model and the data of `state`."""
    for name, what in [("source", "model"), ("data", "data set")]:
        if saved[name] != state[name]:
            raise UserError(f"{run_dir} was started with another {what}: put that back, or start a new run.")
    return saved


def check_unfinished(run_dir, state, steps):
    if state["step"] >= steps and (Path(run_dir) / "summary.json").exists():
        raise UserError(f"{run_dir} has finished its {steps} steps: ask for more with --steps or --epochs, or start a new run.")
