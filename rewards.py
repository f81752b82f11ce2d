"""Rewards that can be checked (DeepSeek-R1, arXiv 2501.12948 section 2.2.2: accuracy and format).

A reward is a plain function, in the form that TRL's trainers use:

    reward(completions: list[str], **columns) -> list[float]

`columns` holds the columns of the data set, one entry per completion: a question's columns are
repeated for each of its completions. A reward takes the columns that it needs by name and ignores
the others. A column of another length is a ValueError.

What a completion answers is read in answers/, in one way for all rewards; here is what that
answer is worth. Plain Python. Rewards that need more are in engine/scoring/: `math_accuracy`
(mathematics.py), programs that are run (programs.py).
"""

import re

from answers import (
    after_thoughts,
    extract_answer,
    gold_answer,
    last_number,
    same_number,
    same_option,
    same_quantity,
)

THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")  # the commas of 1,234,567

# --- accuracy ---


def gsm8k_accuracy(completions, answer, **columns):
    """2.0 for exactly the gold answer, 1.5 for an equal number ("18.0", "$18") or the same option
    ("B. 12" for "B"), else 0.0.

    answer: GSM8K's solutions ("… #### 18"), or bare numbers. The values are those of CPPO's
    published GSM8K setting.
    """
    pairs = zip(completions, answer, strict=True)
    return [_gsm8k_score(extract_answer(text), gold_answer(gold)) for text, gold in pairs]


def _gsm8k_score(given, gold):
    if given is None:
        return 0.0
    if THOUSANDS.sub("", given) == THOUSANDS.sub("", gold):
        return 2.0
    return 1.5 if same_quantity(given, gold) or same_option(given, gold) else 0.0


def toy_accuracy(completions, answer, **columns):
    """1.0 for exactly the gold answer, else 0.0: the only reward of the toy."""
    pairs = zip(completions, answer, strict=True)
    return [1.0 if extract_answer(text) == str(gold) else 0.0 for text, gold in pairs]


def number_accuracy(completions, answer, **columns):
    """1.0 if the last number of the completion is the gold one, else 0.0. It asks for no format.

    A minus between two numbers is a subtraction and not a sign. So "7 - 12" ends with 12, and
    "7 - 12 = -5" ends with -5.
    """
    pairs = zip(completions, answer, strict=True)
    numbers = [(last_number(after_thoughts(text)), gold_answer(gold)) for text, gold in pairs]
    return [1.0 if number and same_number(number, gold) else 0.0 for number, gold in numbers]


# --- format ---


def format_reward(completions, **columns):
    """1.0 for `<think>…</think>\\n<answer>…</answer>` and nothing else, else 0.0. (R1's form) Two
    newlines are paid, too: Qwen3 writes them."""
    return [1.0 if R1_FORMAT.fullmatch(completion) else 0.0 for completion in completions]


def soft_format_reward(completions, **columns):
    """0.25 for each of the four tags that occurs exactly once, and after the tag before it.

    So a model that does not write the whole form yet can learn it tag by tag.
    """
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    return [_in_order(completion, tags) for completion in completions]


def soft_code_format(completions, **columns):
    """0.25 for each of `<think>`, `</think>`, ```python and the closing ``` that occurs exactly
    once, and after the mark before it: the loose form of `code_format`."""
    # "```python" holds a "```", so it gets a name of its own
    marks = ("<think>", "</think>", "<python>", "```")
    return [_in_order(text.replace("```python", "<python>"), marks) for text in completions]


def _in_order(text, marks):
    score, position = 0.0, 0
    for mark in marks:
        found = text.find(mark, position)
        if text.count(mark) == 1 and found >= 0:
            score += 1 / len(marks)
            position = found + len(mark)
    return score


def code_format(completions, **columns):
    """1.0 for `<think>…</think>`, one or two newlines, one ```python block and nothing else, else
    0.0."""
    return [1.0 if CODE_FORMAT.fullmatch(completion) else 0.0 for completion in completions]


# <think>…</think>, a new line, <answer>…</answer> or a program, and nothing else; no tag twice.
# Before the new line there may be an empty one, as Qwen3 writes it
NO_TAG = r"(?:(?!</?(?:think|answer)>).)*"
R1_FORMAT = re.compile(rf"<think>{NO_TAG}</think>\n\n?<answer>{NO_TAG}</answer>", re.DOTALL)
CODE_FORMAT = re.compile(rf"<think>{NO_TAG}</think>\n\n?```python\n(?:(?!```).)*\n```", re.DOTALL)
