"""The memory that `--plan` plans, against the memory that a GPU holds: building, two steps, saving,
resuming.

    python experiments/plan.py                     writes plan.json and plan.md in runs/results/
    torchrun --nproc-per-node 2 experiments/plan.py --cases 'wide, tied' PPO
                                                   what `--shard full` needs on two devices

The models have random weights. All prompts and completions are as long as allowed, so that the
plan's worst case happens. The figure is PyTorch's own count of the bytes that its tensors hold,
from before the first weight on, at its peak in each phase.
"""

import gc
import random
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from engine.base import ranks
from engine.base.errors import UserError
from engine.base.progress import Clock
from engine.model.networks import build
from engine.run import checkpoint
from engine.run.command_line import option, parse, run_program
from engine.run.config import config_of
from engine.run.plan import plan
from engine.run.state import State
from engine.scoring.score import Reward
from experiments.library import toy_model
from experiments.library.bench import every_second, heading, markdown_table, qwen, report
from train import train_step
from update import Limits

WIDE = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 8000, "tie_word_embeddings": True,
}
# memory may run out in the first two; the others are to need less
PHASES = ("generation", "update", "building", "optimizer step", "saving", "resuming")
DEEP = {
    "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 16, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 20_000, "tie_word_embeddings": False,
}
STEP = {
    "questions_per_step": 1, "group_size": 8, "pruning_rate": 0.5, "max_prompt_tokens": 112,
    "max_new_tokens": 16, "micro_batch_tokens": 512,
}  # 2 questions, 8 completions kept, two micro-batches of four
LONG = {"max_prompt_tokens": 400}
ROWS = {"group_size": 64, "micro_batch_tokens": 128, "pruning_rate": 0.98, "allocation": False}
CASES = {  # name: (shape, options on top of STEP)
    "wide, tied": (WIDE, {}),
    "wide, long": (WIDE, LONG | {"max_new_tokens": 112, "micro_batch_tokens": 1024}),
    "deep, untied": (DEEP, {"beta": 0.0}),
    "deep, checkpointed": (DEEP, {"gradient_checkpointing": True}),
    "many rows": (DEEP, ROWS),
    "GSPO": (DEEP, {"algorithm": "gspo", "pruning_rate": 0.0, "group_size": 16}),
    "PPO": (WIDE, {"algorithm": "ppo", "pruning_rate": 0.0}),
    "LoRA": (WIDE, {"lora": 8}),
    "LoRA, long prompts": (WIDE, LONG | {"lora": 8, "group_size": 4}),
    "float32, long prompts": (WIDE, LONG | {"dtype": "float32"}),
}


@dataclass
class Options:
    cases: list[str] | None = option(None, "which; none: all (LoRA: on one device only)")
    output: str = option("runs/results", "folder of plan.json and plan.md")


def longest_questions(config, n):
    """n questions whose prompts differ: an equal prompt is computed once."""
    return [
        {"question": "?", "answer": "1", "prompt": [5 + i] * config.data.max_prompt_tokens}
        for i in range(n)
    ]


def longest_steps(networks, config, algorithm):
    """Make two steps whose prompts and completions are all as long as allowed. Yields the metrics
    of each.

    In the second step the optimizer already has its moments while completions are sampled.
    """
    networks.sampler.stop_ids = [-1]  # no token ends a completion
    questions = longest_questions(config, algorithm.questions_per_step)
    reward = Reward("every second", every_second)
    limits = Limits(config.devices.micro_batch_tokens)
    for number in (1, 2):
        step = train_step(
            networks, algorithm, [reward], config.sampling, limits, questions,
            random.Random(number))
        yield step.metrics


class Tracker:
    """The peak memory of each phase, in bytes, minus the memory held when the Tracker was made."""

    def __init__(self):
        gc.collect()
        self.before = torch.cuda.memory_allocated()
        self.peaks = dict.fromkeys(PHASES, 0)
        torch.cuda.reset_peak_memory_stats()

    def close(self, name):
        """End phase `name`: the peak since the last call belongs to it."""
        self.peaks[name] = max(self.peaks[name], torch.cuda.max_memory_allocated() - self.before)
        torch.cuda.reset_peak_memory_stats()

    @contextmanager
    def phase(self, name):
        """Replaces `Clock.phase`.

        Scoring counts as generation, because scores are made on the CPU. Log-probabilities count as
        update, because they need what an update needs without its backward pass.
        """
        yield
        self.close({"generate": "generation", "score": "generation"}.get(name, "update"))

    def watch(self, optimizer):
        """Count the optimizer's step as a phase. It is called without the hooks that a profiler may
        have added."""
        def step():
            self.close("update")
            type(optimizer).step.__wrapped__(optimizer)
            self.close("optimizer step")

        optimizer.step = step


def tracked(folder, config, algorithm, device):
    """{phase: bytes} of building, two steps, saving and resuming a run from the model in
    `folder`."""
    tracker = Tracker()
    networks = build(config, algorithm, folder, device)
    tracker.close("building")
    tracker.watch(networks.optimizer)
    with patch.object(Clock, "phase", lambda clock, name: tracker.phase(name)):
        for _ in longest_steps(networks, config, algorithm):
            tracker.close("update")

    run_dir = Path(ranks.from_first(tempfile.mkdtemp() if ranks.rank() == 0 else None))
    assert checkpoint.save(run_dir, networks, State(folder, "", 1, step=1)), "it was not saved"
    del networks
    gc.collect()
    tracker.close("saving")
    saved = str(checkpoint.newest(run_dir))
    networks = build(config, algorithm, folder, device, saved)
    checkpoint.restore(saved, networks)
    tracker.close("resuming")
    return tracker.peaks


def measure(name, device):
    """One case as a row of the results."""
    shape, options = CASES[name]
    world = ranks.world_size()
    with tempfile.TemporaryDirectory() as own:
        folder = ranks.from_first(own)
        if ranks.rank() == 0:
            qwen(**shape).save_pretrained(folder)
            toy_model.make_tokenizer().save_pretrained(folder)
        ranks.gather([])  # the other ranks wait for the folder
        chosen = {"model": folder, "dataset": "toy", "mu": 1, "plan": 0.0}
        chosen["shard"] = "full" if world > 1 else "none"
        config, algorithm = config_of(chosen | STEP | options)
        p = plan(config.options)
        peaks = tracked(folder, config, algorithm, device)
        ranks.gather([])  # the first rank, too, before it removes the folder
    return {
        "name": name, "devices": world, "trained": p.trained,
        "planned": dict(zip(PHASES, p.peaks)),
        "tracked": ranks.all_reduce(device, maxima=peaks),
    }


def page(result):
    lines = [["", "devices", "trained", *PHASES, "peak"]]
    for row in result["rows"]:
        planned, held = row["planned"], row["tracked"]
        line = [row["name"], row["devices"], f"{row['trained']:,}"]
        for phase in PHASES:
            cell = f"{held[phase] / 1e6:.1f}"
            if phase in planned:
                cell = f"{planned[phase] / 1e6:.1f} / {cell}"
            line.append(cell)
        ratio = max(planned.values()) / max(held.values())
        lines.append([*line, f"{ratio:.2f}"])
    return (
        heading("The memory planned, and the memory held", result)
        + f"\n{result['device']}. MB planned / MB tracked in the generation and in the update; MB "
        "tracked in the other phases, which are to need less; and the ratio of the planned peak "
        f"and the tracked one.\n\n{markdown_table(lines)}\n"
    )


def main(argv):
    options = parse(Options, argv)
    if not torch.cuda.is_available():
        raise UserError(
            "this benchmark needs a GPU: pytest tests/engine/test_plan.py compares the plan with "
            "the memory of a CPU."
        )
    device = ranks.start()
    names = options.cases or list(CASES)
    if ranks.world_size() > 1 and not options.cases:
        names = [name for name in CASES if "LoRA" not in name]
    if unknown := set(names) - set(CASES):
        raise UserError(f"--cases does not know {unknown.pop()}: there are {'; '.join(CASES)}.")
    measure(names[0], device)  # cuBLAS takes its workspaces, about 70 MB, and keeps them
    rows = [measure(name, device) for name in tqdm(names, disable=ranks.rank() > 0)]
    if ranks.rank() == 0:
        report(options, "plan", {"device": torch.cuda.get_device_name(), "rows": rows}, page)
    ranks.gather([])  # a rank that leaves early would end the talk of the others
    ranks.stop()


if __name__ == "__main__":
    run_program(main)
