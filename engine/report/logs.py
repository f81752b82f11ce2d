"""Logs of a run, what it writes and prints: the lines of its steps, its summary, its picture."""

import shlex
import shutil
from dataclasses import asdict
from pathlib import Path

from engine.base import files, progress, ranks
from engine.base.errors import UserError
from engine.data.questions import fingerprint
from engine.data.rows import same_rows
from engine.model.networks import uses_builtin
from engine.options.command_line import command, flat, words_from
from engine.options.config import config_of, layers
from engine.report.metrics import COUNTS, first_group, mean, phase_totals
from engine.run import checkpoint
from engine.run.folder import ANSWERS, custom_files
from tasks.table import task_of

COMPARED = {"cppo": "grpo", "grpo": "cppo"}
# what these two runs do not share: how they prune, and where they are
NOT_COMPARED = ("algorithm", "keep", "pruning_rate", "allocation", "output_dir", "resume", "recipe")
LINES = ("metrics.jsonl", "samples.jsonl")  # a line of each for each step
SHORT = 100  # tokens; the table shows only answers that are not longer


class Logs:
    """The logs of a run that starts, or goes on, after `last_step`, and its table on the screen.
    Only the first rank writes and prints.

    The evaluation before training has three examples. If answers are short, the table shows those
    to the first example that was answered wrong.
    ask(i) → the model's greedy answer to test question i, a record; every rank asks.
    """

    def __init__(self, config, state, tokenizer, ask):
        self.tokenizer, self.ask = tokenizer, ask
        self.folder, self.first = Path(config.run.output_dir), ranks.rank() == 0
        if self.first:
            trim_logs(self.folder, state.step)
        short = config.sampling.max_new_tokens <= SHORT
        examples = state.before.get("examples", ()) if short else ()
        self.example = min(examples, key=lambda record: bool(record["correct"]), default=None)
        begin_table(state.before, self.example, config.data.measure)

    def write(self, step, of_step, lr):
        """Log a Step, number `step` of the run."""
        metrics = {"step": step} | of_step.metrics | {"lr": lr}
        if self.first:
            files.append(self.folder / "metrics.jsonl", metrics)
            sample = first_group(
                of_step.rollout, of_step.advantages, of_step.kept, self.tokenizer)
            files.append(self.folder / "samples.jsonl", {"step": step} | sample)

    def show(self, run, metrics):
        """Print a line of the table after the steps 1, 2, 4, 8, … and after the last one: the means
        since the line above, and what the model answers now. Print one for each evaluation of
        --eval_every."""
        step, measure = run.state.step, run.config.data.measure
        start = 2 ** (step - 1).bit_length() // 2  # the largest power of 2 below `step`
        if step in (1, 2 * start) or run.finished:
            answer = self.example and self.ask(self.example["index"])
            if self.first:
                rows = files.read_lines(self.folder / "metrics.jsonl")[start:step]
                means = {name: mean([row[name] for row in rows]) for name in (measure, "length")}
                steps = f"{start + 1}–{step}" if step > start + 1 else step
                show_line(steps, means, measure, answer)
        if "eval_length" in metrics:
            best = ", the best so far" if run.better else ""
            scores = {name: metrics[f"eval_{name}"] for name in (measure, "length")}
            show_line("greedy", scores, measure, text=f"  {chosen_on(run)}{best}")


def chosen_on(run):
    """The questions of --eval_every, in words."""
    held_out = run.to_choose is not run.test
    of = "held-out training questions" if held_out else kind_of_test(run.config.data)
    return f"{len(run.to_choose)} {of}"


def kind_of_test(data):
    """What the questions of the evaluation are, in words."""
    return "training questions" if same_rows(data.dataset, data.tested or "") else "test questions"


def trim_logs(run_dir, last_step):
    """Remove the lines of later steps, which the resumed run writes again, the summary, which marks
    a finished run, and its answers."""
    for name in LINES:
        kept = [row for row in files.read_lines(run_dir / name) if row["step"] <= last_step]
        files.write(run_dir / name, files.as_lines(kept))
    for name in (checkpoint.SUMMARY, ANSWERS):
        (run_dir / name).unlink(missing_ok=True)


def begin_answers(run):
    """Begin the file of the answers after training, which tools/compare.py reads. Returns its
    path."""
    path = Path(run.config.run.output_dir, ANSWERS)
    if run.test and ranks.rank() == 0:
        judge = getattr(run.accuracy_reward, "__name__", "judge")
        setting = {
            "model": path.parent.as_posix(), "data": fingerprint(run.test), "judge": judge,
            **asdict(run.config.sampling)}
        files.write(path, files.as_lines([{"setting": setting}]))
    return path


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
    number = f"at most {k}" if algorithm.k_by_difficulty else f"the {k}"
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
    if config.preview.check_rewards:
        progress.note(f"Now the first step is sampled, at most {config.sampling.max_new_tokens} "
                      "tokens for each completion, and scored. Nothing is trained. For less, lower "
                      "--questions_per_step, --group_size or --max_new_tokens.")
    elif run.test:
        steps = 4 * len(run.test) / (questions * run.algorithm.group_size)
        progress.note(f"Before and after the run {len(run.test)} {kind_of_test(config.data)} get "
                      f"a greedy and a sampled answer, as many completions as {steps:.1f} steps. "
                      "--eval_questions changes this; 0: none.")


def show_step(bar, run, metrics):
    """Move the bar."""
    measure = run.config.data.measure
    words = f"{measure} {metrics[measure]:.2f}, length {metrics['length']:.0f}"
    bar.set_description_str(f"{run.algorithm.name}, {words}", refresh=False)
    bar.total = run.steps
    bar.update()


def begin_table(before, example, measure):
    """Print the head of the table, and the line of the evaluation before training."""
    text = ""
    if example:
        gold = "right" if measure == "accuracy" else "answer"
        answer = example["answer"].split()[-1]
        text = f"  {example['question'].strip()}  ({gold}: {answer}), greedy:"
    in_one_row(f"{'steps':>7}  {measure:16}tokens", text)
    if before:
        show_line("before", before["sampled"], measure, example)


def show_line(steps, scores, measure, answer=None, text=""):
    """Print a line of the table. scores: the measure and the length. answer: its record; text: what
    stands in its place."""
    value = scores[measure]
    # no number, if the first reward applies to nothing here; and a reward may be larger than 1
    full = round(10 * value) if 0 <= value <= 1 else 0
    line = f"{steps:>7}  {value:.2f} {'█' * full:10}{scores['length']:7.1f}"
    if answer:
        verdict = "right  " if answer["correct"] else "wrong  "
        line += "  " + (verdict if measure == "accuracy" else "")
        text = " ".join(answer["completion"].split())
    in_one_row(line, text)


def in_one_row(line, text):
    """Print a line, and as much of a text as the terminal has room for: it is cut in its middle,
    because its end holds the answer. A file has 100 columns."""
    room = shutil.get_terminal_size((100, 24)).columns - len(line)
    if len(text) > room > 20:
        text = f"{text[: room - 19]}…{text[-18:]}"
    progress.note(line + text[-room:])


def write_summary(algorithm, run, after, notes):
    """Write the summary and the picture of a finished run, and print what it has learned."""
    if ranks.rank() > 0:
        return
    from engine.report.curves import curves  # matplotlib takes half a second to import

    folder, measure = Path(run.config.run.output_dir), run.config.data.measure
    rows = files.read_lines(folder / "metrics.jsonl")
    counts = {name: sum(row[name] for row in rows) for name in COUNTS}
    summary = {
        "algorithm": algorithm.name, "k": algorithm.k, "per_step": run.per_step,
        **asdict(run.state), "notes": notes, "after": after, "phases": phase_totals(rows),
        **counts, "checkpoint": str(checkpoint.newest(folder)), "chosen_on": chosen_on(run)}
    del summary["past"]
    files.write(folder / checkpoint.SUMMARY, files.as_json(summary, indent=2))
    curves(folder, algorithm.name, measure, scores_before_and_after(summary, measure))
    print_summary(summary, run.config)


def scores_before_and_after(summary, measure):
    """What the evaluations before and after the run say, in words; [] if there are none."""
    before, after, found = summary["before"], summary["after"], []
    for part in ("greedy", "sampled") if before else ():
        values = f"{before[part][measure]:.3f} → {after[part][measure]:.3f}"
        found.append(f"{part} {measure} {values}")
    return found


def print_summary(summary, config):
    """Print what a run has learned, its seconds, and what to do next."""
    folder, task = config.run.output_dir, task_of(config.data.dataset)
    if said := scores_before_and_after(summary, config.data.measure):
        before, after = summary["before"]["sampled"], summary["after"]["sampled"]
        said.append(f"tokens {before['length']:.1f} → {after['length']:.1f}")
        print(f"On {after['questions']} {kind_of_test(config.data)}:", ",\n  ".join(said))
    samples = files.read_lines(Path(folder, "samples.jsonl"))
    usual = task.learned and config.data.rewards == [*task.rewards]
    if usual and (sentence := task.learned(samples[0], samples[-1])):
        print(sentence)
    seconds = summary["phases"]
    spent = ", ".join(f"{word} {seconds[phase]:.0f}" for phase, word in progress.WORDS.items())
    if summary["evaluation_seconds"]:
        spent += f"; and {summary['evaluation_seconds']:.0f} s for --eval_every"
    print(f"{seconds['total']:.0f} s: {spent}")
    print("model    ", summary["checkpoint"])
    if summary["best"]:
        (_, step), (name, value) = summary["best"].items()
        print(f"best      {folder}/{checkpoint.BEST}: step {step}, greedy {name} {value:.3f}, "
              f"chosen on {summary['chosen_on']}")
    print(f"look      {folder}/curves.png")
    if line := baseline_command(config):
        print(f"compare   {line}")
    print("evaluate ", evaluation_command(config))


def evaluation_command(config):
    """The command that evaluates a run. It names the Python files of the run's judge and sampler,
    because eval.py does not take them from run.json."""
    own = custom_files(flat(config))
    if not uses_builtin(config.sampling.sampler):
        own["sampler"] = "builtin"
    return shlex.join(
        ["python", "eval.py", "--model", config.run.output_dir, *words_from(own)])


def baseline_command(config):
    """The command of the same run with GRPO in place of CPPO, or the other way round. None for
    another algorithm, or if the other one refuses an option of this run."""
    options = flat(config)
    if options["algorithm"] not in COMPARED:
        return None
    chosen = {"algorithm": COMPARED[options["algorithm"]]}
    chosen |= {name: options[name] for name in ("dataset", "steps") if options[name]}
    usual = layers(chosen)
    chosen |= {name: x for name, x in options.items() if x not in (None, usual[name])
               and name not in NOT_COMPARED}
    try:
        config_of(chosen)
    except UserError:
        return None
    return command(chosen)
