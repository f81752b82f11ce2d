"""The state of a run: how far it is, what it saves, and why it ends."""

import math
import random
import signal
from pathlib import Path

import torch

from engine.base import files, progress, ranks
from engine.base.errors import CANNOT_WRITE, UserError, one_line, refuse
from engine.model.networks import save_merged
from engine.run import checkpoint, folder
from engine.run.interrupt import Interrupt
from engine.run.metrics import (
    COUNTS,
    describe_step,
    phase_totals,
    report,
    start_logs,
)
from engine.run.options import flat
from engine.run.trackers import Tracker
from engine.tasks.questions import fingerprint, take

BAD_UPDATES = 5  # the run ends after this many updates in a row that are not finite

# after the warm-up: the share of the peak, x from 0 to 1. A schedule of your own is a line here
SCHEDULES = {
    "cosine": lambda x: 0.5 * (1 + math.cos(math.pi * x)),
    "linear": lambda x: 1 - x,
    "constant": lambda x: 1.0,
}


def learning_rate(progress, peak, warmup, schedule="cosine"):
    """Linear warm-up, then the schedule. progress: in [0, 1]. warmup: the share of the run that
    warms up."""
    if progress <= warmup:
        return peak * progress / warmup
    return peak * SCHEDULES[schedule]((progress - warmup) / (1 - warmup))


def run_progress(steps_done, steps, questions_done, questions, per_step):
    """How far the run is in the middle of its next step, in [0, 1].

    The run ends after its steps or its questions, whichever comes first. A step takes `per_step`
    questions. With dynamic sampling it may take more: as many as the earlier steps took on average.
    """
    # in units of `per_step` questions
    end, taken = math.ceil(questions / per_step), questions_done / per_step
    expected = min(max(1, taken / max(1, steps_done)), end - taken)
    return max((steps_done + 0.5) / steps, (taken + expected / 2) / end)


class Run:
    """The state of a run, and everything that happens between two steps.

    source: the model that the run started from. saved: the state in the checkpoint that is resumed,
    or None.

        with run:
            while not run.over:
                run.record(train_step(…, run.next_questions, run.begin_step(), …))
    """

    def __init__(self, config, algorithm, networks, questions, source, saved=None):
        self.config, self.algorithm, self.networks, self.questions = (
            config, algorithm, networks, questions,
        )
        self.folder, world = Path(config.run.output_dir), ranks.world_size()
        self.total = max(1, round(config.run.epochs * len(questions)))  # in questions
        # a resumed run starts from these values; the order of the questions and the random numbers
        # follow from the seed
        self.state = {
            "step": 0, "position": 0, "seconds": 0.0, "no_signal_steps": 0, "skipped_updates": 0,
            "skipped_in_a_row": 0,
            "history": [],  # the mean reward of each question, for GFPO's adaptive k
            "before": {}, "source": source, "data": fingerprint(questions),
            "per_step": algorithm.questions_per_step * world,
        }
        refuse((saved and saved[name] != self.state[name], f"{self.folder} was started with "
                f"another {what}: put that back, or start a new run.")
               for name, what in [("source", "model"), ("data", "data set")])
        self.state |= saved or {}
        # as at the start of the run, even if the number of devices has changed
        self.per_step = self.state["per_step"]
        self.steps = min(config.run.steps or math.inf, math.ceil(self.total / self.per_step))
        few, summary = min(self.per_step, self.total), self.folder / "summary.json"
        refuse([
            (world > few, f"{world} devices for {few} questions: start at most one process per "
                          "question."),
            (saved and self.state["step"] >= self.steps and summary.exists(),
             f"{self.folder} has finished its {self.steps} steps: ask for more with --steps or "
             "--epochs, or start a new run."),
        ])
        self.resumed, self.stopped = bool(saved), False
        refreshed = config.update.refresh_reference and networks.reference.model
        found = {"critic": networks.critic, "reference": refreshed}
        # what a checkpoint holds besides the policy
        self.saved_networks = {name: network for name, network in found.items() if network}

    @property
    def at_end(self):
        return (
            self.stopped or self.state["step"] >= self.steps or self.state["position"] >= self.total
        )

    @property
    def over(self):
        return self.at_end or bool(self.interrupt.asked)

    # --- between the steps ---

    def open(self, examine, notes, evaluated):
        """Evaluate and save the model of a new run, and open the logs. From here on, the run can be
        resumed.

        evaluated: how many questions `examine` asks.
        """
        config, first = self.config, ranks.rank() == 0
        for note in dict.fromkeys(notes):
            progress.note(f"note: {note}")
        questions = min(self.per_step, self.total)
        progress.note(describe_step(
            self.algorithm, config.sampling.max_new_tokens, config.row.questions_per_step,
            questions, evaluated))
        if first:
            folder.keep_options(self.folder, flat(config), self.state["step"])
        if not self.resumed:
            self.state["before"] = examine(label="evaluation before")
            if not self.save():
                raise UserError("stopped, because a run that cannot be saved would be lost: "
                                "free the disk, or name another --output_dir.")
        if first:
            start_logs(self.folder, self.state["step"])
        self.tracker = Tracker(
            config.run.log if first else None, self.folder, self.state["step"], flat(config))
        ranks.barrier()

    def __enter__(self):
        self.interrupt, self.first = Interrupt().__enter__(), self.state["step"] + 1
        self.bar = progress.bar(
            self.algorithm.name, self.steps, "steps", done=self.state["step"], leave=True)
        return self

    def __exit__(self, *error):
        self.bar.set_postfix_str("", refresh=False)  # `close` shows the bar, in a file too
        self.bar.close()
        self.interrupt.__exit__(*error)

    def begin_step(self):
        """Set the learning rates. Returns the step's generator of random numbers.

        The generator follows from the seed and the step, so a resumed run draws the same numbers.
        It is the same on every rank: rollout.py says what is drawn for a question, and what for a
        rank.
        """
        rates, state = self.config.update, self.state
        progress = run_progress(
            state["step"], self.steps, state["position"], self.total, self.per_step
        )
        groups = self.networks.optimizer.param_groups
        for group, peak in zip(groups, self.networks.peaks, strict=True):
            group["lr"] = learning_rate(progress, peak, rates.warmup, rates.lr_schedule)
        return random.Random(f"{self.config.run.seed} {state['step'] + 1} 0")

    def next_questions(self, count=None):
        """This device's share of the next `count` questions, or None if none are left.

        count None: the questions of a whole step.
        """
        position = self.state["position"]
        count = min(count or self.per_step, self.total - position)
        self.state["position"] += count
        if count:
            return ranks.share(take(self.questions, position, count, self.config.run.seed))

    def record(self, of_step):
        """Log a Step, update the state, save a checkpoint if one is due, and find out whether the
        run ends."""
        state, step, metrics = self.state, self.state["step"] + 1, of_step.metrics
        if self.algorithm.ks:
            state["history"] += ranks.gather(of_step.mean_rewards)
        for skipped in of_step.skipped:
            state["skipped_in_a_row"] = state["skipped_in_a_row"] + 1 if skipped else 0
        seconds = metrics["seconds/total"]
        state |= {"step": step, "seconds": state["seconds"] + seconds,
                  "no_signal_steps": state["no_signal_steps"] + (metrics["loss"] is None),
                  "skipped_updates": state["skipped_updates"] + metrics["skipped_updates"]}
        metrics = {"step": step} | metrics | {"lr": self.networks.optimizer.param_groups[0]["lr"]}
        if ranks.rank() == 0:
            files.append(self.folder / "metrics.jsonl", metrics)
            files.append(self.folder / "samples.jsonl", {"step": step} | of_step.sample)
            self.tracker.log(step, metrics)
        facts = f"accuracy {metrics['accuracy']:.2f}, length {metrics['length']:.0f}"
        self.bar.set_description_str(f"{self.algorithm.name}, {facts}", refresh=False)
        self.bar.update()
        if step == self.first < self.steps:
            left = progress.duration((self.steps - step) * seconds)
            progress.note(f"step {step} took {seconds:.1f} s: the others take about {left}.")
        self.check(metrics)
        refresh = self.config.update.refresh_reference
        if refresh and step % refresh == 0:
            self.networks.reference.model.load_state_dict(self.networks.model.state_dict())
        self.interrupt.share(self.networks.model.device)
        # while updates fail, the last good checkpoint stays the newest
        due = step % self.config.run.save_every == 0 and not state["skipped_in_a_row"]
        if (due or self.over) and not self.save() and self.over:
            raise UserError(
                f"the run has ended at step {step}, but what it learned since its last checkpoint "
                "is lost."
            )

    def check(self, metrics):
        """End a run whose updates fail, or whose policy is too far from the reference."""
        state, limit = self.state, self.config.run.stop_kl
        if state["skipped_in_a_row"] >= BAD_UPDATES:
            raise UserError(
                f"stopped at step {state['step']}: {state['skipped_in_a_row']} updates in a row "
                "had a loss or a gradient that is not finite, and were skipped. Lower --lr, or "
                "look into samples.jsonl. "
                f"{checkpoint.how_to_resume(self.folder)}"
            )
        if limit is not None and metrics["kl"] is not None and metrics["kl"] > limit:
            self.stopped = True
            progress.note(
                f"stopped at step {state['step']}: the KL to the reference is {metrics['kl']:.3g}, "
                f"above --stop_kl {limit}."
            )

    def save(self):
        """Write a checkpoint. Returns whether that worked; if not, the run goes on."""
        progress.say("saving")
        problem = checkpoint.save(
            self.folder, self.networks, self.state, self.saved_networks,
            self.config.run.save_total_limit,
        )
        if problem:
            progress.note(
                f"step {self.state['step']}: the checkpoint could not be written ({problem}). "
                f"{checkpoint.how_to_resume(self.folder)}"
            )
        return not problem

    def close(self, examine, notes):
        """Evaluate the trained model and write the summary, or say how to resume.

        Returns the exit code: 130 after Ctrl-C. After SIGTERM or SIGHUP 0, because a run that is
        ended from outside has not failed.
        """
        self.tracker.close()
        if not self.at_end:
            progress.note(
                f"stopped after step {self.state['step']} of {self.steps}. "
                f"{checkpoint.how_to_resume(self.folder)}"
            )
            return 130 if self.interrupt.asked == signal.SIGINT else 0
        after = examine(label="evaluation after")
        if ranks.rank() == 0:
            from engine.run.curves import curves  # matplotlib takes half a second to import

            rows = files.read(self.folder / "metrics.jsonl")
            summary = {
                "algorithm": self.algorithm.name, "k": self.algorithm.k,
                **self.state, "notes": notes, "after": after,
                **{name: sum(row[name] for row in rows) for name in COUNTS},
                "phases": phase_totals(rows),
                "checkpoint": str(checkpoint.newest(self.folder)),
            }
            del summary["history"]
            files.write(self.folder / "summary.json", files.as_json(summary, indent=2))
            curves([[self.folder]], self.folder / "curves.png")
            report(summary)
            if self.config.devices.merge_lora:
                merged = self.folder / "merged"
                save_merged(summary["checkpoint"], self.state["source"], merged)
                print(f"the model with its adapters merged in: {merged}")
        return 0


def in_one_sentence(error, run_dir):
    """A UserError, if the user can change what the error means, or if another rank has ended; else
    the error."""
    is_alone = ranks.is_alone(error)
    if is_alone:  # torchrun is about to end this process, which first says why
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    kinds = [  # (whether it is this one, what it means)
        (isinstance(error, torch.OutOfMemoryError),
         f"out of memory ({one_line(error)}): `--plan` shows what takes it."),
        (isinstance(error, OSError) and error.errno in CANNOT_WRITE,
         f"{CANNOT_WRITE.get(getattr(error, 'errno', None))}."),
        (isinstance(error, FloatingPointError),
         "the model's logits are no longer finite, because its updates were too large: lower "
         "--lr."),
        (isinstance(error, BrokenPipeError),
         "stopped, because the program that read the output has ended."),
        (is_alone,
         "another process of this job has ended; torchrun names it and its reason."),
    ]
    for applies, reason in kinds:
        if applies:
            return UserError(f"{reason} {checkpoint.how_to_resume(run_dir)}")
    return error
