"""The options of a run, in records. Each record is a group of `--help`."""

from dataclasses import dataclass, fields, make_dataclass

import algorithms
from engine.model.contract import Sampling
from engine.model.networks import SAMPLERS
from engine.run import checks
from engine.run.command_line import LARGEST, option
from tasks.table import TASKS


@dataclass
class DataOptions:
    _argument_group_name = "what to train, and on what"

    model: str = option(
        "toy", "name on the hub, folder of a model, folder of a run (its newest checkpoint), or "
        "toy (its base model)")
    dataset: str = option(
        "toy", f"{', '.join(TASKS)}, or a .jsonl file of questions")
    rewards: list[str] | None = option(
        None, "NAME or FILE.py:FUNCTION, each with an optional :WEIGHT; the first is the accuracy; "
        "else the data set's")
    system_prompt: str | None = option(
        None, "system prompt of the chat; else the data set's, which asks for <think> and "
        "<answer> tags")
    max_prompt_tokens: int = option(
        512, "longest prompt in tokens; questions with a longer prompt are skipped",
        limits="[1, ∞)")
    eval_dataset: str | None = option(
        None, "data set that is scored before and after training, named as in --dataset; else "
        "only the toy is scored")
    eval_questions: int = option(
        512, "how many questions of --eval_dataset are scored", limits="[1, ∞)")


# the numbers of an algorithm are declared once, in algorithms.py
ROW_FIELDS = [
    (f.name, f.type | None, option(None, **f.metadata))
    for f in fields(algorithms.Algorithm) if f.metadata
]
RowOptions = make_dataclass("RowOptions", [
    ("algorithm", str, option("cppo", f"a row of the table: {', '.join(algorithms.ALGORITHMS)}")),
    ("questions_per_step", int | None, option(
        None, "B, questions per device and step before allocation; else the data set's",
        limits="[1, ∞)")),
    *ROW_FIELDS,
], namespace={"_argument_group_name": "the algorithm (else what its row in algorithms.py says)"})


@dataclass(frozen=True)
class SamplingOptions(Sampling):
    _argument_group_name = "sampling"

    temperature: float = option(1.0, "sampling temperature", limits="(0, ∞)")
    max_new_tokens: int | None = option(
        None, "longest completion in tokens; else the data set's (1024 for most)",
        limits="[1, ∞)")
    rollout: str = option(
        "own", "the sampler: own is engine/model/sampling.py; vllm needs its package",
        choices=SAMPLERS)
    vllm_share: float = option(
        0.3, "share of a GPU's memory for vLLM's weights, activations and cache", limits="(0, 1)")


@dataclass
class UpdateOptions:
    _argument_group_name = "the update"

    lr: float | None = option(
        None, "peak learning rate of AdamW, from which it falls to 0 like a cosine; else the data "
        "set's (1e-6 for most)", limits="[0, ∞)")
    warmup: float = option(
        0.1, "share of the run in which the learning rate rises", limits="[0, 1)")


@dataclass
class DeviceOptions:
    _argument_group_name = "memory and devices"

    dtype: str = option(
        "auto", "what is computed in: float32 or bfloat16; auto: bfloat16 on a GPU, and on a CPU "
        "with AMX for models of 10 million parameters and more; weights that are trained are "
        "always float32", choices=("auto", "float32", "bfloat16"))
    micro_batch_tokens: int = option(
        2048, "tokens in a micro-batch: prompts, completions and padding", limits="[1, ∞)")
    gradient_checkpointing: bool = option(
        False, "keep only the layers' inputs for the backward pass: less memory, a third more time")
    shard: str = option(
        "none", "none: every device holds all; full: the devices divide weights, gradients, "
        "optimizer (FSDP2)", choices=("none", "full"))
    lora: int | None = option(
        None, "train only low-rank adapters of this rank (peft); use about ten times the --lr",
        limits="[1, ∞)")


@dataclass
class RunOptions:
    _argument_group_name = "the run"

    recipe: str | None = option(None, "a YAML file of options; the command line wins over the file")
    hooks: str | None = option(
        None, "FILE.py with functions of your own that change a step: schedule, curriculum or "
        "metrics (examples/my_schedule.py …)")
    output_dir: str | None = option(None, "folder of the run; else a new folder under runs/")
    resume: bool = option(
        False, "continue the run in --output_dir, from its newest checkpoint and with its options")
    seed: int = option(
        42, "seed of the sampling and of the order of the questions", limits=f"[{-LARGEST}, ∞)")
    epochs: float | None = option(
        None, "passes over the questions; else the data set's (1 for most)", limits="(0, ∞)")
    steps: int | None = option(
        None, "stop after this many steps, if the epochs are not over before", limits="[1, ∞)")
    save_every: int = option(50, "steps between checkpoints", limits="[1, ∞)")
    log: str | None = option(
        None, "also log to this tracker, which must be installed; JSON lines are always written",
        choices=checks.TRACKERS)


@dataclass
class PreviewOptions:
    _argument_group_name = "instead of training"

    check_rewards: bool = option(
        False, "sample the questions of the first step, and print a prompt and the values of each "
        "reward")
    plan: float | None = option(
        None, "print the memory that the run needs per device, and whether it fits a device of so "
        "many GB (without a number: this machine's GPU, or 80); for one GPU, several and two "
        "machines a command that fits, its steps and a calculated time; exit code 3: the run as "
        "given does not fit", limits="[0, ∞)", alone=0.0)
