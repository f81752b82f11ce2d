"""How far a run is, and what follows from it: its learning rate, its next questions, its end."""

import math
from dataclasses import dataclass, field

from engine.base import ranks
from engine.base.errors import UserError
from engine.data.questions import fingerprint, take
from engine.run import checkpoint
from engine.run.duration import length_of_run

BAD_UPDATES = 5  # the run ends after this many updates in a row that are not finite


@dataclass
class State:
    """What a checkpoint saves of a run besides the networks.

    The order of the questions and the random numbers follow from the seed.
    """

    source: str  # the model that the run started from
    data: str  # fingerprint of its questions
    per_step: int  # questions of a step, as at the start, even if the number of devices has changed
    step: int = 0  # steps made
    position: int = 0  # questions taken
    seconds: float = 0.0
    no_signal_steps: int = 0
    skipped_updates: int = 0
    skipped_in_a_row: int = 0
    history: list = field(default_factory=list)  # each question's mean reward: GFPO's adaptive k
    before: dict = field(default_factory=dict)  # the scores before training


@dataclass
class Run:
    """A run between two steps. A step is made by train.train_step."""

    state: State
    questions: list[dict]
    seed: int
    total: int  # questions of all epochs
    steps: int  # of the whole run, at most

    @property
    def finished(self):
        return self.state.step >= self.steps or self.state.position >= self.total

    def next_questions(self, count=None):
        """This device's share of the next `count` questions, or None if none are left.

        count None: the questions of a whole step.
        """
        position = self.state.position
        count = min(count or self.state.per_step, self.total - position)
        self.state.position += count
        if count:
            return ranks.share(take(self.questions, position, count, self.seed))

    def learning_rate(self, peak, warmup):
        """The learning rate of the next step."""
        state = self.state
        done = run_progress(state.step, self.steps, state.position, self.total, state.per_step)
        return learning_rate(done, peak, warmup)

    def count(self, of_step, with_history):
        """Add a Step. with_history: whether the algorithm looks at the rewards of earlier steps."""
        state = self.state
        state.step += 1
        state.seconds += of_step.metrics["seconds/total"]
        state.no_signal_steps += of_step.metrics["loss"] is None
        state.skipped_updates += of_step.metrics["skipped_updates"]
        for skipped in of_step.skipped:
            state.skipped_in_a_row = state.skipped_in_a_row + 1 if skipped else 0
        if with_history:
            state.history += ranks.gather(of_step.mean_rewards)


def open_state(config, algorithm, questions, source, saved):
    """The Run that begins, or goes on from `saved`, the state in a checkpoint."""
    folder = config.run.output_dir
    world = ranks.world_size()
    state = State(source, fingerprint(questions), algorithm.questions_per_step * world)
    if saved:
        for name, what in [("source", "model"), ("data", "data set")]:
            if saved[name] != getattr(state, name):
                raise UserError(f"{folder} was started with another {what}: put that back, or "
                                "start a new run.")
        state = State(**saved)
    total, steps = length_of_run(config.run, len(questions), state.per_step)
    few = min(state.per_step, total)
    if world > few:
        raise UserError(f"{world} devices for {few} questions: start at most one process per "
                        "question.")
    if saved and state.step >= steps and checkpoint.has_finished(folder):
        raise UserError(f"{folder} has finished its {steps} steps: ask for more with --steps or "
                        "--epochs, or start a new run.")
    return Run(state, questions, config.run.seed, total, steps)


def refuse_failing_updates(state, folder):
    """End a run whose updates fail one after the other. Its last good checkpoint stays the
    newest."""
    if state.skipped_in_a_row >= BAD_UPDATES:
        raise UserError(
            f"stopped at step {state.step}: {state.skipped_in_a_row} updates in a row had a loss "
            "or a gradient that is not finite, and were skipped. Lower --lr, or look into "
            f"samples.jsonl. {checkpoint.how_to_resume(folder)}")


def learning_rate(done, peak, warmup):
    """Linear warm-up, then a cosine down to 0. done: the share of the run that is over. warmup: the
    share that warms up."""
    if done <= warmup:
        return peak * done / warmup
    x = (done - warmup) / (1 - warmup)
    return peak * 0.5 * (1 + math.cos(math.pi * x))


def run_progress(steps_done, steps, questions_done, questions, per_step):
    """How far the run is in the middle of its next step, in [0, 1].

    The run ends after its steps or its questions, whichever comes first. A step takes `per_step`
    questions. With dynamic sampling it may take more: as many as the earlier steps took on average.
    """
    # in units of `per_step` questions
    end = math.ceil(questions / per_step)
    taken = questions_done / per_step
    average = max(1, taken / max(1, steps_done))
    expected = min(average, end - taken)
    return max((steps_done + 0.5) / steps, (taken + expected / 2) / end)
