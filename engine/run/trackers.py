"""Where a run's metrics go besides its JSON lines: TensorBoard, or Weights & Biases."""

import uuid
from pathlib import Path

from engine.run.options import UserError


class Tracker:
    """Metrics by step. name: tensorboard, wandb, or None, which logs nothing (ranks but the first).

    A run that goes on after `step` takes the place of what was logged beyond it: TensorBoard hides that, Weights & Biases, which
    finds the run by the id in the run's folder, keeps the earlier of two equal steps. options: shown beside the run.
    """

    def __init__(self, name, run_dir, step, options):
        self.writer = self.run = None
        if name == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(Path(run_dir) / "tensorboard", purge_step=step + 1)
        if name == "wandb":
            import wandb

            known = Path(run_dir) / "wandb-id"
            if step == 0 or not known.exists():
                known.write_text(uuid.uuid4().hex)
            try:
                self.run = wandb.init(project="grpo-cppo", name=Path(run_dir).name, dir=run_dir, id=known.read_text(), resume="allow",
                                      config=options, allow_val_change=True)
            except wandb.Error as error:
                raise UserError(f"--log wandb: {' '.join(str(error).split())}") from None

    def log(self, step, metrics):
        """Only numbers are logged: what a step without an update leaves open is None."""
        numbers = {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
        if self.writer:
            for name, value in numbers.items():
                self.writer.add_scalar(name, value, step)
            self.writer.flush()  # a run that is killed has lost nothing
        if self.run:
            self.run.log(numbers, step=step)

    def close(self):
        for end in filter(None, [self.writer and self.writer.close, self.run and self.run.finish]):
            end()
