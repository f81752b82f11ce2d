"""What a run writes and prints: the lines of its steps, its summary, its picture."""

import shlex
import shutil
from dataclasses import asdict
from pathlib import Path

from engine.base import files, progress, ranks
from engine.data.rows import same_rows
from engine.run import checkpoint
from engine.run.config import compared
from engine.run.metrics import COUNTS, first_group, mean, phase_totals
from tasks.table import task_of

LINES = ("metrics.jsonl", "samples.jsonl")  # a line of each for each step
SHORT = 100  # tokens; the table shows only answers that are not longer


class Logs:
    """The logs of a run that starts, or goes on, after `last_step`, and its table on the screen.
    Only the first rank writes and prints.

    The evaluation before training has three examples. The table shows the answers to the first of
    them that was answered wrong, if answers are short.
    ask(i) → the model's greedy answer to test question i, a record; every rank asks.
    """

    def __init__(self, config, state, tokenizer, ask):
        self.tokenizer, self.ask = tokenizer, ask
        self.folder, self.first = Path(config.run.output_dir), ranks.rank() == 0
        if self.first:
            begin(self.folder, state.step)
        short = config.sampling.max_new_tokens <= SHORT
        examples = state.before.get("examples", ()) if short else ()
        self.example = min(examples, key=is_known_right, default=None)
        self.graded = config.data.graded
        begin_table(state.before, self.example, self.graded)

    def write(self, step, of_step, lr):
        """Log a Step, number `step` of the run."""
        metrics = {"step": step} | of_step.metrics | {"lr": lr}
        if self.first:
            files.append(self.folder / "metrics.jsonl", metrics)
            sample = first_group(of_step, self.tokenizer)
            files.append(self.folder / "samples.jsonl", {"step": step} | sample)

    def show(self, run, metrics):
        """Print a line of the table after the steps 1, 2, 4, 8, … and after the last one: the means
        since the line above, and what the model answers now. Print one for each evaluation of
        --eval_every."""
        step, name = run.state.step, "accuracy"
        if run.config.data.graded:
            name = run.first
            if not self.graded:
                begin_table({}, self.example, graded=True)
            self.graded = True
        start = 2 ** (step - 1).bit_length() // 2  # the largest power of 2 below `step`
        if step in (1, 2 * start) or run.finished:
            answer = self.example and self.ask(self.example["index"])
            if self.first:
                rows = files.read(self.folder / "metrics.jsonl")[start:step]
                means = {column: mean([row[column] for row in rows]) for column in (name, "length")}
                steps = f"{start + 1}–{step}" if step > start + 1 else step
                show_line(steps, means, answer, name=name)
        if "eval_length" in metrics:
            name = "reward" if run.judge_grades else "accuracy"
            best = ", the best so far" if run.better else ""
            scores = {column: metrics[f"eval_{column}"] for column in (name, "length")}
            show_line("greedy", scores, None, f"  {name} on {chosen_on(run)}{best}", name)


def is_known_right(record):
    return bool(record["correct"])


def chosen_on(run):
    """The questions of --eval_every, in words."""
    of = "held-out training questions"
    if run.to_choose is run.test:
        of = kind_of_test(run.config.data)
    return f"{len(run.to_choose)} {of}"


def kind_of_test(data):
    """What the questions of the evaluation are."""
    again = data.tested and same_rows(data.dataset, data.tested)
    return "training questions" if again else "test questions"


def begin(run_dir, last_step):
    """Remove the lines of later steps, which the resumed run writes again, and the summary, which
    marks a finished run."""
    for name in LINES:
        kept = [row for row in files.read(run_dir / name) if row["step"] <= last_step]
        files.write(run_dir / name, files.as_lines(kept))
    (run_dir / checkpoint.SUMMARY).unlink(missing_ok=True)


# --- what is printed ---


def describe_step(algorithm, rule, questions):
    """One line: what a step samples and trains on. rule: its name. questions: of a step, over all
    devices."""
    G = algorithm.group_size
    k = algorithm.k
    line = f"Each step: {progress.count(questions, 'question')} × {G} completions"
    if algorithm.max_rollouts > 1:
        line += f", up to {algorithm.max_rollouts} times"
    if k == G:
        return f"{line}; all are trained on."
    number = f"at most {k}" if algorithm.ks else f"the {k}"
    chosen = "with the largest |A|" if rule == "largest_abs" else f"that the rule {rule} chooses"
    return f"{line}; {number} of each {G} {chosen} are trained on."


def announce(config, run, notes):
    """Print what is trained, the notes, and what the next step does."""
    model = run.networks.model
    folder = f" Folder: {config.run.output_dir}" if config.run.output_dir else ""
    progress.note(f"{run.algorithm.name.upper()} on {Path(config.data.dataset).stem}: "
                  f"{model.config.model_type}, {model.num_parameters():,} parameters.{folder}")
    for note in dict.fromkeys(notes):
        progress.note(f"note: {note}")
    if run.state.step:
        progress.note(f"the run goes on after step {run.state.step}.")
    questions = min(run.per_step, run.total)
    progress.note(describe_step(run.algorithm, config.row.keep, questions))
    if run.test and not run.state.step:
        completions = 4 * len(run.test)
        steps = completions / (questions * run.algorithm.group_size)
        progress.note(f"Before and after the run {len(run.test)} {kind_of_test(config.data)} get "
                      f"a greedy and a sampled answer: {completions:,} completions, as many as in "
                      f"{steps:.1f} steps. --eval_questions changes this; 0: none.")
    if config.preview.check_rewards:
        progress.note(f"Now the first step is sampled, at most {config.sampling.max_new_tokens} "
                      "tokens for each completion, and scored. Nothing is trained. For less, lower "
                      "--questions_per_step, --group_size or --max_new_tokens.")
    if run.hooks.schedule:
        progress.note(f"the schedule in {run.hooks.path} changes this during the run.")


def show_step(bar, run, metrics):
    """Move the bar."""
    if run.config.data.graded:
        worth = f"reward {metrics[run.first]:.3g}"
    else:
        worth = f"accuracy {metrics['accuracy']:.2f}"
    words = f"{worth}, length {metrics['length']:.0f}"
    bar.set_description_str(f"{run.algorithm.name}, {words}", refresh=False)
    bar.total = run.steps
    bar.update()


def begin_table(before, example, graded=False):
    """Print the head of the table, and the line of the evaluation before training."""
    name, gold = ("reward", "answer") if graded else ("accuracy", "right")
    text = ""
    if example:
        answer = example["answer"].split()[-1]
        text = f"  {example['question'].strip()}  ({gold}: {answer}), greedy:"
    in_one_row(f"{'steps':>7}  {name:16}tokens", text)
    if before:
        show_line("before", before["sampled"], example, name=name)


def show_line(steps, scores, answer, text="", name="accuracy"):
    """Print a line of the table. scores: the length, and the accuracy or what else has this name.
    answer: its record, or text in place of one."""
    worth = f"{scores[name]:<15.3g}"
    if name == "accuracy":
        # no number, if the first reward applies to nothing here
        full = round(10 * scores[name]) if scores[name] >= 0 else 0
        worth = f"{scores[name]:.2f} {'█' * full:10}"
    line = f"{steps:>7}  {worth}{scores['length']:7.1f}"
    if answer:
        line += {True: "  right  ", False: "  wrong  ", None: "  "}[answer["correct"]]
        text = " ".join(answer["completion"].split())
    in_one_row(line, text)


def in_one_row(line, text):
    """Print a line, and as much of a text as the terminal has room for: it is cut in its middle,
    because its end holds the answer. A file has 100 columns."""
    room = shutil.get_terminal_size((100, 24)).columns - len(line)
    if len(text) > room > 20:
        text = f"{text[: room - 19]}…{text[-18:]}"
    progress.note(line + text[-room:])


def finish(algorithm, run, after, notes):
    """Write the summary and the picture of a finished run, and print what it has learned."""
    if ranks.rank() > 0:
        return
    from engine.run.curves import curves  # matplotlib takes half a second to import

    folder = Path(run.config.run.output_dir)
    rows = files.read(folder / "metrics.jsonl")
    counts = {name: sum(row[name] for row in rows) for name in COUNTS}
    summary = {
        "algorithm": algorithm.name, "k": algorithm.k, "per_step": run.per_step,
        **asdict(run.state), "notes": notes, "after": after, "phases": phase_totals(rows),
        **counts, "checkpoint": str(checkpoint.newest(folder)), "chosen_on": chosen_on(run)}
    del summary["past"]
    files.write(folder / checkpoint.SUMMARY, files.as_json(summary, indent=2))
    curves(folder, algorithm.name, run.first if run.config.data.graded else "accuracy",
           changes(run.state.before, after)[:2])
    report(summary, run.config)


def changes(before, after):
    """What an evaluation after training says beside that before it: [the greedy accuracy, the
    sampled one, the tokens], each as "name before → after"; [] if there was none. Of a reward that
    grades it is the mean."""
    if not before:
        return []
    name = "reward" if after.get("graded") else "accuracy"
    found = []
    for title, part, key, digits in [
        (f"greedy {name}", "greedy", name, 3), (f"sampled {name}", "sampled", name, 3),
        ("tokens", "sampled", "length", 1),
    ]:
        found.append(f"{title} {before[part][key]:.{digits}f} → {after[part][key]:.{digits}f}")
    return found


def what_is_learned(data, folder):
    """What the data set says of a run with its usual rewards."""
    task = task_of(data.dataset)
    if not task.learned or data.rewards != [*task.rewards]:
        return ""
    samples = files.read(Path(folder, "samples.jsonl"))
    first, last = ([row["completion"] for row in samples[i]["completions"]] for i in (0, -1))
    return task.learned(first, last)


def report(summary, config):
    """Print what a run has learned, its seconds, and what to do next."""
    folder = config.run.output_dir
    before, after = summary["before"], summary["after"]
    if before:
        print(f"On {after['greedy']['questions']} {kind_of_test(config.data)}:",
              ",\n  ".join(changes(before, after)))
    if learned := what_is_learned(config.data, folder):
        print(learned)
    seconds = summary["phases"]
    spent = ", ".join(f"{word} {seconds[phase]:.0f}" for phase, word in progress.WORDS.items())
    if summary["evaluation_seconds"]:
        spent += f"; and {summary['evaluation_seconds']:.0f} s for --eval_every"
    print(f"{seconds['total']:.0f} s: {spent}")
    print("model    ", summary["checkpoint"])
    best = summary["best"]
    if best:
        name = "accuracy" if "accuracy" in best else "reward"
        print(f"best      {folder}/{checkpoint.BEST}: step {best['step']}, greedy {name} "
              f"{best[name]:.3f}, chosen on {summary['chosen_on']}")
    print(f"look      {folder}/curves.png")
    other = compared(config, "cppo" if summary["algorithm"] == "grpo" else "grpo")
    if other:
        print("compare  ", other)
    print("evaluate ", shlex.join(["python", "eval.py", "--model", folder]))
