"""The reward for mathematics: is a LaTeX answer equal to the gold answer? Numbers, and texts that
are no formula, are compared here. All else is judged by math-verify in its own process
(verifier.py)."""

import functools
import json
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path

from answers import (
    LATEX,
    NUMBER_WORDS,
    SERIES,
    SUPERSCRIPTS,
    TYPED,
    at_words,
    extract_answer,
    gold_answer,
    labelled,
    number_and_unit,
    respelled,
    same_option,
    same_quantity,
    same_unit,
    spelled,
)

MATH_LENGTH = 1000  # characters; the longest gold answer of MATH-500 has 53
MATH_SECONDS = 5.0  # of CPU time for one answer; most take a millisecond, few a tenth of a second
MATH_MEMORY = 4 << 30  # bytes
VERIFIER_LOCK = threading.Lock()
# how many answers were called wrong because their verdict ran out of time or memory
COUNTS = {"timeouts": 0}


def math_accuracy(completions, answer, question=None, **columns):
    """1.0 if the answer has the same text as the gold answer, names the same option, or is equal in
    mathematics; else 0.0.

    answer: LaTeX as in MATH, AMC and AIME ("\\frac{1}{2}", "(3,4]", "27"), or a solution that holds
    it in `\\boxed{}`. Rational numbers are compared exactly, other numbers to 30 digits of the gold
    answer: 3.141593 is not π, and 0.333333 is not 1/3. If the gold answer is a number, the
    completion must give a number too, not an expression ("3*4"); a unit may follow ("18 dollars").
    Otherwise, an equal expression counts, by the library math-verify, unless it leaves to do what
    the gold answer has done (KINDS): "\\int 2x\\,dx" is not x^2. An answer is wrong if it cannot be
    parsed, or not judged within MATH_SECONDS and MATH_MEMORY (COUNTS counts these). If the gold
    answer cannot be parsed, a warning names it. What is no formula is compared as text. question:
    if it lists options, "AC" names two of them. Raises ImportError if math-verify is not installed.
    POSIX only.
    """
    rows = zip(completions, answer, question or [None] * len(completions), strict=True)
    return [float(_is_right(extract_answer(text), gold_answer(gold), asked))
            for text, gold, asked in rows]


def _is_right(given, gold, question):
    if given == gold:
        return True
    if given is None or len(given) > MATH_LENGTH:
        return False
    given, gold = _latex(given), re.sub(SHORT_POWER, POWER, _latex(gold))
    if "10^" in gold:
        given = re.sub(SHORT_POWER, POWER, given)
    return same_option(given, gold, question) or _is_equal(given, gold)


def _is_equal(given, gold):
    """Are two texts in LaTeX the same text, or equal in mathematics?"""
    if spelled(given) in (spelled(gold), re.sub("(?<=[0-9])th$", "", spelled(gold))):  # 3 is 3rd
        return True
    bases = _bases(gold)
    if bases or _bases(given):  # math-verify reads no base; a base may be left out, as a unit may
        same = _bases(given) in ([], bases)
        return same and re.sub(BASE, r"\1", given) == re.sub(BASE, r"\1", gold)
    if number_and_unit(given) and number_and_unit(gold) and given.count("{") == given.count("}"):
        return same_quantity(given, gold)
    named = _same_names(labelled(given), labelled(gold))
    if named is not None:
        return named
    (given, unit), (gold, gold_unit) = _split(given), _split(gold)
    # a unit may be left out, but not the degrees of an angle like π/3
    if not same_unit(unit, gold_unit) or unit != gold_unit and "degree" in (unit, gold_unit):
        return False
    series = re.fullmatch(SERIES, given) or re.fullmatch(SERIES, gold)
    if series or ":" in given + gold:  # 2:40 is no division
        return spelled(given) == spelled(gold)
    pieces, gold_pieces = at_words(given), at_words(gold)
    if len(pieces) > 1 or len(gold_pieces) > 1:
        if unit != gold_unit and re.search(r"\d.*[a-z].*\d", gold):  # 2 hours 30
            return False
        same = len(pieces) == len(gold_pieces) and pieces[1::2] == gold_pieces[1::2]
        return same and all(map(_is_equal, pieces[::2], gold_pieces[::2]))
    return _is_equal_formula(_last_side(given), _last_side(gold))


def _is_equal_formula(given, gold):
    if not given or not gold or re.findall(MARKS, given) != re.findall(MARKS, gold):
        return False
    parts = re.split(CHOICE, given)  # \sqrt{8} or 2\sqrt{2}
    if len(parts) > 1 and not re.search(CHOICE, gold) and "=" not in given:
        if all(_is_equal(part, gold) for part in parts):
            return True
    if _is_left_to_do(given, gold):
        return False
    verdict = _ask_verifier(gold, given)
    if not verdict:
        with VERIFIER_LOCK:
            COUNTS["timeouts"] += 1
    if verdict == "no gold":
        warnings.warn(
            f"math_accuracy cannot parse the gold answer {gold!r}: only that very text scores.",
            stacklevel=2,
        )
    return verdict == "right"


# --- one spelling ---

# what models type for LaTeX; a space keeps it apart from the next letter
COMMANDS = (
    r"\pi |\theta |\alpha |\beta |\lambda |\phi |\omega |\infty |\sqrt |^\circ |\times |\cdot |/ "
    r"|\pm |\le |\ge |\ne |\cup |\cap |\in |\emptyset "
    r"|_0 |_1 |_2 |_3 |_4 |_5 |_6 |_7 |_8 |_9 ").split("|")
SIGNS = str.maketrans(dict(zip("πθαβλφω∞√°×·÷±≤≥≠∪∩∈∅₀₁₂₃₄₅₆₇₈₉", COMMANDS, strict=True)))
SPELLINGS = [  # the same in mathematics: (pattern, how math-verify reads it)
    (r"(?<=\d)(?:\\[,;:! ]|~)(?=\d{3}(?!\d))", ""),  # 1\,000
    (r"(?<!\\)\\[()\[\]:]", " "),
    (r"\\varnothing\b", r"\\emptyset"),
    (r"(?<=[a-z])(?=\\mathrm\{[ei]\})", " "),
    (r"\\mathrm\{([ei])\}", r"\1"),
    (r"\s*\^\s*\{?\\circ\s*\}?[\s.]*$", " degrees"),
    (r"[⁰¹²³⁴-⁹⁻]+", lambda power: f"^{{{power[0].translate(SUPERSCRIPTS)}}}"),
    # plain words: pi/2, sqrt(3), infinity, sin(x); and sympy's x**2, 3*I, asin(x), Abs(x)
    (r"(?<=[\w)}\]])\s*\*\*\s*(-?\w+)", r"^{\1}"),
    (r"(?<=[\w)}\]])\s*\*\*\s*(?=\()", "^"),
    (r"\*\s*[iI](?![A-Za-z])|(?<![A-Za-z\\])[iI]\s*\*", "i "),
    (r"(?<![A-Za-z\\])a(?=(?:sin|cos|tan)h?\s*\()", "arc"),
    (r"(?<![A-Za-z\\])((?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|ln|log|exp)(?![A-Za-z])", r"\\\1 "),
    (r"(?<![A-Za-z\\])[aA]bs\s*\(((?:[^()]|\([^()]*\))*)\)", r"|\1|"),
    (r"(?<![A-Za-z\\])(pi|theta|alpha|beta|lambda|omega|sqrt)(?![A-Za-z])", r"\\\1 "),
    (r"(?<![A-Za-z\\])(?:infinity|infty|inf|oo)(?![A-Za-z])", r"\\infty "),
    (r"\\sqrt\s*(?:\(((?:[^()]|\([^()]*\))*)\)|(\d+))", r"\\sqrt{\1\2}"),
    (r"(\d)\s+(\d+)\s*/\s*(\d+)", r"\1 \\frac{\2}{\3}"),  # 11 5/6
    # 3(6/7) is a product, and no mixed number
    (r"(?<![\w^.}])(\d+)\s*(?=(?:\\left\s*)?\(\s*(?:\d|\\[dt]?frac))", r"\1 \\cdot "),
    # 52 in base 8, 52\text{ (base eight)}
    (r"(?<=\w)[\s({]*(?:\\text\w*\s*\{)?[\s(]*(?:in )?base[\s-]*(\w+)[)}\s]*", r"_{\1}"),
    # LaTeX's spaces at both ends
    (r"^(?:\\[,;! ]|\\q?quad\b|\s)+|(?:\\[,;! ]|\\q?quad\b|[\s~])+$", ""),
    (r"^(\d[\d,.]*)--(\d[\d,.]*)$", r"\1-\2"),  # 10--12
    # (x, y) = (1, 2)
    (r"^\((\w), *(\w)\) *= *\(([^(),]*),([^(),]*)\)$", r"\1=\3, \2=\4"),
    (r"^\((\w), *(\w), *(\w)\) *= *\(([^(),]*),([^(),]*),([^(),]*)\)$", r"\1=\4, \2=\5, \3=\6"),
]
# 3e8, which only a gold answer with a power of ten makes a number
SHORT_POWER = r"(?<![\w.])(\d+)[eE](\d+)(?!\w|\.\d)"
POWER = r"\1\\times10^{\2}"


def _latex(text):
    """The answer in LaTeX that math-verify reads: without $ and Unicode, and with one spelling."""
    text = respelled(text.translate(TYPED).translate(SIGNS), LATEX + SPELLINGS).strip(" *")
    return text if text.endswith("..") else text.rstrip(" .,;")


# --- what math-verify does not see ---

BASE = r"(\d[0-9A-F]*|\b[A-F]{2,})\s*_\s*\{?(?:\\text\w*\s*\{)?\s*(\w+)\}*"


def _bases(latex):
    """The bases of the numbers in an answer: ["8"] of 52_8."""
    return [NUMBER_WORDS.get(base, base) for _, base in re.findall(BASE, latex)]


# after a value: "cm", "\\text{ cm}^2", "厘米"; or words that are no unit
TAIL = (
    r"(?<=[\w})\]!|])(?:\\[,;:! ]|[\s~])*(?:%|\\(?:text\w*|mbox|mathrm)\s*\{[^{}]*\}"
    r"|(?<![A-Za-z\\])(?:[A-Za-z][A-Za-z./][A-Za-z./ ]*|[\u4e00-\u9fff]+))(?:\^\{?[23]\}?)?\Z")
# what math-verify drops although it changes the answer: the prime of A', dots
MARKS = r"'|\\prime|\\[lc]?dots|\.\.|…"
CHOICE = r",|(?:\\text\s*\{\s*)?\bor\b(?:\s*\})?"


def _split(latex):
    """("\\sqrt{2}", "cm²") of "\\sqrt{2}\\text{ cm}^2"; the unit is "" without one."""
    tail = re.search(TAIL, latex)
    measured = tail and number_and_unit("2" + tail[0])
    value, unit = (latex[: tail.start()], measured[1]) if measured else (latex, "")
    return re.sub("[$€£%]", "", value), unit


# --- labels, words, and several equations ---


def _same_names(given, gold):
    """Do both, pairs of `labelled`, give the same values to the same names? x, y and z may be left
    out if the order is the same. None if this does not decide whether they are equal."""
    if len(given) != len(gold) or not (_are_names(given) or _are_names(gold)):
        return None
    if _are_names(given) and _are_names(gold):
        given, gold = sorted(given), sorted(gold)
    if not all(map(_is_same_name, given, gold)):
        return None
    return all(_is_equal(value, gold_value) for (_, value), (_, gold_value) in zip(given, gold))


def _are_names(pairs):
    return len({name for name, _ in pairs if name}) == len(pairs)


def _is_same_name(given, gold):
    left_out = re.fullmatch(r"\n?\w(?: [_(].*)?\n?", f"{given[0]}\n{gold[0]}")
    return given[0] == gold[0] or left_out and "=" not in given[1] + gold[1]


def _last_side(latex):
    """"x=5/6" for "x = 10/12 = 5/6": if all sides that are numbers are equal, the last counts."""
    *sides, last = re.split(EQUALS, latex)
    if len(sides) < 2 or not all(re.fullmatch(SIDE, side) for side in sides[1:]):
        return latex
    for side in sides:
        if re.fullmatch(NUMERIC, side) and _ask_verifier(side, last) != "right":
            return latex
    return f"{sides[0]}={last}"


# --- what is left to do ---

# the kinds of calculations, and of marks, that math-verify computes or drops. If the gold answer
# has none of the kind, the answer may only repeat the question.
OF_NUMBERS = (
    r"(?:[\s({})\[\]\d./^-]|\\(?:left|right|[dt]?frac|sqrt|pi|circ|cdot)(?![a-z]))")
KINDS = (
    r"\\i*o?int(?![a-z])", r"\\sum(?![a-z])", r"\\prod(?![a-z])", r"\\lim(?![a-z])",
    # d/dx and ∂/∂x, a determinant, and e^0
    r"\\[dt]?frac\s*\{\s*(?:d|\\partial|\\mathrm\{d\})(?:\s*\^\S+?)?\s*\}\s*\{"
    r"\s*(?:d|\\partial|\\mathrm\{d\})",
    r"\\det(?![a-z])|[vV]matrix", r"(?<![A-Za-z])[A-Za-z]\s*\^\s*\{?\s*[-+]?0\s*\}?(?![.\d])"
    r"|\\exp\s*(?:\\left)?\(\s*[-+]?0\s*(?:\\right)?\)",
    r"\\[dt]?binom\s*(?:\{[^{}A-Za-z]*\}|\d)\s*(?:\{[^{}A-Za-z]*\}|\d)"
    r"|(?:\{|\A)(?:[^{}A-Za-z]|\{[^{}A-Za-z]*\})*\\choose"
    r"(?:[^{}A-Za-z]|\{[^{}A-Za-z]*\})*(?:\}|\Z)",
    # matrices beside each other, and powers of one; sets in braces beside each other
    r"\\end\{\w*matrix\}(?:\\right\W|\s|\\[()])*(?:\\cdot|\\times|[-+*])?"
    r"(?:\\left\W|\s|\\[()])*(?:\\begin|\^)",
    r"\\\}\s*\\(?:cup|setminus)\s*(?:\\left\s*)?\\\{|\\cap(?![a-z])",
    # a sine, or an arc, of a number
    r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)(?![a-z])(?:\s*\^\s*\{?-?\d\}?)?"
    rf"{OF_NUMBERS}*(?:\d|\\pi){OF_NUMBERS}*(?=\Z|[-+,=])",
    r"\\(?:approx|sim|simeq)(?![a-z])|≈|(?<![\w{}\\/])~",
    r"\\infty\s*(?:\\right\s*)?\]|\[\s*-\s*\\infty",  # ∞ is in no interval
)
# {1, 2} for (1, 2)
SET_FOR_PAIR = r"(?:\\left\s*)?\\\{[^()]*,[^()]*\\\} for (?:\\left\s*)?\("
# an equation of one variable that is not solved: 2x = 18, x^2 = 18; but x, f(3) and |z| are names
PART = (
    r"(?:[-+*/^().{}\[\]|\d\s]|e(?=\s*\^)"
    r"|\\(?:sqrt|[dt]?frac|cdot|times|left|right|pi|ln|log|exp)(?![a-z]))")
EQUALS = r"(?<![<>!])=(?![^{]*\})"
NUMERIC = rf"(?:{PART}|!|\\[dt]?binom)+"
# a side of a chain: no words, no list, no "5 y" that begins another equation
SIDE = rf"(?!.*\d(?:\s+[A-Za-z]|[A-Za-z]\s*\Z))(?:{PART}|[!_A-Za-df-z]|e(?!\s*\^)|\\[dt]?binom)+"
UNSOLVED = (
    r"(?![\s(){}|]*([A-Za-z]|\\[a-z]+)[\s(){}|]*=)(?![A-Za-z](?:\^\{?-1\}?)?\([^()A-Za-z]*\)\s*=)"
    rf"{PART}*([A-Za-df-z]|\\(?:theta|alpha|beta|phi|omega|lambda)(?![a-z]))(?:{PART}|\2)*=.*")


def _is_left_to_do(given, gold):
    """Does the answer leave to its judge what the gold answer has done?"""
    if "=" not in gold and re.fullmatch(UNSOLVED, given):
        return True
    stated = re.split(EQUALS, given)[-1]  # "\\int_0^1 2x\\,dx = 1" states 1
    computed = any(re.search(kind, stated) and not re.search(kind, gold) for kind in KINDS)
    return computed or re.match(SET_FOR_PAIR, f"{given} for {gold}") is not None


# --- the process that judges the rest ---


@functools.lru_cache(maxsize=4096)  # completions of one question often agree
def _ask_verifier(gold, given):
    """What verifier.py says; "" if it ran out of time or memory."""
    verdict = ""
    with VERIFIER_LOCK:
        verifier = _process()
        try:
            print(json.dumps([gold, given, MATH_SECONDS]), file=verifier.stdin, flush=True)
            verdict = verifier.stdout.readline().strip()
        finally:
            # it ran out of time or memory; or it was interrupted, and this verdict would be taken
            # for the verdict of the next answer
            if not verdict:
                verifier.kill()
                verifier.wait()
                _process.cache_clear()
    return verdict


@functools.cache
def _process():
    """Start the process that judges. sympy may work for hours; from any thread, only a process can
    be stopped."""
    verifier = subprocess.Popen(
        [sys.executable, "-m", "judges.verifier", str(MATH_MEMORY)],
        cwd=Path(__file__).parents[1], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )
    if verifier.stdout.readline() != "ready\n":
        raise ImportError(
            "math_accuracy cannot run math-verify: is it installed? pip install math-verify"
        )
    return verifier
