"""Trackers: a run's metrics can also go to TensorBoard, to Weights & Biases, or to Trackio."""

import uuid
from pathlib import Path

from engine.base.errors import UserError


class Tracker:
    """Logs metrics by step. name: tensorboard, wandb, trackio, or None, which logs nothing, as on
    all ranks except the first.

    A run that continues after `step` repeats later steps. TensorBoard hides the earlier records of
    these steps. Weights & Biases keeps the earlier records; it finds the run by the id in the run's
    folder. Trackio keeps both; it finds the run by its name, which is the path of the folder, and
    writes to a folder of its own (TRACKIO_DIR). options: shown beside the run.
    """

    def __init__(self, name, run_dir, step, options):
        self.writer = self.run = None
        if name == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(Path(run_dir) / "tensorboard", purge_step=step + 1)
        if name == "wandb":
            import wandb

            id_file = Path(run_dir) / "wandb-id"
            if step == 0 or not id_file.exists():
                id_file.write_text(uuid.uuid4().hex)
            try:
                self.run = wandb.init(
                    project="grpo-cppo", name=Path(run_dir).name, dir=run_dir,
                    id=id_file.read_text(), resume="allow", config=options, allow_val_change=True,
                )
            except wandb.Error as error:
                raise UserError(f"--log wandb: {' '.join(str(error).split())}") from None
        if name == "trackio":
            import trackio

            self.run = trackio.init(
                project="grpo-cppo", name=str(Path(run_dir).resolve()), config=options,
                resume="allow" if step else "never",
            )

    def log(self, step, metrics):
        """Log the metrics that are numbers. Some are None after a step without an update."""
        numbers = {
            name: value for name, value in metrics.items() if isinstance(value, (int, float))
        }
        if self.writer:
            for name, value in numbers.items():
                self.writer.add_scalar(name, value, step)
            self.writer.flush()  # a run that is killed loses nothing
        if self.run:
            self.run.log(numbers, step=step)

    def close(self):
        if self.writer:
            self.writer.close()
        if self.run:
            self.run.finish()
