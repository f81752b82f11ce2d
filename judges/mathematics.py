"""The reward for mathematics: is a LaTeX answer equal to the gold answer? Numbers are compared
here. Everything else is judged by math-verify in its own process (verifier.py)."""

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
    SUPERSCRIPTS,
    TYPED,
    extract_answer,
    gold_answer,
    number_and_unit,
    respelled,
    same_option,
    same_quantity,
    same_unit,
)

MATH_LENGTH = 1000  # characters; the longest gold answer of MATH-500 has 53
MATH_SECONDS = 5.0  # of CPU time for one answer; most take a millisecond, few a tenth of a second
MATH_MEMORY = 4 << 30  # bytes
VERIFIER_LOCK = threading.Lock()
# how many answers were called wrong because their verdict ran out of time or memory
COUNTS = {"timeouts": 0}


def math_accuracy(completions, answer, **columns):
    """1.0 if the answer has the same text as the gold answer, names the same option, or is equal in
    mathematics; else 0.0.

    answer: LaTeX as in MATH, AMC and AIME ("\\frac{1}{2}", "(3,4]", "27"), or a solution that holds
    it in `\\boxed{}`. Rational numbers are compared exactly, other numbers to 30 digits of the gold
    answer: 3.141593 is not π, and 0.333333 is not 1/3. If the gold answer is a number, the
    completion must give a number too, not an expression ("3*4"); a unit may follow ("18 dollars").
    Otherwise, an equal expression counts, by the library math-verify, unless it leaves to do what
    the gold answer has done (KINDS): "\\int 2x\\,dx" is not x^2. An answer is wrong if it cannot be
    parsed, or not judged within MATH_SECONDS and MATH_MEMORY (COUNTS counts these). If the gold
    answer cannot be parsed, a warning names it. Raises ImportError if math-verify is not installed.
    POSIX only.
    """
    pairs = zip(completions, answer, strict=True)
    return [float(_is_right(extract_answer(text), gold_answer(gold))) for text, gold in pairs]


def _is_right(given, gold):
    if given == gold:
        return True
    if given is None or len(given) > MATH_LENGTH:
        return False
    given, gold = _latex(given), _latex(gold)
    if given == gold or same_option(given, gold):
        return True
    bases = _bases(gold)
    if bases or _bases(given):  # math-verify reads no base; a base may be left out, as a unit may
        same = _bases(given) in ([], bases)
        return same and re.sub(BASE, r"\1", given) == re.sub(BASE, r"\1", gold)
    if number_and_unit(given) and number_and_unit(gold) and given.count("{") == given.count("}"):
        return same_quantity(given, gold)
    (given, unit), (gold, gold_unit) = _split(given), _split(gold)
    # a unit may be left out, but not the degrees of an angle like π/3
    if not same_unit(unit, gold_unit) or unit != gold_unit and "degree" in (unit, gold_unit):
        return False
    if ":" in given + gold:  # 2:40 is no division
        return given == gold
    dropped = re.findall(DROPPED, given.lower()) != re.findall(DROPPED, gold.lower())
    if dropped or _is_left_to_do(given, gold):
        return False
    verdict = _ask_verifier(gold, given)
    if not verdict:
        with VERIFIER_LOCK:
            COUNTS["timeouts"] += 1
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
    (r"\s*:\s*", ":"),
    # plain words: pi/2, sqrt(3), infinity
    (r"(?<![A-Za-z\\])(pi|theta|alpha|beta|lambda|omega|sqrt)(?![A-Za-z])", r"\\\1 "),
    (r"(?<![A-Za-z\\])(?:infinity|infty|inf|oo)(?![A-Za-z])", r"\\infty "),
    (r"\\sqrt\s*(?:\(([^()]*)\)|(\d+))", r"\\sqrt{\1\2}"),
    (r"(\d)\s+(\d+)\s*/\s*(\d+)", r"\1 \\frac{\2}{\3}"),  # 11 5/6
    # 3(6/7) is a product, and no mixed number
    (r"(?<![\w^.}])(\d+)\s*(?=(?:\\left\s*)?\(\s*(?:\d|\\[dt]?frac))", r"\1 \\cdot "),
    # 52 in base 8, 52\text{ (base eight)}
    (r"(?<=\w)[\s({]*(?:\\text\w*\s*\{)?[\s(]*(?:in )?base[\s-]*(\w+)[)}\s]*", r"_{\1}"),
    # LaTeX's spaces at both ends
    (r"^(?:\\[,;! ]|\\q?quad\b|\s)+|(?:\\[,;! ]|\\q?quad\b|[\s~])+$", ""),
    # a word in any case: YES, \text{Yes}
    (r"^(?:\\text\w*\s*\{)?\s*([A-Za-z]{2,})\s*\}?$", lambda word: word[1].lower()),
]


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
# what math-verify drops although it changes the answer: words, the prime of A', dots
DROPPED = (
    r"(?<![\\a-z])(?<!begin\{)(?<!end\{)(?!and\b)(?:[a-z]{3,}|no\b|or so)"
    r"|[\u4e00-\u9fff]+|'|\\prime|\\[lc]?dots|\.\.|…")


def _split(latex):
    """("\\sqrt{2}", "cm²") of "\\sqrt{2}\\text{ cm}^2"; the unit is "" without one."""
    tail = re.search(TAIL, latex)
    measured = tail and number_and_unit("2" + tail[0])
    value, unit = (latex[: tail.start()], measured[1]) if measured else (latex, "")
    return re.sub("[$%]", " ", value), unit


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
    r"\\det(?![a-z])|[vV]matrix", r"(?<![A-Za-z])[A-Za-z]\s*\^\s*\{?\s*[-+]?0\s*\}?(?![.\d])",
    r"\\binom\s*\{?\s*\d+\s*\}?\s*\{?\s*\d",
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
PART = r"(?:[-+*/^().{}\[\]|\d\s]|\\(?:sqrt|[dt]?frac|cdot|times|left|right|pi)(?![a-z]))"
UNSOLVED = (
    r"(?![\s(){}|]*([A-Za-z]|\\[a-z]+)[\s(){}|]*=)(?![A-Za-z](?:\^\{?-1\}?)?\([^()A-Za-z]*\)\s*=)"
    rf"{PART}*([A-Za-z]|\\(?:theta|alpha|beta|phi|omega|lambda)(?![a-z]))(?:{PART}|\2)*=.*")


def _is_left_to_do(given, gold):
    """Does the answer leave to its judge what the gold answer has done?"""
    if "=" not in gold and re.fullmatch(UNSOLVED, given):
        return True
    stated = re.split(r"=(?![^{]*\})", given)[-1]  # "\\int_0^1 2x\\,dx = 1" states 1
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
    if verdict == "no gold":
        warnings.warn(
            f"math_accuracy cannot parse the gold answer {gold!r}: only that very text scores.",
            stacklevel=2,
        )
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
