"""Your tracker: the metrics of each step also go to Weights & Biases.

Install it (pip install wandb), and add --hooks examples/my_tracker.py to the command of a run.
Trackio has the same functions: write `import trackio as wandb`. For TensorBoard keep a
SummaryWriter of torch.utils.tensorboard in place of the run, and call its add_scalar.
"""

import functools
import os

import wandb


@functools.cache  # once in a process
def run():
    return wandb.init(project="grpo-cppo")


def metrics(step):
    """Log the metrics of a Step, which are those of all devices. Nothing is added to them."""
    if os.environ.get("RANK", "0") == "0":  # the first process
        numbers = {name: value for name, value in step.metrics.items() if value is not None}
        run().log(numbers, step=step.rollout.step)
    return {}
