"""The answers of an evaluation: one record each, and the file that holds them, eval-NAME.jsonl."""

import hashlib
from pathlib import Path

from engine.run import logs
from engine.run.options import UserError
from engine.scoring.score import Reward, score
from engine.tasks.questions import read_jsonl, reward_columns


def judged(indices, rows, texts, reward):
    """One record for each completion. indices: the numbers of the questions. rows: their columns. One of each for each text."""
    rewards = [Reward(getattr(reward, "__name__", "judge"), reward)]
    (values,) = score(rewards, texts, reward_columns(rows))[0].values()
    return [
        {"index": index, "question": row["question"], "answer": row["answer"], "completion": text, "correct": value > 0, "score": value}
        for index, row, text, value in zip(indices, rows, texts, values.tolist(), strict=True)
    ]


def by_question(records):
    """{index of the question: its records}, in order."""
    groups = {}
    for record in records:
        groups.setdefault(record["index"], []).append(record)
    return dict(sorted(groups.items()))


def questions_in_a_batch(batch_size, samples):
    return max(1, batch_size // samples)


def read_answers(path):
    """(setting, records) of a file of answers. A line that was cut off ends it. (None, []) if there is no file."""
    records = logs.read_whole(path)
    if records and not (isinstance(records[0], dict) and "setting" in records[0]):
        raise UserError(f"{path} is no file of answers that eval.py has written: name another --output_dir, or move it.")
    return (records[0]["setting"], records[1:]) if records else (None, [])


def open_answers(path, setting):
    """A new file for the answers, or the file of an interrupted evaluation, cut back to its whole batches. Returns their records."""
    there, records = read_answers(path)
    if there is not None and there != setting:
        other = ", ".join(f"{key} {there.get(key)!r:.60}" for key in setting if there.get(key) != setting[key])
        raise UserError(f"{path} holds answers in another setting ({other}): name another --output_dir, or remove it.")
    whole = []
    for part, samples in [("greedy", 1), ("sampled", setting["samples"])] if records else []:
        mine = by_question([r for r in records if r["part"] == part])
        complete = {i for i, group in mine.items() if len(group) == samples}
        size = questions_in_a_batch(setting["batch_size"], max(1, samples))
        for start in range(0, setting["questions"], size):
            indices = range(start, min(start + size, setting["questions"]))
            if complete.issuperset(indices):
                whole += [record for i in indices for record in mine[i]]
    logs.write(path, logs.as_lines([{"setting": setting}, *whole]))
    return whole


def scored_file(path, reward):
    """The records of completions that another program sampled: lines with question, answer, and completion or completions.

    If the chat template writes `<think>` into the prompt, the completion must begin with it: there is no template to ask.
    """
    indices, rows, texts, seen = [], [], [], {}
    for number, row in enumerate(read_jsonl(path, reserved=["prompt"]), 1):
        several = row.pop("completions") if "completions" in row else [row.pop("completion", None)]
        if not isinstance(several, list) or not several or not all(isinstance(text, str) for text in several):
            raise UserError(f"{path}, question {number}: each line needs 'completion', a text, or each line 'completions', a list.")
        for text in several:
            indices.append(seen.setdefault(row["question"], len(seen)))
            rows.append(row)
            texts.append(text)
    return judged(indices, rows, texts, reward)


def stamp_of(name):
    """A text that changes when the file of a judge does, or the weights in a model's folder; "" if there is neither.

    name: a path, FILE.py:FUNCTION, RewardModel:DIR, or another judge, perhaps with ":WEIGHT".
    """
    name = name.removeprefix("RewardModel:")
    while ":" in name and not Path(name).exists():
        name = name.rpartition(":")[0]
    path = Path(name)
    files = [path] if path.is_file() else sorted([*path.glob("*.safetensors"), *path.glob("*.bin")])
    stamps = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr(stamps).encode()).hexdigest()[:16] if stamps else ""
