"""The answers of an evaluation: one record for each answer, and the file eval-NAME.jsonl that holds
the records."""

import hashlib
from pathlib import Path

from engine.base import files
from engine.base.errors import UserError
from engine.scoring.score import Reward, score
from engine.tasks.questions import read_jsonl, reward_columns


def judged(indices, rows, texts, reward):
    """One record for each completion, judged by `reward`.

    texts: the completions. indices, rows: for each text, the number of its question and the columns
    of its question. """
    rewards = [Reward(getattr(reward, "__name__", "judge"), reward)]
    (values,) = score(rewards, texts, reward_columns(rows))[0].values()
    return [
        {"index": index, "question": row["question"], "answer": row["answer"],
         "completion": text, "correct": value > 0, "score": value}
        for index, row, text, value in zip(indices, rows, texts, values.tolist(), strict=True)
    ]


def by_question(records):
    """{index of a question: its records}, in the order of the questions."""
    groups = {}
    for record in records:
        groups.setdefault(record["index"], []).append(record)
    return dict(sorted(groups.items()))


def questions_in_a_batch(batch_size, samples):
    return max(1, batch_size // samples)


def read_answers(path):
    """(setting, records) of a file of answers, without lines that cannot be read. Without a file:
    (None, [])."""
    try:
        records = files.read_whole(path)
    except (ValueError, RecursionError):  # no UTF-8; a number of 5,000 digits; JSON nested too deep
        records = [None]
    if records and not (isinstance(records[0], dict) and "setting" in records[0]):
        raise UserError(
            f"{path} is no file of answers that eval.py has written: name another --output_dir, or "
            "move it."
        )
    return (records[0]["setting"], records[1:]) if records else (None, [])


def open_answers(path, setting):
    """Start a file of answers, or continue the file of an interrupted evaluation. Returns the
    records that are kept.

    Only complete batches are kept, because the evaluation samples whole batches.
    """
    earlier, records = read_answers(path)
    if earlier is not None and earlier != setting:
        changed = ", ".join(
            f"{key} {earlier.get(key)!r:.60}" for key in setting if earlier.get(key) != setting[key]
        )
        raise UserError(
            f"{path} holds answers in another setting ({changed}): name another --output_dir, or "
            "remove it."
        )
    kept = []
    for part, samples in [("greedy", 1), ("sampled", setting["samples"])] if records else []:
        groups = by_question([record for record in records if record["part"] == part])
        complete = {i for i, group in groups.items() if len(group) == samples}
        size = questions_in_a_batch(setting["batch_size"], max(1, samples))
        for start in range(0, setting["questions"], size):
            indices = range(start, min(start + size, setting["questions"]))
            if complete.issuperset(indices):
                kept += [record for i in indices for record in groups[i]]
    files.write(path, files.as_lines([{"setting": setting}, *kept]))
    return kept


def scored_file(path, reward):
    """Judge completions that another program sampled. Returns their records.

    Each line of the file holds question, answer, and either completion (a text) or completions (a
    list of texts). If the model's chat template writes `<think>` into the prompt, each completion
    in the file must begin with it. """
    indices, rows, texts, seen = [], [], [], {}
    for number, row in enumerate(read_jsonl(path, reserved=["prompt"]), 1):
        completions = (
            row.pop("completions") if "completions" in row else [row.pop("completion", None)]
        )
        if (
            not isinstance(completions, list)
            or not completions
            or not all(isinstance(x, str) for x in completions)
        ):
            raise UserError(f"{path}, question {number}: each line needs 'completion', a text, "
                            "or each line 'completions', a list of texts.")
        for text in completions:
            indices.append(seen.setdefault(row["question"], len(seen)))
            rows.append(row)
            texts.append(text)
    return judged(indices, rows, texts, reward)


def stamp_of(name):
    """A text that changes when the Python file of a judge does, or the weights of a model. "" if
    there is neither.

    name: a path, FILE.py:FUNCTION, RewardModel:DIR, or the name of a reward; ":WEIGHT" may follow.
    """
    name = name.removeprefix("RewardModel:")
    while ":" in name and not Path(name).exists():
        name = name.rpartition(":")[0]
    path = Path(name)
    files = [path] if path.is_file() else sorted([*path.glob("*.safetensors"), *path.glob("*.bin")])
    stamps = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr(stamps).encode()).hexdigest()[:16] if stamps else ""
