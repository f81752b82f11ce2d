"""Questions as a list of dicts: made here, a benchmark from the hub, or a local file of JSON lines.

Every question has the columns `question` and `answer`, and two columns that rewards do not get:
`prompt` (token ids, after the chat template) and `begun` (the thought that the template has opened
for the model: "<think>", or "").
"""

import functools
import hashlib
import json
import math
import random
from itertools import islice
from pathlib import Path

from engine.base.errors import UserError, one_line
from engine.model.folders import ask_hub, prompt_room
from tasks.table import SYSTEM_PROMPT, TASKS, Hub, task_of


def load_questions(name, tokenizer, *, split="train", limit=None, **prompts):
    """(questions, notes) of `name`: a row of the table of data sets, or the path of a .jsonl file.

    prompts: system_prompt and max_prompt_tokens, as for `with_prompts`.
    """
    return with_prompts(read_rows(name, split, limit), name, tokenizer, **prompts)


def read_rows(name, split="train", limit=None, model=None):
    """The rows of `name`, without prompts. limit: how many, from the first one on; None: as the
    table says. model: as for `check_dataset`."""
    task = task_of(name)
    if isinstance(task.source, Hub):
        rows = read_hub(name, task.source, split)
    elif task.source:
        rows = task.source(split)
    else:
        rows = read_jsonl(name)
    usual = task.train_questions if split == "train" else task.test_questions
    rows = list(islice(rows, limit or usual))
    check_dataset(name, model, rows)
    return rows


def with_prompts(
    rows, name, tokenizer, *, system_prompt=SYSTEM_PROMPT, max_prompt_tokens=512
):
    """(questions, notes) of the rows of `name`.

    A question whose prompt is longer than `max_prompt_tokens` is left out. No prompt is cut,
    because its end holds the question and the header of the assistant's turn. notes: sentences that
    the user should read.
    """
    filled = [row for row in rows if row["question"].strip() and row["answer"].strip()]
    texts, notes = prompt_texts(tokenizer, filled, system_prompt, task_of(name).examples)
    # a chat template writes the special tokens itself
    prompts = tokenizer(texts, add_special_tokens=tokenizer.chat_template is None).input_ids
    questions = []
    for row, text, prompt in zip(filled, texts, prompts):
        if 1 <= len(prompt) <= max_prompt_tokens:
            begun = opened_thought(text, row["question"])
            questions.append({**row, "prompt": prompt, "begun": begun})
    skipped = len(rows) - len(questions)
    if skipped:
        notes.append(
            f"skipped {skipped} of {len(rows)} questions of {name}: their prompts are longer than "
            f"{max_prompt_tokens} tokens, or something is empty.")
    if not questions:
        raise UserError(
            f"no question of {name} has a prompt of 1 to {max_prompt_tokens} tokens: raise "
            "--max_prompt_tokens, or lower --max_new_tokens if the model's context is short.")
    return questions, notes


def prompt_texts(tokenizer, rows, system_prompt, examples):
    """The prompts of the questions as texts, and notes. examples: (role, text), turns before each
    question."""
    if tokenizer.chat_template is None:
        before = "".join(f"{role.capitalize()}: {content}\n" for role, content in examples)
        texts = [f"{system_prompt}\n\n{before}User: {row['question']}\nAssistant:" for row in rows]
        return texts, [
            "the model has no chat template: prompts are plain text, 'User: … Assistant:'."]
    # some templates do not allow a system turn: then its text stands before the question
    with_system = [("system", system_prompt), *examples]
    for turns, before in ((with_system, ""), (examples, f"{system_prompt}\n\n")):
        start = [{"role": role, "content": content} for role, content in turns]
        chats = []
        for row in rows:
            chats.append([*start, {"role": "user", "content": before + row["question"]}])
        try:
            texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
            return texts, []
        except Exception as error:  # a template is a program: it may fail like any other
            reason = one_line(error)
    raise UserError(
        f"the model's chat template fails ({reason}): correct its chat_template.jinja.")


def opened_thought(text, question):
    """The thought that a prompt's text has opened and not closed, for example "<think>\\n"; "" if
    there is none.

    Only the text after the question counts, because a system prompt may mention <think>, too.
    """
    after = text.rpartition(question.strip())[2]  # many templates strip the question
    _, tag, rest = after.rpartition("<think>")
    return tag + rest if tag and "</think>" not in rest else ""


def read_hub(name, hub, split):
    ask_hub(hub.path, "dataset")
    import datasets  # takes a second to import, and many runs need it not

    try:
        rows = datasets.load_dataset(hub.path, hub.configuration, split=getattr(hub, split))
        return [
            {**row, "question": plain(row[hub.question]), "answer": plain(row[hub.answer])}
            for row in rows
        ]
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise UserError(
            f"{name} cannot be loaded from the hub ({one_line(error)}): go online, or name a "
            ".jsonl file with the columns 'question' and 'answer' in place of it."
        ) from None


def rows_of_run(data):
    """(rows for training, rows for the evaluation) of a run."""
    rows = read_rows(data.dataset, model=data.model)
    if not data.eval_dataset:
        return rows, []
    return rows, read_rows(data.eval_dataset, "test", data.eval_questions, data.model)


def questions_of_run(data, rows, max_new_tokens, tokenizer, model):
    """(questions for training, questions for the evaluation, notes) of a run. rows: as of
    `rows_of_run`."""
    room = prompt_room(model, max_new_tokens, data.max_prompt_tokens)
    prompts = {"system_prompt": data.system_prompt, "max_prompt_tokens": room}
    questions, notes = with_prompts(rows[0], data.dataset, tokenizer, **prompts)
    if not data.eval_dataset:
        return questions, [], notes
    eval_questions, more = with_prompts(rows[1], data.eval_dataset, tokenizer, **prompts)
    return questions, eval_questions, notes + more


def check_dataset(name, model=None, rows=()):
    """Refuse an unknown data set, and questions in words for the toy's model. rows: of a local
    file, after it was read."""
    if name in TASKS:
        in_words = not TASKS[name].base
    else:
        refuse_unknown(name)
        in_words = any(c.isalpha() for row in rows for c in row["question"])
    if model == "toy" and in_words:
        raise UserError(
            f"{name} is written in words, and the toy's model knows no letters: name a chat model, "
            "for example --model HuggingFaceTB/SmolLM2-135M-Instruct.")


def refuse_unknown(path):
    if not Path(path).is_file():
        raise UserError(
            f"unknown data set '{path}': there are {', '.join(TASKS)}, and a .jsonl file {path} "
            "does not exist.")


def plain(value):
    """A question or an answer as text; 27.0 becomes "27", and None becomes "".

    Raises ValueError for a list, an object, NaN and infinity: no answer could be right.
    """
    if isinstance(value, (list, dict)) or value in (math.inf, -math.inf) or value != value:
        raise ValueError(f"{value!r:.80} is neither a text nor a number")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return "" if value is None else str(value)


def read_jsonl(path, reserved=("prompt", "completions")):
    """The rows of a local file of JSON lines, with the columns that every row has, except the
    reserved ones.

    `question` (or `problem`) and `answer` must be among them.
    """
    refuse_unknown(path)
    rows = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            rows.append(row_of(line))
        except (ValueError, AttributeError, RecursionError) as error:
            raise UserError(
                f"{path}, line {number}: each line must be a JSON object in UTF-8 with the columns "
                f"'question' (or 'problem') and 'answer' ({one_line(error)}).") from None
    if not rows:
        raise UserError(f"{path} is empty: it must hold one JSON object per line.")
    # a reward gets whole columns, so a column must be in every row
    shared = set.intersection(*map(set, rows)) - set(reserved)
    return [{column: row[column] for column in row if column in shared} for row in rows]


def row_of(line):
    """A line of a file as a row. Raises ValueError, AttributeError or RecursionError at a
    mistake."""
    row = json.loads(line)
    row["question"] = plain(row.get("question", row.get("problem")))
    row["answer"] = plain(row.get("answer"))
    # finds a half of a surrogate pair, which is no text
    json.dumps(row, ensure_ascii=False).encode()
    if not row["question"].strip() or not row["answer"].strip():
        raise ValueError("the question or the answer is missing or empty")
    return row


def reward_columns(questions, group_size=1):
    """The columns that a reward gets besides the completions: {name: values}, a value for each
    completion."""
    columns = {}
    for name in questions[0] if questions else ():
        if name not in ("prompt", "begun"):
            columns[name] = [row[name] for row in questions for _ in range(group_size)]
    return columns


def take(questions, position, count, seed):
    """`count` questions from `position` on, in the order of `numbers_of`."""
    numbers = numbers_of(position, count, len(questions), seed)
    return [questions[number] for number in numbers]


def numbers_of(position, count, questions, seed):
    """The numbers of `count` questions from `position` on. Each epoch has its own random order,
    which follows from the seed alone. questions: how many there are."""
    numbers = []
    for place in range(position, position + count):
        epoch, offset = divmod(place, questions)
        numbers.append(order_of(epoch, questions, seed)[offset])
    return numbers


@functools.lru_cache(maxsize=2)  # a step may reach into the next epoch
def order_of(epoch, count, seed):
    """The numbers of the questions in the order of an epoch."""
    order = list(range(count))
    random.Random(f"{seed} {epoch}").shuffle(order)
    return order


def fingerprint(questions):
    """A short name for the content of a data set. It tells a resumed run whether its questions are
    still the same."""
    content = json.dumps([(row["question"], row["answer"]) for row in questions])
    return hashlib.sha256(content.encode()).hexdigest()[:16]
