"""Rule-based rewards (DeepSeek-R1, arXiv 2501.12948 section 2.2.2: accuracy and format; CPPO uses both on GSM8K).

A reward is a plain function, in the form that TRL's trainers use:

    reward(completions: list[str], **columns) -> list[float]

`columns` holds the data set's columns, one entry per completion (a question's columns are repeated for each of its
completions). A reward takes the columns it needs by name and ignores the rest. Plain Python, no torch.
"""

import re
from fractions import Fraction

NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|(?<![\w.])[-+]?\.\d+", re.ASCII)
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")  # the commas of 1,234,567
DASHES = str.maketrans(dict.fromkeys("‐‑‒–—−－", "-"))
# <think>…</think>, one newline, <answer>…</answer>, and nothing else; no tag twice
NO_TAG = r"(?:(?!</?(?:think|answer)>).)*"
R1_FORMAT = re.compile(rf"<think>{NO_TAG}</think>\n<answer>{NO_TAG}</answer>", re.DOTALL)


def extract_answer(text):
    """The final answer that a completion (or a data set's solution) states, as text; None where it states none.

    Looks after the last `</think>`: what is thought is not answered. There the first of these forms that occurs counts,
    and its last occurrence: `<answer>…</answer>`, `\\boxed{…}`, `#### …`, "the answer is …".
    """
    text = text.rpartition("</think>")[2]
    if "<think>" in text:
        return None  # still thinking when it ended
    answer = None
    for form in (_tagged, _boxed, _after_hashes, _after_phrase):
        found = form(text)
        if found is not None:  # it may hold one of the forms that follow: look inside it
            answer = text = found.strip()
    return answer or None


def _tagged(text):
    for part in reversed(text.split("</answer>")[:-1]):
        if "<answer>" in part:
            return part.rpartition("<answer>")[2]
    return None


def _boxed(text):
    _, opening, rest = text.rpartition("\\boxed{")
    depth = 1
    for i, c in enumerate(rest if opening else ""):
        depth += (c == "{") - (c == "}")
        if depth == 0:
            return rest[:i]
    return None


def _after_hashes(text):
    _, found, rest = text.rpartition("####")
    line = rest.split("\n")[0].strip()
    return line if found and line else None


def _after_phrase(text):
    rest = re.split(r"answer is:?", text, flags=re.IGNORECASE)[1:]
    return rest[-1].strip().split("\n")[0] if rest and rest[-1].strip() else None


def to_number(text):
    """The one number that `text` states, as an exact Fraction, whatever currency or unit stands beside it; else None.

    "$1,234.50" and "1234.5 dollars" are the same number; "12 or 13", "1e3" and "10-5" are none.
    """
    text = text.translate(DASHES).replace("$", "").replace("- ", "-")
    found = NUMBER.findall(text)
    if len(found) != 1 or len(found[0]) > 100:
        return None
    # a digit or a dash beside the number: an exponent, a fraction, a lost sign
    if sum(map(str.isnumeric, text)) != sum(map(str.isnumeric, found[0])) or text.count("-") != found[0].count("-"):
        return None
    return Fraction(found[0].replace(",", ""))


def gsm8k_accuracy(completions, answer, **columns):
    """2.0 where the answer is exactly the gold one, 1.5 where it is equal as a number ("18.0", "$18"), else 0.0.

    answer: GSM8K's solutions ("… #### 18") or the bare numbers. The values are those of CPPO's published GSM8K setting.
    """
    return [_gsm8k_score(completion, gold) for completion, gold in zip(completions, answer, strict=True)]


def _gsm8k_score(completion, gold):
    gold, given = extract_answer(gold) or gold.strip(), extract_answer(completion)
    if given is None:
        return 0.0
    if THOUSANDS.sub("", given) == THOUSANDS.sub("", gold):
        return 2.0
    number = to_number(given)
    return 1.5 if number is not None and number == to_number(gold) else 0.0


def format_reward(completions, **columns):
    """1.0 for `<think>…</think>\\n<answer>…</answer>` and nothing before, between or after; else 0.0. (R1's template)"""
    return [1.0 if R1_FORMAT.fullmatch(completion) else 0.0 for completion in completions]


def soft_format_reward(completions, **columns):
    """0.25 for each of the four tags that occurs exactly once and after the one before it: a way up to `format_reward`."""
    return [_soft_format_score(completion) for completion in completions]


def _soft_format_score(completion):
    score, position = 0.0, 0
    for tag in ("<think>", "</think>", "<answer>", "</answer>"):
        found = completion.find(tag, position)
        if completion.count(tag) == 1 and found >= 0:
            score, position = score + 0.25, found + len(tag)
    return score


def toy_accuracy(completions, answer, **columns):
    """1.0 where the completion's answer is exactly the gold one, else 0.0: the only reward of the toy (engine/toy.py)."""
    return [1.0 if extract_answer(completion) == gold else 0.0 for completion, gold in zip(completions, answer, strict=True)]
