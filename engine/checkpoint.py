"""Checkpoints: a Hugging Face folder that also holds what a run needs to go on exactly where it was.

There is no random state to save: step s of rank r draws from a generator seeded by (seed, s, r), and the order of the
questions follows from the seed, so that the number of the step says it all. Nor is there a scheduler: the learning rate
is a function of the step. So a run goes on with the number of devices and of questions per step that it was started with.
"""

import shutil
from pathlib import Path

import torch

from engine.options import UserError


def save(run_dir, model, tokenizer, optimizer, state, others):
    """Write `run_dir/checkpoint-STEP`: first beside it under another name, then renamed, so that what bears a
    checkpoint's name is always whole. Older ones are removed last. others: {name: model}, whose weights are saved too."""
    run_dir = Path(run_dir)
    final, unfinished = run_dir / f"checkpoint-{state['step']:06d}", run_dir / "unfinished-checkpoint"
    older = [path for path in checkpoints(run_dir) if path != final]
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    saved = {"state": state, "optimizer": optimizer.state_dict(), "others": {name: m.state_dict() for name, m in others.items()}}
    torch.save(saved, unfinished / "trainer.pt")
    shutil.rmtree(final, ignore_errors=True)  # of a start that was given up
    unfinished.rename(final)
    for path in older:
        shutil.rmtree(path)


def checkpoints(run_dir):
    """The checkpoints of a run, the newest last."""
    return sorted(Path(run_dir).glob("checkpoint-??????"))


def newest(run_dir):
    found = checkpoints(run_dir)
    if not found:
        raise UserError(f"nothing to resume: {run_dir} holds no checkpoint. Start a new run, without --resume and in another folder.")
    return found[-1]


def say(run_dir):
    """How to go on after a run has ended early."""
    found = checkpoints(run_dir)
    return f"To go on from {found[-1].name}: --output_dir {run_dir} --resume" if found else "There was no checkpoint yet."


def resume(run_dir, steps, expect):
    """(folder, what `save` put into trainer.pt) of a run's newest checkpoint, which must come from the model and data of `expect`."""
    folder = newest(run_dir)
    saved = torch.load(folder / "trainer.pt", map_location="cpu", weights_only=True)
    for name, what in [("source", "model"), ("data", "data set"), ("per_step", "number of questions per step over all devices")]:
        if saved["state"][name] != expect[name]:
            raise UserError(f"{run_dir} was started with another {what}: put that back, or start a new run.")
    if saved["state"]["step"] >= steps and (Path(run_dir) / "summary.json").exists():
        raise UserError(f"{run_dir} has finished its {steps} steps: ask for more with --steps or --epochs, or start a new run.")
    return str(folder), saved
