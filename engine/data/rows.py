"""The rows of a data set: of the table, of a local file, or of the hub.

Each row has the columns `question` and `answer`, under whatever name the file has them. The rows of
a file stay on the disk until they are taken.
"""

import hashlib
import json
import re
import shlex
from collections.abc import Sequence
from decimal import Decimal
from itertools import islice
from pathlib import Path

from engine.base import progress
from engine.base.errors import UserError, nearest, one_line, unknown
from engine.model.folders import ask_hub
from tasks.table import TASKS, Hub, task_of

FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
# usual names of the two columns, the first that is there counts; a.b: the field b of the column a
USUAL = {
    "question": ("question", "problem", "prompt", "instruction", "messages"),
    "answer": (
        "answer", "reward_model.ground_truth", "ground_truth", "solution", "extra_info.answer"),
}
# columns that a row does not keep: rewards know these names as something else
RESERVED = ("prompt", "completions")
# names of columns that look like a part of the question
PARTS = re.compile(
    r"(?:^|_)(?:choice|option|candidate|context|passage|paragraph|article|document|stor(?:y|ies)"
    r"|dialog|conversation|message|history|tool|image|picture|figure|audio|video|table|hint|input"
    r"|background|premise)s?(?:$|[_.])|^[A-E]$", re.IGNORECASE)
LOOKED_AT = 1_000  # rows that are looked at before the run
TOY_CHARACTERS = "0123456789+-=?;\n "  # its tokenizer drops spaces, which changes nothing


def read_rows(name, split="train", limit=None, model=None, columns=None):
    """The rows of `name`, a sequence of dicts without prompts. limit: how many, from the first one
    on; None: as the table says. model: as for `check_dataset`. columns: the words of --columns; a
    row of the table has columns of its own.

    name: a row of the table of data sets, a local file, or a data set of the hub.
    """
    task = task_of(name)
    source = task.source
    most = limit or getattr(task, f"{split}_questions")
    if isinstance(source, Hub):
        hub_split = getattr(source, split)
        dataset = load_dataset(name, source.path, source.configuration, split=hub_split)
        rows = Rows(dataset, (source.question, source.answer))
    elif source:
        return list(islice(source(split), most))
    else:
        rows = open_file(name, split, columns=columns)
    if most:
        rows = rows.select(range(min(most, len(rows))))
    check_dataset(name, model, rows)
    return rows


class Rows(Sequence):
    """The rows of a data set of the library `datasets`, which keeps them on the disk.

    columns: the names of question and answer; a.b: the field b of the column a. To take a row whose
    question or answer is missing, empty, or no text raises ValueError.
    """

    def __init__(self, dataset, columns):
        self.dataset, self.columns = dataset, columns
        self.flat = dataset.flatten()  # the field b of the column a is its column a.b
        self.fingerprint = dataset._fingerprint

    def select(self, numbers):
        """The rows with these numbers."""
        chosen = Rows(self.dataset.select(numbers), self.columns)
        chosen.fingerprint = self.fingerprint  # of all rows
        return chosen

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, i):
        raw, flat = self.dataset[i], self.flat[i]
        row = {name: value for name, value in raw.items() if name not in RESERVED}
        question, answer = map(flat.get, self.columns)
        label = self.flat.features[self.columns[1]]
        if hasattr(label, "int2str") and answer is not None:  # a ClassLabel keeps a number
            answer = label.int2str(answer)
        if isinstance(question, list):
            row["prompt"] = chat_of(question)
            question = None
            for turn in row["prompt"]:
                if turn["role"] == "user":
                    question = turn["content"]
        elif self.columns[0] == "instruction" and raw.get("input"):  # of Alpaca's form
            question = f"{question}\n\n{raw['input']}"
        row["question"], row["answer"] = plain(question), plain(answer)
        if not row["question"].strip() or not row["answer"].strip():
            raise ValueError("its question or its answer is missing or empty")
        return row

    def unread(self):
        """The columns that look like a part of the question and are not in the prompt."""
        used = {column.partition(".")[0] for column in self.columns}
        if self.columns[0] == "instruction":
            used.add("input")
        return [name for name in self.dataset.column_names
                if name not in used and PARTS.search(name)]


# --- columns ---


def named_columns(words):
    """{"question": NAME, "answer": NAME}, or one of them, of the words of --columns. None: no
    words."""
    named = {}
    for word in words or ():
        what, _, name = word.partition("=")
        if what not in USUAL or what in named or not name:
            raise UserError(f"--columns: '{word}' must be question=NAME or answer=NAME, each at "
                            "most once.")
        named[what] = name
    return named


def find_columns(dataset, name, named):
    """(column of the question, column of the answer). named: of `named_columns`; a column that it
    does not have is looked for under its usual names."""
    kinds = dataset.flatten().features  # {column: its type}
    found = {what: next(filter(kinds.get, usual), None) for what, usual in USUAL.items()} | named
    missing = [what for what in found if found[what] not in kinds]
    if missing:
        for what in missing:
            found[what] = (nearest(found[what] or "", kinds) or ["NAME"])[0]
        words = [f"{what}={column}" for what, column in found.items()]
        raise UserError(
            f"{name} has no column for the {' and the '.join(missing)}: it has {', '.join(kinds)}. "
            f"Name one that each file has: --columns {shlex.join(words)}")
    return tuple(found.values())


def chat_of(messages):
    """The turns of a chat, dicts with a role and a text as content, without what is None. A content
    may be a list of parts. Raises ValueError if something is no text, for example an image."""
    turns = []
    for message in messages:
        try:
            turn = {name: value for name, value in message.items() if value is not None}
            content = message["content"]
            if isinstance(content, list):
                content = "".join(part["text"] for part in content)
            turns.append(turn | {"role": message["role"], "content": str(content or "")})
        except (AttributeError, KeyError, TypeError):
            raise ValueError(f"{message!r:.80} is no turn of a chat: it needs a role, and a text "
                             "as content") from None
    return turns


def plain(value):
    """A question or an answer as text; 27.0 becomes "27", 0.1 + 0.2 becomes "0.3", ["2"] becomes
    "2", None becomes "".

    Raises ValueError for another list, an object, and a number that is not exact, such as NaN: no
    answer could be right.
    """
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, (list, dict)):
        raise ValueError(f"{value!r:.80} is neither a text nor a number")
    if isinstance(value, float):
        if not abs(value) < 2**53:
            raise ValueError(f"{value!r} is no exact number: write it as a text, in quotes")
        digits = ".0f" if value.is_integer() else ".15g"
        return format(Decimal(format(value, digits)), "f")  # 0.00005, not 5e-05
    return "" if value is None else str(value)


# --- where rows come from ---


def open_file(name, split="train", columns=None):
    """The Rows of a local file, of a folder, or of a data set of the hub. columns: the words of
    --columns."""
    refuse_unknown(name)
    named, path, kind = named_columns(columns), Path(name), format_of(name)
    if not path.is_file():
        dataset = load_dataset(name, name, split=split)
        rows = Rows(dataset, find_columns(dataset, name, named))
        files = [file for file in sorted(path.rglob("*")) if format_of(str(file))]
        if files:
            rows.fingerprint = " ".join([split, *map(digest, files)])
        return rows
    if not path.stat().st_size:
        raise UserError(f"{name} is empty: it must hold questions.")
    options = {"keep_default_na": False} if kind == "csv" else {}
    dataset = load_dataset(name, kind, data_files=name, split="train", **options)
    rows = Rows(dataset, find_columns(dataset, name, named))
    rows.fingerprint = digest(path)
    return rows


def digest(path):
    """SHA-256 of a file: the same content elsewhere, or of another day, is the same data set."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_dataset(name, *arguments, **options):
    """A data set of the library `datasets`."""
    local = Path(name).exists()
    if not local:
        ask_hub(arguments[0], "dataset")
    import datasets  # takes a second to import, and many runs need it not

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    if local:
        datasets.disable_progress_bars()
    progress.say("reading the data set")
    try:
        if Path(name, "state.json").is_file():  # save_to_disk has written it
            return datasets.load_from_disk(name)
        return datasets.load_dataset(*arguments, **options)
    except Exception as error:  # of pyarrow, pandas, the hub, …
        reason = one_line(error.__cause__ or error)
    for file in filter(format_of, map(str, Path(name).rglob("*"))):
        # tells which file it is
        load_dataset(file, format_of(file), data_files=file, split="train")
    cure = "correct the file" if local else "go online, or name a file of questions in place of it"
    if name.endswith(".jsonl"):
        reason = first_mistake(name) or reason
        cure = "each line must be a JSON object in UTF-8"
    if "Unknown split" in reason:
        cure = "name a file of the questions in place of it"
    raise UserError(f"{name} cannot be loaded ({reason}): {cure}.")


def first_mistake(path):
    """The first line of a file of JSON lines that is none, and why. None: all lines are JSON."""
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                json.loads(line.strip() or "{}")
            except (ValueError, RecursionError) as error:
                return f"line {number}: {one_line(error)}"


def check_dataset(name, model=None, rows=()):
    """Refuse an unknown data set, a row of a file that cannot be used, and for the toy's model
    questions that it cannot read. rows: of a file, after it was opened."""
    if name in TASKS:
        readable = TASKS[name].base
    else:
        refuse_unknown(name)
        signs = set()
        for number in range(min(LOOKED_AT, len(rows))):
            try:
                signs |= set(rows[number]["question"])
            except ValueError as error:
                raise UserError(f"{name}, row {number + 1}: {error}. Correct this row, or "
                                "leave it out.") from None
        readable = signs <= set(TOY_CHARACTERS)
    if model == "toy" and not readable:
        raise UserError(
            f"{name} holds more than digits and the signs + - = ?, and the toy's tokenizer knows "
            "nothing else: name a chat model, for example "
            "--model HuggingFaceTB/SmolLM2-135M-Instruct.")


def check_columns(words, names):
    """Refuse the words of --columns if the table knows the columns of all these data sets."""
    if words and set(names) <= set(TASKS):
        raise UserError(f"--columns has no effect on {names[0]}, whose columns are known: leave "
                        "--columns out, or name a file.")


def same_rows(name, other):
    """Whether the test split of `other` holds the very rows of the training split of `name`."""
    one_split = not TASKS[name].has_test_split if name in TASKS else Path(name).is_file()
    return one_split and Path(name).resolve() == Path(other).resolve()


def refuse_unknown(name):
    """Refuse a name that is no file of questions, no folder, and no OWNER/NAME of the hub."""
    path, kind = Path(name), format_of(name)
    here = path.is_dir() or path.is_file() and kind
    of_the_hub = re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) and not path.exists() and not kind
    if not here and not of_the_hub:
        raise UserError(
            f"{unknown('data set', name, TASKS)}. Or name a file that exists and ends with "
            f"{', '.join(FORMATS)}, also with .gz; a folder; or OWNER/NAME of the hub.")


def format_of(name):
    """The format of a file by its name, for the library `datasets`; None: it is no data file."""
    return FORMATS.get(Path(name.removesuffix(".gz")).suffix)
