"""What a run writes and prints: the lines of its steps, its summary, its picture."""

from dataclasses import asdict
from pathlib import Path

from engine.base import files, progress, ranks
from engine.run import checkpoint
from engine.run.command_line import flat
from engine.run.metrics import COUNTS, first_group, phase_totals
from engine.run.trackers import Tracker

MERGE = """
# The checkpoint holds only adapters. To merge them into their model:
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

SOURCE, CHECKPOINT, OUT = "{source}", "{checkpoint}", "{folder}/merged"
model = AutoModelForCausalLM.from_pretrained(SOURCE, dtype=torch.float32)
PeftModel.from_pretrained(model, CHECKPOINT).merge_and_unload().save_pretrained(OUT)
AutoTokenizer.from_pretrained(CHECKPOINT).save_pretrained(OUT)"""
LINES = ("metrics.jsonl", "samples.jsonl")  # a line of each for each step


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


def describe_step(algorithm, questions, max_new_tokens):
    """One line: what a step samples and trains on. questions: of a step, over all devices."""
    G = algorithm.group_size
    k = algorithm.k
    line = (f"each step, over all devices: {questions} questions × {G} completions = "
            f"{questions * G} sampled, at most {max_new_tokens} tokens each")
    if algorithm.max_rollouts > 1:
        line += f", up to {algorithm.max_rollouts} times"
    if k == G:
        return f"{line}; trained on: all of them."
    at_most = "at most " if algorithm.ks else ""
    return f"{line}; trained on: {at_most}{questions * k}, k = {k} of each {G}."


def announce(config, run, notes):
    """Print the notes, and what the next step does."""
    for note in dict.fromkeys(notes):
        progress.note(f"note: {note}")
    if run.state.step:
        progress.note(f"the run goes on after step {run.state.step}.")
    questions = min(run.per_step, run.total)
    progress.note(describe_step(run.algorithm, questions, config.sampling.max_new_tokens))
    if run.hooks.schedule:
        progress.note(f"the schedule in {run.hooks.path} changes this during the run.")


def show_step(bar, name, run, metrics, first):
    """Move the bar. After the first step, say how long the others take."""
    accuracy = metrics["accuracy"]
    length = metrics["length"]
    bar.set_description_str(f"{name}, accuracy {accuracy:.2f}, length {length:.0f}", refresh=False)
    bar.total = run.steps
    bar.update()
    step = run.state.step
    if first and step < run.steps:
        seconds = metrics["seconds/total"]
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
    summary = {"algorithm": algorithm.name, "k": algorithm.k, "per_step": run.per_step}
    summary |= state | {"notes": notes}
    summary["after"] = after
    for name in COUNTS:
        summary[name] = sum(row[name] for row in rows)
    summary["phases"] = phase_totals(rows)
    summary["checkpoint"] = str(checkpoint.newest(folder))
    files.write(folder / checkpoint.SUMMARY, files.as_json(summary, indent=2))
    curves(folder)
    report(summary)
    if config.devices.lora:
        print(MERGE.format(**summary, folder=folder))


def report(summary):
    """Print the table at the end of a run, and the model's answers to the same questions before and
    after training."""
    if summary["before"]:
        compare(summary["before"], summary["after"])
    print(f"\ntrained on {summary['questions']} questions in {summary['step']} steps and "
          f"{summary['seconds']:.0f} s")
    model = summary["checkpoint"]
    print(f"the model: {model}\n")
    print("from transformers import AutoModelForCausalLM, AutoTokenizer")
    print(f'model = AutoModelForCausalLM.from_pretrained("{model}")')
    print(f'tokenizer = AutoTokenizer.from_pretrained("{model}")')


def compare(before, after):
    """Print the scores before and after training, and some answers."""
    print(f"\n{'':20}{'before':>10}{'after':>10}")
    for part in ("greedy", "sampled"):
        for name in ("accuracy", "length"):
            title = f"{name}, {part}"
            print(f"{title:20}{before[part][name]:10.3f}{after[part][name]:10.3f}")
    for old, new in zip(before["examples"], after["examples"]):
        gold = old["answer"].strip().splitlines()[-1]
        print(f"\n{old['question'].strip()}   (gold answer: {gold})")
        show_answer("before", old)
        show_answer("after", new)


def show_answer(when, record):
    verdict = "right" if record["correct"] else "wrong"
    print(f"  {when:7}{verdict}   {record['completion']!r:.200}")
