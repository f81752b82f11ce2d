"""Option checks before any work: options that do not fit each other or the machine are refused."""

import traceback
from types import SimpleNamespace

import torch

import algorithms
from algorithms import ALGORITHMS, KEEP, Row, rule_name
from engine.base.errors import UserError, one_line
from engine.data.rows import check_columns, check_dataset
from engine.model.folders import adapters_in, resolve_model
from engine.model.networks import sampler_class
from engine.options.hooks import load_metrics
from engine.scoring.score import load_rewards
from tasks.table import TASKS, base_model, task_of


def check_options(o):
    """Refuse the mistakes that the options alone show. o: all options, as attributes."""
    sampler_class(o.sampler).check(o)
    if o.lora and o.shard == "full":
        raise UserError(
            "--lora needs no --shard full: each device samples from a whole copy of the model, so "
            "shards would only add memory. Leave out --shard, also on several devices: torchrun "
            f"--nproc-per-node N train.py --lora {o.lora} …")
    if o.lora and ALGORITHMS[o.algorithm].critic:
        raise UserError(f"--lora cannot be combined with --algorithm {o.algorithm}: leave one of "
                        "them out.")
    if o.check_rewards and o.plan is not None:
        raise UserError("--plan and --check_rewards are two programs in place of training: leave "
                        "out one of them.")
    if o.overlong_buffer and o.overlong_buffer > o.max_new_tokens:
        raise UserError(f"--overlong_buffer must lie in 1 … --max_new_tokens ({o.max_new_tokens}), "
                        f"not {o.overlong_buffer}.")
    names = [o.dataset, o.eval_dataset or o.dataset]
    for name in names:
        check_dataset(name, o.model)
        if base_model(o.model, name) != base_model(o.model, o.dataset):
            raise UserError(f"the toy has one base model for {o.dataset} and another for {name}: "
                            "leave out --eval_dataset.")
    check_columns(o.columns, names)
    load_rewards(o.rewards)
    load_metrics(o.hooks)
    # the plan needs only its config.json
    adapters = adapters_in(resolve_model(o.model)) if o.model != "toy" and o.plan is None else None
    if adapters and adapters["r"] != o.lora:
        raise UserError(f"{o.model} holds adapters, not a whole model: --lora {adapters['r']}, "
                        "their rank, trains them further. Or merge them into their model first, as "
                        "docs/gpus.md shows.")


def check_algorithm(o):
    """Refuse options that the algorithm does not take, and a pruning rule that does not fit it."""
    name, keep, row = o.algorithm, o.keep, ALGORITHMS[o.algorithm]
    usual = rule_name(row.keep)
    of_row = vars(row) | {"keep": usual, "min_prefix": None, "scale_rewards": None}
    of_row["token_weights"] = row.token_weights.__name__
    for option in Row.allowed_options:  # all that some row allows
        if getattr(o, option) != of_row[option] and option not in row.allowed_options:
            raise UserError(f"--{option} does not fit {name}: leave it out, or take another "
                            "--algorithm.")
    if o.min_prefix is not None and str(o.sampler_correction).startswith("sequence"):
        raise UserError(f"--sampler_correction {o.sampler_correction} needs the whole completion: "
                        "leave out --min_prefix, or take a token_ correction.")
    other_kind = usual != "all" and kept_only(keep) != kept_only(usual)
    own_metric = row.custom_keep_is_metric and keep not in KEEP
    if other_kind and not own_metric or row.k_by_difficulty and keep == "max_variance":
        raise UserError(
            f"{name} keeps completions by {usual}: it cannot be combined with --keep {keep}.")
    if o.pruning_rate and keep == "all":
        raise UserError(f"{name} with --keep all keeps every completion: set --pruning_rate 0, or "
                        "give a rule, for example --keep largest_abs.")
    if o.group_size == 1 and not row.critic:
        raise UserError("--group_size must be at least 2, not 1: an advantage compares completions "
                        "of one question.")
    most = max(row.k_by_difficulty, default=0)
    if o.group_size < most:
        raise UserError(f"{name} keeps up to {most} completions of a question: --group_size "
                        f"{o.group_size} is too small.")


def kept_only(name):
    """Whether the advantages of this rule compare only the kept completions."""
    return name in KEEP and KEEP[name].normalize_kept_only


def try_rule(algorithm, name):
    """Call a rule or a metric of the user's own on made-up completions: what does not fit is
    refused before any work. An error of its own may only say that these lack what a run has."""
    shape = algorithm.questions_per_step, algorithm.group_size
    A = torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 4 - 2
    made_up = SimpleNamespace(step=0, seed=0, total=A, rewards=A[None], trainable=A > -3,
                              lengths=torch.ones(shape).long())
    try:
        algorithms.kept_rows(algorithm.keep, made_up, A, algorithm.k)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        of_result = last.filename == algorithms.kept_rows.__code__.co_filename
        if of_result and not isinstance(error, AttributeError):
            raise UserError(f"--keep {name} does not fit {algorithm.name}: {one_line(error)}. A "
                            "rule takes (rollout, advantages, k) and returns rows or a mask; "
                            "a metric, for --algorithm gfpo, takes the rollout and returns numbers "
                            "(Q, G).") from None


# --- what is allowed, and worth a note ---


def notes_on_options(o):
    """Sentences about what is judged, and options that do nothing or harm. o: as for
    `check_options`."""
    notes = []
    if o.dataset not in TASKS:
        notes.append(f"reward: {', '.join(o.rewards)} (--rewards to change).")
    if 1 <= (o.clip_low or 0) < 1e9 and o.clip_low != ALGORITHMS[o.algorithm].clip_low:
        notes.append(f"--clip_low {o.clip_low:g} does not clip, because a ratio is never below 0: "
                     "usual are 0.1 to 0.3.")
    if o.lora and o.lr == task_of(o.dataset).lr:
        notes.append(f"--lora: the learning rate is {o.lr:g}, that of all weights. Adapters "
                     f"usually need about ten times as much: --lr {10 * o.lr:g}.")
    return notes
