"""Rewards that can be checked (DeepSeek-R1, arXiv 2501.12948 section 2.2.2: accuracy and format).

A reward is a plain function, in the form that TRL's trainers use:

    reward(completions: list[str], **columns) -> list[float]

`columns` holds the columns of the data set, one entry per completion: a question's columns are
repeated for each of its completions. A reward takes the columns that it needs by name and ignores
the others. A column of another length is a ValueError.

What a completion answers is read in answers/, in one way for all rewards; here is what that
answer is worth. Plain Python. Rewards that need more are in judges/: `math_accuracy`
(mathematics.py), programs that are run (programs.py).
"""

import re

from answers import (
    after_thoughts,
    extract_answer,
    gold_answer,
    last_number,
    python_fences,
    same_number,
    same_option,
    same_quantity,
)

# --- accuracy ---


def gsm8k_accuracy(completions, answer, **columns):
    """2.0 for exactly the gold answer, 1.5 for an equal number ("18.0", "$18") or the same option
    ("B. 12" for "B"), else 0.0.

    answer: GSM8K's solutions ("… #### 18"), or bare numbers. The values are those of CPPO's
    published GSM8K setting.
    """
    thousands = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")  # the commas of 1,234,567
    rewards = []
    for text, solution in zip(completions, answer, strict=True):
        given, gold = extract_answer(text), gold_answer(solution)
        if given is None:
            rewards.append(0.0)
        elif thousands.sub("", given) == thousands.sub("", gold):
            rewards.append(2.0)
        elif same_quantity(given, gold) or same_option(given, gold):
            rewards.append(1.5)
        else:
            rewards.append(0.0)
    return rewards


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
    inside = r"(?:(?!</?(?:think|answer)>).)*"  # no tag twice
    form = re.compile(rf"<think>{inside}</think>\n\n?<answer>{inside}</answer>", re.DOTALL)
    return [1.0 if form.fullmatch(text) else 0.0 for text in completions]


def soft_format_reward(completions, **columns):
    """0.25 for each of the four tags that occurs exactly once, and after the tag before it.

    So a model that does not write the whole form yet can learn it tag by tag.
    """
    rewards = []
    for text in completions:
        reward, position = 0.0, 0
        for tag in ("<think>", "</think>", "<answer>", "</answer>"):
            found = text.find(tag, position)
            if text.count(tag) == 1 and found >= 0:
                reward += 0.25
                position = found + len(tag)
        rewards.append(reward)
    return rewards


def code_format(completions, **columns):
    """1.0 for `<think>…</think>`, one or two newlines, one ```python block and nothing else, else
    0.0."""
    inside = r"(?:(?!</?(?:think|answer)>).)*"
    block = r"```python\n(?:(?!```).)*\n```"
    form = re.compile(rf"<think>{inside}</think>\n\n?{block}", re.DOTALL)
    return [1.0 if form.fullmatch(text) else 0.0 for text in completions]


def soft_code_format(completions, **columns):
    """0.25 for each of `<think>`, `</think>`, ```python and the closing ``` that occurs exactly
    once, and after the mark before it: the loose form of `code_format`. The fences are those of
    `code_accuracy`: ```python3, ```py, and ``` if it opens the only block."""
    rewards = []
    for text in completions:
        # it holds a "```", so it gets another name
        text = python_fences(text).replace("```python", "<python>")
        reward, position = 0.0, 0
        for mark in ("<think>", "</think>", "<python>", "```"):
            found = text.find(mark, position)
            if text.count(mark) == 1 and found >= 0:
                reward += 0.25
                position = found + len(mark)
        rewards.append(reward)
    return rewards
