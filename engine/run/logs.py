"""What a run writes and prints: the lines of its steps, its summary, its picture."""

from dataclasses import asdict
from pathlib import Path

from engine.base import files, progress, ranks
from engine.run import checkpoint
from engine.run.command_line import flat
from engine.run.metrics import COUNTS, first_group, phase_totals
from engine.run.trackers import Tracker

LINES = ("metrics.jsonl", "samples.jsonl")  # a line of each for each step
COMPARED = [  # (title, how it stands in the scores)
    ("accuracy, greedy", ("greedy", "accuracy")),
    ("accuracy, sampled", ("sampled", "accuracy")),
    ("completion length, sampled (tokens)", ("sampled", "length")),
    ("seconds to sample these answers", ("seconds",)),
]


class Logs:
    """The logs of a run that starts, or goes on, after `last_step`. Only the first rank writes."""

    def __init__(self, config, last_step, tokenizer):
        self.tokenizer = tokenizer
        self.folder, self.first = Path(config.run.output_dir), ranks.rank() == 0
        if self.first:
            begin(self.folder, last_step)
        name = config.run.log if self.first else None
        self.tracker = Tracker(name, self.folder, last_step, flat(config))

    def write(self, step, of_step, lr):
        """Log a Step, number `step` of the run."""
        metrics = {"step": step} | of_step.metrics | {"lr": lr}
        if self.first:
            files.append(self.folder / "metrics.jsonl", metrics)
            sample = first_group(of_step, self.tokenizer)
            files.append(self.folder / "samples.jsonl", {"step": step} | sample)
            self.tracker.log(step, metrics)

    def close(self):
        self.tracker.close()


def begin(run_dir, last_step):
    """Remove the lines of later steps, which the resumed run writes again, and the summary, which
    marks a finished run."""
    for name in LINES:
        rows = files.read(run_dir / name)
        kept = [row for row in rows if isinstance(row, dict) and row["step"] <= last_step]
        files.write(run_dir / name, files.as_lines(kept))
    (run_dir / checkpoint.SUMMARY).unlink(missing_ok=True)


# --- what is printed ---


def describe_step(algorithm, max_new_tokens, before, questions, evaluated):
    """One line: what a step samples and trains on. before: questions of a device before allocation.
    questions: of a step, all devices, after it. evaluated: questions, at most."""
    G, k, rounds = algorithm.group_size, algorithm.k, algorithm.max_rollouts
    times = f", up to {rounds} times" if rounds > 1 else ""
    more = algorithm.questions_per_step > before
    allocated = f" (after allocation; before: {before} per device)" if more else ""
    kept = f"{questions * k}, k = {k} of each {G}" if k < G else "all of them"
    at_most = "at most " if algorithm.ks else ""
    scored = f"at most {evaluated} questions" if evaluated else "nothing"
    return (
        f"each step, over all devices: {questions} questions{allocated} × {G} completions = "
        f"{questions * G} sampled{times}, at most {max_new_tokens} tokens each; trained on: "
        f"{at_most}{kept}. Evaluated before and after training: {scored}."
    )


def announce(config, run, notes):
    """Print the notes, and what the next step does."""
    for note in dict.fromkeys(notes):
        progress.note(f"note: {note}")
    questions = min(run.per_step, run.total)
    before = config.row.questions_per_step
    longest = config.sampling.max_new_tokens
    scored = config.data.eval_questions if config.data.eval_dataset else 0
    progress.note(describe_step(run.algorithm, longest, before, questions, scored))
    if run.hooks.schedule:
        progress.note(f"the schedule in {run.hooks.path} changes this during the run.")


def show_step(bar, name, run, metrics, first):
    """Move the bar. After the first step, say how long the others take."""
    facts = f"accuracy {metrics['accuracy']:.2f}, length {metrics['length']:.0f}"
    bar.set_description_str(f"{name}, {facts}", refresh=False)
    bar.total = run.steps
    bar.update()
    step, seconds = run.state.step, metrics["seconds/total"]
    if first and step < run.steps:
        left = progress.duration((run.steps - step) * seconds)
        progress.note(f"step {step} took {seconds:.1f} s: the others take about {left}.")


def finish(config, algorithm, run, after, notes):
    """Write the summary and the picture of a finished run, and print its table."""
    if ranks.rank() > 0:
        return
    from engine.run.curves import curves  # matplotlib takes half a second to import

    folder = Path(config.run.output_dir)
    rows = files.read(folder / "metrics.jsonl")
    state = asdict(run.state)
    del state["past"]
    summary = {"algorithm": algorithm.name, "k": algorithm.k, **state, "notes": notes}
    summary["after"] = after
    for name in COUNTS:
        summary[name] = sum(row[name] for row in rows)
    summary["phases"] = phase_totals(rows)
    summary["checkpoint"] = str(checkpoint.newest(folder))
    files.write(folder / checkpoint.SUMMARY, files.as_json(summary, indent=2))
    curves(folder)
    report(summary)


def report(summary):
    """Print the table at the end of a run, and the model's answers to the same questions before and
    after training."""
    if summary["before"]:
        compare(summary["before"], summary["after"])
    phases = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in summary["phases"].items())
    print(f"\ntrained on {summary['questions']} questions in {summary['step']} steps and "
          f"{summary['seconds']:.0f} s: {phases}")
    model = summary["checkpoint"]
    print(f"the model: {model}\n")
    print("from transformers import AutoModelForCausalLM, AutoTokenizer")
    print(f'model = AutoModelForCausalLM.from_pretrained("{model}")')
    print(f'tokenizer = AutoTokenizer.from_pretrained("{model}")')


def compare(before, after):
    """Print the scores before and after training, and some answers."""
    print(f"\n{'':36}{'before':>10}{'after':>10}")
    for title, names in COMPARED:
        old, new = before, after
        for name in names:
            old, new = old[name], new[name]
        print(f"{title:36}{old:10.3f}{new:10.3f}")
    for old, new in zip(before["examples"], after["examples"]):
        gold = old["answer"].strip().splitlines()[-1]
        print(f"\n{old['question'].strip()}   (gold answer: {gold})")
        for name, row in [("before", old), ("after", new)]:
            verdict = "right" if row["correct"] else "wrong"
            print(f"  {name:7}{verdict}   {row['completion']!r:.200}")
