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
machines, all ranks must see the same run folder.
"""

import contextlib
import hashlib
import json
import shutil
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError

from engine.base import ranks
from engine.base.errors import one_line, refuse
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
    still there.
    """
    import torch.distributed.checkpoint as dcp  # imports in functions here are slow ones

    run_dir = Path(run_dir)
    final, unfinished = (
        run_dir / f"checkpoint-{state['step']:06d}", run_dir / "unfinished-checkpoint",
    )
    weights = None  # save_pretrained finds whole weights by itself
    if shards.is_sharded(networks.model):
        weights = {}  # in the memory of the first rank's host
        for name, tensor in shards.whole_weights(networks.model):
            weights |= {name: tensor.cpu()} if ranks.rank() == 0 else {}

    def export():
        shutil.rmtree(unfinished, ignore_errors=True)
        networks.model.save_pretrained(unfinished, state_dict=weights)
        networks.tokenizer.save_pretrained(unfinished)
        (unfinished / "state.json").write_text(
            json.dumps(state, ensure_ascii=False), encoding="utf-8"
        )

    def share():
        trained = bool(networks.optimizer.state)  # empty before the first update
        dcp.save(sharded_state(networks, others, trained), checkpoint_id=unfinished / "networks")

    def finish():
        sums = json.dumps(checksums(unfinished), indent=2)
        (unfinished / "checksums.json").write_text(sums, encoding="utf-8")
        shutil.rmtree(final, ignore_errors=True)  # an interrupted start may have left this folder
        unfinished.rename(final)
        for path in checkpoints(run_dir)[:-limit]:
            shutil.rmtree(path)

    for work in (export, share, finish):
        problem = attempt(work, run_dir) if ranks.rank() == 0 or work is share else None
        problem = next(filter(None, ranks.gather([problem])), None)
        if problem:
            if ranks.rank() == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            return problem


def attempt(work, folder):
    """Call `work`. Returns None, or why it failed. The free space is added: torch does not say that
    a disk is full."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        work()
    except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
        reason = one_line(reason_of(error))
        with contextlib.suppress(OSError):  # the disk itself may be gone
            reason += f"; {shutil.disk_usage(folder).free / 1e6:.0f} MB are free there"
        return reason


def reason_of(error):
    """The error of the first rank that failed, if torch.distributed.checkpoint wraps it; else the
    error itself."""
    failures = getattr(error, "failures", None)
    return next(iter(failures.values()))[0] if failures else error


def sharded_state(networks, others, with_optimizer):
    """What torch.distributed.checkpoint saves and loads, under names that do not depend on the
    number of ranks."""
    from torch.distributed.checkpoint import state_dict

    state = {name: state_dict.get_model_state_dict(network) for name, network in others.items()}
    if with_optimizer:
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
    names = {name.split(".")[0] for name in reader.read_metadata().state_dict_metadata}
    others = {name: network for name, network in others.items() if name in names}
    state = sharded_state(networks, others, with_optimizer="optimizer" in names)
    try:
        dcp.load(state, storage_reader=reader, planner=Planner())
    except CheckpointException as error:
        raise reason_of(error) from None
    for name, network in others.items():
        state_dict.set_model_state_dict(network, state[name])
    if "optimizer" in names:
        learners = torch.nn.ModuleList(networks.learners)
        state_dict.set_optimizer_state_dict(learners, networks.optimizer, state["optimizer"])


def checksums(folder):
    """{file: SHA-256} of the files under `folder`."""
    def digest(path):
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    files = [path for path in sorted(Path(folder).rglob("*"))
             if path.is_file() and path.name != "checksums.json"]
    with ThreadPoolExecutor() as pool:  # threads help: hashing does not hold Python's lock
        names = (str(path.relative_to(folder)) for path in files)
        return dict(zip(names, pool.map(digest, files)))


def damaged(folder):
    """The files of a checkpoint that have changed since they were written.

    If checksums.json is missing or cut off, it is the only file of the list.
    """
    try:
        written = json.loads((folder / "checksums.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ["checksums.json"]
    found = checksums(folder)
    return [name for name in written if found.get(name) != written[name]]


def newest(run_dir):
    found = checkpoints(run_dir)
    refuse([(not found, f"nothing to resume: {run_dir} holds no checkpoint. Start a new run, "
                        "without --resume and in another folder.")])
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
    one of the run.
    """
    newest(run_dir)
    folder, notes = ranks.from_first(undamaged(run_dir) if ranks.rank() == 0 else None)
    refuse([(folder is None, f"nothing to resume: every checkpoint of {run_dir} is damaged. Start "
                             "a new run in another folder.")])
    return str(folder), json.loads((folder / "state.json").read_text(encoding="utf-8")), notes


def undamaged(run_dir):
    """(the newest undamaged checkpoint, notes about the newer ones, which are renamed); (None, [])
    if all are damaged. No file is deleted."""
    harmed, notes = {}, []
    for folder in reversed(checkpoints(run_dir)):
        if names := damaged(folder):
            harmed[folder] = names
            continue
        for path, names in harmed.items():
            place = path.rename(tempfile.mkdtemp(prefix=f"damaged-{path.name}-", dir=run_dir))
            notes.append(f"{path} is damaged ({', '.join(names)}) and was renamed to {place.name}: "
                         f"the run goes on from {folder.name}.")
        return folder, notes
    return None, []
