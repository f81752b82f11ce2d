"""Training state: how far a run is. Its learning rate, its next questions and its end follow."""

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from algorithms import Algorithm
from engine.base import progress, ranks
from engine.base.errors import UserError
from engine.data.questions import DATA_FORM, Questions, numbers_of
from engine.model.folders import resolve_model
from engine.model.networks import Networks, build
from engine.options.config import Config
from engine.run import checkpoint
from engine.run.folder import how_to_resume, keep_options
from engine.scoring.score import Reward, is_custom, is_graded
from tasks.table import base_model

BAD_UPDATES = 5  # the run ends after this many updates in a row that are not finite
ENDLESS = 10**15  # more questions than any run asks
WINDOW = 4  # --stop_kl compares the mean KL of this many steps that made an update


@dataclass
class State:
    """What a checkpoint saves of a run besides the networks.

    The order of the questions and the random numbers follow from the seed.
    """

    source: str  # the model that the run started from
    data: str  # fingerprint of its questions
    devices: int  # at the start: a step asks as many questions, even if their number has changed
    prompt: str = ""  # fingerprint of the first prompt
    data_form: int = DATA_FORM  # of the fingerprint `data`; that of another version may differ
    step: int = 0  # steps made
    position: int = 0  # questions taken
    seconds: float = 0.0
    steps_without_signal: int = 0
    skipped_updates: int = 0
    skipped_in_a_row: int = 0
    recent_kl: list = field(default_factory=list)  # of the last WINDOW steps that made an update
    skipped_questions: int = 0  # that could not be asked
    # the mean reward of each question that was asked, for GFPO's adaptive k
    past: list = field(default_factory=list)
    before: dict = field(default_factory=dict)  # the scores before training
    # of --eval_every: the step and its accuracy, or its mean reward
    best: dict = field(default_factory=dict)
    evaluation_seconds: float = 0.0  # of --eval_every
    hook_failures: int = 0  # steps whose custom metrics failed


@dataclass
class Run:
    """A run between two steps. A step is made by train.train_step, the Run by begin.py."""

    config: Config
    algorithm: Algorithm
    state: State
    questions: Questions
    test: list[dict]  # the questions of the evaluation
    to_choose: list[dict]  # the questions of --eval_every
    networks: Networks
    reward_functions: list[Reward]
    accuracy_reward: Callable  # the reward that says whether a completion is right
    custom_metrics: Callable  # of hooks.py
    micro_batch_tokens: int  # on this device
    better: dict = field(default_factory=dict)  # than state.best: a model that is not saved yet

    @property
    def seed(self):
        return self.config.run.seed

    @property
    def total(self):
        """Questions of all epochs; ENDLESS if --steps alone ends the run."""
        epochs = self.config.run.epochs
        return ENDLESS if epochs is None else max(1, round(epochs * len(self.questions)))

    @property
    def per_step(self):
        """Questions of the next step, over all devices."""
        return self.algorithm.questions_per_step * self.state.devices

    @property
    def steps(self):
        """Steps of the whole run, at most; fewer if a step takes more than `per_step` questions."""
        left = math.ceil((self.total - self.state.position) / self.per_step)
        return min(self.config.run.steps or math.inf, self.state.step + left)

    @property
    def progress(self):
        """The share of the run that is over, 0 … 1."""
        most = self.config.run.steps or math.inf
        return max(self.state.step / most, self.state.position / self.total)

    @property
    def went_too_far(self):
        """Whether --stop_kl ends the run. The KL is that over all devices, so all agree."""
        most, kls = self.config.run.stop_kl, self.state.recent_kl
        return most is not None and len(kls) == WINDOW and fmean(kls) > most

    @property
    def finished(self):
        return self.went_too_far or self.state.step >= self.steps

    def next_questions(self, count=None):
        """This device's share of the next `count` questions, or None if none are left.

        count None: the questions of a whole step. A question that cannot be asked, for example
        because its prompt is too long, makes way for the next one.
        """
        count = min(count or self.per_step, self.total - self.state.position)
        if count <= 0:
            return None
        asked, start = [], self.state.position
        while len(asked) < count:
            position = self.state.position
            numbers = numbers_of(position, count - len(asked), len(self.questions), self.seed)
            self.state.position += len(numbers)
            questions = self.questions.ask(numbers)
            asked += [questions[number] for number in numbers if number in questions]
            skipped = self.state.position - start - len(asked)
            if skipped > len(self.questions):
                raise ranks.AgreedError(
                    "almost all questions that are asked next have prompts that are too long: "
                    "raise --max_prompt_tokens.")
        if skipped and not self.state.skipped_questions:
            progress.note(f"note: a question of {self.questions.name} is left out, because its "
                          f"prompt is longer than {self.questions.max_prompt_tokens} tokens, or "
                          "something is empty; the next one is asked instead. summary.json counts "
                          "them.")
        self.state.skipped_questions += skipped
        return ranks.split_over_ranks(asked)

    def numbers_ahead(self):
        """The numbers of the questions that the run asks."""
        state, size = self.state, len(self.questions)
        of_steps = (self.steps - state.step) * self.per_step
        count = min(self.total - state.position, of_steps, size)
        return numbers_of(state.position, count, size, self.seed)

    def learning_rate(self, peak):
        """The learning rate in the middle of the next step.

        The run ends after its steps or its questions, whichever comes first. A step takes
        `per_step` questions. With dynamic sampling it may take more: as many as the earlier steps
        took on average.
        """
        state = self.state
        # in units of `per_step` questions
        end = math.ceil(self.total / self.per_step)
        taken = state.position / self.per_step
        average = min(self.algorithm.max_rollouts, max(1, taken / max(1, state.step)))
        expected = min(average, end - taken)
        done = max((state.step + 0.5) / self.steps, (taken + expected / 2) / end)
        return learning_rate(done, peak, self.config.update.warmup)

    def count(self, of_step):
        """Add a Step."""
        state = self.state
        state.step += 1
        state.seconds += of_step.metrics["seconds/total"]
        state.steps_without_signal += of_step.metrics["loss"] is None
        state.skipped_updates += of_step.metrics["skipped_updates"]
        if of_step.metrics["kl"] is not None:
            state.recent_kl = [*state.recent_kl, of_step.metrics["kl"]][-WINDOW:]
        for skipped in of_step.skipped:
            state.skipped_in_a_row = state.skipped_in_a_row + 1 if skipped else 0
        if self.algorithm.k_by_difficulty:
            state.past += ranks.gather(of_step.rollout.total.mean(1).tolist())

    def measure(self, of_step):
        """{custom/NAME: number} of a Step. If they fail, the run goes on: nothing depends on them.
        """
        numbers, problems = self.custom_metrics(of_step)
        if problems and not self.state.hook_failures:
            progress.note(f"note: the custom metrics fail: {problems[0]} The run goes on without "
                          "them, and summary.json counts the steps in which they fail.")
        self.state.hook_failures += bool(problems)
        return numbers

    def look_at_rewards(self, of_step):
        """From the first value on that is no verdict nothing is called right or wrong."""
        function = self.reward_functions[0].function
        values = of_step.rollout.rewards[0].flatten().tolist()
        found = any(is_graded(function, value) for value in values)
        if is_custom(function) and any(ranks.gather([found])):
            self.show_rewards()
        if self.config.data.measure == "reward":
            of_step.metrics.update(accuracy=None, all_right=None, all_wrong=None)

    def show_rewards(self):
        """The first reward is no verdict: run.json keeps this."""
        if self.config.data.measure == "accuracy":
            self.config.data.measure = "reward"
            keep_options(self.config.run.output_dir, self.config)
            progress.note(
                f"note: {self.reward_functions[0].name} pays more than 0 and 1. From now on the "
                "table shows the mean reward, and nothing is called right or wrong.")

    @property
    def evaluates(self):
        """Whether --eval_every asks for an evaluation after this step."""
        every = self.config.data.eval_every
        if not every or self.went_too_far:  # that model is not kept, so it cannot be the best
            return False
        return self.state.step % every == 0 or self.finished

    def count_evaluation(self, scores):
        """Add an evaluation. Returns what the log says of it."""
        state, name = self.state, self.config.data.measure
        state.evaluation_seconds += scores["seconds"]
        value = scores["greedy"][name]
        # of equal ones the earliest is the best; an accuracy says nothing of a mean reward
        if value > state.best.get(name, -math.inf):
            self.better = {"step": state.step, name: value}
        return {f"eval_{name}": value, "eval_length": scores["greedy"]["length"]}

    def save(self, last):
        """Write a checkpoint of this step, if one is due: also if it is the best one so far. last:
        the run ends with this step.

        While updates fail, the last good checkpoint stays the newest. If --stop_kl ends the run,
        the one from before does.
        """
        state, better, self.better = self.state, self.better, {}
        due = better or state.step % self.config.run.save_every == 0
        if self.went_too_far or not (last or due and not state.skipped_in_a_row):
            return
        before = state.best
        state.best = better or before
        if not checkpoint.save(self.config.run.output_dir, self.networks, state):
            state.best = before
            if last:
                raise UserError(f"the run has ended at step {state.step}. What it learned after "
                                "its last checkpoint is lost.")

    def refuse_failing_updates(self):
        """End a run whose updates fail one after the other. Its last good checkpoint stays the
        newest."""
        failed = self.state.skipped_in_a_row
        if failed >= BAD_UPDATES:
            raise UserError(
                f"stopped at step {self.state.step}: {failed} updates in a row had a loss or a "
                "gradient that is not finite, and were skipped. Lower --lr, or look for NaN in a "
                f"loss of your own. {how_to_resume(self.config.run.output_dir)}")

    def go_back(self):
        """After --stop_kl has ended the run: take the networks of the newest checkpoint. Says so,
        and returns the sentence."""
        options = self.config.run
        folder = checkpoint.resume(options.output_dir)[0]
        source, device = model_of(self.config), self.networks.model.device
        self.networks = None  # the old ones leave the memory before the others are loaded
        gc.collect()  # a layer that is recomputed refers to itself
        self.networks = build(self.config, self.algorithm, source, device, folder)
        sentence = (
            f"--stop_kl {options.stop_kl:g} ends the run at step {self.state.step}, because the KL "
            f"to the reference was {fmean(self.state.recent_kl):.3g} on average over the last "
            f"{WINDOW} steps with an update; the model of the run is {Path(folder).name}, and "
            "--resume with a larger --stop_kl goes on from there.")
        progress.note(sentence)
        return sentence


def model_of(config):
    """The hub name or folder that a run starts from."""
    return resolve_model(base_model(config.data.model, config.data.dataset))


def learning_rate(done, peak, warmup):
    """Linear warm-up, then a cosine down to 0. done: the share of the run that is over. warmup: the
    share that warms up."""
    if done <= warmup:
        return peak * done / warmup
    x = (done - warmup) / (1 - warmup)
    return peak * 0.5 * (1 + math.cos(math.pi * x))
