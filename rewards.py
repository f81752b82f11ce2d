"""Rewards that can be checked (DeepSeek-R1, arXiv 2501.12948 section 2.2.2: accuracy and format).

A reward is a plain function, in the form that TRL's trainers use:

    reward(completions: list[str], **columns) -> list[float]

`columns` holds the columns of the data set, one entry per completion: a question's columns are
repeated for each of its completions. A reward takes the columns that it needs by name and ignores
the others. A column of another length is a ValueError.

First come the rewards, then how an answer and a number are read from a text. Plain Python.
Rewards that need more are in engine/scoring/: `math_accuracy` (mathematics.py), programs that are
run (programs.py).
"""

import re
from fractions import Fraction

# --- accuracy ---


def gsm8k_accuracy(completions, answer, **columns):
    """2.0 for exactly the gold answer, 1.5 for an equal number ("18.0", "$18"), else 0.0.

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
    return 1.5 if same_number(given, gold) else 0.0


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
    numbers = [(_last_number(after_thoughts(text)), gold_answer(gold)) for text, gold in pairs]
    return [1.0 if number and same_number(number, gold) else 0.0 for number, gold in numbers]


# --- format ---


def format_reward(completions, **columns):
    """1.0 for `<think>…</think>\\n<answer>…</answer>` and nothing else, else 0.0. (R1's form)"""
    return [1.0 if R1_FORMAT.fullmatch(completion) else 0.0 for completion in completions]


def soft_format_reward(completions, **columns):
    """0.25 for each of the four tags that occurs exactly once, and after the tag before it.

    So a model that does not write the whole form yet can learn it tag by tag.
    """
    return [_soft_format_score(completion) for completion in completions]


def _soft_format_score(completion):
    score, position = 0.0, 0
    for tag in ("<think>", "</think>", "<answer>", "</answer>"):
        found = completion.find(tag, position)
        if completion.count(tag) == 1 and found >= 0:
            score, position = score + 0.25, found + len(tag)
    return score


def code_format(completions, **columns):
    """1.0 for `<think>…</think>`, a newline, one ```python block and nothing else, else 0.0."""
    return [1.0 if CODE_FORMAT.fullmatch(completion) else 0.0 for completion in completions]


# <think>…</think>, one newline, <answer>…</answer> or a program, and nothing else; no tag twice
NO_TAG = r"(?:(?!</?(?:think|answer)>).)*"
R1_FORMAT = re.compile(rf"<think>{NO_TAG}</think>\n<answer>{NO_TAG}</answer>", re.DOTALL)
CODE_FORMAT = re.compile(rf"<think>{NO_TAG}</think>\n```python\n(?:(?!```).)*\n```", re.DOTALL)


# --- what a completion answers ---


def extract_answer(text):
    """The final answer of a completion (or of a data set's solution), as text; None without one.

    Thoughts are no answer: only the text after the last `</think>` counts. These forms are tried
    in order: `<answer>…</answer>`, `\\boxed{…}` (with a minus before it), `#### …`, "the answer is
    …". The first form that occurs in the text counts. If it occurs several times, the last one
    counts. An empty tag or box gives None. A `####` or "the answer is" with no text after it is
    ignored.
    """
    answer, text = None, after_thoughts(text)
    for form in (_tagged, _boxed, _after_hashes, _after_phrase):
        found = form(text)
        if found is not None:  # it may hold one of the next forms: look inside it
            answer = text = found.strip()
    return answer or None


def gold_answer(text):
    """The gold answer: the final answer of a solution. A bare answer, text or number, stays."""
    return extract_answer(str(text)) or str(text).strip()


def extract_code(text):
    """The program in the last ```python block after the thoughts. None if no block is complete."""
    _, opening, rest = after_thoughts(text).rpartition("```python\n")
    code, closing, _ = rest.partition("```")
    return code if opening and closing else None


def after_thoughts(text):
    """The text after the last `</think>`. It is empty if the completion ended inside a thought."""
    text = text.rpartition("</think>")[2]
    return "" if "<think>" in text else text


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


def _after_hashes(text):
    lines = (rest.split("\n")[0].strip() for rest in reversed(text.split("####")[1:]))
    return next(filter(None, lines), None)


def _after_phrase(text):
    parts = re.split(r"answer is:?", text, flags=re.IGNORECASE)[1:]
    rests = (rest.strip() for rest in reversed(parts))
    return next((rest.split("\n")[0] for rest in rests if rest), None)


MINUS = tuple("-‐‑‒–−－")
# a minus after one of these is a subtraction or a hyphen: a number ("7", "7x") on the same line,
# or a letter without a space in between
SUBTRACTS = re.compile(
    r"(?:[0-9][A-Za-z]?[ \t$*)\]}%°\\]*|[A-Za-z][$*)\]}%°\\]*)\Z")


def _ends_in_minus(before):
    """Does the text before a number or a box end in its minus sign?

    A list bullet, a dash and a subtraction are no minus sign. A minus with white space after it is
    a sign only after "=", after an opening bracket, or at the beginning of the text.
    """
    # these may stand after the minus: currency, opening brackets, bold type, LaTeX's spaces
    left = before.rstrip(" \t\n$€£¥₹([{*\\,;:!")
    if not left.endswith(MINUS):
        return False
    gap, left = before[len(left) :], left[:-1]
    if SUBTRACTS.search(left) or left.endswith((*MINUS, "—")):
        return False
    opened = left.rstrip(" \t\n*")
    return (
        not gap[:1].isspace() or not opened or left.endswith("$")
        or opened.endswith(("=", "(", "[", "{", "<answer>"))
    )


# --- numbers ---


def to_number(text):
    """The one number that `text` states, as an exact Fraction; None if it does not state just one.

    Before the number there may be "total =", a sign, a currency. After it there may be a unit, in
    words that do not change its value. So "$1,234.50" and "1234.5 dollars" are the same number,
    and "\\frac{3}{4}" is 0.75. These are None: "minus 5", "18 million", "3 fourths", "12 or 13",
    "1e3", "10-5", "Ann has 18", an unfinished division ("36/2"), a text over 100 characters.
    """
    if len(text) > 100:
        return None
    text = SAID_TWICE.sub("", text).replace("{,}", ",").translate(DASHES)
    found = NUMBER.fullmatch(DRESS.sub(" ", FRACTION.sub(r" \1/\2 ", text)))
    if found is None:
        return None
    name, sign, above, below, unit = found.groups("")
    numerals = any(map(str.isnumeric, name + POWER.sub("", unit)))  # such as ½, ², 万
    if numerals or CHANGES_VALUE.search(f"{name} {unit}"):
        return None
    value = Fraction(sign + above.replace(",", ""))
    if not below:
        return value
    below = Fraction(below.replace(",", ""))
    return value / below if below and (value / below).denominator > 1 else None


def same_number(given, gold, tolerance=0):
    """Do both texts state a number, and are the two equal up to `tolerance` · the gold number?"""
    given, gold = to_number(given), to_number(gold)
    return None not in (given, gold) and abs(given - gold) <= tolerance * abs(gold)


def _last_number(text):
    *_, last = [None, *re.finditer(DIGITS, text)]
    return last and ("-" if _ends_in_minus(text[: last.start()]) else "") + last[0]


DASHES = str.maketrans(dict.fromkeys((*MINUS, "—"), "-"))
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")  # the commas of 1,234,567
# what may stand around a number without changing it: LaTeX's text, spaces and brackets, bold type,
# currency, percent, degrees
DRESS = re.compile(
    r"\\(?:text|textbf|mathrm|mathbf|mbox)\b|\\[,;:!]|\^\{?\\circ\}?|\\?[ $%(){}\[\]]"
    r"|\*\*|[€£¥₹°`'\"]"
)
FRACTION = re.compile(r"\\[dt]?frac\{(-?[0-9]+)\}\{([0-9]+)\}")
DIGITS = r"((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
# "total =", a sign, a number, perhaps "/" and another number, a unit
NUMBER = re.compile(
    rf"((?:[^\W\d_]|\s)*[=:：])?\s*([-+]?)\s*{DIGITS}(?:\s*/\s*{DIGITS})?((?:[^\W\d_]|[\s./])*)")
# words that change the value of the number beside them. Any other word after a number is a unit,
# as in "5 seventh graders"
MULTIPLES = (
    r"hundred|thousand|[mb]illion|trillion|lakh|crore|dozen|half|halve|third|fifth|tenth|hundredth"
    r"|squared|cubed|(?:four|six|seven|eigh|nin|eleven|twelf|\w{3,5}teen|\w{3,5}tie|thousand"
    r"|[mb]illion)th(?:s|(?= of\b|[\s.]*$))"
)
MULTIPLE = re.compile(rf"\b(?:{MULTIPLES})s?\b", re.IGNORECASE)
ONES = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
CHANGES_VALUE = re.compile(
    rf"\b(?:[BM]|(?i:{MULTIPLES}|k|[mb]n|[mb]il|[mb]ln|and|or|nor|not|than|plus|minus|negative"
    rf"|{'|'.join(ONES)})s?)\b|半"
)
SAID_TWICE = re.compile(  # 2 (two)
    "|".join(rf"(?<=(?<![0-9.,]){i}) ?\({word}\)" for i, word in enumerate(ONES, 1)), re.IGNORECASE)
POWER = re.compile(r"(?<=[^\W\d_²³])[²³]")  # of a unit: cm²
