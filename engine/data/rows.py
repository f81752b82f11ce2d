"""The rows of a data set: of the table, of a local file, or of the hub.

Each row has the columns `question` and `answer`, under whatever name the file has them. The rows of
a file stay on the disk until they are taken.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from engine.base import progress
from engine.base.errors import UserError, one_line, unknown
from engine.model.folders import ask_hub
from tasks.table import TASKS, Hub, task_of

FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
# names of the two columns, the first that is there counts; a.b: the field b of the column a
QUESTION = (
    "question", "Question", "problem", "prompt", "query", "instruction", "messages",
    "conversations", "0.value")
ANSWER = (
    "answer", "Answer", "reward_model.ground_truth", "ground_truth", "final_answer", "solution",
    "response", "output", "extra_info.answer", "1.ground_truth.value")
# columns that a row does not keep: rewards know these names as something else
RESERVED = ("prompt", "completions")
LOOKED_AT = 1_000  # rows that are looked at before the run
TOY_CHARACTERS = "0123456789+-=?;\n "  # its tokenizer drops spaces, which changes nothing
QUICK = 10**8  # a file of fewer bytes is read without a bar
COMPARED = 100_000  # questions that are compared with each other before the run


def read_rows(name, split="train", limit=None, model=None):
    """The rows of `name`, a sequence of dicts without prompts. limit: how many, from the first one
    on; None: as the table says. model: as for `check_dataset`.

    name: a row of the table of data sets, a local file, or a data set of the hub.
    """
    task = task_of(name)
    if isinstance(task.source, Hub):
        columns = (task.source.question, task.source.answer)
        dataset = load(name, task.source.path, task.source.configuration,
                       split=getattr(task.source, split))
        rows = Rows(dataset, name, columns)
    elif task.source:
        rows = task.source(split)
    else:
        rows = open_file(name, split)
    most = limit or (task.train_questions if split == "train" else task.test_questions)
    if isinstance(rows, Rows):
        rows.limit(most)
    else:
        rows = list(islice(rows, most))
    check_dataset(name, model, first_rows(rows, name))
    return rows


def first_rows(rows, name):
    """The first rows. Raises UserError if one of a file cannot be used."""
    first = []
    for number in range(min(LOOKED_AT, len(rows))):
        try:
            first.append(rows[number])
        except ValueError as error:
            if name not in TASKS:
                raise UserError(f"{name}, row {number + 1}: {error}. Correct it, or leave it "
                                "out.") from None
    return first


class Rows(Sequence):
    """The rows of a data set of the library `datasets`, which keeps them on the disk.

    columns: the names of question and answer; None: they are found. To take a row whose question
    or answer is missing, empty, or no text raises ValueError.
    """

    def __init__(self, dataset, name, columns=None, reserved=RESERVED):
        self.dataset, self.name, self.reserved = dataset, name, reserved
        self.known = columns is not None
        self.columns = columns or (
            self.find(QUESTION, "question"), self.find(ANSWER, "answer"))
        self.fingerprint = dataset._fingerprint

    def find(self, names, what):
        """The first of these columns that the data set has."""
        first = self.dataset[: 100]
        rows = [dict(zip(first, values)) for values in zip(*first.values())]
        for name in names:
            if any(field(row, name) not in (None, "") for row in rows):
                return name
        raise UserError(
            f"{self.name} has no column for the {what}: it has {', '.join(first)}. Call one "
            f"'{what}' (known are also {', '.join(names[1:])}).")

    def limit(self, most):
        if most and most < len(self):
            self.dataset = self.dataset.select(range(most))

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, i):
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        raw = self.dataset[i]
        row = {name: value for name, value in raw.items() if name not in self.reserved}
        question, answer = (field(raw, name) for name in self.columns)
        if isinstance(question, list):
            question, row["system_prompt"] = turns(question)
        elif self.columns[0] == "instruction" and raw.get("input"):  # of Alpaca's form
            question = f"{question}\n\n{raw['input']}"
        row["question"], row["answer"] = plain(question), plain(answer)
        if not row["question"].strip() or not row["answer"].strip():
            raise ValueError("the question or the answer is missing or empty")
        json.dumps(row, ensure_ascii=False, default=str).encode()  # half of a surrogate pair fails
        return row

    def notes(self):
        """What the user should know of the columns, and of questions that are there more than
        once."""
        question, answer = self.columns
        notes = []
        if not self.known and self.columns != ("question", "answer"):
            notes.append(f"{self.name}: the question is the column '{question}', the answer is "
                         f"'{answer}'.")
        first = self.dataset[:COMPARED]
        values = first[question.split(".")[0]]
        if question == "instruction" and "input" in first:
            values = [*zip(values, first["input"])]
        different = len(set(map(str, values)))
        if different < len(values):
            notes.append(f"{self.name}: only {different:,} of {len(values):,} questions are "
                         "different, the others are copies of them.")
        return notes


def field(row, name):
    """The value of a column, or of a field in it: a.b. None if it is not there."""
    for part in name.split("."):
        row = row.get(part) if isinstance(row, dict) else None
    return row


def turns(messages):
    """(text of the last user turn, text of the system turn or None) of a chat."""
    found = {}
    for message in messages:
        if not isinstance(message, dict):
            raise ValueError(f"{message!r:.80} is no message of a chat")
        role = message.get("role", message.get("from"))
        content = message.get("content", message.get("value"))
        if isinstance(content, list):  # the parts of a message
            content = "".join(part.get("text") or "" for part in content)
        found[{"human": "user"}.get(role, role)] = content
    return found.get("user"), found.get("system")


def plain(value):
    """A question or an answer as text; 27.0 becomes "27", None becomes "", ["27"] becomes "27".

    Raises ValueError for another list, an object, NaN and infinity: no answer could be right.
    """
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, (list, dict)) or value in (math.inf, -math.inf) or value != value:
        raise ValueError(f"{value!r:.80} is neither a text nor a number")
    if isinstance(value, float) and abs(value) >= 2**53:
        raise ValueError(f"{value!r} has lost digits: write it as a text, in quotes")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return "" if value is None else str(value)


# --- where rows come from ---


def open_file(name, split="train", reserved=RESERVED):
    """The Rows of a local file, of a folder, or of a data set of the hub. reserved: columns that a
    row does not keep."""
    path = Path(name)
    refuse_unknown(name)
    if not path.is_file():
        return Rows(load(name, name, split=split), name)
    with path.open("rb") as file:
        if not file.read(100).strip():
            raise UserError(f"{name} is empty: it must hold questions.")
        file.seek(0)
        content = hashlib.file_digest(file, "sha256").hexdigest()
    suffix = next(s for s in reversed(path.suffixes) if s != ".gz")
    options = {"keep_default_na": False} if suffix == ".csv" else {}
    dataset = load(name, FORMATS[suffix], data_files=str(path), split="train", **options)
    try:
        rows = Rows(dataset, name, reserved=reserved)
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not in UTF-8 ({first_mistake(name) or error}): save it in "
                        "UTF-8.") from None
    rows.fingerprint = content  # the same content elsewhere is the same data set
    return rows


def load(name, *arguments, **options):
    """A data set of the library `datasets`."""
    local = Path(name).exists()
    if not local:
        ask_hub(arguments[0], "dataset")
    import datasets  # takes a second to import, and many runs need it not

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    if Path(name).is_file() and Path(name).stat().st_size < QUICK:
        datasets.disable_progress_bars()
    progress.say("reading the data set")
    try:
        return datasets.load_dataset(*arguments, **options)
    except Exception as error:  # of pyarrow, pandas, the hub, …
        reason = one_line(error.__cause__ or error)
    if name.endswith(".jsonl"):
        reason = first_mistake(name) or reason
    cure = ("each line must be a JSON object in UTF-8" if name.endswith(".jsonl") else
            "correct it" if local else "go online, or name a file of questions in place of it")
    raise UserError(f"{name} cannot be loaded ({reason}): {cure}.") from None


def first_mistake(path):
    """Which line of a file of JSON lines is none, and why; None: the lines are JSON objects."""
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        try:
            if line.strip() and not isinstance(json.loads(line), dict):
                return f"line {number} is no JSON object"
        except (ValueError, RecursionError) as error:
            return f"line {number}: {one_line(error)}"
    return None


def check_dataset(name, model=None, rows=()):
    """Refuse an unknown data set, and for the toy's model questions that it cannot read. rows: the
    first ones of a file, after it was read."""
    if name in TASKS:
        readable = TASKS[name].base
    else:
        refuse_unknown(name)
        readable = set(TOY_CHARACTERS).issuperset("".join(row["question"] for row in rows))
    if model == "toy" and not readable:
        raise UserError(
            f"{name} holds more than digits and the signs + - = ?, and the toy's tokenizer knows "
            "nothing else: name a chat model, for example "
            "--model HuggingFaceTB/SmolLM2-135M-Instruct.")


def refuse_unknown(name):
    """Refuse a name that is no file, no folder, and no OWNER/NAME of the hub."""
    path = Path(name)
    has_format = any(suffix in FORMATS for suffix in path.suffixes)
    if path.is_file():
        if not has_format:
            raise UserError(f"{name} is no file of questions: its name must end with "
                            f"{', '.join(FORMATS)}, or one of these and .gz.")
        return
    is_path = has_format or name.startswith((".", "/", "~", "runs/"))
    of_the_hub = name.count("/") == 1 and not is_path
    if not path.is_dir() and not of_the_hub:
        raise UserError(
            f"{unknown('data set', name, TASKS)}. A file of questions ({', '.join(FORMATS)}) with "
            "this name does not exist, and a data set of the hub is called OWNER/NAME.")
