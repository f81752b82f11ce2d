"""How a run begins, or goes on from its newest checkpoint."""

from pathlib import Path

from engine.base import ranks
from engine.base.errors import UserError
from engine.data.questions import questions_of_run
from engine.model.networks import build
from engine.run import checkpoint
from engine.run.hooks import load_hooks
from engine.run.state import Run, State, model_of
from engine.scoring.golds import notes_on_golds
from engine.scoring.score import accuracy_reward, load_rewards

PROJECT = Path(__file__).parents[2]


def begin(config, algorithm, device, rows):
    """(the Run, sentences that the user should know). rows: as of `rows_of_run`."""
    data = config.data
    folder, saved, notes = None, None, []
    if config.run.resume:
        folder, saved, notes = checkpoint.resume(config.run.output_dir)
    source = model_of(config)
    networks = build(config, algorithm, source, device, folder)
    questions, test, of_questions = questions_of_run(
        data, rows, config.sampling.max_new_tokens, networks.tokenizer, networks.model)
    run = open_state(config, algorithm, networks, questions, source, saved)
    if saved:
        checkpoint.restore(folder, networks)
    run.reward_functions = load_rewards(data.rewards)
    run.test = test
    eval_dataset = data.eval_dataset or data.dataset
    of_golds = notes_on_golds(run.reward_functions, questions, run.numbers_ahead())
    run.is_right = accuracy_reward(run.reward_functions, data.dataset, eval_dataset)
    return run, notes + of_questions + of_golds


def open_state(config, algorithm, networks, questions, source, saved):
    """The Run that begins, or goes on from `saved`, the state in a checkpoint."""
    folder = config.run.output_dir
    world = ranks.world_size()
    # a model of the project is the same one in another copy of the project
    source = source.removeprefix(f"{PROJECT}/")
    state = State(source, questions.fingerprint(), world)
    if saved:
        for name, what in [("source", "model"), ("data", "data set")]:
            was, now = saved[name], getattr(state, name)
            if was != now:
                raise UserError(f"{folder} was started with another {what} ({was}, not {now}): put "
                                "that back, or start a new run.")
        state = State(**saved)
    run = Run(config, algorithm, state, questions, load_hooks(config.run.hooks), networks)
    run.follow_schedule()
    few = min(run.per_step, run.total)
    if world > few:
        raise UserError(f"{world} devices for {few} questions: start at most one process per "
                        "question.")
    if saved and run.finished and checkpoint.has_finished(folder):
        raise UserError(f"{folder} has finished its {state.step} steps: ask for more with --steps "
                        "or --epochs, or start a new run.")
    return run
