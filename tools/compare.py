"""Compare runs or evaluations, or judge what another program has sampled.

    python tools/compare.py runs/toy-cppo-1 runs/toy-grpo-1
    python tools/compare.py A/eval-gsm8k.jsonl B/eval-gsm8k.jsonl
    python tools/compare.py completions.jsonl --judge math_accuracy

Runs are named by their folders, and compared with the first one. A table shows their scores on the
test questions, and the differences, question by question: the mean difference, its 95 % interval,
and the p of a paired permutation test. The picture compared.png shows their curves, by the clock.
Runs that differ only in their seed are one line with a band.

Two files of answers that eval.py has written are compared in the same way, without a picture.

One file is judged. Each of its lines holds question, answer, and either completion, a text, or
completions, a list of texts. The scores are written beside it, into scored-completions.json.
"""

import argparse
import sys
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from engine.base import files, progress
from engine.base.errors import UserError
from engine.data.rows import open_file
from engine.run.checkpoint import has_finished
from engine.run.command_line import run_program
from engine.run.folder import ANSWERS, options_of
from engine.run.metrics import AXES
from engine.scoring.score import load_rewards, reward_columns, score
from eval import answer_of, judged, key_of, read_answers, report
from scores import group_by_question, mean_value, paired, summarize

# --- one file of completions ---


def judge_file(path, judge, columns, output_dir):
    """Judge the completions of a file, print their scores, and write them into a folder."""
    [reward] = load_rewards([judge], option="--judge")
    records, rows = read_completions(path, columns)
    texts = [record["completion"] for record in records]
    scores, _ = score([reward], texts, reward_columns(rows))
    for record, value in zip(records, scores[reward.name].tolist()):
        record.update(judged(reward.function, value))
    summary = summarize(records, partial(answer_of, reward.name), key_of(records))
    report("sampled", summary)
    folder = Path(output_dir or Path(path).parent)
    scored = folder / f"scored-{Path(path).stem}.json"
    content = {"from_file": path, "judge": judge, "sampled": summary}
    with files.writing_into(folder):
        files.write(scored, files.as_json(content, indent=2))
    print(f"judged by {judge}; written: {scored}")


def read_completions(path, columns):
    """(a record of each completion of a file, the columns of its question)."""
    records, rows = [], []
    numbers = {}  # {question: its number}
    data = open_file(path, reserved=["prompt"], columns=columns)
    for line in range(len(data)):
        try:
            row = data[line]
        except ValueError as error:
            raise UserError(f"{path}, question {line + 1}: {error}. Correct this row, or leave it "
                            "out. To compare two files of answers, name both.") from None
        single, several = row.pop("completion", None), row.pop("completions", None)
        completions = several or [single]
        one_list = isinstance(completions, list) and not (single and several)
        if not one_list or not all(isinstance(text, str) for text in completions):
            raise UserError(f"{path}, question {line + 1}: each line needs either 'completion', a "
                            "text, or 'completions', a list of texts.")
        number = numbers.setdefault(row["question"], len(numbers))
        for text in completions:
            records.append({"index": number, "completion": text})
            rows.append(row)
    return records, rows


# --- two files of answers ---

# what is compared; and what only makes other draws of the same kind
DRAWN = ("model", "seed", "batch_size", "torch", "transformers")


def compare(paths):
    """Print the difference between two files of answers to the same questions."""
    (setting, first), (other, second) = map(read_answers, paths)
    key = key_of(chain(*first.values(), *second.values()))
    if key == "score":
        print("note: the judge says more than right and wrong: these are mean rewards.")
    print(f"{setting['model']}: {paths[0]}")
    print(f"{other['model']}: {paths[1]}")
    note_other_setting(setting, other)
    for part in first:
        if part in second:
            before = values_of(first[part], key)
            after = values_of(second[part], key)
            means = f"{fmean(before.values()):.4f} → {fmean(after.values()):.4f}"
            change = difference(before, after, key)
            print(f"{part:8} {means}   {change}, {len(before)} questions")


def note_other_setting(setting, other):
    """Print in what two settings differ."""
    for key in setting:
        one, two = setting[key], other.get(key)
        if one != two and key not in DRAWN:
            print(f"note: not the same {key}: {one!r:.60} and {two!r:.60}.")


def values_of(records, key):
    """{(number, question): the mean of this key of the answers to it}"""
    groups = group_by_question(records, key)
    return {(group[0]["index"], group[0]["question"]): mean_value(group, key) for group in groups}


def difference(before, after, key):
    """The difference between what two models answer, in words. before, after: of `values_of`."""
    if before.keys() != after.keys():
        raise UserError("these are not answers to the same questions: only answers to the same "
                        "questions can be compared, of evaluations that have ended.")
    least = -1.0 if key == "correct" else None
    mean, (low, high), p = paired([*before.values()], [*after.values()], least=least)
    return f"{mean:+.4f} [{low:+.4f}, {high:+.4f}], p = {p:.4f}"


# --- runs ---

PICTURE = "compared.png"


def compare_runs(folders, x, output_dir):
    """Print what the runs in these folders have learned and used, and draw their curves.

    x: what stands below the curves, of AXES. output_dir: where the picture goes; None: into the
    folder that holds the first run.
    """
    lines = {folder: lines_of_run(folder) for folder in folders}
    show_scores(folders)
    for column, title in AXES.values():
        sums = {folder: sum(row[column] for row in rows) for folder, rows in lines.items()}
        ratios = {folder: f"{sums[folder] / sums[folders[0]]:.2f} times" for folder in folders[1:]}
        show(title, {folder: f"{total:,.1f}".removesuffix(".0") for folder, total in sums.items()},
             ratios)
    from engine.run.curves import curves_of_runs  # matplotlib takes half a second to import

    output_dir = Path(output_dir or Path(folders[0]).parent)
    with files.writing_into(output_dir):
        curves_of_runs(by_seed(lines), x, output_dir / PICTURE)
    print(f"written: {output_dir / PICTURE}")


def lines_of_run(folder):
    """The lines of metrics.jsonl of a run."""
    lines = files.read(Path(folder, "metrics.jsonl"))
    if not lines or not Path(folder, "run.json").is_file():
        raise UserError(f"{folder} holds no run with at least one step: name another folder. To "
                        "compare two evaluations, name their files, eval-NAME.jsonl.")
    return lines


def show_scores(folders):
    """Print the scores of runs on their test questions, and the differences from the first run."""
    tested = [folder for folder in folders
              if has_finished(folder) and Path(folder, ANSWERS).is_file()]
    for folder in folders:
        if folder not in tested:
            print(f"note: {folder} holds no answers to test questions: it has not ended, or it "
                  "evaluates nothing.")
    if not tested:
        return
    settings, answers = zip(*(read_answers(Path(folder, ANSWERS)) for folder in tested))
    for setting in settings[1:]:
        note_other_setting(settings[0], setting)
    key = key_of(record for own in answers for records in own.values() for record in records)
    measure = "reward" if key == "score" else "accuracy"
    for part in ("greedy", "sampled"):
        values = [values_of(own[part], key) for own in answers]
        if part == "greedy":
            print(f"{len(values[0])} test questions; the difference from the first run, its 95 % "
                  "interval, and p of a paired test")
        means = {folder: f"{fmean(own.values()):.4f}" for folder, own in zip(tested, values)}
        differences = {folder: difference(values[0], own, key)
                       for folder, own in zip(tested[1:], values[1:])}
        show(f"{part} {measure}", means, differences)


def show(title, values, changes):
    """Print a line for each run. values, changes: {folder: text}."""
    width = max(map(len, values))
    for folder, value in values.items():
        print(f"{title:20} {folder:{width}} {value:>9}  {changes.get(folder, '')}".rstrip())
        title = ""


def by_seed(lines):
    """{name: (algorithm, [lines of a run, for each seed])}: the runs of each group differ only in
    their seed. lines: {folder of a run: its lines}."""
    groups = {}
    for folder in lines:
        same = options_of(folder) | dict.fromkeys(("seed", "output_dir", "resume", "recipe"))
        groups.setdefault(str(same), []).append(folder)
    named = {}
    for first, *others in groups.values():
        name = f"{first} and {progress.count(len(others), 'other seed')}" if others else first
        runs = [lines[folder] for folder in (first, *others)]
        named[name] = options_of(first)["algorithm"], runs
    return named


# --- the program ---


def main(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "paths", nargs="+", metavar="PATH",
        help="folders of runs, or two files of answers, to compare them; or one file of "
        "completions, to judge them")
    parser.add_argument(
        "--x", choices=AXES, help="what stands below the curves of runs (default: seconds)")
    parser.add_argument(
        "--judge", metavar="REWARD",
        help="the reward by which a completion is right, above 0, as in train.py's --rewards "
        "(default: gsm8k_accuracy)")
    parser.add_argument(
        "--columns", nargs="+", metavar="X",
        help="question=NAME answer=NAME, or one of the two, of one file: as in train.py")
    parser.add_argument(
        "--output_dir", metavar="FOLDER",
        help="where the scores of one file go (default: the folder of the file), or the picture of "
        "runs (default: the folder that holds the first run)")
    options = parser.parse_intermixed_args(argv)
    paths = options.paths
    refuse_what_does_not_fit(options, runs=any(Path(path).is_dir() for path in paths))
    if Path(paths[0]).is_dir():
        return compare_runs(paths, options.x or "seconds", options.output_dir)
    if len(paths) == 2:
        return compare(paths)
    judge = options.judge or "gsm8k_accuracy"
    return judge_file(paths[0], judge, options.columns, options.output_dir)


def refuse_what_does_not_fit(options, runs):
    """Refuse paths and options that have no meaning together. runs: whether a path is a folder."""
    paths = options.paths
    for path in paths:
        if not Path(path).exists():
            raise UserError(f"{path} does not exist: name the folders of two runs; or a .jsonl "
                            "file of question, answer, and completion or completions; or two files "
                            "of answers.")
    if runs and (len(paths) == 1 or not all(Path(path).is_dir() for path in paths)):
        raise UserError("a folder of a run is compared with those of other runs: name two folders "
                        "or more, and no files.")
    if len(paths) > 2 and not runs:
        raise UserError("these are more than two files: name one to judge it, or two to compare "
                        "them.")
    if len(paths) > 1 and (options.judge or options.columns):
        raise UserError("--judge and --columns have no effect here: the answers are judged "
                        "already.")
    if options.x and not runs:
        raise UserError("--x has no effect with files: only the curves of runs are drawn.")
    if len(paths) == 2 and not runs and options.output_dir:
        raise UserError("--output_dir has no effect with two files: nothing is written.")


if __name__ == "__main__":
    run_program(main)
