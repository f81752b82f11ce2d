"""The options of a run, in records, and how a command line becomes a Config and an Algorithm.

Options are layers. Each layer wins over those before it:

    defaults | data set's row | algorithm's row | the run that is resumed | recipe | command line
"""

import os
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from types import SimpleNamespace

import algorithms
from engine.base.errors import UserError, refuse
from engine.base.files import own_function
from engine.model.networks import SAMPLERS
from engine.model.sampling import Sampling
from engine.run import checks, folder
from engine.run.options import LARGEST, compose, flat, given, option
from engine.run.own_rule import own_rule
from engine.tasks.table import task_of


@dataclass
class DataOptions:
    _argument_group_name = "what to train, and on what"

    model: str = option(
        "toy", "name on the hub, folder of a model, folder of a run (its newest checkpoint), or "
        "toy (its base model)")
    dataset: str = option(
        "toy", "toy, toy_code or arithmetic; gsm8k, gsm8k_zh or math from the hub; or a .jsonl "
        "file of questions")
    rewards: list[str] | None = option(
        None, "NAME, FILE.py:FUNCTION or RewardModel:MODEL, each with an optional :WEIGHT; the "
        "first is the accuracy; else the data set's")
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
OF_A_ROW = [
    (f.name, f.type | None, option(None, **f.metadata))
    for f in fields(algorithms.Algorithm) if f.metadata
]
RowOptions = make_dataclass("RowOptions", [
    ("algorithm", str, option("cppo", f"a row of the table: {', '.join(algorithms.ALGORITHMS)}")),
    ("questions_per_step", int | None, option(
        None, "B, questions per device and step before allocation; else the data set's",
        limits="[1, ∞)")),
    *OF_A_ROW,
], namespace={"_argument_group_name": "the algorithm (else what its row in algorithms.py says)"})


@dataclass(frozen=True)
class SamplingOptions(Sampling):
    _argument_group_name = "sampling"

    temperature: float = option(1.0, "sampling temperature", limits="(0, ∞)")
    max_new_tokens: int | None = option(
        None, "longest completion in tokens; else the data set's (1024 for most)",
        limits="[1, ∞)")
    rollout: str = option(
        "own", "the sampler: own (engine/model/sampling.py), or vllm (in this process; needs the "
        "package)", choices=SAMPLERS)
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
    merge_lora: bool = option(
        False, "at the end, also save the model with its adapters merged in, as OUTPUT_DIR/merged")


@dataclass
class RunOptions:
    _argument_group_name = "the run"

    recipe: str | None = option(None, "a YAML file of options; the command line wins over the file")
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
        None, "also log to tensorboard, wandb or trackio, which must be installed; JSON lines are "
        "always written", choices=checks.TRACKERS)


@dataclass
class LookOptions:
    _argument_group_name = "instead of training"

    check_rewards: bool = option(
        False, "sample the questions of the first step, and print a prompt and the values of each "
        "reward")
    plan: float | None = option(
        None, "print the memory that the run needs per device, and whether it fits a device of so "
        "many GB (without a number: this machine's GPU, or 80); if not, print a command that fits, "
        "and end with exit code 3", limits="[0, ∞)", alone=0.0)


@dataclass
class Config:
    """All options of a run. A function gets the record that it needs."""

    data: DataOptions = field(default_factory=DataOptions)
    row: RowOptions = field(default_factory=RowOptions)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)  # `train_step` takes this
    update: UpdateOptions = field(default_factory=UpdateOptions)
    devices: DeviceOptions = field(default_factory=DeviceOptions)
    run: RunOptions = field(default_factory=RunOptions)
    look: LookOptions = field(default_factory=LookOptions)

    @property
    def options(self):
        """All options, as attributes."""
        return SimpleNamespace(**flat(self))


# --- the layers ---


def layers(chosen):
    """{name: value} of all options. chosen: those that were given."""
    values = flat(Config()) | chosen
    task = task_of(values["dataset"])
    row = algorithms.ALGORITHMS[values["algorithm"]]
    return flat(Config()) | of_task(task, values["dataset"]) | of_row(row, task, chosen) | chosen


def unusual(values):
    """The options that differ from a run of the same algorithm on the same data set."""
    usual = layers({name: values[name] for name in ("algorithm", "dataset")})
    return {name: value for name, value in values.items() if value != usual[name]}


def of_task(task, name):
    return {
        "rewards": list(task.rewards),
        "system_prompt": task.system_prompt,
        "eval_dataset": name if task.evaluated else None,
        "questions_per_step": task.questions_per_step,
        "max_new_tokens": task.max_new_tokens,
        "lr": task.lr,
        "epochs": task.epochs,
    }


def of_row(row, task, chosen):
    values = {name: getattr(row, name) for name, *_ in OF_A_ROW}
    values["keep"] = algorithms.rule_name(row.keep)
    values["pruning_rate"] = algorithms.usual_pruning_rate(row, chosen.get("keep"))
    values["minibatches"] = max(row.minibatches, task.minibatches)
    return values


def algorithm_of(options):
    """The Algorithm of a run. options: all of them, as attributes.

    Raises UserError if they do not fit.
    """
    keep = options.keep
    if keep == algorithms.rule_name(algorithms.ALGORITHMS[options.algorithm].keep):
        keep = None  # it is the row's own rule, which may be a function
    elif keep not in algorithms.KEEP:
        keep = own_rule(own_function(keep, "--keep"), keep)
    numbers = {name: getattr(options, name) for name, *_ in OF_A_ROW if name != "keep"}
    try:
        return algorithms.resolve(
            options.algorithm, keep=keep, questions_per_step=options.questions_per_step, **numbers)
    except ValueError as error:
        raise UserError(f"{error}: lower --pruning_rate.") from None


def check(chosen):
    """(Config, Algorithm) of a run. Options that cannot work are refused.

    chosen: {name: value} of the options that were given.
    """
    name = chosen.get("algorithm", "cppo")
    if name not in algorithms.ALGORITHMS:
        known = ", ".join(algorithms.ALGORITHMS)
        raise UserError(f"unknown algorithm '{name}': there are {known}.")
    values = layers(chosen)
    options = SimpleNamespace(**values)
    checks.check_options(options, unusual(values))
    algorithm = algorithm_of(options)
    checks.check_algorithm(options, algorithm)
    return compose(Config, values), algorithm


def notes_of(config, algorithm):
    """Sentences about options without an effect."""
    return checks.notes_of(config.options, unusual(flat(config)), algorithm)


# --- a new run, or one that goes on ---


def open_run(argv):
    """(Config, Algorithm, notes) of a new run, or of a run to resume. notes: sentences about
    options without an effect."""
    chosen = given(Config, argv)
    if chosen.get("resume"):
        chosen = saved_options(chosen) | chosen
    config, algorithm = check(chosen)
    run, look = config.run, config.look
    looks = look.check_rewards or look.plan is not None
    # allowed restarts, not past ones: the machines of a job may count past restarts differently
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0
    sharded = config.devices.shard == "full" and look.plan is None
    refuse([
        (restarts and not run.output_dir,
         "--max-restarts needs --output_dir, by which a restarted job finds its run again."),
        (sharded and "WORLD_SIZE" not in os.environ,
         "--shard full needs torchrun: torchrun --nproc-per-node 2 train.py …, with the number of "
         "your GPUs."),
    ])
    if run.output_dir and not run.resume and not looks:
        run.resume = folder.holds_run(run.output_dir, flat(config), restarts)
    return config, algorithm, notes_of(config, algorithm)


def saved_options(chosen):
    """The options of the run in --output_dir. Those that make it what it is cannot change."""
    run_dir = chosen.get("output_dir")
    refuse([
        (run_dir is None, "--resume needs to know the run: --output_dir runs/NAME."),
        (chosen.get("recipe"),
         "--resume goes on with the run's own options: leave out --recipe."),
        (not Path(run_dir or "", "run.json").is_file(),
         f"nothing to resume: {run_dir} holds no run. Start it without --resume."),
    ])
    _, saved = folder.options_of(run_dir)
    known = flat(Config())  # an older run may have options that are gone
    saved = {name: value for name, value in saved.items() if name in known}
    fixed = ("model", "algorithm", "dataset", "group_size", "questions_per_step", "seed", "lora")
    refuse((chosen.get(name, saved[name]) != saved[name],
            f"{run_dir} was started {folder.as_started(name, saved[name])}: resume it like that, "
            "or start a new run.") for name in fixed)
    return saved
