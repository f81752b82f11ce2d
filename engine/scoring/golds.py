"""Gold answers that no completion can win: a run would train on them in vain."""

from answers import gold_answer, to_number
from engine.base import progress
from engine.base.errors import UserError
from engine.data.questions import reward_columns
from engine.scoring.score import try_out, values_of

LOOKED_AT = 1_000  # questions before a run; the others are judged when they are taken
NO_ANSWERS = ("proof", "notfound", "not found", "n/a", "none", "-")  # of NuminaMath and others
NUMBERS_ONLY = ("gsm8k_accuracy", "number_accuracy")  # rewards that judge numbers
OPTION = tuple("ABCDEFGHIJ")
# the perfect completion, in two forms
FORMS = ("<think>\n\n</think>\n<answer>\n{}\n</answer>", "\\boxed{{{}}}")


class Golds:
    """The gold answers of a run, each judged once. reward: the accuracy."""

    def __init__(self, reward):
        self.reward = reward
        self.won = {}  # {number of a question: whether a completion can win its gold answer}
        self.told = False

    def note(self, rows, what):
        """[a sentence, if some of these gold answers cannot be won]. Only those that are judged for
        the first time count. rows: {number: row}. what: which gold answers these are."""
        new = [number for number in rows if number not in self.won]
        won = winnable(self.reward, [rows[number] for number in new])
        self.won.update(zip(new, won))
        lost = [number for number in new if not self.won[number]]
        if not lost:
            return []
        shown = []
        for number in lost[:3]:
            shown.append(f"row {number + 1}: {rows[number]['answer']!r:.60}")
        return [f"{len(lost)} of {what} cannot be won with {self.reward.name} "
                f"({', '.join(shown)}): leave these rows out, or take another reward, such as "
                "math_accuracy."]

    def lost(self, asked):
        """How many of the questions of a step cannot be won. The first ones that were not judged
        before the run are told."""
        for note in self.note(asked, f"the {len(asked)} gold answers of this step"):
            if not self.told:
                progress.note(f"note: {note} summary.json counts them.")
            self.told = True
        return [self.won[number] for number in asked].count(False)


def before_a_run(reward_functions, questions, numbers):
    """(Golds, notes). Tries the rewards on a question, and judges the first gold answers.
    questions: of the run. numbers: those that it asks first."""
    first = questions.first()
    texts = [form.format(gold_answer(first["answer"])) for form in FORMS]
    try_out(reward_functions, texts, reward_columns([first], len(texts)))
    rows = {}
    for number in numbers[:LOOKED_AT]:
        try:
            rows[number] = questions[number]
        except ValueError:  # a row that is not asked either
            continue
    golds = Golds(reward_functions[0])
    return golds, golds.note(rows, f"the first {len(rows)} gold answers")


def winnable(reward, rows):
    """[whether a completion can win the gold answer of this row]. The reward judges the gold answer
    itself, in a tag and in a box."""
    golds = [gold_answer(row["answer"]) for row in rows]
    won = [gold.lower() not in NO_ANSWERS for gold in golds]
    if reward.name in NUMBERS_ONLY:
        return [one and (to_number(gold) is not None or gold in OPTION)
                for one, gold in zip(won, golds)]
    if not rows or reward.name == "code_accuracy":  # each answer would be a program to run
        return won
    paid = [False] * len(rows)
    for form in FORMS:
        try:
            values, error = values_of(
                reward, [form.format(gold) for gold in golds], reward_columns(rows))
        except UserError as mistake:
            error = mistake
        if error:  # if a completion has this fault too, the run says so
            return won
        paid = [before or value > 0 for before, value in zip(paid, values)]
    return [one and win for one, win in zip(won, paid)]
