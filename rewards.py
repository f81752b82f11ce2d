"""Rewards that can be checked (DeepSeek-R1, arXiv 2501.12948 section 2.2.2: accuracy and format), and a model as a judge.

A reward is a plain function, in the form that TRL's trainers use:

    reward(completions: list[str], **columns) -> list[float]

`columns` holds the data set's columns, one entry per completion (a question's columns are repeated for each of its
completions). A reward takes the columns it needs by name and ignores the rest; one of another length is a ValueError.
Plain Python. Rewards that need a machine are in engine/scoring/: `math_accuracy` (mathematics.py), programs that are
run (programs.py), a model that judges (reward_model.py).
"""

import re
from fractions import Fraction

MINUS = tuple("-‐‑‒–−－")
DASHES = str.maketrans(dict.fromkeys((*MINUS, "—"), "-"))
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")  # the commas of 1,234,567
# what may stand around a number and changes nothing: LaTeX's text, spaces and brackets, bold type, currency, percent, degrees
DRESS = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\b|\\[,;:!]|\^\{?\\circ\}?|\\?[ $%(){}\[\]]|\*\*|[€£¥₹°`'\"]")
FRACTION = re.compile(r"\\[dt]?frac\{(-?[0-9]+)\}\{([0-9]+)\}")
# a minus after these is a subtraction or a hyphen: "7" or "7x" before it on the same line; a letter, if no space comes between
SUBTRACTS = re.compile(r"(?:[0-9][A-Za-z]?[ \t$*)\]}%°\\]*|[A-Za-z][$*)\]}%°\\]*)\Z")
DIGITS = r"((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
# "total =", a sign, a number, perhaps "/" and another, a unit
NUMBER = re.compile(rf"((?:[^\W\d_]|\s)*[=:：])?\s*([-+]?)\s*{DIGITS}(?:\s*/\s*{DIGITS})?((?:[^\W\d_]|[\s./])*)")
# words that make another number of the one beside them; any other word after a number is its unit, as in "5 seventh graders"
MULTIPLES = (
    r"hundred|thousand|[mb]illion|trillion|lakh|crore|dozen|half|halve|third|fifth|tenth|hundredth|squared|cubed"
    r"|(?:four|six|seven|eigh|nin|eleven|twelf|\w{3,5}teen|\w{3,5}tie|thousand|[mb]illion)th(?:s|(?= of\b|[\s.]*$))"
)
MULTIPLE = re.compile(rf"\b(?:{MULTIPLES})s?\b", re.IGNORECASE)
ONES = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
CHANGES_VALUE = re.compile(
    rf"\b(?:[BM]|(?i:{MULTIPLES}|k|[mb]n|[mb]il|[mb]ln|and|or|nor|not|than|plus|minus|negative|{'|'.join(ONES)})s?)\b|半"
)
SAID_TWICE = re.compile("|".join(rf"(?<=(?<![0-9.,]){i}) ?\({word}\)" for i, word in enumerate(ONES, 1)), re.IGNORECASE)  # 2 (two)
POWER = re.compile(r"(?<=[^\W\d_²³])[²³]")  # of a unit: cm²
# <think>…</think>, one newline, <answer>…</answer> or a program, and nothing else; no tag twice
NO_TAG = r"(?:(?!</?(?:think|answer)>).)*"
R1_FORMAT = re.compile(rf"<think>{NO_TAG}</think>\n<answer>{NO_TAG}</answer>", re.DOTALL)
CODE_FORMAT = re.compile(rf"<think>{NO_TAG}</think>\n```python\n(?:(?!```).)*\n```", re.DOTALL)


# --- what a completion answers ---


def extract_answer(text):
    """The final answer that a completion (or a data set's solution) states, as text; None where it states none.

    Looks after the last `</think>`: what is thought is not answered. There the first of these forms that occurs counts,
    and its last occurrence: `<answer>…</answer>`, `\\boxed{…}` (with a minus before it), `#### …`, "the answer is …".
    An empty tag or box is an empty answer: None. A `####` or "the answer is" that nothing follows is passed over.
    """
    answer, text = None, after_thoughts(text)
    for form in (_tagged, _boxed, _after_hashes, _after_phrase):
        found = form(text)
        if found is not None:  # it may hold one of the forms that follow: look inside it
            answer = text = found.strip()
    return answer or None


def after_thoughts(text):
    text = text.rpartition("</think>")[2]
    return "" if "<think>" in text else text  # still thinking when it ended


def _tagged(text):
    for part in reversed(text.split("</answer>")[:-1]):
        if "<answer>" in part:
            return part.rpartition("<answer>")[2]
    return None


def _boxed(text):
    before, opening, rest = text.rpartition("\\boxed{")
    sign = "-" if _ends_in_minus(before) else ""
    depth = 1
    for i, c in enumerate(rest if opening else ""):
        depth += (c == "{") - (c == "}")
        if depth == 0:
            return sign + rest[:i].strip() if rest[:i].strip() else ""
    return None


def _ends_in_minus(before):
    """Does `before`, the text before a number or a box, end in a minus that belongs to it: no bullet, dash or subtraction?

    If white space follows the minus, it does only after "=", after an opening bracket, or if nothing stands before it.
    """
    left = before.rstrip(" \t\n$€£¥₹([{*\\,;:!")  # what may stand between: currency, opening brackets, bold type, LaTeX's spaces
    if not left.endswith(MINUS):
        return False
    gap, left = before[len(left) :], left[:-1]
    if SUBTRACTS.search(left) or left.endswith((*MINUS, "—")):
        return False
    opened = left.rstrip(" \t\n*")
    return not gap[:1].isspace() or not opened or left.endswith("$") or opened.endswith(("=", "(", "[", "{", "<answer>"))


def _after_hashes(text):
    lines = (rest.split("\n")[0].strip() for rest in reversed(text.split("####")[1:]))
    return next(filter(None, lines), None)


def _after_phrase(text):
    rests = (rest.strip() for rest in reversed(re.split(r"answer is:?", text, flags=re.IGNORECASE)[1:]))
    return next((rest.split("\n")[0] for rest in rests if rest), None)


def gold_answer(text):
    return extract_answer(text) or text.strip()


# --- numbers ---


def to_number(text):
    """The one number that `text` states, as an exact Fraction, whatever currency or unit stands beside it; else None.

    Before the number there may be "total =", a sign, a currency; after it a unit, in words that leave its value alone. So
    "$1,234.50" and "1234.5 dollars" are the same number, and "\\frac{3}{4}" is 0.75. None are "minus 5", "18 million",
    "3 fourths", "12 or 13", "1e3", "10-5", "Ann has 18", a division that is left to do ("36/2"), and more than 100 characters.
    """
    if len(text) > 100:
        return None
    text = FRACTION.sub(r" \1/\2 ", SAID_TWICE.sub("", text).replace("{,}", ",").translate(DASHES))
    found = NUMBER.fullmatch(DRESS.sub(" ", text))
    if found is None:
        return None
    name, sign, above, below, unit = found.groups("")
    if CHANGES_VALUE.search(f"{name} {unit}") or any(map(str.isnumeric, name + POWER.sub("", unit))):  # isnumeric: ½, ², 万
        return None
    value = Fraction(sign + above.replace(",", ""))
    if not below:
        return value
    below = Fraction(below.replace(",", ""))
    return value / below if below and (value / below).denominator > 1 else None


def same_number(given, gold, tolerance=0):
    given, gold = to_number(given), to_number(gold)
    return given is not None and gold is not None and abs(given - gold) <= tolerance * abs(gold)


def gsm8k_accuracy(completions, answer, **columns):
    """2.0 where the answer is exactly the gold one, 1.5 where it is equal as a number ("18.0", "$18"), else 0.0.

    answer: GSM8K's solutions ("… #### 18") or the bare numbers. The values are those of CPPO's published GSM8K setting.
    """
    return [_gsm8k_score(extract_answer(text), gold_answer(gold)) for text, gold in zip(completions, answer, strict=True)]


def _gsm8k_score(given, gold):
    if given is None:
        return 0.0
    if THOUSANDS.sub("", given) == THOUSANDS.sub("", gold):
        return 2.0
    return 1.5 if same_number(given, gold) else 0.0


def toy_accuracy(completions, answer, **columns):
    """1.0 where the completion's answer is exactly the gold one, else 0.0: the only reward of the toy (engine/toy.py)."""
    return [1.0 if extract_answer(completion) == gold else 0.0 for completion, gold in zip(completions, answer, strict=True)]


def number_accuracy(completions, answer, **columns):
    """1.0 where the last number that the completion names is the gold one, else 0.0: for models that follow no form.

    A minus between two numbers subtracts and is no sign: "7 - 12" names 12, and "7 - 12 = -5" names -5.
    """
    named = [_last_number(after_thoughts(completion)) for completion in completions]
    return [1.0 if number and same_number(number, gold_answer(gold)) else 0.0 for number, gold in zip(named, answer, strict=True)]


def _last_number(text):
    *_, last = [None, *re.finditer(DIGITS, text)]
    return last and ("-" if _ends_in_minus(text[: last.start()]) else "") + last[0]


# --- format ---


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


def code_format(completions, **columns):
    """1.0 for `<think>…</think>`, a newline and one ```python block, and nothing before, between or after; else 0.0."""
    return [1.0 if CODE_FORMAT.fullmatch(completion) else 0.0 for completion in completions]


def extract_code(text):
    """The program in the last ```python block after the thoughts; None where there is none, or its end is missing."""
    _, opening, rest = after_thoughts(text).rpartition("```python\n")
    code, closing, _ = rest.partition("```")
    return code if opening and closing else None
