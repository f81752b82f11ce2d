"""Checkpoints: a Hugging Face folder that also holds what a run needs to continue exactly where it
stopped.

    checkpoint-000050/    model.safetensors, config.json, tokenizer …      what transformers loads
                          networks/         the optimizer's moments and PPO's critic, also as
                                            safetensors, saved by torch.distributed.checkpoint: any
                                            number of ranks can read them
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
from engine.run.folder import how_to_resume

# a single process saves alone: nothing is wrong
warnings.filterwarnings("ignore", ".*torch.distributed is disabled")

SUMMARY = "summary.json"  # it marks a finished run
KEPT = 2  # checkpoints of a run, besides the best one
BEST = "best"  # a link to it
TENSORS = 30  # of a file in networks/: the writer holds a whole file in the host's memory


def save(run_dir, networks, state):
    """Write `run_dir/checkpoint-STEP`. Every rank calls this. Returns whether that worked.

    The folder gets this name only at the end, so that a folder named checkpoint-STEP is always
    complete. KEPT checkpoints are kept: the previous one, because the new one may be damaged later.
    Older checkpoints are removed last. If saving failed on any rank, for example because the disk
    is full, the reason is told, and all earlier checkpoints are still there.
    """
    progress.say("saving")
    unfinished = Path(run_dir, "unfinished-checkpoint")
    weights = None  # save_pretrained finds whole weights by itself
    if networks.policy.sharded:  # to the memory of the first rank's host
        parts = shards.full_state_dict(networks.model)
        weights = {name: tensor.cpu() for name, tensor in parts if ranks.rank() == 0}
    problem = (
        problem_of(save_model, unfinished, networks, weights, state)
        or problem_of(save_tensors, unfinished, networks)
        or problem_of(publish_checkpoint, unfinished, run_dir, state))
    if problem:
        if ranks.rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        progress.note(f"step {state.step}: the checkpoint could not be written ({problem}). "
                      f"{how_to_resume(run_dir)}")
    return not problem


def save_or_stop(run_dir, networks, state):
    """`save` before the first step: a run that cannot be saved does not begin."""
    if not save(run_dir, networks, state):
        raise UserError("stopped, because this run cannot be saved. Free the disk, or name another "
                        "--output_dir.")


def problem_of(work, folder, *others):
    """Call work(folder, *others) on every rank. Returns the same on every rank: why it failed on
    one of them, or None."""
    from torch.distributed.checkpoint.api import CheckpointException  # a slow import

    problems = []
    try:
        work(folder, *others)
    except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
        free = shutil.disk_usage(folder.parent).free / 1e6  # torch does not say that a disk is full
        # torch.distributed.checkpoint wraps the errors of the ranks
        failures = getattr(error, "failures", None) or {0: (error,)}
        reason, *_ = next(iter(failures.values()))
        problems = [f"{one_line(reason)}; {free:.0f} MB are free there"]
    return next(iter(ranks.gather(problems)), None)


def save_model(folder, networks, weights, state):
    """Write what transformers loads, and the State. The first rank does it."""
    if ranks.rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        networks.optimized_networks[0].save_pretrained(folder, state_dict=weights)
        networks.tokenizer.save_pretrained(folder)
        files.write(folder / "state.json", json.dumps(asdict(state), ensure_ascii=False))


def save_tensors(folder, networks):
    """Write the tensors of `tensors_of`. Every rank writes a part."""
    import torch.distributed.checkpoint as dcp

    trained = bool(networks.optimizer.state)  # empty before the first update
    tensors = tensors_of(networks, trained)
    numbers = {name: 1 + i // TENSORS for i, name in enumerate(tensors)}  # of their files
    writer = dcp.HuggingFaceStorageWriter(
        folder / "networks", fqn_to_index_mapping=numbers, save_distributed=True)
    dcp.save(tensors, storage_writer=writer)


def publish_checkpoint(folder, run_dir, state):
    """Give a checkpoint that is complete its name, and remove old ones. The first rank does it."""
    if ranks.rank() == 0:
        files.write(folder / "checksums.json", json.dumps(checksums(folder), indent=2))
        final = path_of(run_dir, state.step)
        shutil.rmtree(final, ignore_errors=True)  # an interrupted start may have left this folder
        folder.rename(final)
        best = link_best(run_dir, state.best)
        for path in checkpoints(run_dir)[:-KEPT]:
            if path != best:
                shutil.rmtree(path)


def path_of(run_dir, step):
    return Path(run_dir, f"checkpoint-{step:06d}")


def link_best(run_dir, best):
    """Let run_dir/best be the best checkpoint. Returns its path; None: there is none yet."""
    link = Path(run_dir, BEST)
    link.unlink(missing_ok=True)
    if best:
        path = path_of(run_dir, best["step"])
        link.symlink_to(path.name)
        return path


def tensors_of(networks, with_optimizer):
    """{name: tensor} of PPO's critic, and of the optimizer's state if with_optimizer. The names do
    not depend on the number of ranks. The tensors are those in use, not copies."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    tensors = {}
    if networks.critic:
        for name, tensor in networks.optimized_networks[-1].state_dict().items():
            tensors[f"critic.{name}"] = tensor
    if with_optimizer:
        learners = torch.nn.ModuleList(networks.optimized_networks)
        parameters = get_optimizer_state_dict(learners, networks.optimizer)["state"]
        for name, values in parameters.items():
            for key, tensor in values.items():
                tensors[f"optimizer.{name}.{key}"] = tensor
    return tensors


def restore(folder, networks):
    """Load the files of `save_tensors` into the critic and the optimizer of `networks`. The number
    of ranks may have changed. The files may be a stranger's: safetensors hold no code."""
    import torch.distributed.checkpoint as dcp

    reader = dcp.HuggingFaceStorageReader(Path(folder, "networks"))
    names = reader.read_metadata().state_dict_metadata
    trained = any(name.startswith("optimizer.") for name in names)
    dcp.load(tensors_of(networks, trained), storage_reader=reader)  # into these tensors
    networks.copy_master_weights()


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
    return checkpoints(run_dir)[-1]


def has_finished(run_dir):
    return Path(run_dir, SUMMARY).exists()


def resume(run_dir):
    """(folder, state, notes) of a run's newest undamaged checkpoint. Every rank calls this; the
    first reads the files.

    Newer, damaged checkpoints get another name. Then the checkpoint that is resumed is the newest
    one of the run.
    """
    found = undamaged(run_dir) if ranks.rank() == 0 else None
    folder, notes = ranks.from_first(found)
    if folder is None:
        raise UserError(f"nothing to resume: {run_dir} holds no checkpoint, or only damaged ones. "
                        "Start a new run, without --resume and in another folder.")
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    best = state["best"]
    if best and not path_of(run_dir, best["step"]).exists():  # a later one, now damaged, was better
        notes.append(f"the best checkpoint, of step {best['step']}, is gone: best/ begins anew.")
        state["best"] = {}
    if ranks.rank() == 0:
        link_best(run_dir, state["best"])  # a run that was killed may not have come to this
    return str(folder), state, notes


def undamaged(run_dir):
    """(a run's newest undamaged checkpoint or None, notes). Damaged ones that are newer get another
    name."""
    notes = []
    for path in reversed(checkpoints(run_dir)):
        if not is_damaged(path):
            return path, notes
        place = tempfile.mkdtemp(prefix=f"damaged-{path.name}-", dir=run_dir)
        path.rename(place)
        notes.append(f"{path} is damaged and was renamed to {Path(place).name}: the run goes on "
                     "from the checkpoint before it.")
    return None, notes
