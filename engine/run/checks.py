"""Checks before any work: options that do not fit each other or the machine are refused."""

import os
from importlib.util import find_spec
from pathlib import Path

import torch

from algorithms import ALGORITHMS, KEEP, OVER_KEPT, rule_name
from engine.base.errors import UserError, refuse
from engine.base.files import own_function
from engine.model.folders import resolve_model
from engine.model.vllm import TESTED
from engine.scoring import score
from engine.tasks.questions import check_dataset

# values that mean the same as None: the option was not given
SAME_AS_NONE = {"pruning_rate": 0.0, "allocation": False}
# Options that have no effect in some runs: (options, whether they have one in the run of the
# options o and the Algorithm a, what is the matter). The first list is refused, because the run
# would not do what it was asked for.
REFUSED = [
    ({"device_gb"}, lambda o, a: o.plan, "is for --plan: leave it out"),
    ({"check_rewards"}, lambda o, a: not o.plan,
     "cannot be combined with --plan: leave one of them out"),
    ({"eval_questions"}, lambda o, a: o.eval_dataset,
     "needs something to evaluate: set --eval_dataset"),
    ({"stop_kl", "refresh_reference"}, lambda o, a: a.beta,
     "needs a reference model: set --beta above 0"),
    ({"clip_low", "clip_high"}, lambda o, a: o.algorithm != "sapo",
     "does not fit sapo, which has a soft gate in place of the clip: leave it out"),
    ({"merge_lora"}, lambda o, a: o.lora,
     "has nothing to merge: give the adapters' rank too, for example --lora 16"),
]
NOTED = [
    ({"devices"}, lambda o, a: o.plan or o.devices == int(os.environ.get("WORLD_SIZE", 1)),
     "is for --plan: torchrun says how many devices train"),
    ({"reward_timeout"}, lambda o, a: ".py:" in " ".join(o.rewards),
     "limits only a reward of your own, FILE.py:FUNCTION"),
    ({"clip_low", "clip_high", "target_kl"}, lambda o, a: a.mu * a.minibatches > 1,
     "has no effect: in the only update of a step every ratio is 1; set --mu or --minibatches "
     "above 1"),
    ({"keep", "allocation"}, lambda o, a: a.k < a.group_size,
     "has no effect: no completion is pruned; see --pruning_rate"),
    ({"refresh_reference"}, lambda o, a: not o.steps or o.refresh_reference < o.steps,
     "comes after the last step"),
    ({"vllm_share"}, lambda o, a: o.rollout == "vllm",
     "has no effect: vLLM does not sample; see --rollout"),
    ({"system_prompt"}, lambda o, a: o.model != "toy",
     "has no effect: the toy's model reads only the question"),
]
INSTALL = f"pip install vllm (tested: version {TESTED})"
ADAPTER = "adapter_config.json"
# values of --log, and names of the packages that they need
TRACKERS = ("tensorboard", "wandb", "trackio")


def check_given(config):
    """Refuse the mistakes that the options alone show. config: a Config."""
    o, table = config.options, ALGORITHMS
    refuse([(o.algorithm not in table,
             f"unknown algorithm '{o.algorithm}': there are {', '.join(table)}.")])
    check_row(o)
    check_sampler(config.sampling, o.lora, o.plan)
    others = {"--shard full": o.shard == "full", "PPO": table[o.algorithm].critic,
              "--refresh_reference": o.refresh_reference}
    refuse((o.lora and given, f"--lora cannot be combined with {other}: leave one of them out.")
           for other, given in others.items())
    for name in filter(None, [o.dataset, o.eval_dataset]):
        check_dataset(name, o.model)
    score.choose(o.rewards or [])
    # no origin: only a folder of that name, which wandb leaves
    refuse([(o.log and getattr(find_spec(o.log), "origin", None) is None,
             f"--log {o.log} needs a package that is not installed: pip install {o.log}")])
    # the plan needs only its config.json
    if o.model != "toy" and not o.plan and Path(resolve_model(o.model), ADAPTER).exists():
        raise UserError(f"{o.model} holds adapters, not a whole model: train from the merged model "
                        "instead, which a run with --merge_lora writes into its folder merged.")


def check_row(o):
    """Refuse options that the algorithm does not take, and rules that it does not keep by. o: all
    options."""
    name, keep, row = o.algorithm, o.keep, ALGORITHMS[o.algorithm]
    default, ks, own_file = row.keep, row.ks or (0,), (keep or "").partition(":")[0].endswith(".py")
    taken = {option for other in ALGORITHMS.values() for option in other.takes}
    refuse((getattr(o, option) not in (None, SAME_AS_NONE.get(option)),
            f"--{option} does not fit {name}: leave it out, or take one of "
            f"{', '.join(other for other in ALGORITHMS if option in ALGORITHMS[other].takes)}.")
           for option in sorted(taken - set(row.takes)))
    refuse([
        (keep and keep not in (*KEEP, rule_name(default)) and not own_file,
         f"unknown rule --keep {keep}: there are {', '.join(KEEP)}, and FILE.py:FUNCTION."),
        (keep == "all" and default != "all",
         f"{name} keeps only some completions: --keep all needs an algorithm that keeps all, as "
         "grpo."),
        (keep and default in OVER_KEPT and keep not in OVER_KEPT,
         f"{name} keeps completions by {default}: it cannot be combined with pruning by |A|."),
        (row.ks and keep == "max_variance",
         f"{name} keeps completions by --keep shortest or efficiency, not by max_variance."),
        (keep in OVER_KEPT and default not in ("all", *OVER_KEPT),
         f"{name} prunes by |A|: --keep {keep} needs gfpo, pods, or an algorithm that keeps all."),
        (o.pruning_rate and default == "all" and keep in (None, "all"),
         f"{name} keeps every completion: with --pruning_rate give a rule too, for example --keep "
         "largest_abs."),
        (o.group_size == 1 and not row.critic,
         "--group_size must be at least 2, not 1: an advantage compares completions of one "
         "question."),
        (o.group_size < max(ks),
         f"{name} keeps up to {max(ks)} completions of a question: --group_size {o.group_size} is "
         "too small."),
    ])
    if own_file:
        own_function(keep, "--keep")


def check_sampler(sampling, lora, plan):
    """Refuse what vLLM cannot sample. sampling: SamplingOptions."""
    if sampling.rollout == "own":
        return
    temperature, own = sampling.temperature, "or use --rollout own."
    refuse([
        (sampling.sample_batch_size,
         "vLLM decides by itself how many completions it samples at a time: leave out "
         f"--sample_batch_size, {own}"),
        (lora, f"--rollout vllm does not take adapters: leave out --lora, {own}"),
        (find_spec("vllm") is None and not plan, f"--rollout vllm needs vLLM: {INSTALL}."),
        (not 0.01 <= temperature <= 2,
         f"--rollout vllm takes a --temperature in [0.01, 2], not {temperature}: change it, {own}"),
        (temperature != 1 and (sampling.top_p < 1 or sampling.top_k > 0),
         "vLLM gives log-probabilities before temperature, top_p and top_k, or after all three: "
         f"with --top_p or --top_k set --temperature 1, {own}"),
    ])


def slow_sampler(options):
    """A list with a note, if there is a GPU, and vLLM could sample on it but is not installed."""
    own = options.rollout == "own" and not options.lora and options.model != "toy"
    return [
        f"vLLM is not installed. On a GPU it samples several times as fast: {INSTALL}, then add "
        "--rollout vllm."
    ] if torch.cuda.is_available() and own and not find_spec("vllm") else []


def without_effect(options, usual, algorithm, table):
    """A sentence about each option of `table` that was given and has no effect.

    options, usual: all options, of this run and of one without options. algorithm: None for
    eval.py.
    """
    return [
        f"--{name} {matter}." for names, works, matter in table for name in sorted(names)
        if getattr(options, name) != getattr(usual, name) and not works(options, algorithm)]
