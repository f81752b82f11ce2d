"""How a run begins, or goes on from its newest checkpoint."""

import os
from functools import partial
from pathlib import Path

from algorithms import KEEP
from engine.base import progress, ranks
from engine.base.errors import UserError
from engine.data.questions import hold_out, names_others, questions_of_run
from engine.model.networks import build
from engine.options import checks
from engine.options.command_line import compose, flat, parse_given
from engine.options.config import Config, config_of
from engine.options.hooks import load_metrics
from engine.run import checkpoint
from engine.run.folder import options_of, refuse_used
from engine.run.plan import choose_micro_batch_tokens
from engine.run.state import Run, State, model_of
from engine.scoring.gold_answers import is_right_answer, notes_on_gold_answers
from engine.scoring.score import choose_accuracy_reward, load_rewards

PROJECT = Path(__file__).parents[2]
# what an accuracy depends on: accuracies that were measured with others cannot be compared
MEASURED_WITH = ("eval_dataset", "eval_questions", "rewards", "max_new_tokens", "stop",
                 "system_prompt", "chat_template_kwargs")


# --- its options ---


def open_run(argv):
    """(Config, Algorithm, notes) of a new run, or of a run to resume. notes: sentences about
    options that surprise people."""
    chosen = parse_given(Config, argv)
    if chosen.get("resume"):
        chosen = saved_options(chosen) | chosen
    config, algorithm = config_of(chosen)
    o = config.options
    if o.keep not in KEEP:
        checks.try_rule(algorithm, o.keep)
    if o.shard == "full" and o.plan is None and "WORLD_SIZE" not in os.environ:
        raise UserError("--shard full needs torchrun: torchrun --nproc-per-node 2 train.py …, with "
                        "the number of your GPUs. On one device: --shard none, also to resume.")
    if o.output_dir and not o.resume and o.plan is None and not o.check_rewards:
        refuse_used(o.output_dir)
    return config, algorithm, checks.notes_on_options(o)


def saved_options(chosen):
    """The options of the run in --output_dir. Those that make it what it is cannot change."""
    run_dir = chosen.get("output_dir")
    if not run_dir or not Path(run_dir, "run.json").is_file():
        raise UserError("nothing to resume: --resume goes on with the run in --output_dir "
                        "runs/NAME. Name a run there, or leave out --resume.")
    if chosen.get("recipe"):
        raise UserError("--resume goes on with the run's own options: leave out --recipe.")
    saved = options_of(run_dir)
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


# --- its networks, questions and state ---


def begin_run(config, algorithm, device, rows):
    """(the Run, sentences that the user should know). rows: as of `rows_of_run`."""
    data = config.data
    folder, saved, notes = None, None, []
    if config.run.resume:
        folder, saved, notes = checkpoint.resume(config.run.output_dir)
    source = model_of(config)
    networks = build(config, algorithm, source, device, folder)
    reward_functions = load_rewards(data.rewards)
    held_out = ()
    if data.eval_every and not names_others(data):
        others, held_out = hold_out(rows[0], config.run.seed)
        rows = (others, rows[1])
    questions, test, to_choose, of_questions = questions_of_run(
        data, rows, config.sampling.max_new_tokens, networks.tokenizer, networks.model,
        partial(is_right_answer, reward_functions[0]), held_out)
    if data.eval_every and not to_choose:
        raise UserError("--eval_every holds out a quarter of the questions: it needs 4 or more.")
    # a model of the project is the same one in another copy of the project
    state = State(
        source.removeprefix(f"{PROJECT}/"), questions.fingerprint(), ranks.world_size(),
        questions.first_prompt())
    if saved:
        notes += notes_on_resume(config.run.output_dir, saved, state)
        state = State(**saved | {"prompt": state.prompt})
        checkpoint.restore(folder, networks)
    accuracy_reward = choose_accuracy_reward(
        reward_functions, data.dataset, data.eval_dataset or data.dataset)
    tokens, of_tokens = choose_micro_batch_tokens(config.options, device)
    run = Run(
        config, algorithm, state, questions, test, to_choose, networks, reward_functions,
        accuracy_reward, load_metrics(config.run.hooks), tokens)
    refuse_nothing_to_do(run)
    of_answers = notes_on_gold_answers(reward_functions, questions, run.numbers_ahead())
    return run, notes + of_questions + of_tokens + of_answers


def notes_on_resume(run_dir, saved, state):
    """[a sentence], if the prompts of a resumed run have changed. Another model, data set or
    version is refused. saved: {field: value} of its State. state: that of a run that starts now."""
    if saved.get("data_form") != state.data_form:
        raise UserError(f"{run_dir} was started by another version of train.py, which compares "
                        "data sets in another way: finish it with that version, or start a new "
                        "run.")
    of_prompts = "data set, system prompt or chat template"
    for name, what in [("source", "model"), ("data", of_prompts)]:
        was, now = saved[name], getattr(state, name)
        if was != now:
            raise UserError(f"{run_dir} was started with another {what} ({was}, not {now}): put "
                            "that back, or start a new run.")
    if saved["prompt"] == state.prompt:
        return []
    return ["the chat template writes other prompts than before the run stopped, perhaps another "
            "date. So from here on the run is not the same, bit for bit, as a run in one go."]


def refuse_nothing_to_do(run):
    """Refuse processes without a question, and a run that has made all of its steps."""
    few, world, folder = min(run.per_step, run.total), ranks.world_size(), run.config.run.output_dir
    if world > few:
        raise UserError(f"{world} devices for {few} questions: start at most one process per "
                        "question.")
    if run.config.run.resume and run.finished and checkpoint.has_finished(folder):
        name = "epochs" if run.state.position >= run.total else "steps"
        raise UserError(f"{folder} has made its {progress.count(run.state.step, 'step')}, and "
                        f"--{name} {getattr(run.config.run, name)} asks for no more: give a larger "
                        f"--{name}, or start a new run.")
