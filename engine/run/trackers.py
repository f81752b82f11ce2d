"""Trackers: a run's metrics can also go to TensorBoard, to Weights & Biases, or to Trackio."""

from importlib import import_module
from pathlib import Path

from engine.base.errors import UserError, one_line


class Tracker:
    """Logs metrics by step. name: tensorboard, wandb, trackio, or None, which logs nothing, as on
    all ranks except the first.

    A run that continues after `step` repeats later steps. TensorBoard hides the earlier records of
    these steps. Trackio finds the run by its name, the path of the folder, and keeps both records.
    Weights & Biases begins another run of the same name, unless WANDB_RUN_ID names the earlier one.
    These two write to folders of their own (TRACKIO_DIR, WANDB_DIR). options: shown beside the run.
    """

    def __init__(self, name, run_dir, step, options):
        self.writer = self.run = None
        path = Path(run_dir).resolve()
        if name == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(path / name, purge_step=step + 1)
        elif name:
            try:
                self.run = import_module(name).init(  # trackio has wandb's interface
                    project="grpo-cppo", name=str(path)[-128:], config=options,
                    resume="allow" if step else "never")
            except Exception as error:  # there is no login, no network, …
                raise UserError(f"--log {name}: {one_line(error)}") from None

    def log(self, step, metrics):
        """Log the metrics. Those that are None, as after a step without an update, are left out."""
        numbers = {key: x for key, x in metrics.items() if x is not None}
        if self.run:
            self.run.log(numbers, step=step)
        if self.writer:
            for key, x in numbers.items():
                self.writer.add_scalar(key, x, step)
            self.writer.flush()  # a run that is killed loses nothing

    def close(self):
        if self.run:
            self.run.finish()
        if self.writer:
            self.writer.close()
