"""What a run writes and prints: its folder, its logs, the seconds of each phase, the table at its end."""

import contextlib
import json
import os
import signal
import time
from dataclasses import asdict
from pathlib import Path

from engine.run import checkpoint, progress, ranks
from engine.run.options import UserError


def new_folder(stem):
    """Make the folder runs/STEM-N, with the first free N: every run gets a folder of its own."""
    n = 1
    while True:
        folder = Path("runs") / f"{stem}-{n}"
        try:
            folder.mkdir(parents=True)
            return str(folder)
        except FileExistsError:
            n += 1


def run_folder(config):
    """The folder of the run: --output_dir, or a new one. The folder is made if it does not exist."""
    folder = config.output_dir or new_folder(f"{Path(config.dataset).stem}-{config.algorithm}")
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the folder {folder} of the run cannot be made ({error.strerror}): "
                        "name another --output_dir.") from None
    return folder


def drop_if_empty(folder):
    """Remove the folder of a run that was refused before it wrote anything."""
    with contextlib.suppress(OSError):  # it is not empty, or another rank was faster
        os.rmdir(folder)


def start_logs(run_dir, config, step):
    """Prepare the files of a run that starts, or continues, after `step`."""
    for log in ("metrics.jsonl", "samples.jsonl"):
        cut(run_dir / log, step)
    (run_dir / "summary.json").unlink(missing_ok=True)  # this file marks a finished run
    write(run_dir / "config.json", json.dumps(asdict(config) | {"resume": False}, indent=2) + "\n")


def write_summary(run_dir, summary, counts):
    """Write and print the summary of a finished run. counts: the metrics that are added up over the steps."""
    rows = read(run_dir / "metrics.jsonl")
    summary |= {name: sum(row[name] for row in rows) for name in counts}
    summary |= {"phases": phase_totals(rows), "checkpoint": str(checkpoint.newest(run_dir))}
    del summary["history"]
    write(run_dir / "summary.json", json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    report(summary)


def as_lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def append(path, *rows):
    """Add rows to a log, one line of JSON each."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(as_lines(rows))


def read(path):
    # not splitlines(), which also splits at U+2028: a completion may hold that character
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").split("\n") if line]


def read_whole(path):
    """The rows of a log, up to a line that was cut off because the program was killed. Without a file: []."""
    rows = []
    for line in Path(path).read_text(encoding="utf-8").split("\n") if Path(path).is_file() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def cut(path, last_step):
    """Remove the lines of the steps after `last_step`: the resumed run writes them again."""
    write(path, as_lines(row for row in read_whole(path) if row["step"] <= last_step))


def write(path, text):
    """Replace a file as a whole: a crash leaves the old file or the new file, never a part."""
    new = Path(f"{path}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


class Interrupt:
    """After Ctrl-C, or a scheduler's SIGTERM, the run finishes its step and ends. A second one ends it at once.

    A scheduler and torchrun may both pass on one signal, so a signal within a second of the first does not count.
    """

    def __enter__(self):
        self.asked = self.noted = 0
        self.before = {number: signal.signal(number, self.note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def note(self, number, frame):
        if not self.noted:
            self.noted, self.when = number, time.monotonic()
            patience = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30) if "TORCHELASTIC_RUN_ID" in os.environ else 0
            progress.note("finishing this step; once more to stop now"
                          + (f" (torchrun waits {patience} s for it)" if patience else ""))
        elif time.monotonic() > self.when + 1:
            raise KeyboardInterrupt

    def share(self, device):
        """Tell all ranks what one rank was asked. No rank obeys before, so all ranks end after the same step."""
        self.asked = int(ranks.all_sum({"noted": self.noted}, device, op="max")["noted"])

    @property
    def exit_code(self):
        """130 after Ctrl-C. 0 after SIGTERM, because a run that its scheduler ends has not failed."""
        return 0 if self.asked == signal.SIGTERM else 130


def a_step(config, algorithm, questions, evaluated):
    """One line: what a step samples and trains on. questions: of a step, all devices. evaluated: questions."""
    G, k, devices = algorithm.group_size, algorithm.k, ranks.world_size()
    times = f", up to {algorithm.max_rollouts} times" if algorithm.max_rollouts > 1 else ""
    kept = "all of them"
    if k < G:
        rule = f"at most {questions * k}, {min(algorithm.ks)} to {k}" if algorithm.ks else f"{questions * k}, k = {k}"
        kept = f"{rule} of each {G}"
    if algorithm.questions_per_step > config.questions_per_step:
        kept += f" (allocation: {algorithm.questions_per_step} questions per device in place of {config.questions_per_step})"
    fall = "" if config.lr_schedule == "constant" else f", {config.lr_schedule} to 0"
    return (f"each step{f' on {devices} devices' * (devices > 1)}: {questions} questions × {G} completions = "
            f"{questions * G} sampled{times}, at most {config.max_new_tokens} tokens each; trained on: {kept}. "
            f"Learning rate: {config.lr:g} at its peak{fall}. "
            f"Evaluated: {f'{evaluated} questions, before and after training' if evaluated else 'nothing'}.")


def duration(seconds):
    """90 → "90 s", 900 → "15 min", 9000 → "2 h 30 min"."""
    minutes = round(seconds / 60)
    return (f"{seconds:.0f} s" if seconds < 100 else f"{minutes} min" if minutes < 100
            else f"{minutes // 60} h {minutes % 60} min")


def phase_totals(rows):
    """{phase: seconds}, added up over the rows of a run's metrics."""
    names = dict.fromkeys(name for row in rows for name in row if name.startswith("seconds/"))
    return {name.removeprefix("seconds/"): sum(row.get(name, 0.0) for row in rows) for name in names}


def report(summary):
    """Print the table at the end of a run, and the model's answers to the same questions before and after training."""
    before, after = summary["before"], summary["after"]
    if before:
        print(f"\n{'':36}{'before':>10}{'after':>10}")
        for name, key in [("accuracy, greedy", "greedy"), ("accuracy, sampled", "sampled")]:
            print(f"{name:36}{before[key]['accuracy']:10.3f}{after[key]['accuracy']:10.3f}")
        print(f"{'completion length, sampled (tokens)':36}"
              f"{before['sampled']['length']:10.1f}{after['sampled']['length']:10.1f}")
        print(f"{'seconds to sample these answers':36}{before['seconds']:10.1f}{after['seconds']:10.1f}")
        for old, new in zip(before["examples"], after["examples"]):
            print(f"\n{old['question'].strip()}   (gold answer: {old['answer'].strip().splitlines()[-1]})")
            for name, row in [("before", old), ("after", new)]:
                print(f"  {name:7}{'right' if row['correct'] else 'wrong'}   {row['completion']!r:.200}")
    print(f"\ntrained on {summary['questions']} questions in {summary['step']} steps and {summary['seconds']:.0f} s: ",
          end="")
    print(", ".join(f"{name} {seconds:.0f} s" for name, seconds in summary["phases"].items()))
    print(f"the model: {summary['checkpoint']}")
