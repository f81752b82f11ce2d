"""Judge what another program has sampled, or compare two evaluations.

    python tools/compare.py completions.jsonl --judge math_accuracy
    python tools/compare.py A/eval-gsm8k.jsonl B/eval-gsm8k.jsonl

One file is judged. Each of its lines holds question, answer, and either completion, a text, or
completions, a list of texts. The scores are written beside it, into scored-completions.json.

Two files of answers that eval.py has written are compared: the difference of their scores, its 95 %
interval, and the p of a paired permutation test.
"""

import argparse
import sys
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from engine.base import files
from engine.base.errors import UserError
from engine.data.rows import open_file
from engine.run.command_line import run_program
from engine.scoring.score import load_rewards, reward_columns, score
from eval import answer_of, read_answers, report
from scores import group_by_question, mean_value, paired, summarize, verdict

# --- one file of completions ---


def judge_file(path, judge, columns, output_dir):
    """Judge the completions of a file, print their scores, and write them into a folder."""
    [reward] = load_rewards([judge], option="--judge")
    records, rows = read_completions(path, columns)
    texts = [record["completion"] for record in records]
    scores, _ = score([reward], texts, reward_columns(rows))
    for record, value in zip(records, scores[reward.name].tolist()):
        record["correct"] = verdict(value)
    summary = summarize(records, answer_of)
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
    print(f"{setting['model']}: {paths[0]}")
    print(f"{other['model']}: {paths[1]}")
    for key in setting:
        one, two = setting[key], other.get(key)
        if one != two and key not in DRAWN:
            print(f"note: not the same {key}: {one!r:.60} and {two!r:.60}.")
    for part in first:
        if part in second:
            compare_part(part, first[part], second[part])


def compare_part(part, first, second):
    """Print the difference between the records of one part of two files."""
    asked, before = right_answers(first)
    asked_too, after = right_answers(second)
    if asked != asked_too:
        raise UserError(f"the two files do not hold the same questions ({part}): only answers to "
                        "the same questions can be compared, of evaluations that have ended.")
    difference, (low, high), p = paired(before, after)
    means = f"{fmean(before):.4f} → {fmean(after):.4f}"
    interval = f"[{low:+.4f}, {high:+.4f}]"
    print(f"{part:8} {means}   {difference:+.4f} {interval}, p = {p:.4f}, {len(asked)} questions")


def right_answers(records):
    """(the questions, the share of right answers to each)."""
    groups = group_by_question(records)
    questions = [group[0]["question"] for group in groups]
    return questions, [mean_value(group, "correct") for group in groups]


# --- the program ---


def main(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "paths", nargs="+", metavar="FILE",
        help="one file of completions, to judge them; or two files of answers, to compare them")
    parser.add_argument(
        "--judge", metavar="REWARD",
        help="the reward by which a completion is right, above 0, as in train.py's --rewards "
        "(default: gsm8k_accuracy)")
    parser.add_argument(
        "--columns", nargs="+", metavar="X",
        help="question=NAME answer=NAME, or one of the two, of one file: as in train.py")
    parser.add_argument(
        "--output_dir", metavar="FOLDER",
        help="where the scores of one file go (default: the folder of the file)")
    options = parser.parse_intermixed_args(argv)
    for path in options.paths:
        if not Path(path).is_file():
            raise UserError(f"the file {path} does not exist: name a .jsonl file of question, "
                            "answer, and completion or completions, or two files of answers.")
    if len(options.paths) == 1:
        judge = options.judge or "gsm8k_accuracy"
        return judge_file(options.paths[0], judge, options.columns, options.output_dir)
    if len(options.paths) > 2:
        raise UserError("these are more than two files: name one to judge it, or two to compare "
                        "them.")
    if options.judge or options.columns or options.output_dir:
        raise UserError("--judge, --columns and --output_dir have no effect with two files: the "
                        "answers are judged already, and nothing is written.")
    compare(options.paths)


if __name__ == "__main__":
    run_program(main)
