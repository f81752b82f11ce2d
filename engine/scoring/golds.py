"""Gold answers that no completion can win, found before a run: it would train on them in vain."""

from answers import gold_answer, to_number
from engine.scoring.score import values_of

LOOKED_AT = 1_000  # questions
NO_ANSWERS = ("proof", "notfound", "not found", "n/a", "none", "-")  # of NuminaMath and others
NUMBERS_ONLY = ("gsm8k_accuracy", "number_accuracy")  # rewards that judge numbers
OPTION = tuple("ABCDEFGHIJ")


def notes_on_golds(reward, questions, numbers):
    """A sentence if gold answers of these questions cannot be won. reward: the accuracy. questions:
    of the run. numbers: those that it asks first."""
    rows = {}
    for number in numbers[:LOOKED_AT]:
        try:
            rows[number] = questions[number]
        except ValueError:  # a row that is not asked either
            continue
    won = winnable(reward, [*rows.values()])
    lost = [number for number, wins in zip(rows, won) if not wins]
    if not lost:
        return []
    shown = ", ".join(f"row {number + 1}: {rows[number]['answer']!r:.60}" for number in lost[:3])
    return [f"{len(lost)} of the first {len(rows)} gold answers cannot be won with {reward.name} "
            f"({shown}): leave these rows out, or take another reward, such as math_accuracy."]


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
    columns = {name: [row.get(name) for row in rows] for name in rows[0]}
    paid = [False] * len(rows)
    for form in ("<think>\n\n</think>\n<answer>\n{}\n</answer>", "\\boxed{{{}}}"):
        texts = [form.format(gold) for gold in golds]
        values, error = values_of(reward, texts, columns)
        if error:  # the run itself will say what is wrong
            return won
        paid = [before or value > 0 for before, value in zip(paid, values)]
    return [one and win for one, win in zip(won, paid)]
