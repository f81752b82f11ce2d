"""The options of a training run: their meaning, their defaults, and what is refused before any work."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from cppo import keep_count, prune
from engine.model import policy, vllm
from engine.run import checkpoint, trackers
from engine.run.options import UserError, as_words, at_least, option, parse
from engine.scoring import score as scoring
from engine.select import SELECT_FIRST
from engine.tasks import data

TOY = {"lr": 3e-4, "questions_per_step": 8}
REAL = {"lr": 1e-6, "questions_per_step": 1}  # CPPO's published setting
ARITHMETIC = {"lr": 3e-5, "questions_per_step": 4}
CRITIC_LR = {True: 1e-3, False: 1e-5}  # on the toy, else: ten times the policy's is usual


@dataclass
class Config:
    algorithm: str = option("cppo", "grpo, cppo, drgrpo, dapo, gspo(_token), gfpo(_adaptive), gdpo, pods or ppo: the table in train.py")
    model: str = option("toy", "hub name, model folder, folder of a run (its newest checkpoint), or toy: the toy's base model")
    dataset: str = option("toy", "toy, toy_code, arithmetic; gsm8k, gsm8k_zh, math (from the hub); or a .jsonl file of questions")
    rewards: list[str] | None = option(None, "NAME[:WEIGHT] … of rewards.py, FILE.py:FUNCTION, RewardModel:MODEL; the first is accuracy")
    check_rewards: bool = option(False, "do not train: sample a few completions and print what each reward says of them")
    reward_timeout: float = option(60.0, "seconds that a FILE.py:FUNCTION may take for all completions, then for each alone; 0: no limit")
    recipe: str | None = option(None, "a YAML file of options; the command line wins over it")
    output_dir: str | None = option(None, "folder of the run; none: a new one under runs/")
    resume: bool = option(False, "go on with the run in --output_dir, from its newest checkpoint and with its options")
    seed: int = option(42, "of the sampling and of the order of the questions")

    epochs: float = option(1.0, "passes over the questions")
    steps: int | None = option(None, "stop after this many steps; none: when the epochs are over")
    questions_per_step: int | None = option(None, "B, questions per device and step before allocation; none: toy 8, arithmetic 4, else 1")
    group_size: int = option(16, "G, completions sampled per question")
    pruning_rate: float | None = option(None, "P: ⌊G(1−P)⌋ completions are kept per question; none: the algorithm's (cppo 0.75)")
    keep: str | None = option(None, "which: largest_abs, largest, smallest_abs (|A|, A), random; shortest, efficiency, max_variance")
    allocation: bool | None = option(None, "fill the pruned places with more questions, ⌊B·G/k⌋ not B; none: all but gfpo, pods, ppo")
    prune_pooled: bool = option(False, "as CPPO's published code: keep the largest |A| of all the device's questions together")
    max_rollouts: int | None = option(None, "DAPO's dynamic sampling: a step may sample so often until groups with signal fill it; none: 4")
    overlong_cache: int | None = option(None, "DAPO's overlong penalty grows to −1 over the last so many of max_new_tokens; none: none")
    mask_truncated: bool = option(False, "completions cut off at max_new_tokens are not trained on; their rewards still count in the group")

    temperature: float = option(1.0, "sampling temperature")
    top_p: float = option(1.0, "nucleus sampling; below 1 the sampled and the scored policy differ")
    top_k: int = option(0, "sample from the most likely tokens only; 0: all; else the sampled and the scored policy differ")
    max_new_tokens: int | None = option(None, "longest completion in tokens; none: 48 on the toy, 16 on arithmetic, else 1024")
    max_prompt_tokens: int = option(512, "questions with a longer prompt are skipped and counted")
    system_prompt: str | None = option(None, "of the chat; none: asks for <think> and <answer> tags, on arithmetic to calculate")

    mu: int | None = option(None, "μ, how often each batch of completions is trained on; none: the algorithm's (2; ppo 4)")
    minibatches: int | None = option(None, "updates that a batch is cut into, each time; none: the algorithm's (1; gspo 4)")
    target_kl: float | None = option(None, "end the updates on a batch when KL(π_old ‖ π_θ) passes this; none: never")
    stop_kl: float | None = option(None, "end the run when the KL to the reference passes this; none: never")
    refresh_reference: int | None = option(None, "make the policy the new reference every so many steps, as DeepSeek-R1; none: never")
    beta: float | None = option(None, "β, weight of the KL to the reference; 0: no reference; none: the algorithm's (grpo, cppo 0.04)")
    clip_low: float | None = option(None, "ε below 1; none: the algorithm's (gspo 3e-4, else 0.2)")
    clip_high: float | None = option(None, "ε above 1; none: the algorithm's (gspo 4e-4, dapo 0.28, else 0.2)")
    lam: float | None = option(None, "PPO: λ of the generalised advantage estimate, 0: one step ahead, 1: to the end; none: 0.95")
    critic_lr: float | None = option(None, "PPO: peak learning rate of the critic; none: 1e-3 on the toy, else 1e-5")
    lr: float | None = option(None, "peak learning rate of AdamW; none: toy 3e-4, arithmetic 3e-5, else 1e-6")
    warmup: float = option(0.1, "share of the run in which the learning rate rises; then it falls along a cosine")
    max_grad_norm: float = option(1.0, "gradients longer than this are scaled down to it")
    micro_batch_tokens: int = option(2048, "prompt and completion tokens, padding included, in one forward pass")
    importance_cap: float | None = option(None, "a token counts min(π_old / π_sampler, this): mends what the sampler computes differently")

    rollout: str = option("own", "what samples: own: the loop of engine/rollout.py; vllm: vLLM, where installed, in this process")
    shard: str = option("none", "none: every device holds a replica; full: weights, gradients, optimizer are shared out (FSDP2)")
    gradient_checkpointing: bool = option(False, "keep only the layers' inputs for the backward pass: less memory, a third more time")
    lora: int | None = option(None, "train low-rank adapters of this rank (peft), which take ten times the --lr; none: all weights")
    merge_lora: bool = option(False, "at the end also save the model with its adapters merged in, as OUTPUT_DIR/merged")

    eval_dataset: str | None = option(None, "questions scored before and after, as --dataset; none: the toy's held-out ones, else nothing")
    eval_questions: int = option(512, "how many of them")
    save_every: int = option(50, "steps between checkpoints")
    log: str | None = option(None, "also log to tensorboard or wandb, where installed; JSON lines are always written")

    plan: bool = option(False, "do not train: print the memory that the run needs per device, and whether it fits")
    devices: int | None = option(None, "of --plan: how many; none: as torchrun was told, else 1")
    device_gb: float | None = option(None, "memory of a device in GB; none: the GPU's own (without one: 80 for --plan)")


def combine(config, algorithms):
    """Refuse options that do not fit the algorithm, or each other."""
    algorithm, name = algorithms[config.algorithm], config.algorithm
    owners = [  # options that only some algorithms take
        (("lam", "critic_lr"), lambda a: a.critic),
        (("max_rollouts",), lambda a: a.dynamic_sampling),
        (("keep", "prune_pooled"), lambda a: not a.critic),
        (("pruning_rate", "allocation"), lambda a: not (a.critic or a.ks)),
    ]
    unset = {"pruning_rate": 0.0, "allocation": False, "prune_pooled": False}  # what says no more than None
    for options, takes in owners:
        for given in (o for o in options if getattr(config, o) not in (None, unset.get(o)) and not takes(algorithm)):
            takers = ", ".join(other for other in algorithms if takes(algorithms[other]))
            raise UserError(f"--{given} does not fit {name}: leave it out, or take an algorithm that it belongs to ({takers}).")
    filters = algorithm.keep in SELECT_FIRST
    if filters and (config.prune_pooled or config.keep not in (*SELECT_FIRST, None)):
        raise UserError(f"{name} keeps completions by {algorithm.keep}: it cannot be combined with pruning by |A|.")
    if algorithm.ks and config.keep == "max_variance":
        raise UserError(f"{name} keeps completions by --keep shortest or efficiency, not by max_variance.")
    if config.keep in SELECT_FIRST and not filters and algorithm.keep:
        raise UserError(f"{name} prunes by |A|: --keep {config.keep} belongs to gfpo, pods, or one that keeps all.")
    if config.keep and config.prune_pooled:
        raise UserError("--prune_pooled is a rule of its own: leave out --keep.")
    if config.pruning_rate and not (algorithm.keep or config.keep or config.prune_pooled):
        raise UserError(f"{name} keeps every completion: with --pruning_rate say which ones, as --keep largest_abs.")
    if config.group_size == 1 and not algorithm.critic:
        raise UserError("--group_size must be at least 2, not 1: an advantage compares completions of one question.")
    if algorithm.ks and config.group_size < max(algorithm.ks):
        raise UserError(f"{name} keeps up to {max(algorithm.ks)} completions of a question: --group_size {config.group_size} is too small.")


def check_engine(config, algorithm):
    """Refuse what does not fit the way the weights are held."""
    if config.shard not in ("none", "full"):
        raise UserError(f"--shard must be none or full, not {config.shard}.")
    if config.rollout not in ("own", "vllm"):
        raise UserError(f"--rollout must be own or vllm, not {config.rollout}.")
    if config.rollout == "vllm" and not config.plan:
        vllm.check(config)
    if config.merge_lora and not config.lora:
        raise UserError("--merge_lora has nothing to merge: give the adapters' rank too, as --lora 16.")
    if config.lora and (config.shard == "full" or algorithm.critic or config.refresh_reference):
        other = "--shard full" if config.shard == "full" else "PPO" if algorithm.critic else "--refresh_reference"
        raise UserError(f"--lora cannot be combined with {other}: leave one of them out.")


def check(config, algorithms):
    """Fill in what depends on other options; refuse what cannot work, before any work. Returns k.

    algorithms: the table of train.py.
    """
    if config.algorithm not in algorithms:
        raise UserError(f"unknown algorithm '{config.algorithm}': there are {', '.join(algorithms)}.")
    algorithm = algorithms[config.algorithm]
    combine(config, algorithms)
    at_least(config, {
        "steps": 1, "group_size": 1, "questions_per_step": 1, "max_new_tokens": 1, "max_prompt_tokens": 1, "mu": 1, "micro_batch_tokens": 1,
        "eval_questions": 1, "save_every": 1, "epochs": 0, "top_k": 0, "beta": 0, "lr": 0, "warmup": 0, "max_rollouts": 1,
        "minibatches": 1, "refresh_reference": 1, "lam": 0, "critic_lr": 0, "lora": 1, "devices": 1, "reward_timeout": 0,
    })
    check_engine(config, algorithm)
    for name in ("temperature", "epochs", "max_grad_norm", "clip_low", "clip_high", "target_kl", "stop_kl", "importance_cap", "device_gb"):
        if getattr(config, name) is not None and not getattr(config, name) > 0:
            raise UserError(f"--{name} must be above 0, not {getattr(config, name)}.")
    if config.lam is not None and config.lam > 1:
        raise UserError(f"--lam must lie in [0, 1], not {config.lam}.")
    if not 0 < config.top_p <= 1 or not config.warmup < 1:
        raise UserError(f"--top_p must lie in (0, 1] and --warmup in [0, 1), not {config.top_p} and {config.warmup}.")
    for name in filter(None, [config.dataset, config.eval_dataset]):
        data.check_name(name, config.model)
    config.rewards = config.rewards or scoring.default(config.dataset)
    scoring.choose(config.rewards)
    trackers.check(config.log)
    if config.model != "toy" and not config.plan:  # a plan reads config.json only
        policy.resolve(config.model)

    low, high = algorithm.clip
    keep = None if config.prune_pooled else config.keep or algorithm.keep
    prunes = (keep or config.prune_pooled) and not algorithm.ks
    rate = algorithm.pruning_rate or (0.75 if prunes else 0.0)
    allocation = not (algorithm.critic or algorithm.keep in SELECT_FIRST)
    defaults = {"pruning_rate": rate, "keep": keep, "allocation": allocation, "beta": algorithm.beta, "clip_low": low,
                "clip_high": high, "minibatches": algorithm.minibatches, "mu": algorithm.mu}
    if algorithm.critic:
        defaults |= {"lam": 0.95, "critic_lr": CRITIC_LR[config.dataset in data.TOYS]}
    if algorithm.dynamic_sampling:
        defaults |= {"max_rollouts": 4}
    of_dataset = TOY if config.dataset in data.TOYS else ARITHMETIC if config.dataset == "arithmetic" else REAL
    defaults |= {"max_new_tokens": data.LONGEST.get(config.dataset, 1024), "system_prompt": data.PROMPTS.get(config.dataset)}
    for name, value in (defaults | of_dataset).items():
        if getattr(config, name) is None:
            setattr(config, name, value)
    if config.eval_dataset is None and config.dataset in data.TOYS:
        config.eval_dataset = config.dataset
    for name in ("stop_kl", "refresh_reference"):
        if getattr(config, name) is not None and not config.beta:
            raise UserError(f"--{name} needs a reference model: set --beta above 0 ({config.algorithm}'s is {algorithm.beta}).")
    if config.overlong_cache is not None and not 0 < config.overlong_cache <= config.max_new_tokens:
        raise UserError(f"--overlong_cache must lie in 1 … --max_new_tokens ({config.max_new_tokens}), not {config.overlong_cache}.")
    try:
        if config.keep not in (*SELECT_FIRST, None):
            prune(torch.zeros(1, 1), 1, rule=config.keep)
    except ValueError as error:
        raise UserError(f"{error}; or {', '.join(SELECT_FIRST)}, which GFPO and PODS keep by.") from None
    try:
        k = max(algorithm.ks) if algorithm.ks else keep_count(config.group_size, config.pruning_rate)
    except ValueError as error:
        raise UserError(f"{error}: lower --pruning_rate.") from None
    if config.keep in SELECT_FIRST and k < 2:
        raise UserError(f"{config.keep} keeps 1 completion of a question, which has nothing to be compared with: lower --pruning_rate.")
    return k


def open_run(argv, algorithms):
    """The options of a new run, or of one to resume (its own, with the command line on top), and k."""
    config = parse(Config, argv)
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0  # how many there were, torchrun's nodes may count differently
    if restarts and not config.output_dir:
        raise UserError("--max-restarts needs --output_dir, by which a restarted job finds its run again.")
    if restarts and checkpoint.checkpoints(config.output_dir):
        argv, config.resume, config.recipe = [*argv, "--resume", "true"], True, None
    if config.resume:
        if config.output_dir is None:
            raise UserError("--resume needs to know the run: --output_dir runs/NAME.")
        if config.recipe:
            raise UserError("--resume goes on with the run's own options: leave out --recipe.")
        saved_file = Path(config.output_dir) / "config.json"
        if not saved_file.exists():
            raise UserError(f"nothing to resume: {config.output_dir} holds no run. Start it without --resume.")
        checkpoint.newest(config.output_dir)
        saved = json.loads(saved_file.read_text())
        config = parse(Config, argv, earlier=as_words(saved, Config, str(saved_file)))
        for name in ("model", "algorithm", "dataset", "group_size", "questions_per_step", "seed", "lora"):
            if getattr(config, name) != saved[name]:
                start = f"without --{name}" if saved[name] is None else f"with --{name} {saved[name]}"
                raise UserError(f"{config.output_dir} was started {start}: resume it like that, or start a new run.")
    k = check(config, algorithms)
    if config.shard == "full" and not config.plan and "WORLD_SIZE" not in os.environ:
        raise UserError("--shard full needs torchrun: torchrun --nproc-per-node 2 train.py …, with the number of your GPUs.")
    if config.output_dir and Path(config.output_dir).is_file():
        raise UserError(f"--output_dir {config.output_dir} is a file: name a folder.")
    taken = config.output_dir and any((Path(config.output_dir) / name).exists() for name in ("config.json", "metrics.jsonl"))
    if taken and not (config.resume or config.check_rewards or config.plan or restarts):
        raise UserError(f"{config.output_dir} already holds a run: add --resume to go on with it, or name another --output_dir.")
    return config, k
