"""Checkpoints: a Hugging Face folder that also holds what a run needs to go on exactly where it was.

There is no random state to save: step s of rank r draws from a generator seeded by (seed, s, r), and the order of the
questions follows from the seed, so that the number of the step says it all.
"""

import shutil
from pathlib import Path

import torch

from engine.options import UserError


def save(run_dir, step, model, tokenizer, optimizer, state):
    """Write `run_dir/checkpoint-STEP`: first beside it under another name, then renamed, so that what bears a
    checkpoint's name is always whole. Older ones are removed last."""
    run_dir = Path(run_dir)
    final, unfinished = run_dir / f"checkpoint-{step:06d}", run_dir / "unfinished-checkpoint"
    older = [path for path in checkpoints(run_dir) if path != final]
    if not final.exists():
        shutil.rmtree(unfinished, ignore_errors=True)
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        torch.save({"step": step, "optimizer": optimizer.state_dict(), **state}, unfinished / "trainer.pt")
        unfinished.rename(final)
    for path in older:
        shutil.rmtree(path)
    return final


def checkpoints(run_dir):
    """The checkpoints of a run, the newest last."""
    return sorted(Path(run_dir).glob("checkpoint-??????"))


def newest(run_dir):
    found = checkpoints(run_dir)
    if not found:
        raise UserError(f"nothing to resume: {run_dir} holds no checkpoint. Start the run without --resume, in another folder.")
    return found[-1]


def load_trainer_state(folder):
    return torch.load(Path(folder) / "trainer.pt", map_location="cpu", weights_only=True)
