"""Config layers: how the options of a run become a Config and an Algorithm.

Options are layers. Each layer wins over those before it:

    defaults | data set's row | algorithm's row | the run that is resumed | recipe | command line
"""

from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace

from algorithms import (
    ALGORITHMS,
    KEEP,
    resolve,
    rule_name,
    usual_pruning_rate,
)
from engine.base import ranks
from engine.base.errors import UserError, unknown
from engine.base.files import builtin_or_custom
from engine.options import checks
from engine.options.command_line import compose, flat
from engine.options.options import (
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
    row, task = ALGORITHMS[name], task_of(known["dataset"], known["model"])
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
    of_row["token_weights"] = row.token_weights.__name__
    of_row["pruning_rate"] = usual_pruning_rate(row, chosen.get("keep"))
    if not row.one_update:
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
        keep = builtin_or_custom(keep, KEEP, "rule", "--keep")
    checks.check_algorithm(options)
    others = {name: getattr(options, name) for name in ALGORITHM_OPTIONS - {"keep"}}
    try:
        algorithm = resolve(options.algorithm, keep=keep, **others)
    except AssertionError as error:  # of keep_count
        raise UserError(f"{error}: lower --pruning_rate.") from None
    if algorithm.over_all_devices:
        gathered = partial(ranks.over_all_groups, algorithm.advantages)
        algorithm = replace(algorithm, advantages=gathered, over_all_devices=False)
    if algorithm.keep.normalize_kept_only and algorithm.k < 2:
        raise UserError(f"{options.keep} keeps 1 completion of a question, which has nothing to be "
                        "compared with: lower --pruning_rate.")
    return algorithm


def config_of(chosen):
    """(Config, Algorithm) of a run. Options that cannot work are refused.

    chosen: {name: value} of the options that were given.
    """
    config = compose(Config, layers(chosen))
    algorithm = algorithm_of(config.options)
    checks.check_options(config.options)
    return config, algorithm
