"""Compare runs or evaluations.

    python tools/compare.py runs/toy-cppo-1 runs/toy-grpo-1
    python tools/compare.py A/eval-gsm8k.jsonl B/eval-gsm8k.jsonl

Runs are named by their folders, and compared with the first one. A table shows their scores on the
test questions, and the differences, question by question: the mean difference, its 95 % interval,
and the p of a paired permutation test. The picture compared.png shows their curves, by the clock.
Runs that differ only in their seed are one line with a band.

Files of answers that eval.py has written are compared in the same way, without a picture.
"""

import argparse
import sys
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from engine.base import files, progress
from engine.base.errors import UserError
from engine.base.program import run_program
from engine.report.answers import read_answers, score_key
from engine.report.metrics import AXES
from engine.run.checkpoint import has_finished
from engine.run.folder import ANSWERS, options_of
from scores import group_by_question, mean_value, paired

# --- files of answers ---

# what is compared; and what only makes other draws of the same kind
DRAWN = ("model", "seed", "batch_size", "torch", "transformers")


def compare_answers(paths):
    """Print the scores in files of answers, and the differences from the first file.

    paths: {name: file}. A part that a file does not have is left out.
    """
    settings, answers = zip(*map(read_answers, paths.values()))
    for setting in settings[1:]:
        note_other_setting(settings[0], setting)
    key = score_key(record for own in answers for records in own.values() for record in records)
    measure = "reward" if key == "score" else "accuracy"
    print("the difference from the first one, its 95 % interval, and p of a paired test:")
    for part in answers[0]:
        if all(part in own for own in answers):
            values = [values_by_question(own[part], key) for own in answers]
            means = [f"{fmean(own.values()):.4f}" for own in values]
            differences = [difference(values[0], own, key) for own in values[1:]]
            print_values(f"{part} {measure}", paths, means, differences)


def note_other_setting(setting, other):
    """Print in what two settings differ."""
    for key in setting:
        one, two = setting[key], other.get(key)
        if one != two and key not in DRAWN:
            print(f"note: not the same {key}: {one!r:.60} and {two!r:.60}.")


def values_by_question(records, key):
    """{(number, question): the mean of this key of the answers to it}"""
    groups = group_by_question(records, key)
    return {(group[0]["index"], group[0]["question"]): mean_value(group, key) for group in groups}


def difference(before, after, key):
    """The difference between what two models answer, in words. before, after: of
    `values_by_question`."""
    if before.keys() != after.keys():
        raise UserError("these are not answers to the same questions: only answers to the same "
                        "questions can be compared, of evaluations that have ended.")
    least = -1.0 if key == "correct" else None
    mean, (low, high), p = paired([*before.values()], [*after.values()], least=least)
    return f"{mean:+.4f} [{low:+.4f}, {high:+.4f}], p = {p:.4f}, {len(before)} questions"


# --- runs ---

PICTURE = "compared.png"


def compare_runs(folders, x, output_dir):
    """Print what the runs in these folders have learned and used, and draw their curves.

    x: what stands below the curves, of AXES. output_dir: where the picture goes; None: into the
    folder that holds the first run.
    """
    lines = {folder: lines_of_run(folder) for folder in folders}
    if tested := answers_of_runs(folders):
        compare_answers(tested)
    for column, title in AXES.values():
        sums = [sum(row[column] for row in rows) for rows in lines.values()]
        values = [f"{total:,.1f}".removesuffix(".0") for total in sums]
        print_values(title, lines, values, [f"{total / sums[0]:.2f} times" for total in sums[1:]])
    from engine.report.curves import curves_of_runs  # matplotlib takes half a second to import

    output_dir = Path(output_dir or Path(folders[0]).parent)
    with files.writing_into(output_dir):
        curves_of_runs(by_seed(lines), x, output_dir / PICTURE)
    print(f"written: {output_dir / PICTURE}")


def lines_of_run(folder):
    """The lines of metrics.jsonl of a run."""
    lines = files.read_lines(Path(folder, "metrics.jsonl"))
    if not lines or not Path(folder, "run.json").is_file():
        raise UserError(f"{folder} holds no run with at least one step: name another folder. To "
                        "compare two evaluations, name their files, eval-NAME.jsonl.")
    return lines


def answers_of_runs(folders):
    """{folder: its file of answers} of the runs that have answered test questions at their end."""
    paths = {}
    for folder in folders:
        path = Path(folder, ANSWERS)
        if has_finished(folder) and path.is_file():
            paths[folder] = path
        else:
            print(f"note: {folder} holds no answers to test questions: it has not ended, or it "
                  "evaluates nothing.")
    return paths


def print_values(title, names, values, changes):
    """Print a line for each run or file. changes: from the first one, of all others."""
    width = max(map(len, names))
    for name, value, change in zip(names, values, ["", *changes]):
        print(f"{title:20} {name:{width}} {value:>9}  {change}".rstrip())
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
        help="folders of runs, or files of answers that eval.py has written")
    parser.add_argument(
        "--x", choices=AXES, help="what stands below the curves of runs (default: seconds)")
    parser.add_argument(
        "--output_dir", metavar="FOLDER",
        help="where the picture of runs goes (default: the folder that holds the first run)")
    options = parser.parse_intermixed_args(argv)
    paths = options.paths
    refuse_what_does_not_fit(paths)
    if Path(paths[0]).is_dir():
        return compare_runs(paths, options.x or "seconds", options.output_dir)
    for path in paths:
        setting, _ = read_answers(path)
        print(f"{path}: {setting['model']}")
    return compare_answers({path: path for path in paths})


def refuse_what_does_not_fit(paths):
    """Refuse what cannot be compared."""
    for path in paths:
        if not Path(path).exists():
            raise UserError(f"{path} does not exist: name the folders of two runs, or two files of "
                            "answers.")
    if len(paths) == 1 or len({Path(path).is_dir() for path in paths}) > 1:
        raise UserError("one thing is compared with others of its kind: name two folders of runs "
                        "or more, or two files of answers or more.")


if __name__ == "__main__":
    run_program(main)
