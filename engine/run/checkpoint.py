"""Checkpoints: a Hugging Face folder that also holds what a run needs to continue exactly where it
stopped.

    checkpoint-000050/    model.safetensors, config.json, tokenizer …      what transformers loads
                          networks/         the optimizer's moments, PPO's critic, a refreshed
                                            reference, saved by
                                            torch.distributed.checkpoint: any number of ranks can
                                            read them
                          state.json        step, questions seen, and the like
                          checksums.json    SHA-256 of every other file

No random state is saved: step s draws from a generator seeded by (seed, s), and the order of the
questions follows from the seed, so the number of the step is enough. No scheduler is saved either:
the learning rate follows from the steps made and the questions taken. If a run uses several
machines, all ranks must see the same run folder. """

import contextlib
import hashlib
import itertools
import json
import pickle
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError

from engine.base import ranks
from engine.base.errors import UserError
from engine.model import shards
from engine.model.folders import checkpoints

# a single process saves alone: nothing is wrong
warnings.filterwarnings("ignore", ".*torch.distributed is disabled")


def save(run_dir, networks, state, others, limit=2):
    """Write `run_dir/checkpoint-STEP`. Every rank calls this.

    The folder gets this name only at the end, so that a folder named checkpoint-STEP is always
    complete. `limit` checkpoints are kept: the previous one, because the new one may be damaged
    later. Older checkpoints are removed last.

    others: {name: network}, saved besides the policy. Returns None, or the reason if saving failed
    on any rank, for example because the disk is full. If saving failed, all earlier checkpoints are
    still there. """
    import torch.distributed.checkpoint as dcp  # imports in functions here are slow ones

    run_dir, own = Path(run_dir), {}  # own: the checksums of the files that this rank has written
    final, unfinished = (
        run_dir / f"checkpoint-{state['step']:06d}", run_dir / "unfinished-checkpoint",
    )
    # save_pretrained finds whole weights by itself
    weights = gathered(networks.model) if shards.is_sharded(networks.model) else None

    def export():
        shutil.rmtree(unfinished, ignore_errors=True)
        networks.model.save_pretrained(unfinished, state_dict=weights)
        networks.tokenizer.save_pretrained(unfinished)
        (unfinished / "state.json").write_text(
            json.dumps(state, ensure_ascii=False), encoding="utf-8"
        )

    def share():
        dcp.save(sharded_state(networks, others), checkpoint_id=unfinished / "networks")

    def add_up():
        own.update(checksums(unfinished, lambda path: writer(path) == ranks.rank()))

    def finish():
        sums = dict(sorted(ranks.gather(list(own.items()))))
        if ranks.rank() == 0:
            (unfinished / "checksums.json").write_text(json.dumps(sums, indent=2), encoding="utf-8")
            # an interrupted start may have left this folder
            shutil.rmtree(final, ignore_errors=True)
            unfinished.rename(final)
            for path in checkpoints(run_dir)[:-limit]:
                shutil.rmtree(path)

    for work in (export, share, add_up, finish):
        problem = attempt(work, run_dir) if ranks.rank() == 0 or work is not export else None
        problem = next(filter(None, ranks.gather([problem])), None)
        if problem:
            if ranks.rank() == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            return problem
    return None


def gathered(model):
    """{name: tensor} of a model with shards. The first rank gathers the tensors of all ranks in the
    host's memory."""
    from torch.distributed.checkpoint import state_dict

    whole = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = state_dict.get_model_state_dict(model, options=whole)
    all_names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name in all_names - {name for name, _ in model.named_parameters()}:
        weights.pop(name, None)  # a tied head shares the embedding's tensor
    return weights


def attempt(work, folder):
    """Call `work`. Returns None, or why it failed. The free space is added: torch does not say that
    a disk is full."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        work()
    # Python, torch, safetensors write
    except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
        if isinstance(error, CheckpointException):
            # the error of the first rank that failed
            error, _ = next(iter(error.failures.values()))
        free = ""
        with contextlib.suppress(OSError):  # the disk itself may be gone
            free = f"; {shutil.disk_usage(folder).free / 1e6:.0f} MB are free there"
        return f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}{free}"


def sharded_state(networks, others):
    """What torch.distributed.checkpoint saves and loads, under names that do not depend on the
    number of ranks."""
    from torch.distributed.checkpoint import state_dict

    state = {name: state_dict.get_model_state_dict(network) for name, network in others.items()}
    if networks.optimizer.state:  # empty before the first update
        learners = torch.nn.ModuleList(networks.learners)
        state["optimizer"] = state_dict.get_optimizer_state_dict(learners, networks.optimizer)
    return state


def restore(folder, networks, others):
    """Load the files of `save` into `others` and the optimizer of `networks`. The number of ranks
    may have changed.

    The files may be a stranger's: no code that they name is run (reader.py).
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict
    from torch.distributed.checkpoint.api import CheckpointException

    from engine.run.reader import Planner, Reader

    reader = Reader(Path(folder) / "networks")
    refused = UserError(
        f"{folder}/networks holds code, as no checkpoint of this project does: do not use this run."
    )
    try:
        names = {name.split(".")[0] for name in reader.read_metadata().state_dict_metadata}
    except pickle.UnpicklingError:
        raise refused from None
    learners = torch.nn.ModuleList(networks.learners)
    state = {
        name: state_dict.get_model_state_dict(network)
        for name, network in others.items()
        if name in names
    }
    if "optimizer" in names:
        state["optimizer"] = state_dict.get_optimizer_state_dict(learners, networks.optimizer)
    try:
        dcp.load(state, storage_reader=reader, planner=Planner())
    except CheckpointException as error:
        if any(isinstance(reason, pickle.UnpicklingError) for reason, _ in error.failures.values()):
            raise refused from None
        raise
    for name, loaded in state.items():
        if name == "optimizer":
            state_dict.set_optimizer_state_dict(learners, networks.optimizer, loaded)
        else:
            state_dict.set_model_state_dict(others[name], loaded)


def writer(path):
    """The rank that has written a file of a checkpoint: networks/__3_0.distcp is rank 3's; all
    others are the first's."""
    return int(path.name.split("_")[2]) if path.suffix == ".distcp" else 0


def checksums(folder, which=lambda path: path.name != "checksums.json"):
    """{file: SHA-256} of the files under `folder`; which(path) says of which."""
    def digest(path):
        sha = hashlib.sha256()
        with open(path, "rb") as file:
            while part := file.read(1 << 20):
                sha.update(part)
        return sha.hexdigest()

    files = sorted(path for path in Path(folder).rglob("*") if path.is_file() and which(path))
    with ThreadPoolExecutor() as pool:  # threads help: hashing does not hold Python's lock
        return {
            str(path.relative_to(folder)): sha for path, sha in zip(files, pool.map(digest, files))
        }


def damaged(folder, which=lambda path: path.name != "checksums.json"):
    """The files of a checkpoint that have changed since they were written. which: as for
    `checksums`.

    If checksums.json is missing or cut off, it is the only file of the list.
    """
    try:
        written = json.loads((folder / "checksums.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ["checksums.json"]
    found = checksums(folder, which)
    return [name for name in written if which(folder / name) and found.get(name) != written[name]]


def newest(run_dir):
    found = checkpoints(run_dir)
    if not found:
        raise UserError(f"nothing to resume: {run_dir} holds no checkpoint. "
                        "Start a new run, without --resume and in another folder.")
    return found[-1]


def how_to_resume(run_dir):
    """The sentence that says how to resume a run that ended early."""
    found = checkpoints(run_dir)
    return (f"To go on from {found[-1].name}: --output_dir {run_dir} --resume" if found
            else "There was no checkpoint yet: only the steps so far are lost.")


def resume(run_dir):
    """(folder, state, notes) of a run's newest undamaged checkpoint. Every rank calls this; the
    first reads the files.

    Newer, damaged checkpoints get another name. Then the checkpoint that is resumed is the newest
    one of the run. """
    newest(run_dir)
    folder, notes = None, []
    if ranks.rank() == 0:
        damaged_files = {}  # {checkpoint: its damaged files}, the newest first
        for path in reversed(checkpoints(run_dir)):
            if not (files := damaged(path)):
                folder = path
                break
            damaged_files[path] = files
        for path, files in damaged_files.items() if folder else []:
            renamed = set_aside(path)
            notes.append(
                f"{path} is damaged ({', '.join(files)}) and was renamed to {renamed.name}: "
                f"the run goes on from {folder.name}."
            )
    folder, notes = ranks.from_first((folder, notes))
    if folder is None:
        raise UserError(
            f"nothing to resume: every checkpoint of {run_dir} is damaged. Start a new run in "
            "another folder."
        )
    return str(folder), json.loads((folder / "state.json").read_text(encoding="utf-8")), notes


def set_aside(path):
    """Rename a damaged checkpoint, so that the run no longer counts it. No file is deleted. Returns
    the new path."""
    name = f"damaged-{path.name}"
    names = itertools.chain([name], (f"{name}-{n}" for n in itertools.count(2)))
    return path.rename(next(free for free in map(path.with_name, names) if not free.exists()))


def agreed(run_dir, saved, state):
    """The saved state. Raises UserError if it comes from another model or other data than
    `state`."""
    for name, what in [("source", "model"), ("data", "data set")]:
        if saved[name] != state[name]:
            raise UserError(
                f"{run_dir} was started with another {what}: put that back, or start a new run."
            )
    return saved


def check_unfinished(run_dir, state, steps):
    if state["step"] >= steps and (Path(run_dir) / "summary.json").exists():
        raise UserError(
            f"{run_dir} has finished its {steps} steps: ask for more with --steps or --epochs, or "
            "start a new run."
        )
