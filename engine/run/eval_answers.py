"""The answers of eval.py: one record for each answer, and the file eval-NAME.jsonl that holds the
records."""

from itertools import groupby
from operator import itemgetter

from engine.base import files
from engine.base.errors import UserError
from engine.scoring.score import Reward, score
from engine.tasks.questions import read_jsonl, reward_columns


def judge_answers(indices, rows, texts, is_right):
    """One record for each completion, judged by the reward `is_right`.

    texts: the completions. indices, rows: for each text, the number of its question and the columns
    of its question.
    """
    reward = Reward(getattr(is_right, "__name__", "judge"), is_right)
    scores, _ = score([reward], texts, reward_columns(rows))
    values = scores[reward.name].tolist()
    return [
        {"index": index, "question": row["question"], "answer": row["answer"],
         "completion": text, "correct": value > 0, "score": value}
        for index, row, text, value in zip(indices, rows, texts, values, strict=True)
    ]


def group_by_question(records):
    """A list for each question: its records, in the order of the questions."""
    index = itemgetter("index")
    return [list(group) for _, group in groupby(sorted(records, key=index), index)]


def questions_in_a_batch(batch_size, samples):
    return max(1, batch_size // samples)


# --- eval-NAME.jsonl ---


def read_answers(path):
    """(setting, records) of a file of answers, without lines that cannot be read. Without a file:
    (None, [])."""
    lines = files.read(path)
    if not lines:
        return None, []
    if not isinstance(lines[0], dict) or "setting" not in lines[0]:
        raise UserError(
            f"{path} is no file of answers that eval.py has written: name another --output_dir, or "
            "move it.")
    return lines[0]["setting"], lines[1:]


def open_answers(path, setting):
    """Start a file of answers, or continue the file of an interrupted evaluation.

    Returns the records that are kept: those of complete batches, because the evaluation samples
    whole batches.
    """
    earlier, records = read_answers(path)
    if earlier is not None:
        refuse_another_setting(path, earlier, setting)
    kept = []
    for part, samples in [("greedy", 1), ("sampled", setting["samples"])]:
        of_part = [record for record in records if record["part"] == part]
        if of_part:
            kept += complete_batches(of_part, samples, setting)
    files.write(path, files.as_lines([{"setting": setting}, *kept]))
    return kept


def refuse_another_setting(path, earlier, setting):
    """Refuse a file of answers that were sampled or judged with another setting."""
    changed = [
        f"{key} {earlier.get(key)!r:.60}" for key in setting if earlier.get(key) != setting[key]]
    if changed:
        raise UserError(
            f"{path} holds answers in another setting ({', '.join(changed)}): name another "
            "--output_dir, or remove it.")


def complete_batches(records, samples, setting):
    """The records of the batches that have all of their answers."""
    questions = setting["questions"]
    size = questions_in_a_batch(setting["batch_size"], samples)
    kept = []
    for start in range(0, questions, size):
        end = min(start + size, questions)
        batch = [record for record in records if start <= record["index"] < end]
        if len(batch) == (end - start) * samples:
            kept += batch
    return kept


# --- completions of another program ---


def judge_file(path, is_right):
    """The records of completions that another program sampled.

    Each line of the file holds question, answer, and either completion (a text) or completions (a
    list of texts). If the model's chat template writes `<think>` into the prompt, each completion
    in the file must begin with it.
    """
    indices, rows, texts = [], [], []
    known = {}  # {question: its index}
    for number, row in enumerate(read_jsonl(path, reserved=["prompt"]), 1):
        single = row.pop("completion", None)
        completions = row.pop("completions", [single])
        is_list = isinstance(completions, list) and completions
        if not is_list or not all(isinstance(text, str) for text in completions):
            raise UserError(f"{path}, question {number}: each line needs 'completion', a text, "
                            "or each line 'completions', a list of texts.")
        index = known.setdefault(row["question"], len(known))
        for text in completions:
            indices.append(index)
            rows.append(row)
            texts.append(text)
    return judge_answers(indices, rows, texts, is_right)
