"""What a run leaves behind and shows: its folder, its logs, the seconds of each phase, the table at its end."""

import json
import signal
from dataclasses import asdict
from pathlib import Path

from engine.run import checkpoint, ranks


def new_folder(stem):
    """runs/STEM-N with the first free N: every run gets a folder of its own."""
    n = 1
    while True:
        folder = Path("runs") / f"{stem}-{n}"
        try:
            folder.mkdir(parents=True)
            return str(folder)
        except FileExistsError:
            n += 1


def run_folder(config):
    """The folder of the run, made where it is not there: --output_dir, or a new one."""
    folder = config.output_dir or new_folder(f"{Path(config.dataset).stem}-{config.algorithm}")
    Path(folder).mkdir(parents=True, exist_ok=True)
    return folder


def open_run(run_dir, config, step):
    """The files of a run that goes on after `step`."""
    for log in ("metrics.jsonl", "samples.jsonl"):
        cut(run_dir / log, step)
    (run_dir / "summary.json").unlink(missing_ok=True)  # it is the mark of a finished run
    write(run_dir / "config.json", json.dumps(asdict(config) | {"resume": False}, indent=2) + "\n")


def close_run(run_dir, summary, counts):
    """The summary of a finished run: with its counts added up over the steps, and its newest checkpoint."""
    rows = read(run_dir / "metrics.jsonl")
    summary |= {name: sum(row[name] for row in rows) for name in counts}
    summary |= {"phases": phase_totals(rows), "checkpoint": str(checkpoint.newest(run_dir))}
    del summary["history"]
    write(run_dir / "summary.json", json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    report(summary)


def as_lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def append(path, *rows):
    """More lines of a JSON-lines log."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(as_lines(rows))


def read(path):
    # not splitlines(): a completion may hold other line ends, as U+2028
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").split("\n") if line]


def read_whole(path):
    """The rows of a log up to a line that was cut off, as where the program was killed while it wrote; none of no file."""
    rows = []
    for line in Path(path).read_text(encoding="utf-8").split("\n") if Path(path).is_file() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def cut(path, last_step):
    """Drop the lines that come after `last_step`: the resumed run writes them again."""
    write(path, as_lines(row for row in read_whole(path) if row["step"] <= last_step))


def write(path, text):
    """Replace a file as a whole: a crash leaves the old one or the new one."""
    beside = Path(f"{path}.new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


class Interrupt:
    """Ctrl-C, or a scheduler's request to end, is noted and the step at hand is finished; a second Ctrl-C does not wait."""

    def __enter__(self):
        self.asked = self.noted = 0
        self.before = {number: signal.signal(number, self.note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def note(self, number, frame):
        if self.noted and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.noted = max(self.noted, number)

    def share(self, device):
        """What one rank was asked holds for all, and only from here on: so they all end after the same step."""
        self.asked = int(ranks.all_sum({"noted": self.noted}, device, op="max")["noted"])

    @property
    def exit_code(self):
        """0 where the scheduler asked: to be ended by it is no failure."""
        return 0 if self.asked == signal.SIGTERM else 130


def phase_totals(rows):
    """{phase: seconds} over the rows of a run's metrics."""
    names = dict.fromkeys(name for row in rows for name in row if name.startswith("seconds/"))
    return {name.removeprefix("seconds/"): sum(row.get(name, 0.0) for row in rows) for name in names}


def report(summary):
    """The table at the end of a run, and what the model said to the same questions before and after."""
    before, after = summary["before"], summary["after"]
    if before:
        print(f"\n{'':36}{'before':>10}{'after':>10}")
        for name, key in [("accuracy, greedy", "greedy"), ("accuracy, sampled", "sampled")]:
            print(f"{name:36}{before[key]['accuracy']:10.3f}{after[key]['accuracy']:10.3f}")
        print(f"{'completion length, sampled (tokens)':36}{before['sampled']['length']:10.1f}{after['sampled']['length']:10.1f}")
        print(f"{'seconds to sample these answers':36}{before['seconds']:10.1f}{after['seconds']:10.1f}")
        for old, new in zip(before["examples"], after["examples"]):
            print(f"\n{old['question'].strip()}   (gold answer: {old['answer'].strip().splitlines()[-1]})")
            for name, row in [("before", old), ("after", new)]:
                print(f"  {name:7}{'right' if row['correct'] else 'wrong'}   {row['completion']!r:.200}")
    print(f"\ntrained on {summary['questions']} questions in {summary['step']} steps and {summary['seconds']:.0f} s: ", end="")
    print(", ".join(f"{name} {seconds:.0f} s" for name, seconds in summary["phases"].items()))
    print(f"the model: {summary['checkpoint']}")
