"""Unreachable gold answers, which no completion can win: a run would train on them in vain."""

import math
import re

from answers import changes_number, gold_answer, to_number
from engine.scoring.score import is_custom, is_graded, reward_columns, reward_values, score

LOOKED_AT = 1_024  # gold answers that are judged before a run: all of the first command's
BY_OWN = 64  # by a reward of the user's own, which may be slow
NO_ANSWERS = ("proof", "notfound", "not found", "n/a", "none", "-")  # of NuminaMath and others
NUMBERS_ONLY = ("gsm8k_accuracy", "number_accuracy")  # rewards that judge numbers
OPTION = tuple("ABCDEFGHIJ")
# the perfect completion, in forms that rewards read
FORMS = (
    "<think>\n\n</think>\n<answer>\n{}\n</answer>", "\\boxed{{{}}}", "<answer>{}</answer>",
    "#### {}", "The answer is {}",
)
# 6 \mathrm{~cm} and 6\text{ cm}: a number, a space and its unit
WITH_UNIT = re.compile(
    r"(-?[\d.,]*\d)(?:\\[,;: ]|[~\s])*\\(?:text|mathrm|mbox)\s*\{([~\s][^{}]*)\}(?:\^\{?[23]\}?)?")


def notes_on_gold_answers(reward_functions, questions, numbers):
    """[a sentence], if there are gold answers that cannot be won. First each reward is called on
    one question: a fault of its own ends the run here.

    questions: of the run. numbers: those that it asks.
    """
    first = questions.first()
    texts = [form.format(gold_answer(first["answer"])) for form in FORMS]
    score(reward_functions, texts, reward_columns([first], len(texts)))
    return notes_on_lost(reward_functions[0], [*questions.complete(numbers[:LOOKED_AT]).values()])


def notes_on_lost(reward, rows):
    """[a sentence], if this reward can pay no completion for some of the rows."""
    rows = rows[: BY_OWN if is_custom(reward.function) else LOOKED_AT]
    lost = []
    for row, won in zip(rows, reachable(reward, rows)):
        if not won:
            lost.append(f"{row['question']!r:.40}: {row['answer']!r:.60}")
    if not lost:
        return []
    return [f"{len(lost)} of the {len(rows)} gold answers that were judged cannot be won with "
            f"{reward.name} ({', '.join(lost[:3])}): leave these rows out, or take "
            "another reward, such as math_accuracy."]


def is_right_answer(reward, text, row):
    """Whether the reward calls a text the right answer to a row, and the empty text not."""
    values, error = reward_values(reward, [text, ""], reward_columns([row], 2))
    if error:
        return False
    return values[0] > max(0, values[1]) and not is_graded(reward.function, values[0])


def reachable(reward, rows):
    """[whether a completion can win the gold answer of this row].

    The reward judges the gold answer itself, in each of the FORMS. It wins if it is paid more than
    an empty completion, or if the reward does not apply to its row. If a reward of one's own pays
    none of them, it wants another form, and all of them can be won. math_accuracy must pay the
    number of a gold answer without its unit.
    """
    gold_answers = [gold_answer(row["answer"]) for row in rows]
    won = [gold.lower() not in NO_ANSWERS for gold in gold_answers]
    builtin = not is_custom(reward.function)
    if builtin and reward.name in NUMBERS_ONLY:
        return [one and (to_number(gold) is not None or gold in OPTION)
                for one, gold in zip(won, gold_answers)]
    if builtin and reward.name == "code_accuracy":  # each answer would be a program to run
        return won
    if builtin and reward.name == "math_accuracy":  # a unit may be left out
        gold_answers = [_number_alone(gold) for gold in gold_answers]
    paid = []
    for form in ("", *FORMS):
        texts = [form.format(gold) for gold in gold_answers]
        values, error = reward_values(reward, texts, reward_columns(rows))
        if error:  # if a completion has this fault too, the run says so
            return won
        paid.append(values)
    wins = [max(right) > nothing or math.isnan(nothing) for nothing, *right in zip(*paid)]
    return [one and (win or not (builtin or any(wins))) for one, win in zip(won, wins)]


def _number_alone(gold):
    """The number of a gold answer with a unit; else the gold answer."""
    found = WITH_UNIT.fullmatch(gold)
    return found[1] if found and not changes_number(found[2]) else gold
