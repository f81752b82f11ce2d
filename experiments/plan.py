"""The memory that `--plan` plans, against the memory that a GPU holds: building, two steps,
evaluating, resuming.

    python experiments/plan.py                                 writes plan.json and plan.md in
                                                               experiments/results
    torchrun --nproc-per-node 2 experiments/plan.py            adds what `--shard full` needs on two
                                                               devices

The models have random weights. All prompts and completions are as long as allowed, so that the
plan's worst case happens. The figure is PyTorch's own count of the bytes that its tensors hold,
from before the first weight on, at its peak in each phase. """

import gc
import json
import random
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from tqdm import tqdm
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from engine.base import ranks
from engine.base.errors import UserError
from engine.model.networks import build
from engine.model.sampling import Sampling
from engine.run import checkpoint
from engine.run.config import Config, check
from engine.run.metrics import Clock
from engine.run.options import option, parse, run_program
from engine.run.plan import PHASES, plan
from engine.scoring.score import Reward
from engine.tasks import toy_model
from eval import evaluate
from experiments.setting import heading, setting, write
from train import train_step
from update import Limits

WIDE = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 8000, "tie_word_embeddings": True,
}
DEEP = {
    "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 16, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 20_000, "tie_word_embeddings": False,
}
QWEN = {
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151_936,
    "tie_word_embeddings": True,
}
STEP = {
    "questions_per_step": 1, "group_size": 8, "pruning_rate": 0.5, "max_prompt_tokens": 112,
    "max_new_tokens": 16, "micro_batch_tokens": 512,
}  # 2 questions, 8 completions kept, two micro-batches of four
PPO = {"algorithm": "ppo", "pruning_rate": None}
CASES = {  # name: (shape, options)
    "wide, tied": (WIDE, STEP),
    "wide, long": (
        WIDE, STEP | {"max_prompt_tokens": 400, "max_new_tokens": 112, "micro_batch_tokens": 1024},
    ),
    "deep, untied": (DEEP, STEP | {"beta": 0.0}),
    "deep, checkpointed": (DEEP, STEP | {"gradient_checkpointing": True}),
    "many rows": (
        DEEP,
        STEP
        | {"group_size": 64, "micro_batch_tokens": 128, "pruning_rate": 0.98, "allocation": False},
    ),
    "GSPO": (DEEP, STEP | {"algorithm": "gspo", "pruning_rate": None, "group_size": 16}),
    "PPO": (WIDE, STEP | PPO),
    "LoRA": (WIDE, STEP | {"lora": 8}),
    "LoRA, long prompts": (WIDE, STEP | {"lora": 8, "max_prompt_tokens": 400, "group_size": 4}),
    "float32, long prompts": (WIDE, STEP | {"max_prompt_tokens": 400, "dtype": "float32"}),
    "Qwen2.5-0.5B": (QWEN, STEP),
    "Qwen2.5-0.5B, checkpointed": (QWEN, STEP | {"gradient_checkpointing": True}),
    "Qwen2.5-0.5B, LoRA": (QWEN, STEP | {"lora": 16}),
}


TRAINING = [phase for phase in PHASES if phase != "evaluation"]


@dataclass
class Options:
    cases: list[str] | None = option(None, "which; none: all that the devices can share out")
    output: str = option("experiments/results", "folder of plan.json and plan.md")


def longest_questions(config, n):
    """n questions whose prompts differ: an equal prompt is computed once."""
    return [
        {"question": "?", "answer": "1", "prompt": [5 + i] * config.max_prompt_tokens}
        for i in range(n)
    ]


def every_second(completions, **columns):
    """The reward: 0, 1, 0, 1, …"""
    return [float(i % 2) for i in range(len(completions))]


def longest_steps(networks, config, algorithm):
    """Make two steps whose prompts and completions are all as long as allowed. Yields the metrics
    of each.

    In the second step the optimizer already has its moments while completions are sampled.
    """
    networks.sampler.stop_ids = [-1]  # no token ends a completion
    questions = longest_questions(config, algorithm.questions_per_step)
    rewards, sampling = [Reward("every second", every_second)], Sampling(config.max_new_tokens)
    for number in (1, 2):
        limits, rng = Limits(config.micro_batch_tokens, config.max_grad_norm), random.Random(number)
        metrics, *_ = train_step(
            networks, algorithm, rewards, sampling, limits, lambda missing: questions, rng
        )
        yield metrics


class Tracker:
    """The peak memory of each phase, in bytes, minus the memory held when the Tracker was made."""

    def __init__(self):
        gc.collect()
        self.before, self.peaks = (
            torch.cuda.memory_allocated(), dict.fromkeys([*PHASES, "saving", "resuming"], 0),
        )
        torch.cuda.reset_peak_memory_stats()

    def close(self, name):
        """End phase `name`: the peak since the last call belongs to it."""
        self.peaks[name] = max(self.peaks[name], torch.cuda.max_memory_allocated() - self.before)
        torch.cuda.reset_peak_memory_stats()

    @contextmanager
    def phase(self, name):
        """Takes the place of `Clock.phase`.

        Scoring counts as generation, because scores are made on the CPU. Log-probabilities count as
        update, because they need what an update needs without its backward pass. """
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
    """(Plan, {phase: bytes}) of building, two steps, evaluating and resuming a run from the model
    in `folder`."""
    expected, tracker = plan(config), Tracker()
    options = {"lr": config.lr, "beta": config.beta, "critic": algorithm.critic}
    networks = build(str(folder), device, config, config, **options)
    tracker.close("building")
    tracker.watch(networks.optimizer)
    with patch.object(Clock, "phase", lambda clock, name: tracker.phase(name)):
        for _ in longest_steps(networks, config, algorithm):
            tracker.close("update")
    questions, sampling = (
        longest_questions(config, expected.evaluated * ranks.world_size()),
        Sampling(config.max_new_tokens),
    )
    evaluate(
        networks.sampler, networks.tokenizer, questions, every_second, sampling,
        batch_size=expected.evaluated,
    )
    tracker.close("evaluation")

    run_dir = Path(ranks.from_first(tempfile.mkdtemp() if ranks.rank() == 0 else None))
    problem = checkpoint.save(
        run_dir, networks, {"step": 1}, {"critic": networks.critic} if algorithm.critic else {}
    )
    assert problem is None, problem
    del networks
    gc.collect()
    tracker.close("saving")
    saved = str(checkpoint.newest(run_dir))
    networks = build(str(folder), device, config, config, folder=saved, **options)
    checkpoint.restore(saved, networks, {"critic": networks.critic} if algorithm.critic else {})
    tracker.close("resuming")
    return expected, tracker.peaks


def measure(name, device):
    """One case as a row of the results."""
    shape, given = CASES[name]
    world = ranks.world_size()
    with tempfile.TemporaryDirectory() as own:
        folder = Path(ranks.from_first(own))
        if ranks.rank() == 0:
            torch.manual_seed(0)
            tokenizer = toy_model.make_tokenizer()
            Qwen2ForCausalLM(
                Qwen2Config(**shape, bos_token_id=None, eos_token_id=None)
            ).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        ranks.barrier()
        config = Config(
            model=str(folder), dataset="toy", shard="full" if world > 1 else "none",
            **{"mu": 1} | given,
        )
        expected, peaks = tracked(folder, config, check(config), device)
        ranks.barrier()
    planned = dict(zip(PHASES, expected.peaks)) | {"resuming": max(expected.peaks)}
    return {
        "name": name, "devices": world, "parameters": expected.parameters,
        "evaluated": expected.evaluated, "planned": planned,
        "tracked": ranks.all_sum(peaks, device, op="max"),
    }


def page(result):
    lines = [
        heading("The memory planned, and the memory held", result),
        f"{result['device']}. MB planned / MB tracked in each phase, and the ratio of the two "
        "peaks of training. An evaluation may take as much as training does. Resuming has no plan "
        "of its own: it is to need no more than the run. The rows of two devices are those of "
        "`torchrun --nproc-per-node 2 experiments/plan.py`.\n",
        "| | devices | parameters | " + " | ".join(PHASES) + " | resuming | peak of training |",
        "|---" * (len(PHASES) + 5) + "|",
    ]
    for row in result["rows"]:
        planned, held = row["planned"], row["tracked"]
        cells = [
            f"{planned[phase] / 1e6:.1f} / {held[phase] / 1e6:.1f}"
            for phase in (*PHASES, "resuming")
        ]
        peak = max(planned[phase] for phase in TRAINING) / max(held[phase] for phase in TRAINING)
        lines.append(
            f"| {row['name']} | {row['devices']} | {row['parameters']:,} | "
            + " | ".join(cells)
            + f" | {peak:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main(argv):
    options = parse(Options, argv)
    if not torch.cuda.is_available():
        raise UserError(
            "this benchmark needs a GPU: pytest tests/engine/test_plan.py compares the plan with "
            "the memory of a CPU."
        )
    device = ranks.start()
    world, path = ranks.world_size(), Path(options.output) / "plan.json"
    names = options.cases or [
        name for name, (_, given) in CASES.items() if world == 1 or not given.get("lora")
    ]
    if unknown := set(names) - set(CASES):
        raise UserError(
            f"--cases does not know {', '.join(sorted(unknown))}: there are {'; '.join(CASES)}."
        )
    for name in tqdm(names, disable=ranks.rank() > 0):
        row = measure(name, device)
        # what was measured before, with another case or another number of devices, stays
        if ranks.rank() == 0:
            before = json.loads(path.read_text())["rows"] if path.exists() else []
            rows = [old for old in before if (old["devices"], old["name"]) != (world, name)] + [row]
            rows.sort(key=lambda row: (row["devices"], list(CASES).index(row["name"])))
            result = {
                **setting(["torch", "transformers"]), "device": torch.cuda.get_device_name(),
                "rows": rows,
            }
            write(options.output, "plan", result, page(result))
    if ranks.rank() == 0:
        print(page(result))
    ranks.barrier()
    ranks.stop()


if __name__ == "__main__":
    run_program(main)
