"""The answers of an evaluation: one record for each answer, and the file eval-NAME.jsonl that holds
the records."""

import hashlib
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from engine.base import files
from engine.base.errors import UserError
from engine.scoring.score import Reward, score
from engine.tasks.questions import read_jsonl, reward_columns


def judged(indices, rows, texts, reward):
    """One record for each completion, judged by `reward`.

    texts: the completions. indices, rows: for each text, the number of its question and the columns
    of its question.
    """
    rewards = [Reward(getattr(reward, "__name__", "judge"), reward)]
    (values,) = score(rewards, texts, reward_columns(rows))[0].values()
    return [
        {"index": index, "question": row["question"], "answer": row["answer"],
         "completion": text, "correct": value > 0, "score": value}
        for index, row, text, value in zip(indices, rows, texts, values.tolist(), strict=True)
    ]


def by_question(records):
    """{index of a question: its records}, in the order of the questions."""
    index = itemgetter("index")
    return {i: list(group) for i, group in groupby(sorted(records, key=index), index)}


def questions_in_a_batch(batch_size, samples):
    return max(1, batch_size // samples)


def read_answers(path):
    """(setting, records) of a file of answers, without lines that cannot be read. Without a file:
    (None, [])."""
    records = files.read(path)
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
    kept, questions = [], setting["questions"]
    for part, samples in [("greedy", 1), ("sampled", setting["samples"] or 1)]:
        size = questions_in_a_batch(setting["batch_size"], samples)
        of_part = [record for record in records if record["part"] == part]
        for start in range(0, questions, size):
            end = min(start + size, questions)
            batch = [record for record in of_part if start <= record["index"] < end]
            kept += batch if len(batch) == (end - start) * samples else []
    files.write(path, files.as_lines([{"setting": setting}, *kept]))
    return kept


def scored_file(path, reward):
    """Judge completions that another program sampled. Returns their records.

    Each line of the file holds question, answer, and either completion (a text) or completions (a
    list of texts). If the model's chat template writes `<think>` into the prompt, each completion
    in the file must begin with it.
    """
    indices, rows, texts, seen = [], [], [], {}
    for number, row in enumerate(read_jsonl(path, reserved=["prompt"]), 1):
        completions = row.pop("completions", [row.pop("completion", None)])
        is_list = isinstance(completions, list) and completions
        if not is_list or not all(isinstance(text, str) for text in completions):
            raise UserError(f"{path}, question {number}: each line needs 'completion', a text, "
                            "or each line 'completions', a list of texts.")
        indices += [seen.setdefault(row["question"], len(seen))] * len(completions)
        rows += [row] * len(completions)
        texts += completions
    return judged(indices, rows, texts, reward)


def stamp_of(name):
    """A text that changes when the Python file of a judge does, or the weights of a model. "" if
    there is neither.

    name: a path, FILE.py:FUNCTION, RewardModel:DIR, or the name of a reward; ":WEIGHT" may follow.
    """
    path = Path(name.removeprefix("RewardModel:").split(":")[0])
    held = [path] if path.is_file() else sorted([*path.glob("*.safetensors"), *path.glob("*.bin")])
    stamps = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in held]
    return hashlib.sha256(repr(stamps).encode()).hexdigest()[:16] if stamps else ""
