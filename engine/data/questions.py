"""Questions: the rows of a data set with their prompts, which are made when a question is taken.

Every question has the columns `question` and `answer`, and two columns that rewards do not get:
`prompt` (token ids, after the chat template) and `begun` (the thought that the template has opened
for the model: "<think>", or "").
"""

import functools
import hashlib
import json
import random
from contextlib import suppress
from dataclasses import dataclass

from engine.base.errors import UserError, one_line
from engine.data.rows import Rows, read_rows
from engine.model.folders import prompt_room
from tasks.table import SYSTEM_PROMPT, TASKS, task_of


@dataclass
class Questions:
    """The questions of a data set. len, questions[i]: its rows. `ask` makes the prompts."""

    rows: list | Rows
    name: str
    tokenizer: object
    system_prompt: str = SYSTEM_PROMPT
    max_prompt_tokens: int = 512

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]

    def ask(self, numbers):
        """{number: question with its prompt} of those of these rows that can be asked.

        A row is left out if its prompt is longer than `max_prompt_tokens`, or something is empty.
        No prompt is cut, because its end holds the question and the header of the assistant's turn.
        """
        rows = {}
        for number in numbers:
            with suppress(ValueError):
                rows[number] = self.rows[number]
        examples = task_of(self.name).examples
        texts = prompt_texts(self.tokenizer, [*rows.values()], self.system_prompt, examples)
        # a chat template writes the special tokens itself
        plain_text = self.tokenizer.chat_template is None
        prompts = self.tokenizer(texts, add_special_tokens=plain_text).input_ids if texts else []
        questions = {}
        for (number, row), text, prompt in zip(rows.items(), texts, prompts):
            if 1 <= len(prompt) <= self.max_prompt_tokens:
                begun = opened_thought(text, row["question"])
                questions[number] = {**row, "prompt": prompt, "begun": begun}
        return questions

    def first(self):
        """The first question that can be asked. Raises UserError if it is not among the first
        hundred."""
        for number in range(min(100, len(self))):
            for question in self.ask([number]).values():
                return question
        self.refuse_none({})

    def refuse_none(self, asked):
        """UserError if there is none among these questions."""
        if not asked:
            raise UserError(
                f"no question of {self.name} has a prompt of 1 to {self.max_prompt_tokens} tokens: "
                "raise --max_prompt_tokens, or lower --max_new_tokens if the model's context is "
                "short.")

    def notes(self):
        """What the user should know."""
        notes = []
        question, answer = getattr(self.rows, "columns", ("question", "answer"))
        if self.name not in TASKS and (question, answer) != ("question", "answer"):
            notes.append(
                f"{self.name}: the question is the column '{question}', the answer is '{answer}'.")
        if self.tokenizer.chat_template is None:
            notes.append("the model has no chat template: prompts are plain text, "
                         "'User: … Assistant:'.")
        return notes

    def fingerprint(self):
        """A short name for the content. It tells a resumed run whether its questions, and the first
        prompt, are still the same."""
        if isinstance(self.rows, Rows):
            content = [self.rows.fingerprint, *self.rows.columns, len(self)]
        else:
            content = fingerprint(self.rows)
        return short_hash([content, self.first()["prompt"]])


def load_questions(name, tokenizer, *, split="train", limit=None, **prompts):
    """(questions, notes) of `name`: a row of the table of data sets, a file, or a data set of the
    hub. prompts: system_prompt and max_prompt_tokens, as for `with_prompts`."""
    return with_prompts(read_rows(name, split, limit), name, tokenizer, **prompts)


def with_prompts(rows, name, tokenizer, **prompts):
    """(questions, notes): a list of all rows that can be asked. prompts: of `Questions`."""
    questions = Questions(rows, name, tokenizer, **prompts)
    asked, notes = questions.ask(range(len(rows))), questions.notes()
    questions.refuse_none(asked)
    skipped = len(rows) - len(asked)
    if skipped:
        notes.append(
            f"skipped {skipped} of {len(rows)} questions of {name}: their prompts are longer than "
            f"{questions.max_prompt_tokens} tokens, or something is empty.")
    return [*asked.values()], notes


def prompt_texts(tokenizer, rows, system_prompt, examples):
    """The prompts of the questions as texts. examples: (role, text), turns before each question.

    If `system_prompt` is the default, a row's own one counts. An empty one writes no system turn.
    """
    def own(row):
        usual = system_prompt == SYSTEM_PROMPT
        return row.get("system_prompt") or system_prompt if usual else system_prompt

    if tokenizer.chat_template is None:
        before = "".join(f"{role.capitalize()}: {content}\n" for role, content in examples)
        starts = [f"{own(row)}\n\n" if own(row) else "" for row in rows]
        return [f"{start}{before}User: {row['question']}\nAssistant:"
                for start, row in zip(starts, rows)]
    reason = None
    # some templates do not allow a system turn: then its text comes before the question
    for has_system_turn in (True, False):
        chats = []
        for row in rows:
            system, question = own(row), row["question"]
            turns = [*examples, ("user", question)]
            if system and has_system_turn:
                turns = [("system", system), *turns]
            elif system:
                turns[-1] = ("user", f"{system}\n\n{question}")
            chats.append([{"role": role, "content": content} for role, content in turns])
        try:
            return tokenizer.apply_chat_template(
                chats, tokenize=False, add_generation_prompt=True) if chats else []
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


def rows_of_run(data):
    """(rows for training, rows for the evaluation) of a run."""
    rows = read_rows(data.dataset, model=data.model, columns=data.columns)
    if not data.eval_dataset:
        return rows, []
    return rows, read_rows(
        data.eval_dataset, "test", data.eval_questions, data.model, data.columns)


def questions_of_run(data, rows, max_new_tokens, tokenizer, model):
    """(Questions for training, questions for the evaluation, notes) of a run. rows: as of
    `rows_of_run`."""
    room = prompt_room(model, max_new_tokens, data.max_prompt_tokens)
    prompts = {"system_prompt": data.system_prompt, "max_prompt_tokens": room}
    questions = Questions(rows[0], data.dataset, tokenizer, **prompts)
    questions.first()  # so that a mistake is told before any slow work
    notes = questions.notes()
    if not data.eval_dataset:
        return questions, [], notes
    eval_questions, more = with_prompts(rows[1], data.eval_dataset, tokenizer, **prompts)
    return questions, eval_questions, notes + more


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
    """A short name for the content of a list of questions."""
    return short_hash([(row["question"], row["answer"]) for row in questions])


def short_hash(content):
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
