"""Checkpoints: a Hugging Face folder that also holds what a run needs to continue exactly where it
stopped.

    checkpoint-000050/    model.safetensors, config.json, tokenizer …      what transformers loads
                          networks/         the optimizer's moments and PPO's critic, saved by
                                            torch.distributed.checkpoint: any number of ranks can
                                            read them
                          state.json        step, questions seen, and the like
                          checksums.json    SHA-256 of every other file

No random state is saved: step s draws from a generator seeded by (seed, s), and the order of the
questions follows from the seed, so the number of the step is enough. No scheduler is saved either:
the learning rate follows from the steps made and the questions taken. If a run uses several
machines, all ranks must see the same run folder.
"""

import hashlib
import json
import shutil
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError

from engine.base import files, progress, ranks
from engine.base.errors import UserError, one_line
from engine.model import shards
from engine.model.folders import checkpoints

# a single process saves alone: nothing is wrong
warnings.filterwarnings("ignore", ".*torch.distributed is disabled")

SUMMARY = "summary.json"  # it marks a finished run
KEPT = 2  # checkpoints of a run


def save(run_dir, networks, state):
    """Write `run_dir/checkpoint-STEP`. Every rank calls this. Returns whether that worked.

    The folder gets this name only at the end, so that a folder named checkpoint-STEP is always
    complete. KEPT checkpoints are kept: the previous one, because the new one may be damaged later.
    Older checkpoints are removed last. If saving failed on any rank, for example because the disk
    is full, the reason is told, and all earlier checkpoints are still there.
    """
    import torch.distributed.checkpoint as dcp  # imports in functions here are slow ones

    progress.say("saving")
    unfinished = Path(run_dir, "unfinished-checkpoint")
    weights = None  # save_pretrained finds whole weights by itself
    if shards.is_sharded(networks.model):  # to the memory of the first rank's host
        parts = shards.whole_weights(networks.model)
        weights = {name: tensor.cpu() for name, tensor in parts if ranks.rank() == 0}

    def export():
        shutil.rmtree(unfinished, ignore_errors=True)
        networks.model.save_pretrained(unfinished, state_dict=weights)
        networks.tokenizer.save_pretrained(unfinished)
        files.write(unfinished / "state.json", json.dumps(asdict(state), ensure_ascii=False))

    def share():
        trained = bool(networks.optimizer.state)  # empty before the first update
        dcp.save(sharded_state(networks, trained), checkpoint_id=unfinished / "networks")

    def finish():
        files.write(unfinished / "checksums.json", json.dumps(checksums(unfinished), indent=2))
        final = Path(run_dir, f"checkpoint-{state.step:06d}")
        shutil.rmtree(final, ignore_errors=True)  # an interrupted start may have left this folder
        unfinished.rename(final)
        for path in checkpoints(run_dir)[:-KEPT]:
            shutil.rmtree(path)

    for work in (export, share, finish):
        problems = []
        try:
            if ranks.rank() == 0 or work is share:
                work()
        except (OSError, RuntimeError, SafetensorError, dcp.api.CheckpointException) as error:
            # torch does not say that a disk is full
            free = shutil.disk_usage(run_dir).free / 1e6
            problems = [f"{one_line(reason_of(error))}; {free:.0f} MB are free there"]
        problems = ranks.gather(problems)
        if problems:
            if ranks.rank() == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            progress.note(f"step {state.step}: the checkpoint could not be written "
                          f"({problems[0]}). {how_to_resume(run_dir)}")
            return False
    return True


def reason_of(error):
    """The error of the first rank that failed, if torch.distributed.checkpoint wraps it; else the
    error itself."""
    failures = getattr(error, "failures", None)
    return next(iter(failures.values()))[0] if failures else error


def sharded_state(networks, with_optimizer):
    """What torch.distributed.checkpoint saves and loads, under names that do not depend on the
    number of ranks."""
    from torch.distributed.checkpoint import state_dict

    state = {}
    if networks.critic:
        state["critic"] = state_dict.get_model_state_dict(networks.critic)
    if with_optimizer:
        learners = torch.nn.ModuleList(networks.learners)
        state["optimizer"] = state_dict.get_optimizer_state_dict(learners, networks.optimizer)
    return state


def restore(folder, networks):
    """Load the files of `save` into the critic and the optimizer of `networks`. The number of ranks
    may have changed.

    The files may be a stranger's: no code that they name is run (reader.py).
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict

    from engine.run.reader import Planner, Reader

    reader = Reader(Path(folder) / "networks")
    names = {name.split(".")[0] for name in reader.read_metadata().state_dict_metadata}
    state = sharded_state(networks, with_optimizer="optimizer" in names)
    try:
        dcp.load(state, storage_reader=reader, planner=Planner())
    except dcp.api.CheckpointException as error:
        raise reason_of(error) from None
    if networks.critic:
        state_dict.set_model_state_dict(networks.critic, state["critic"])
    if "optimizer" in names:
        learners = torch.nn.ModuleList(networks.learners)
        state_dict.set_optimizer_state_dict(learners, networks.optimizer, state["optimizer"])


def checksums(folder):
    """{file: SHA-256} of the files under `folder`."""
    def digest(path):
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    paths = [path for path in sorted(Path(folder).rglob("*"))
             if path.is_file() and path.name != "checksums.json"]
    with ThreadPoolExecutor() as pool:  # threads help: hashing does not hold Python's lock
        return dict(zip((str(p.relative_to(folder)) for p in paths), pool.map(digest, paths)))


def is_damaged(folder):
    """Whether a file of a checkpoint has changed since it was written. Other files may be there."""
    try:
        written = json.loads((folder / "checksums.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True
    return not written.items() <= checksums(folder).items()


def newest(run_dir):
    found = checkpoints(run_dir)
    if not found:
        raise UserError(f"nothing to resume: {run_dir} holds no checkpoint. Start a new run, "
                        "without --resume and in another folder.")
    return found[-1]


def has_finished(run_dir):
    return Path(run_dir, SUMMARY).exists()


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
    found = checkpoints(run_dir)[::-1]
    folder, damaged, notes = None, [], []
    if ranks.rank() == 0:
        whole = (path for path in found if not is_damaged(path))
        folder = next(whole, None)
    folder = ranks.from_first(folder)
    if folder is None:
        raise UserError(f"nothing to resume: every checkpoint of {run_dir} is damaged. Start a new "
                        "run in another folder.")
    if ranks.rank() == 0:
        damaged = found[: found.index(folder)]
    for path in damaged:
        place = tempfile.mkdtemp(prefix=f"damaged-{path.name}-", dir=run_dir)
        path.rename(place)
        notes.append(f"{path} is damaged and was renamed to {Path(place).name}: the run goes on "
                     f"from {folder.name}.")
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    return str(folder), state, notes
