"""What a completion answers: its final answer as text, and the number that such a text states.

    >>> extract_answer("<think>9 + 9</think> **Final Answer:** $18")
    '$18'
    >>> to_number("$18"), to_number("11 5/6 miles")
    (Fraction(18, 1), Fraction(71, 6))

All rewards read a completion by `extract_answer`. So two rewards may pay different amounts for an
answer, but they never disagree about what the answer is. Which forms are read, and which are not:
docs/rewards.md and tests/concepts/verdicts.jsonl. Plain Python: copy this folder with rewards.py.
"""

from answers.read import after_thoughts, extract_answer, extract_code, gold_answer, python_fences
from answers.text import SERIES, at_words, labelled, spelled
from answers.units import NUMBER_WORDS, changes_number, same_unit
from answers.value import (
    LATEX,
    SUPERSCRIPTS,
    TYPED,
    last_number,
    number_and_unit,
    respelled,
    same_number,
    same_option,
    same_quantity,
    to_number,
)
