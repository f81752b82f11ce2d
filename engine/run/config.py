"""How the options of a run become a Config and an Algorithm.

Options are layers. Each layer wins over those before it:

    defaults | data set's row | algorithm's row | the run that is resumed | recipe | command line
"""

import os
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from algorithms import ALGORITHMS, FILTER, KEEP, resolve, rule_name, usual_pruning_rate
from engine.base import ranks
from engine.base.errors import UserError, unknown
from engine.base.files import known_or_own
from engine.run import checks, folder, own
from engine.run.command_line import (
    command,
    compose,
    flat,
    given,
    given_twice,
    parser_of,
    read,
    words_from,
)
from engine.run.options import (
    ALGORITHM_OPTIONS,
    ROW_FIELDS,
    DataOptions,
    DeviceOptions,
    PreviewOptions,
    RowOptions,
    RunOptions,
    SamplingOptions,
    UpdateOptions,
)
from tasks.table import task_of

# what two runs do not share that are compared: how they prune, and where they are
NOT_COMPARED = ("algorithm", "keep", "pruning_rate", "allocation", "output_dir", "resume", "recipe")
# what changes the time of both runs alike, or not at all
SAME_PACE = {"seed", "epochs", "output_dir", "resume", "recipe"}
# what an accuracy depends on: accuracies that were measured with others cannot be compared
MEASURED_WITH = ("eval_dataset", "eval_questions", "rewards", "max_new_tokens", "stop",
                 "system_prompt", "chat_template_kwargs")


@dataclass
class Config:
    """All options of a run. A function gets the record that it needs."""

    most_used = ("model", "dataset", "rewards", "algorithm", "pruning_rate", "output_dir")

    data: DataOptions = field(default_factory=DataOptions)
    row: RowOptions = field(default_factory=RowOptions)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)  # `train_step` takes this
    update: UpdateOptions = field(default_factory=UpdateOptions)
    devices: DeviceOptions = field(default_factory=DeviceOptions)
    run: RunOptions = field(default_factory=RunOptions)
    preview: PreviewOptions = field(default_factory=PreviewOptions)

    @property
    def options(self):
        """All options, as attributes, and the measure."""
        return SimpleNamespace(**flat(self), measure=self.data.measure)


# --- the layers ---


def layers(chosen):
    """{name: value} of all options. chosen: those that were given."""
    defaults = flat(Config())
    known = defaults | chosen
    name = known["algorithm"]
    if name not in ALGORITHMS:
        raise UserError(f"{unknown('algorithm', name, ALGORITHMS)}.")
    row, task = ALGORITHMS[name], task_of(known["dataset"])
    of_task = {
        "rewards": list(task.rewards),
        "system_prompt": task.system_prompt,
        "eval_questions": 512 if known["eval_dataset"] else task.eval_questions,
        "questions_per_step": task.questions_per_step,
        "max_new_tokens": task.max_new_tokens,
        "lr": task.lr,
        "epochs": None if known["steps"] else task.epochs,
    }
    of_row = {name: getattr(row, name) for name in ROW_FIELDS}
    of_row["keep"] = rule_name(row.keep)
    of_row["pruning_rate"] = usual_pruning_rate(row, chosen.get("keep"))
    of_row["minibatches"] = max(row.minibatches, task.minibatches)
    return defaults | of_task | of_row | chosen


def algorithm_of(options):
    """The Algorithm of a run. options: all of them, as attributes.

    Raises UserError if they do not fit.
    """
    keep, row = options.keep, ALGORITHMS[options.algorithm]
    if keep == rule_name(row.keep):
        keep = None  # it is the row's own rule, which may be a function
    elif keep not in KEEP:
        function = known_or_own(keep, KEEP, "rule", "--keep")
        # GFPO keeps the smallest of a metric, others ask a rule
        made_of = own.own_filter if row.keep == FILTER else own.own_rule
        keep = made_of(function, f"--keep {keep}")
    checks.check_algorithm(options)
    others = {name: getattr(options, name) for name in ALGORITHM_OPTIONS - {"keep"}}
    try:
        algorithm = resolve(options.algorithm, keep=keep, **others)
    except AssertionError as error:  # of keep_count
        raise UserError(f"{error}: lower --pruning_rate.") from None
    algorithm = own.checked(algorithm)
    if algorithm.over_all_devices:
        gathered = partial(ranks.over_all_groups, algorithm.advantages)
        algorithm = replace(algorithm, advantages=gathered, over_all_devices=False)
    if algorithm.over_kept and algorithm.k < 2:
        raise UserError(f"{options.keep} keeps 1 completion of a question, which has nothing to be "
                        "compared with: lower --pruning_rate.")
    return algorithm


def algorithm_with(config, changed):
    """The Algorithm of a run whose schedule changes some options. changed: {option: value}."""
    others = sorted(changed.keys() - ALGORITHM_OPTIONS)
    if others:
        raise UserError(f"a schedule cannot change {', '.join(others)}: it can change "
                        f"{', '.join(sorted(ALGORITHM_OPTIONS))}.")
    if changed.get("beta") and not (config.row.beta or config.run.stop_kl):
        raise UserError("a schedule cannot raise beta above 0 in a run that has no reference: "
                        "start the run with a --beta above 0.")
    values = read(parser_of(Config), words_from(changed), "the schedule: ")
    return algorithm_of(SimpleNamespace(**flat(config) | values))


def config_of(chosen):
    """(Config, Algorithm) of a run. Options that cannot work are refused.

    chosen: {name: value} of the options that were given.
    """
    config = compose(Config, layers(chosen))
    algorithm = algorithm_of(config.options)
    checks.check_options(config.options)
    return config, algorithm


def compared(config):
    """Lines: the command of the run with which this one is compared, and how long that one takes,
    if this is known. [] if the other run refuses an option of this one."""
    options, chosen = flat(config), counterpart(config.row)
    algorithms = {config.row.algorithm, chosen["algorithm"]}
    chosen["dataset"] = options["dataset"]
    # with --steps, --epochs has no usual value
    usual = layers({name: options[name] for name in ("algorithm", "dataset", "steps")})
    usual["steps"] = None
    changed = {name: x for name, x in options.items() if x not in (None, usual[name])}
    chosen |= {name: x for name, x in changed.items() if name not in NOT_COMPARED}
    try:
        config_of(chosen)
    except UserError:
        return []
    lines = [command(chosen)]
    times = task_of(config.data.dataset).grpo_takes
    if times and algorithms == {"cppo", "grpo"} and changed.keys() <= SAME_PACE:
        lines.append(f"GRPO takes about {times:g} times as long as CPPO.")
    return lines


def counterpart(row):
    """{option: value} of the run with which a run of these RowOptions is compared. It has the same
    loss and does not prune. If this run does not prune, the other one prunes as usual; algorithms
    without pruning are compared with GRPO."""
    name, of_row = row.algorithm, ALGORITHMS[row.algorithm]
    if name == "cppo" and row.pruning_rate:  # GRPO has the same loss
        return {"algorithm": "grpo"}
    if of_row.ks:
        return {"algorithm": "gfpo", "pruning_rate": 0.0}
    if row.pruning_rate:
        return {"algorithm": name, "pruning_rate": 0.0}
    if of_row.pruning_rate:
        return {"algorithm": name}
    return {"algorithm": "cppo" if name == "grpo" else "grpo"}


# --- a new run, or one that goes on ---


def open_run(argv):
    """(Config, Algorithm, notes) of a new run, or of a run to resume. notes: sentences about
    options that surprise people."""
    chosen = given(Config, argv)
    if chosen.get("resume"):
        chosen = saved_options(chosen) | chosen
    config, algorithm = config_of(chosen)
    o = config.options
    if o.keep not in KEEP:
        own.try_rule(algorithm)
    if o.shard == "full" and o.plan is None and "WORLD_SIZE" not in os.environ:
        raise UserError("--shard full needs torchrun: torchrun --nproc-per-node 2 train.py …, with "
                        "the number of your GPUs. On one device: --shard none, also to resume.")
    if o.output_dir and not o.resume and o.plan is None and not o.check_rewards:
        folder.refuse_used(o.output_dir)
    return config, algorithm, given_twice(argv) + checks.notes_on_options(o, algorithm)


def saved_options(chosen):
    """The options of the run in --output_dir. Those that make it what it is cannot change."""
    run_dir = chosen.get("output_dir")
    if not run_dir or not Path(run_dir, "run.json").is_file():
        raise UserError("nothing to resume: --resume goes on with the run in --output_dir "
                        "runs/NAME. Name a run there, or leave out --resume.")
    if chosen.get("recipe"):
        raise UserError("--resume goes on with the run's own options: leave out --recipe.")
    saved = folder.options_of(run_dir)
    other = saved.keys() - {"measure"} ^ flat(Config()).keys()
    if other:
        raise UserError(
            f"{run_dir} was started by another version of train.py, with other options "
            f"({', '.join(sorted(other))}): finish it with that version, or start a new run.")
    fixed = ("model", "algorithm", "dataset", "columns", "group_size", "questions_per_step", "seed",
             "lora", "eval_every")
    if saved["eval_every"] or compose(Config, saved).data.tested:
        fixed += MEASURED_WITH
    for name in fixed:
        was, now = saved[name], chosen.get(name, saved[name])
        if name == "rewards":  # the first one says what is right
            was, now = was[0], now[0]
        if now != was:
            raise UserError(f"{run_dir} was started with --{name} {was!s:.60}, not {now!s:.60}: "
                            "leave that out, or start a new run.")
    return saved
