"""The options of a run, in records, and how a command line becomes a Config and an Algorithm."""

import copy
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace

import torch

import algorithms
from engine.base.errors import UserError, one_line, refuse
from engine.base.files import own_function
from engine.model.networks import SAMPLERS
from engine.model.sampling import Sampling
from engine.run import checks, folder
from engine.run.options import LARGEST, compose, flat, option, parse
from engine.run.state import SCHEDULES
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
        "first is the accuracy; None: the data set's")
    reward_timeout: float = option(
        60.0, "seconds that one call of a FILE.py:FUNCTION may take; 0: no limit", limits="[0, ∞)")
    system_prompt: str | None = option(
        None, "system prompt of the chat; None: the data set's, which asks for <think> and "
        "<answer> tags")
    max_prompt_tokens: int = option(
        512, "longest prompt in tokens; questions with a longer prompt are skipped",
        limits="[1, ∞)")
    eval_dataset: str | None = option(
        None, "data set that is scored before and after training, named as in --dataset; None: "
        "only the toy is scored")
    eval_questions: int = option(
        512, "how many questions of --eval_dataset are scored", limits="[1, ∞)")


@dataclass
class RowOptions:
    _argument_group_name = "the algorithm (None: the value of the algorithm's row, see --list)"

    algorithm: str = option(
        "cppo", "a row of the table in algorithms.py: cppo, grpo, drgrpo, dapo, gspo, gfpo, gdpo, "
        "pods, ppo, …")
    group_size: int = option(16, "G, completions sampled per question", limits="[1, ∞)")
    questions_per_step: int | None = option(
        None, "B, questions per device and step before allocation; None: the data set's",
        limits="[1, ∞)")
    pruning_rate: float | None = option(
        None, "P, the share that is pruned: ⌊G(1−P)⌋ completions are kept per question",
        limits="[0, 1)")
    keep: str | None = option(
        None, "which are kept: largest_abs or smallest_abs (of |A|), largest (of A), random, "
        "pooled; unbiased (drawn, and weighed); shortest or efficiency (GFPO), max_variance "
        "(PODS); or FILE.py:FUNCTION")
    allocation: bool | None = option(
        None, "use the freed places for more questions, ⌊B·G/k⌋ instead of B")
    beta: float | None = option(
        None, "β, weight of the KL to the reference; 0: no reference", limits="[0, ∞)")
    clip_low: float | None = option(
        None, "ε_low: the ratio is clipped below 1 − ε_low", limits="(0, ∞)")
    clip_high: float | None = option(
        None, "ε_high: the ratio is clipped above 1 + ε_high", limits="(0, ∞)")
    mu: int | None = option(None, "μ, passes over each batch of completions", limits="[1, ∞)")
    minibatches: int | None = option(
        None, "mini-batches that a batch is cut into; each pass makes one update per mini-batch; "
        "None: the row's or the data set's, whichever is more", limits="[1, ∞)")
    target_kl: float | None = option(
        None, "end the updates on a batch when KL(π_old ‖ π_θ) exceeds this; None: never",
        limits="(0, ∞)")
    importance_cap: float | None = option(
        None, "a token counts min(π_old / π_sampler, this), to correct for a different sampler; "
        "None: no correction", limits="(0, ∞)")
    importance_low: float | None = option(
        None, "IcePop: a token with π_old / π_sampler below this or above --importance_cap counts "
        "0; needs an --importance_cap above 1; None: only the cap", limits="(0, 1)")
    max_rollouts: int | None = option(
        None, "DAPO: a step samples again until groups with a signal fill it, at most this many "
        "times", limits="[1, ∞)")
    overlong_cache: int | None = option(
        None, "DAPO: a penalty grows from 0 to −1 over this many last tokens of max_new_tokens; "
        "None: no penalty", limits="[1, ∞)")
    mask_truncated: bool = option(
        False, "do not train on completions cut off at max_new_tokens; their rewards still count "
        "in the group")
    lam: float | None = option(
        None, "PPO: λ of the generalised advantage estimate; 0 looks one step ahead, 1 looks to "
        "the end", limits="[0, 1]")


@dataclass(frozen=True)
class SamplingOptions(Sampling):
    _argument_group_name = "sampling"

    temperature: float = option(1.0, "sampling temperature", limits="(0, ∞)")
    top_p: float = option(
        1.0, "nucleus sampling; below 1, the sampled policy differs from the scored one",
        limits="(0, 1]")
    top_k: int = option(
        0, "sample from the k most likely tokens; 0: from all; above 0, the sampled policy differs "
        "from the scored one", limits="[0, ∞)")
    max_new_tokens: int | None = option(
        None, "longest completion in tokens; None: the data set's (1024 for most)",
        limits="[1, ∞)")
    sample_batch_size: int | None = option(
        None, "completions that a device samples at a time, rounded up to whole questions; None: "
        "all of a step", limits="[1, ∞)")
    rollout: str = option(
        "own", "the sampler: own (engine/model/sampling.py), or vllm (in this process; needs the "
        "package)", choices=("own", *SAMPLERS))
    vllm_share: float = option(
        0.3, "share of a GPU's memory for vLLM's weights, activations and cache", limits="(0, 1)")


@dataclass
class UpdateOptions:
    _argument_group_name = "the update"

    lr: float | None = option(
        None, "peak learning rate of AdamW; None: the data set's (1e-6 for most)",
        limits="[0, ∞)")
    critic_lr: float | None = option(
        None, "PPO: peak learning rate of the critic; None: the data set's (1e-5 for most)",
        limits="[0, ∞)")
    warmup: float = option(
        0.1, "share of the run in which the learning rate rises", limits="[0, 1)")
    lr_schedule: str = option(
        "cosine", "how the learning rate falls after that: cosine or linear, down to 0; constant: "
        "it does not; another one is a line of SCHEDULES in engine/run/state.py",
        choices=SCHEDULES)
    max_grad_norm: float = option(
        1.0, "a gradient with a larger norm is scaled down to this norm", limits="(0, ∞)")
    refresh_reference: int | None = option(
        None, "steps between refreshes: the policy becomes the new reference, as in DeepSeek-R1; "
        "None: never", limits="[1, ∞)")


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
        None, "train only low-rank adapters of this rank (peft); use about ten times the --lr; "
        "None: all weights", limits="[1, ∞)")
    merge_lora: bool = option(
        False, "at the end, also save the model with its adapters merged in, as OUTPUT_DIR/merged")


@dataclass
class RunOptions:
    _argument_group_name = "the run"

    recipe: str | None = option(None, "a YAML file of options; the command line wins over the file")
    output_dir: str | None = option(None, "folder of the run; None: a new folder under runs/")
    resume: bool = option(
        False, "continue the run in --output_dir, from its newest checkpoint and with its options")
    seed: int = option(
        42, "seed of the sampling and of the order of the questions",
        limits=f"[{-LARGEST}, ∞)",
    )
    epochs: float | None = option(
        None, "passes over the questions; None: the data set's (1 for most)", limits="(0, ∞)")
    steps: int | None = option(
        None, "stop after this many steps; None: stop after the epochs", limits="[1, ∞)")
    stop_kl: float | None = option(
        None, "end the run when the KL to the reference exceeds this; None: never",
        limits="(0, ∞)")
    save_every: int = option(50, "steps between checkpoints", limits="[1, ∞)")
    save_total_limit: int = option(
        2, "checkpoints that are kept; with 1 there is none to fall back on if the newest is "
        "damaged", limits="[1, ∞)")
    log: str | None = option(
        None, "also log to tensorboard, wandb or trackio, which must be installed; JSON lines are "
        "always written", choices=checks.TRACKERS)


@dataclass
class LookOptions:
    _argument_group_name = "instead of training"

    list: bool = option(False, "print the table of algorithms")
    check_rewards: bool = option(
        False, "print a prompt, and the values of each reward for some questions: "
        "--questions_per_step, or 8 (on a CPU 4)")
    plan: bool = option(
        False, "print the memory that the run needs per device, and whether it fits; if not, print "
        "a command that fits, and end with exit code 3")
    devices: int | None = option(
        None, "for --plan: number of devices; None: the number of torchrun's processes, or 1 "
        "without torchrun", limits="[1, ∞)")
    device_gb: float | None = option(
        None, "for --plan: memory of a device in GB; None: that of this machine's GPU, or 80 "
        "without a GPU", limits="(0, ∞)")


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

    @classmethod
    def of(cls, **options):
        """Config.of(algorithm="cppo", lr=1e-6): each option goes to its record."""
        assert not (unknown := options.keys() - flat(cls())), f"no such option: {unknown}"
        return compose(cls, options)

    @property
    def options(self):
        """All options, as attributes."""
        return SimpleNamespace(**flat(self))


# --- a rule of the user's own ---


def own_rule(function, name):
    """A keep rule of the user's own. What it returns is checked: wrong rows would go unnoticed.

    It gets copies: what it changes in them changes nothing in the step. name: of the rule, for the
    messages.
    """

    def keep(rollout, advantages, k):
        n = advantages.numel()
        try:
            returned = function(copy.deepcopy(rollout), advantages.clone(), k)
        except (Exception, SystemExit) as error:
            raise UserError(f"--keep {name} failed: {one_line(error)}.") from error
        pair = isinstance(returned, tuple) and len(returned) == 2
        rows, own = returned if pair else (returned, returned)
        try:
            rows, own = torch.as_tensor(rows).cpu(), torch.as_tensor(own).to("cpu", torch.float32)
            whole = rows.dtype == torch.int64 or not len(rows)  # for torch an empty list is float32
            inside = rows.dim() == 1 and set(rows.tolist()) <= set(range(n))
            once = len(rows.unique()) == len(rows)
            right = whole and inside and once and own.shape == rows.shape and own.isfinite().all()
        except (TypeError, ValueError, RuntimeError):  # a ragged list, or no numbers
            right = False
        if not right:
            raise UserError(
                f"--keep {name} must return rows of the batch, whole numbers from 0 to {n - 1} and "
                "each once, as cppo.batch_rows makes them; or such rows and one finite advantage "
                "for each.")
        rows, order = rows.long().sort()
        return (rows, own[order]) if pair else rows

    return keep


# --- from a command line to a Config and an Algorithm ---


def algorithm_of(row):
    """The row of the table with the options of a run applied. row: RowOptions, or all options.

    Raises UserError if they do not fit.
    """
    options = {f.name: getattr(row, f.name) for f in fields(RowOptions)}
    name, keep = options.pop("algorithm"), options.pop("keep")
    if keep == algorithms.rule_name(algorithms.ALGORITHMS[name].keep):
        keep = None  # it is the row's own rule, which may be a function
    elif keep and keep not in algorithms.KEEP:
        keep = own_rule(own_function(keep, "--keep"), keep)
    try:
        return algorithms.resolve(name, keep=keep, **options)
    except ValueError as error:
        raise UserError(f"{error}: lower --pruning_rate.") from None


def fill_in(config):
    """(Config, Algorithm): an option that was not given gets the value of the data set or row."""
    options, task = flat(config), task_of(config.data.dataset)
    row = algorithms.ALGORITHMS[config.row.algorithm]

    def fill(defaults, *names):
        options.update({name: defaults[name] for name in names if options[name] is None})

    of_task = vars(task) | {
        "rewards": list(task.rewards), "minibatches": max(row.minibatches, task.minibatches),
        "eval_dataset": config.data.dataset if task.evaluated else None,
    }
    fill(of_task, "rewards", "system_prompt", "max_new_tokens", "questions_per_step", "minibatches",
         "lr", "epochs", "eval_dataset")
    algorithm = algorithm_of(SimpleNamespace(**options))
    keep = algorithms.rule_name(row.keep)
    of_row = vars(algorithm) | {"keep": keep, "critic_lr": task.critic_lr}
    fill(of_row, "beta", "clip_low", "clip_high", "mu", *row.takes)
    return compose(Config, options), algorithm


def check(config):
    """Refuse options that cannot work. Returns (Config, Algorithm), as `fill_in`."""
    checks.check_given(config)
    config, algorithm = fill_in(config)
    o = config.options
    useless = checks.without_effect(o, usual_of(config), algorithm, checks.REFUSED)
    refuse([
        *((True, sentence) for sentence in useless),
        (o.overlong_cache and o.overlong_cache > o.max_new_tokens,
         f"--overlong_cache must lie in 1 … --max_new_tokens ({o.max_new_tokens}), not "
         f"{o.overlong_cache}."),
        (o.importance_low and (o.importance_cap or 0) <= 1,
         "--importance_low needs an --importance_cap above 1, because with a smaller one rounding "
         "leaves out tokens on which sampler and trainer agree: IcePop takes --importance_low 0.5 "
         "--importance_cap 5."),
        (algorithm.over_kept and algorithm.k < 2,
         f"{o.keep} keeps 1 completion of a question, which has nothing to be compared with: "
         "lower --pruning_rate."),
    ])
    return config, algorithm


def usual_of(config):
    """All options of a run of the same algorithm on the same data set, if no other is given."""
    usual = Config.of(algorithm=config.row.algorithm, dataset=config.data.dataset)
    return fill_in(usual)[0].options


def notes_of(config, algorithm):
    """Sentences about options that have no effect, and about LoRA's learning rate."""
    usual, options = usual_of(config), config.options
    notes = checks.without_effect(options, usual, algorithm, checks.NOTED)
    notes += checks.slow_sampler(options)
    if options.lora and options.lr == usual.lr:
        notes.append(f"--lora: the learning rate is {usual.lr:g}, that of all weights. Adapters "
                     f"usually need about ten times as much: --lr {10 * usual.lr:g}.")
    return notes


def open_run(argv):
    """(Config, Algorithm) of a new run, or of a run to resume."""
    config = parse(Config, argv)
    if config.run.resume:
        config = resumed(config.run, argv)
    config, algorithm = check(config)
    run, look = config.run, config.look
    # allowed restarts, not past ones: the machines of a job may count past restarts differently
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0
    sharded = config.devices.shard == "full" and not look.plan
    refuse([
        (restarts and not run.output_dir,
         "--max-restarts needs --output_dir, by which a restarted job finds its run again."),
        (sharded and "WORLD_SIZE" not in os.environ,
         "--shard full needs torchrun: torchrun --nproc-per-node 2 train.py …, with the number of "
         "your GPUs."),
    ])
    if run.output_dir and not (run.resume or look.check_rewards or look.plan):
        run.resume = folder.holds_run(run.output_dir, flat(config), restarts)
    return config, algorithm


def resumed(run, argv):
    """The options of the run in --output_dir. The command line wins over them."""
    refuse([
        (run.output_dir is None, "--resume needs to know the run: --output_dir runs/NAME."),
        (run.recipe, "--resume goes on with the run's own options: leave out --recipe."),
        (not Path(run.output_dir or "", "run.json").is_file(),
         f"nothing to resume: {run.output_dir} holds no run. Start it without --resume."),
    ])
    _, saved = folder.options_of(run.output_dir)
    config = parse(Config, argv, saved)
    options = flat(config)
    fixed = ("model", "algorithm", "dataset", "group_size", "questions_per_step", "seed", "lora")
    refuse((options[name] != saved[name],
            f"{run.output_dir} was started {folder.as_started(name, saved[name])}: resume it like "
            "that, or start a new run.") for name in fixed)
    return config
