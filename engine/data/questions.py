"""Questions: the rows of a data set with their prompts, which are made when a question is taken.

Every question has the columns `question` and `answer`, and two columns that rewards do not get:
`prompt` (token ids, after the chat template) and `begun` (what the prompt has begun of the answer:
"<think>", the text of a last turn of the assistant, or "").
"""

import functools
import hashlib
import json
import random
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from engine.base import progress
from engine.base.errors import UserError, one_line
from engine.data.rows import Rows, read_rows
from engine.model.folders import prompt_room
from tasks.table import SYSTEM_PROMPT, TASKS, task_of

DATA_FORM = 2  # of Questions.fingerprint: another number if it hashes something else
HELD_OUT = 256  # questions of the training set that --eval_every keeps for its evaluations
SYSTEM_ROLES = ("system", "developer")
# a question that somebody has already put into a chat template, or a chat that became a text
TEMPLATE = re.compile(r"<\|\w+\|>|\[INST\]|<start_of_turn>|^\s*[\[{].*\brole\b", re.DOTALL)
PLAIN = (  # the chat as plain text, for a model without a chat template
    "{% for turn in messages %}{% if turn.role == 'system' %}{{ turn.content + '\n\n' }}"
    "{% else %}{{ turn.role.capitalize() + ': ' + turn.content + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


@dataclass
class Questions:
    """The questions of a data set. len, questions[i]: its rows. `ask` makes the prompts."""

    rows: list | Rows
    name: str
    tokenizer: object
    system_prompt: str = SYSTEM_PROMPT
    max_prompt_tokens: int = 512
    template_options: dict = field(default_factory=dict)  # for the chat template
    # (text, row) → whether the text alone is a right answer; None: nobody can say
    is_right: Callable | None = None

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]

    def complete(self, numbers):
        """{number: row} of those of these rows in which nothing is missing or empty."""
        rows = {}
        for number in numbers:
            with suppress(ValueError):
                rows[number] = self.rows[number]
        return rows

    def ask(self, numbers):
        """{number: question with its prompt} of those of these rows that can be asked.

        A row is left out if its prompt is longer than `max_prompt_tokens`, or something is empty.
        No prompt is cut, because its end holds the question and the header of the assistant's turn.
        """
        examples = task_of(self.name).examples
        # a chat template writes the special tokens itself
        plain_text = self.tokenizer.chat_template is None
        questions = {}
        for number, row in self.complete(numbers).items():
            row = self.without_given_answer(row)
            text = prompt_text(
                self.tokenizer, row, self.system_prompt, examples, self.template_options)
            prompt = self.tokenizer(text, add_special_tokens=plain_text).input_ids
            if 1 <= len(prompt) <= self.max_prompt_tokens:
                questions[number] = {**row, "prompt": prompt, "begun": begun(text, row)}
        return questions

    def without_given_answer(self, row):
        """The same row. A chat that ends with the solution, a turn of the assistant that is a right
        answer by itself, loses this turn: a model that reads it learns nothing."""
        *others, last = row.get("prompt") or [{"role": "user"}]
        if not self.is_right or last["role"] != "assistant":
            return row
        if not self.is_right(last["content"], row):
            return row
        progress.note_once(f"note: {self.name}: chats end with a turn of the assistant that is "
                           "paid by itself. The model does not see it, because it is the answer.")
        return row | {"prompt": others}

    def first(self):
        """The first question that can be asked. Raises UserError if it is not among the first
        hundred, or the chat template fails on one of them."""
        asked = self.ask(range(min(100, len(self))))
        if not asked:
            raise UserError(
                f"no question of {self.name} has a prompt of 1 to {self.max_prompt_tokens} tokens: "
                "raise --max_prompt_tokens, or lower --max_new_tokens if the model's context is "
                "short.")
        return next(iter(asked.values()))

    def notes(self):
        """What the user should know."""
        notes = []
        if self.name not in TASKS:
            columns = self.rows.columns
            if columns != ("question", "answer"):
                notes.append(f"columns of {self.name}: {' and '.join(columns)} (--columns to "
                             "change).")
            first = self.complete([0]).get(0)
            if first and TEMPLATE.search(first["question"]):
                notes.append(f"{self.name}: a question holds a chat template's marks or JSON, and "
                             "the model sees them as text. Give it as a list of turns, or bare.")
            unread = self.rows.unread()
            if unread:
                notes.append(f"{self.name}: only rewards get the columns {', '.join(unread)}. If "
                             "the model needs them, write them into the question.")
        if self.tokenizer.chat_template is None:
            notes.append("the model has no chat template: prompts are plain text, "
                         "'User: … Assistant:'.")
        return notes

    def fingerprint(self):
        """A short name for what prompts are made of: the rows, the system prompt, the chat template
        and its options. It tells a resumed run whether its questions are still the same.

        The prompts themselves may change with the clock: some templates write today's date.
        """
        if isinstance(self.rows, Rows):
            content = [self.rows.fingerprint, *self.rows.columns, len(self)]
        else:
            content = fingerprint(self.rows)
        template = self.tokenizer.chat_template or PLAIN
        return short_hash([content, self.system_prompt, template, self.template_options])

    def first_prompt(self):
        """A short name for the first prompt. It tells a resumed run whether its prompts are still
        the same."""
        return short_hash(self.first()["prompt"])


def load_questions(name, tokenizer, *, split="train", limit=None, **prompts):
    """(questions, notes) of `name`: a row of the table of data sets, a file, or a data set of the
    hub. prompts: as for `with_prompts`."""
    return with_prompts(read_rows(name, split, limit), name, tokenizer, **prompts)


def with_prompts(rows, name, tokenizer, **prompts):
    """(questions, notes): a list of all rows that can be asked. prompts: of `Questions`."""
    questions = Questions(rows, name, tokenizer, **prompts)
    asked, notes = questions.ask(range(len(rows))), questions.notes()
    if not asked:
        questions.first()  # raises
    skipped = len(rows) - len(asked)
    if skipped:
        notes.append(
            f"skipped {skipped} of {len(rows)} questions of {name}: their prompts are longer than "
            f"{questions.max_prompt_tokens} tokens, or something is empty.")
    return [*asked.values()], notes


def prompt_text(tokenizer, row, system_prompt, examples, template_options):
    """The prompt of a question as text. The arguments are those of `turns_of` and `Questions`."""
    turns = turns_of(row, system_prompt, examples)
    goes_on = turns[-1]["role"] == "assistant"  # the completion continues the last turn
    template = tokenizer.chat_template or PLAIN
    for name in template_options:
        if name not in template:
            raise UserError(f"--chat_template_kwargs: the model's chat template knows no {name}.")
    # some templates do not allow a system turn, others take a content only as a list of parts
    chats = [turns, without_system_turns(turns)]
    reasons = []
    for chat in (*chats, *map(in_parts, chats)):
        try:
            text = tokenizer.apply_chat_template(
                chat, chat_template=template, tokenize=False, add_generation_prompt=not goes_on,
                continue_final_message=goes_on, **template_options)
        except Exception as error:  # a template is a program: it may fail like any other
            reasons.append(one_line(error))
            continue
        left_out = [  # many leave out the thoughts of earlier turns
            turn for turn in own_turns(row)
            if turn["content"].rpartition("</think>")[2].strip() not in text]
        if not left_out:
            return text
        reasons.append("it leaves out the turn of {role}, {content!r:.60}".format(**left_out[0]))
    raise UserError(f"the model's chat template fails ({reasons[1]}): correct its "
                    "chat_template.jinja, or the chats of the data set.")


def own_turns(row):
    """The turns of a row: its chat, or its question as a turn of the user."""
    return row.get("prompt") or [{"role": "user", "content": row["question"]}]


def turns_of(row, system_prompt, examples):
    """The turns of a question, dicts with role and content: its own chat, or the examples, which
    are (role, text), and then its text.

    Before them comes the system prompt; if it is empty, none. If it is the default, a row's own one
    or the system turn of its chat counts.
    """
    turns = own_turns(row)
    if not row.get("prompt"):
        turns = [{"role": role, "content": text} for role, text in examples] + turns
    if system_prompt == SYSTEM_PROMPT:
        if turns[0]["role"] in SYSTEM_ROLES:
            return turns
        system_prompt = row.get("system_prompt") or system_prompt
    turns = [turn for turn in turns if turn["role"] not in SYSTEM_ROLES]
    return [{"role": "system", "content": system_prompt}, *turns] if system_prompt else turns


def without_system_turns(turns):
    """The same turns, but the texts of the system turns stand before the text of the last user
    turn."""
    system = [turn["content"] for turn in turns if turn["role"] in SYSTEM_ROLES]
    others = [dict(turn) for turn in turns if turn["role"] not in SYSTEM_ROLES]
    for turn in reversed(others):
        if turn["role"] == "user":
            turn["content"] = "\n\n".join([*system, turn["content"]])
            break
    return others


def in_parts(turns):
    """The same turns, but the content of each is a list of one part, its text."""
    return [turn | {"content": [{"type": "text", "text": turn["content"]}]} for turn in turns]


def begun(text, row):
    """What a prompt's text has begun of the answer; "" if nothing: the last turn of a chat, if it
    is the assistant's, or a thought that the template opens after the last turn, such as
    "<think>\\n"."""
    last = own_turns(row)[-1]
    if last["role"] == "assistant":
        return last["content"]
    # what comes before may mention <think>, too; many templates strip the question
    after = text.rpartition(last["content"].strip())[2]
    _, tag, rest = after.rpartition("<think>")
    return tag + rest if tag and "</think>" not in rest else ""


def rows_of_run(data):
    """(rows for training, rows for the evaluation) of a run."""
    rows = read_rows(data.dataset, model=data.model, columns=data.columns)
    if not data.tested:
        return rows, []
    return rows, read_rows(data.tested, "test", data.eval_questions, data.model, data.columns)


def questions_of_run(data, rows, max_new_tokens, tokenizer, model, is_right, held_out=()):
    """(Questions for training, questions for the evaluation, those for --eval_every, notes) of a
    run. rows: as of `rows_of_run`. is_right: as for `Questions`. held_out: rows that --eval_every
    keeps out of the training; without them it takes the questions of the evaluation."""
    room = prompt_room(model, max_new_tokens, data.max_prompt_tokens)
    prompts = {"system_prompt": data.system_prompt, "max_prompt_tokens": room,
               "template_options": data.chat_template_kwargs or {}, "is_right": is_right}
    questions = Questions(rows[0], data.dataset, tokenizer, **prompts)
    notes, test, to_choose = questions.notes(), [], []
    if data.tested:
        test, more = with_prompts(rows[1], data.tested, tokenizer, **prompts)
        notes += more
    if held_out:
        to_choose, more = with_prompts(held_out, data.dataset, tokenizer, **prompts)
        notes += more
    return questions, test, to_choose or test, notes


def names_others(data):
    """Whether --eval_dataset names the questions for --eval_every. A test split that nobody has
    named does not: a model that is chosen on test questions looks better than it is."""
    return bool(data.eval_dataset and data.eval_questions)


def hold_out(rows, seed):
    """(the other rows, HELD_OUT of the rows or a quarter of them). The seed says which."""
    count = min(HELD_OUT, len(rows) // 4)
    chosen = random.Random(f"{seed} held out").sample(range(len(rows)), count)
    others = sorted(set(range(len(rows))) - set(chosen))
    if isinstance(rows, Rows):
        return rows.select(others), rows.select(chosen)
    return [rows[i] for i in others], [rows[i] for i in chosen]


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
    """A short name for the content of a list of questions."""
    return short_hash([(row["question"], row["answer"]) for row in questions])


def short_hash(content):
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
