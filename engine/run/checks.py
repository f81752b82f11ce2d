"""Checks before any work: options that do not fit each other or the machine are refused."""

import os
from importlib.util import find_spec
from pathlib import Path

import torch

from algorithms import ALGORITHMS, KEEP, OVER_KEPT
from engine.base.errors import UserError
from engine.base.files import own_function
from engine.model.folders import refuse_missing, resolve_model
from engine.model.vllm import TESTED, filtered
from engine.run.checkpoint import damaged
from engine.run.options import check_limits
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
    ({"devices"}, lambda o, a: o.plan or o.devices == processes(),
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
TRACKERS = ("tensorboard", "wandb")  # values of --log, and names of the packages that they need


def check_given(config):
    """Refuse the mistakes that the options alone show. config: a Config."""
    data, row = config.data, config.row
    if row.algorithm not in ALGORITHMS:
        raise UserError(
            f"unknown algorithm '{row.algorithm}': there are {', '.join(ALGORITHMS)}.")
    check_limits(config)
    check_row(row, config.update.critic_lr)
    check_keep(row)
    check_sampler(config.sampling, config.devices.lora, config.look.plan)
    check_lora(config.devices, config.update, row.algorithm)
    for name in filter(None, [data.dataset, data.eval_dataset]):
        check_dataset(name, data.model)
    score.choose(data.rewards or [])
    check_tracker(config.run.log)
    if data.model != "toy":
        check_model(data.model, config.look.plan)


def check_model(model, plan):
    """Refuse a model that is not there or cannot be trained. --plan needs only its config.json."""
    if plan:
        refuse_missing(model)
    elif Path(unchanged(resolve_model(model)), "adapter_config.json").exists():
        raise UserError(f"{model} holds adapters, not a whole model: train from the merged model "
                        "instead, which a run with --merge_lora writes into its folder merged.")


def unchanged(model):
    """The folder or name of a model.

    Refuses a checkpoint of a run if a file that is loaded is not as the run wrote it. Under
    torchrun the first process of a machine looks; the others would find the same. """
    folder, first = Path(model), os.environ.get("LOCAL_RANK", "0") == "0"
    loaded = lambda path: path.parent == folder and path.name != "checksums.json"
    if first and (folder / "checksums.json").exists() and (files := damaged(folder, loaded)):
        raise UserError(
            f"{model} is damaged: {', '.join(files)} is not as the run wrote it. Name an earlier "
            "checkpoint; if you changed it yourself, remove checksums.json there.")
    return model


def check_row(row, critic_lr):
    """Refuse options that the algorithm does not take, but others do."""
    given = vars(row) | {"critic_lr": critic_lr}
    taken = {option for other in ALGORITHMS.values() for option in other.takes}
    for option in sorted(taken - set(ALGORITHMS[row.algorithm].takes)):
        if given[option] not in (None, SAME_AS_NONE.get(option)):
            takers = ", ".join(name for name, other in ALGORITHMS.items() if option in other.takes)
            raise UserError(f"--{option} does not fit {row.algorithm}: leave it out, or take an "
                            f"algorithm that it belongs to ({takers}).")


def check_keep(row):
    """Check the options that say which completions are kept. row: RowOptions."""
    name, keep, G = row.algorithm, row.keep, row.group_size
    default, ks = ALGORITHMS[name].keep, ALGORITHMS[name].ks
    if keep and keep not in KEEP:
        if not keep.partition(":")[0].endswith(".py"):
            raise UserError(
                f"unknown rule --keep {keep}: there are {', '.join(KEEP)}, and FILE.py:FUNCTION.")
        own_function(keep, "--keep")
    if keep == "all" and default != "all":
        raise UserError(f"{name} keeps only some completions: --keep all needs an algorithm that "
                        "keeps all, as grpo.")
    if keep and default in OVER_KEPT and keep not in OVER_KEPT:
        raise UserError(f"{name} keeps completions by {default}: it cannot be combined with "
                        "pruning by |A|.")
    if ks and keep == "max_variance":
        raise UserError(f"{name} keeps completions by --keep shortest or efficiency, not by "
                        "max_variance.")
    if keep in OVER_KEPT and default not in ("all", *OVER_KEPT):
        raise UserError(f"{name} prunes by |A|: --keep {keep} needs gfpo, pods, or an algorithm "
                        "that keeps all.")
    if row.pruning_rate and default == "all" and keep in (None, "all"):
        raise UserError(f"{name} keeps every completion: with --pruning_rate give a rule too, for "
                        "example --keep largest_abs.")
    if G == 1 and not ALGORITHMS[name].critic:
        raise UserError("--group_size must be at least 2, not 1: an advantage compares completions "
                        "of one question.")
    if ks and G < max(ks):
        raise UserError(f"{name} keeps up to {max(ks)} completions of a question: --group_size "
                        f"{G} is too small.")


def check_lora(devices, update, algorithm):
    """Refuse what adapters cannot be combined with."""
    others = {"--shard full": devices.shard == "full", "PPO": ALGORITHMS[algorithm].critic,
              "--refresh_reference": update.refresh_reference}
    for other, given in others.items():
        if devices.lora and given:
            raise UserError(f"--lora cannot be combined with {other}: leave one of them out.")


def check_sampler(sampling, lora, plan):
    """Refuse what vLLM cannot sample. sampling: SamplingOptions."""
    if sampling.rollout != "vllm":
        return
    if sampling.sample_batch_size:
        raise UserError("vLLM decides by itself how many completions it samples at a time: leave "
                        "out --sample_batch_size, or use --rollout own.")
    if lora:
        raise UserError("--rollout vllm does not take adapters: leave out --lora, or use "
                        "--rollout own.")
    if find_spec("vllm") is None and not plan:
        raise UserError(f"--rollout vllm needs vLLM: {INSTALL}.")
    if not 0.01 <= sampling.temperature <= 2:
        raise UserError(f"--rollout vllm takes a --temperature in [0.01, 2], not "
                        f"{sampling.temperature}: change it, or use --rollout own.")
    if sampling.temperature != 1 and filtered(sampling):
        raise UserError(
            "vLLM gives log-probabilities before temperature, top_p and top_k, or after all three: "
            "with --top_p or --top_k set --temperature 1, or use --rollout own.")


def slow_sampler(options):
    """A list with a note, if there is a GPU, and vLLM could sample on it but is not installed."""
    own = options.rollout == "own" and not options.lora and options.model != "toy"
    if not torch.cuda.is_available() or not own or find_spec("vllm"):
        return []
    return [
        f"vLLM is not installed. On a GPU it samples several times as fast: {INSTALL}, then add "
        "--rollout vllm."
    ]


def check_tracker(name):
    """Refuse a tracker whose package is not installed. None: no tracker."""
    found = name and find_spec(name)
    # no origin: only a folder of that name, which wandb leaves
    if name and (found is None or found.origin is None):
        raise UserError(f"--log {name} needs a package that is not installed: pip install {name}")


def processes():
    return int(os.environ.get("WORLD_SIZE", 1))


def without_effect(options, usual, algorithm, table):
    """A sentence about each option of `table` that was given and has no effect.

    options, usual: all options, of this run and of one without options. algorithm: None for
    eval.py.
    """
    return [
        f"--{name} {matter}." for names, works, matter in table for name in sorted(names)
        if getattr(options, name) != getattr(usual, name) and not works(options, algorithm)]


def check_filled_in(options, algorithm, usual):
    """Refuse the mistakes that depend on values of the data set or the algorithm.

    options, usual: all options, filled in, of this run and of one without options.
    """
    for sentence in without_effect(options, usual, algorithm, REFUSED):
        raise UserError(sentence)
    longest = options.max_new_tokens
    if options.overlong_cache is not None and options.overlong_cache > longest:
        raise UserError(f"--overlong_cache must lie in 1 … --max_new_tokens ({longest}), not "
                        f"{options.overlong_cache}.")
    if options.importance_low and options.importance_low >= (options.importance_cap or 0):
        raise UserError("--importance_low needs a larger --importance_cap: IcePop takes "
                        "--importance_low 0.5 --importance_cap 5.")
    if algorithm.over_kept and algorithm.k < 2:
        raise UserError(f"{options.keep} keeps 1 completion of a question, which has nothing to be "
                        "compared with: lower --pruning_rate.")
