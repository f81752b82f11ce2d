"""A reward that is wrong from the start: 1 for the right answer plus one, and nothing else.

    torchrun train.py --rewards toy_accuracy:0 experiments/off_by_one.py:off_by_one
"""

from answers import extract_answer


def off_by_one(completions, answer, **columns):
    """1.0 for exactly the gold answer + 1, else 0.0."""
    pairs = zip(completions, answer, strict=True)
    return [1.0 if extract_answer(text) == str(int(gold) + 1) else 0.0 for text, gold in pairs]
