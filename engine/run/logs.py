"""What a run writes and prints: its logs, the seconds of each phase, the table at its end."""

import os
import signal
import time

from engine.base import files, progress, ranks
from engine.run import checkpoint


def start_logs(run_dir, step):
    """Prepare the logs of a run that starts, or continues, after `step`."""
    for log in ("metrics.jsonl", "samples.jsonl"):
        cut(run_dir / log, step)
    (run_dir / "summary.json").unlink(missing_ok=True)  # this file marks a finished run


def summed_up(run_dir, summary, counts):
    """The summary of a finished run. counts: the metrics that are added up over the steps."""
    rows = files.read(run_dir / "metrics.jsonl")
    summary |= {name: sum(row[name] for row in rows) for name in counts}
    summary |= {"phases": phase_totals(rows), "checkpoint": str(checkpoint.newest(run_dir))}
    del summary["history"]
    return summary


def cut(path, last_step):
    """Remove the lines of the steps after `last_step`: the resumed run writes them again."""
    rows = [
        row for row in files.read_whole(path) if isinstance(row, dict) and row["step"] <= last_step
    ]
    files.write(path, files.as_lines(rows))
    if len(rows) < last_step:
        progress.note(
            f"note: {path} lacks {last_step - len(rows)} of the {last_step} steps so far: "
            "their lines cannot be read."
        )


class Interrupt:
    """After Ctrl-C, a scheduler's SIGTERM, or SIGHUP, the run finishes its step and ends. A second
    one ends it at once.

    SIGHUP says that the terminal is gone, for example with its ssh connection; `nohup` lets a run
    ignore it. A scheduler and torchrun may both pass on one signal, so a signal within a second of
    the first does not count. """

    def __enter__(self):
        self.asked = self.noted = 0
        numbers = [signal.SIGINT, signal.SIGTERM]
        numbers += [signal.SIGHUP] * (signal.getsignal(signal.SIGHUP) != signal.SIG_IGN)
        self.before = {number: signal.signal(number, self.note) for number in numbers}
        return self

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def note(self, number, frame):
        if not self.noted:
            self.noted, self.when = number, time.monotonic()
            patience = (
                os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30)
                if "TORCHELASTIC_RUN_ID" in os.environ
                else 0
            )
            progress.note("finishing this step; once more to stop now"
                          + (f" (torchrun waits {patience} s for it)" if patience else ""))
        elif time.monotonic() > self.when + 1:
            raise KeyboardInterrupt

    def share(self, device):
        """Tell all ranks what one rank was asked. No rank obeys before, so all ranks end after the
        same step."""
        self.asked = int(ranks.all_sum({"noted": self.noted}, device, op="max")["noted"])

    @property
    def exit_code(self):
        """130 after Ctrl-C. 0 after SIGTERM or SIGHUP, because a run that is ended from outside has
        not failed."""
        return 130 if self.asked == signal.SIGINT else 0


def a_step(update, algorithm, before_allocation, max_new_tokens, questions, evaluated):
    """One line: what a step samples and trains on. questions: of a step, all devices. evaluated:
    questions."""
    G, k, devices = algorithm.group_size, algorithm.k, ranks.world_size()
    times = f", up to {algorithm.max_rollouts} times" if algorithm.max_rollouts > 1 else ""
    kept = "all of them"
    if k < G:
        rule = (
            f"at most {questions * k}, {min(algorithm.ks)} to {k}"
            if algorithm.ks
            else f"{questions * k}, k = {k}"
        )
        kept = f"{rule} of each {G}"
    if algorithm.questions_per_step > before_allocation:
        kept += f" (allocation: {algorithm.questions_per_step} questions per device in place of {before_allocation})"
    fall = "" if update.lr_schedule == "constant" else f", {update.lr_schedule} to 0"
    return (
        f"each step{f' on {devices} devices' * (devices > 1)}: {questions} questions × {G} "
        f"completions = {questions * G} sampled{times}, at most {max_new_tokens} tokens "
        f"each; trained on: {kept}. Learning rate: {update.lr:g} at its peak{fall}. "
        f"Evaluated: "
        f"{f'{evaluated} questions, before and after training' if evaluated else 'nothing'}."
    )


def duration(seconds):
    """90 → "90 s", 900 → "15 min", 9000 → "2 h 30 min"."""
    minutes = round(seconds / 60)
    return (f"{seconds:.0f} s" if seconds < 100 else f"{minutes} min" if minutes < 100
            else f"{minutes // 60} h {minutes % 60} min")


def phase_totals(rows):
    """{phase: seconds}, added up over the rows of a run's metrics."""
    names = dict.fromkeys(name for row in rows for name in row if name.startswith("seconds/"))
    return {
        name.removeprefix("seconds/"): sum(row.get(name, 0.0) for row in rows) for name in names
    }


def report(summary):
    """Print the table at the end of a run, and the model's answers to the same questions before and
    after training."""
    before, after = summary["before"], summary["after"]
    if before:
        print(f"\n{'':36}{'before':>10}{'after':>10}")
        for name, key in [("accuracy, greedy", "greedy"), ("accuracy, sampled", "sampled")]:
            print(f"{name:36}{before[key]['accuracy']:10.3f}{after[key]['accuracy']:10.3f}")
        print(f"{'completion length, sampled (tokens)':36}"
              f"{before['sampled']['length']:10.1f}{after['sampled']['length']:10.1f}")
        print(
            f"{'seconds to sample these answers':36}{before['seconds']:10.1f}{after['seconds']:10.1f}"
        )
        for old, new in zip(before["examples"], after["examples"]):
            print(
                f"\n{old['question'].strip()}   (gold answer: "
                f"{old['answer'].strip().splitlines()[-1]})"
            )
            for name, row in [("before", old), ("after", new)]:
                print(
                    f"  {name:7}{'right' if row['correct'] else 'wrong'}   "
                    f"{row['completion']!r:.200}"
                )
    print(
        f"\ntrained on {summary['questions']} questions in {summary['step']} steps and "
        f"{summary['seconds']:.0f} s: ",
        end="",
    )
    print(", ".join(f"{name} {seconds:.0f} s" for name, seconds in summary["phases"].items()))
    print(
        f"the model: {summary['checkpoint']}\n\nfrom transformers import AutoModelForCausalLM, "
        "AutoTokenizer"
    )
    for name, kind in [("model", "AutoModelForCausalLM"), ("tokenizer", "AutoTokenizer")]:
        print(f'{name} = {kind}.from_pretrained("{summary["checkpoint"]}")')
