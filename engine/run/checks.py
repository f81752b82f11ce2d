"""Checks before any work: options that do not fit each other, or do not fit the machine, are
refused."""

import os
from importlib.util import find_spec
from pathlib import Path

import torch

from algorithms import OVER_KEPT
from engine.base.errors import UserError
from engine.base.files import own_function
from engine.model.folders import refuse_missing, resolve_model
from engine.model.vllm import TESTED, filtered
from engine.run.checkpoint import damaged
from engine.run.options import LARGEST, at_least, inside
from engine.run.state import SCHEDULES
from engine.scoring import score
from engine.tasks.questions import check_dataset

LEAST = {  # the smallest value of an option
    "steps": 1, "group_size": 1, "questions_per_step": 1, "max_new_tokens": 1,
    "max_prompt_tokens": 1, "mu": 1, "micro_batch_tokens": 1, "eval_questions": 1, "save_every": 1,
    "save_total_limit": 1, "epochs": 0, "top_k": 0, "beta": 0, "lr": 0, "max_rollouts": 1,
    "minibatches": 1, "refresh_reference": 1, "critic_lr": 0, "lora": 1, "devices": 1,
    "reward_timeout": 0, "sample_batch_size": 1, "seed": -LARGEST,
}
SHARES = {"pruning_rate": "[0, 1)", "top_p": "(0, 1]", "warmup": "[0, 1)", "lam": "[0, 1]"}
ABOVE_0 = (
    "temperature", "epochs", "max_grad_norm", "clip_low", "clip_high", "target_kl", "stop_kl",
    "importance_cap", "device_gb", "vllm_share",
)
CHOICES = {
    "lr_schedule": tuple(SCHEDULES), "shard": ("none", "full"), "rollout": ("own", "vllm"),
    "dtype": ("auto", "float32", "bfloat16"),
}
# values that mean the same as None: the option was not given
SAME_AS_NONE = {"pruning_rate": 0.0, "allocation": False}
# Options that have no effect in some runs: (options, whether they have one in the run of a config
# and its algorithm, what is the matter). The first list is refused, because the run would not do
# what it was asked for.
REFUSED = [
    ({"device_gb"}, lambda c, a: c.plan, "is for --plan: leave it out"),
    (
        {"check_rewards"}, lambda c, a: not c.plan,
        "cannot be combined with --plan: leave one of them out",
    ),
    (
        {"eval_questions"}, lambda c, a: c.eval_dataset,
        "needs something to evaluate: set --eval_dataset",
    ),
    (
        {"stop_kl", "refresh_reference"}, lambda c, a: a.beta,
        "needs a reference model: set --beta above 0",
    ),
    (
        {"merge_lora"}, lambda c, a: c.lora,
        "has nothing to merge: give the adapters' rank too, for example --lora 16",
    ),
]
NOTED = [
    (
        {"devices"}, lambda c, a: c.plan or c.devices == processes(),
        "is for --plan: torchrun says how many devices train",
    ),
    (
        {"reward_timeout"}, lambda c, a: ".py:" in " ".join(c.rewards),
        "limits only a reward of your own, FILE.py:FUNCTION",
    ),
    (
        {"clip_low", "clip_high", "target_kl"}, lambda c, a: c.mu * c.minibatches > 1,
        "has no effect: in the only update of a step every ratio is 1; set --mu or --minibatches "
        "above 1",
    ),
    (
        {"keep", "allocation"}, lambda c, a: a.k < c.group_size,
        "has no effect: no completion is pruned; see --pruning_rate",
    ),
    (
        {"refresh_reference"}, lambda c, a: not c.steps or c.refresh_reference < c.steps,
        "comes after the last step",
    ),
    (
        {"vllm_share"}, lambda c, a: c.rollout == "vllm",
        "has no effect: vLLM does not sample; see --rollout",
    ),
    (
        {"system_prompt"}, lambda c, a: c.model != "toy",
        "has no effect: the toy's model reads only the question",
    ),
]
INSTALL = f"pip install vllm (tested: version {TESTED})"
TRACKERS = ("tensorboard", "wandb")  # values of --log, and names of the packages that they need


def check_given(config, algorithms):
    """Refuse the mistakes that the options alone show. algorithms: the module."""
    table = algorithms.ALGORITHMS
    if config.algorithm not in table:
        raise UserError(f"unknown algorithm '{config.algorithm}': there are {', '.join(table)}.")
    fitting(config, table)
    keeping(config, table[config.algorithm], algorithms.KEEP)
    at_least(config, LEAST)
    devices(config, table[config.algorithm])
    for name in ABOVE_0:
        if getattr(config, name) is not None and not getattr(config, name) > 0:
            raise UserError(f"--{name} must be above 0, not {getattr(config, name)}.")
    inside(config, SHARES)
    for name in filter(None, [config.dataset, config.eval_dataset]):
        check_dataset(name, config.model)
    score.choose(config.rewards or [])
    tracker(config.log)
    if config.model != "toy":
        of_a_model(config)


def of_a_model(config):
    """Refuse a model that is not there, or that cannot be trained. --plan needs no more than its
    config.json."""
    if config.plan:
        refuse_missing(config.model)
    elif Path(unchanged(resolve_model(config.model)), "adapter_config.json").exists():
        raise UserError(
            f"{config.model} holds adapters, not a whole model: train from the merged model "
            "instead, which a run with --merge_lora writes into its folder merged."
        )


def unchanged(model):
    """The folder or name of a model. Refuses a checkpoint of a run if a file that is loaded is not
    as the run wrote it.

    Under torchrun the first process of a machine looks; the others would find the same.
    """
    folder, first = Path(model), os.environ.get("LOCAL_RANK", "0") == "0"
    if first and (folder / "checksums.json").exists():
        if files := damaged(
            folder, lambda path: path.parent == folder and path.name != "checksums.json"
        ):
            raise UserError(
                f"{model} is damaged: {', '.join(files)} is not as the run wrote it. Name an "
                "earlier checkpoint; if you changed it yourself, remove checksums.json there."
            )
    return model


def fitting(config, table):
    """Refuse options that the algorithm does not take, but others do."""
    taken = {option for row in table.values() for option in row.takes}
    for option in sorted(taken - set(table[config.algorithm].takes)):
        if getattr(config, option) not in (None, SAME_AS_NONE.get(option)):
            takers = ", ".join(name for name, row in table.items() if option in row.takes)
            raise UserError(
                f"--{option} does not fit {config.algorithm}: leave it out, "
                f"or take an algorithm that it belongs to ({takers}).")


def keeping(config, row, rules):
    """Check the options that say which completions are kept."""
    name, keep, over_kept = config.algorithm, config.keep, row.keep in OVER_KEPT
    if keep and keep not in rules:
        if not keep.partition(":")[0].endswith(".py"):
            raise UserError(
                f"unknown rule --keep {keep}: there are {', '.join(rules)}, and FILE.py:FUNCTION."
            )
        own_function(keep, "--keep")
    if keep == "all" and row.keep != "all":
        raise UserError(
            f"{name} keeps only some completions: --keep all needs an algorithm that keeps all, as "
            "grpo."
        )
    if keep and over_kept and keep not in OVER_KEPT:
        raise UserError(
            f"{name} keeps completions by {row.keep}: it cannot be combined with pruning by |A|."
        )
    if row.ks and keep == "max_variance":
        raise UserError(
            f"{name} keeps completions by --keep shortest or efficiency, not by max_variance."
        )
    if keep in OVER_KEPT and not over_kept and row.keep != "all":
        raise UserError(
            f"{name} prunes by |A|: --keep {keep} needs gfpo, pods, or an algorithm that keeps all."
        )
    if config.pruning_rate and row.keep == "all" and keep in (None, "all"):
        raise UserError(
            f"{name} keeps every completion: with --pruning_rate give a rule too, for example "
            "--keep largest_abs."
        )
    if config.group_size == 1 and not row.critic:
        raise UserError(
            "--group_size must be at least 2, not 1: an advantage compares completions of one "
            "question."
        )
    if row.ks and config.group_size < max(row.ks):
        raise UserError(f"{name} keeps up to {max(row.ks)} completions of a question: "
                        f"--group_size {config.group_size} is too small.")


def devices(config, row):
    """Check the options that say how devices hold the weights, and what samples."""
    for name, choices in CHOICES.items():
        if getattr(config, name) not in choices:
            raise UserError(
                f"--{name} must be {' or '.join(choices)}, not {getattr(config, name)}."
            )
    if config.rollout == "vllm" and config.sample_batch_size:
        raise UserError(
            "vLLM decides by itself how many completions it samples at a time: leave out "
            "--sample_batch_size, or use --rollout own."
        )
    if config.rollout == "vllm":
        vllm(config)
    if config.lora and (config.shard == "full" or row.critic or config.refresh_reference):
        other = (
            "--shard full"
            if config.shard == "full"
            else "PPO"
            if row.critic
            else "--refresh_reference"
        )
        raise UserError(f"--lora cannot be combined with {other}: leave one of them out.")


def vllm(config):
    """Refuse what vLLM cannot sample."""
    if config.lora:
        raise UserError(
            "--rollout vllm does not take adapters: leave out --lora, or use --rollout own."
        )
    if find_spec("vllm") is None and not config.plan:
        raise UserError(f"--rollout vllm needs vLLM: {INSTALL}.")
    if config.vllm_share >= 1:
        raise UserError(
            f"--vllm_share must be below 1, not {config.vllm_share}: the trainer needs memory, too."
        )
    if not 0.01 <= config.temperature <= 2:
        raise UserError(
            f"--rollout vllm takes a --temperature in [0.01, 2], not {config.temperature}: "
            "change it, or use --rollout own."
        )
    if config.temperature != 1 and filtered(config):
        raise UserError(
            "vLLM gives log-probabilities before temperature, top_p and top_k, or after all three: "
            "with --top_p or --top_k set --temperature 1, or use --rollout own."
        )


def slow_sampler(config):
    """A list with a note, if there is a GPU, and vLLM could sample on it but is not installed."""
    if (
        not torch.cuda.is_available()
        or config.rollout == "vllm"
        or config.lora
        or config.model == "toy"
        or find_spec("vllm")
    ):
        return []
    return [
        f"vLLM is not installed. On a GPU it samples several times as fast: {INSTALL}, then add "
        "--rollout vllm."
    ]


def tracker(name):
    """Refuse a tracker that does not exist, or whose package is not installed. None: no tracker."""
    if name not in (None, *TRACKERS):
        raise UserError(
            f"--log {name}: there are {' and '.join(TRACKERS)}; JSON lines are always written."
        )
    found = name and find_spec(name)
    # no origin: only a folder of that name, which wandb leaves
    if name and (found is None or found.origin is None):
        raise UserError(f"--log {name} needs a package that is not installed: pip install {name}")


def processes():
    return int(os.environ.get("WORLD_SIZE", 1))


def idle(config, usual, algorithm, table):
    """A sentence about each option of `table` that was given and has no effect. usual: the Config
    without options."""
    return [
        f"--{name} {matter}." for names, works, matter in table for name in sorted(names)
        if getattr(config, name) != getattr(usual, name) and not works(config, algorithm)]


def check_filled_in(config, algorithm, usual):
    """Refuse the mistakes that show only after `fill_in`: they depend on values of the data set or
    the algorithm.

    usual: the Config of a run of the same algorithm on the same data set, if no other option is
    given. """
    for sentence in idle(config, usual, algorithm, REFUSED):
        raise UserError(sentence)
    if config.overlong_cache is not None and not 0 < config.overlong_cache <= config.max_new_tokens:
        raise UserError(
            f"--overlong_cache must lie in 1 … --max_new_tokens ({config.max_new_tokens}), "
            f"not {config.overlong_cache}."
        )
    if algorithm.over_kept and algorithm.k < 2:
        raise UserError(
            f"{config.keep} keeps 1 completion of a question, which has nothing to be compared "
            "with: lower --pruning_rate."
        )
