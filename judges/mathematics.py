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
    ONES,
    PARTS,
    SUPERSCRIPTS,
    TYPED,
    UNITS,
    changing_words,
    extract_answer,
    gold_answer,
    number_and_unit,
    same_option,
    same_quantity,
)

MATH_LENGTH = 1000  # characters; the longest gold answer of MATH-500 has 53
MATH_SECONDS = 5.0  # of CPU time for one answer; most take a millisecond, few a tenth of a second
MATH_MEMORY = 4 << 30  # bytes
VERIFIER_LOCK = threading.Lock()


def math_accuracy(completions, answer, **columns):
    """1.0 if the answer has the same text as the gold answer, names the same option, or is equal in
    mathematics; else 0.0.

    answer: LaTeX as in MATH, AMC and AIME ("\\frac{1}{2}", "(3,4]", "27"), or a solution that holds
    it in `\\boxed{}`. Rational numbers are compared exactly, other numbers to 30 digits of the gold
    answer: 3.141593 is not π, and 0.333333 is not 1/3. If the gold answer is a number, the
    completion must give a number too, not an expression ("3*4"); a unit may follow ("18 dollars").
    Otherwise, any equal expression counts, by the library math-verify. An answer is wrong if it
    cannot be parsed, or not judged within MATH_SECONDS and MATH_MEMORY. If the gold answer cannot
    be parsed, a warning names it. Raises ImportError if math-verify is not installed. POSIX only.
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
        return same and BASE.sub(r"\1", given) == BASE.sub(r"\1", gold)
    a, b = number_and_unit(given), number_and_unit(gold)
    complete = given.count("{") == given.count("}")
    if a and b and complete and not _is_factor(a[1]) and not _is_factor(b[1]):
        return same_quantity(given, gold)
    same_marks = _marks(given, is_number=bool(b)) == _marks(gold, is_number=bool(b))
    return same_marks and _ask_verifier(gold, given)


# --- one spelling ---

# what models type for LaTeX; a space keeps it apart from the next letter
COMMANDS = (
    r"\pi \theta \alpha \beta \lambda \phi \omega \infty \sqrt ^\circ \times \cdot / \pm \le \ge"
    r" \ne \cup \cap \in \emptyset _0 _1 _2 _3 _4 _5 _6 _7 _8 _9")
SIGNS = "πθαβλφω∞√°×·÷±≤≥≠∪∩∈∅₀₁₂₃₄₅₆₇₈₉"
SIGNS = {ord(sign): command + " " for sign, command in zip(SIGNS, COMMANDS.split(), strict=True)}
SPELLINGS = [  # the same in mathematics: (pattern, how math-verify reads it)
    # $…$, \(…\), \[…\], and percent, which is a unit
    (re.compile(r"(?<!\\)(?:\\[()\[\]%]|[$%])"), " "),
    (re.compile(r"\\varnothing\b"), r"\\emptyset"),
    (re.compile(r"(?<=[a-z])(?=\\mathrm\{[ei]\})"), " "),
    (re.compile(r"\\mathrm\{([ei])\}"), r"\1"),
    (re.compile(r"(?<=\d)(?:\\[,;:! ]|~)(?=\d{3}(?!\d))"), ""),  # 1\,000
    (re.compile(r"[⁰¹²³⁴-⁹⁻]+"), lambda power: f"^{{{power[0].translate(SUPERSCRIPTS)}}}"),
    # plain words: pi/2, sqrt(3), infinity
    (re.compile(r"(?<![A-Za-z\\])(pi|theta|alpha|beta|lambda|omega|sqrt)(?![A-Za-z])"), r"\\\1 "),
    (re.compile(r"(?<![A-Za-z\\])(?:infinity|infty|inf|oo)(?![A-Za-z])"), r"\\infty "),
    (re.compile(r"\\sqrt\s*(?:\(([^()]*)\)|(\d+))"), r"\\sqrt{\1\2}"),
    (re.compile(r"(\d)\s+(\d+)\s*/\s*(\d+)"), r"\1 \\frac{\2}{\3}"),  # 11 5/6
    # 3(6/7) is a product, and no mixed number
    (re.compile(r"(?<![\w^.}])(\d+)\s*(?=(?:\\left\s*)?\(\s*(?:\d|\\[dt]?frac))"), r"\1 \\cdot "),
    # 52 in base 8, 52\text{ (base eight)}
    (re.compile(r"(?<=\w)[\s({]*(?:\\text\w*\s*\{)?[\s(]*(?:in )?base[\s-]*(\w+)[)}\s]*"),
     r"_{\1}"),
]


def _latex(text):
    """The answer in LaTeX that math-verify reads: without $ and Unicode, and with one spelling."""
    text = text.translate(TYPED).translate(PARTS).translate(SIGNS)
    for pattern, same in SPELLINGS:
        text = pattern.sub(same, text)
    text = text.strip(" *")
    return text if text.endswith("..") else text.rstrip(" .,;")


# --- what math-verify does not see ---

BASE = re.compile(r"(\d[0-9A-F]*|\b[A-F]{2,})\s*_\s*\{?(?:\\text\w*\s*\{)?\s*(\w+)\}*")
TEXT = re.compile(r"\\(?:text\w*|mbox)\s*\{([^{}]*)\}")


def _bases(latex):
    """The bases of the numbers in an answer: ["8"] of 52_8."""
    return [ONES.get(base, base) for _, base in BASE.findall(latex)]


def _marks(latex, is_number):
    """What math-verify drops although it changes the answer: the words in "5\\text{ or more}", the
    prime of A', dots. is_number: whether the gold answer is a number; "2 or 3" may be 2, 3."""
    words = changing_words(latex)
    if not is_number:
        words = [word for word in words if word not in ("and", "or")]
    texts = [text for text in TEXT.findall(latex) if re.search(r"[\d:<>]", text)]
    return words, texts, re.findall(r"'|\\prime|\\[lc]?dots|\.\.|…", latex)


# letters beside a number that may be factors, and no unit: 18 xy, 18 pi, 18π, 18 theta
FACTOR = re.compile(
    r"(?!(?:per|pct)$)[a-z]{1,3}|alpha|beta|gamma|delta|epsilon|zeta|theta|kappa|lambda|sigma|omega"
    r"|.*[^a-z\u3040-\u9fff].*",  # Chinese words are units
    re.IGNORECASE,
)


def _is_factor(unit):
    """May the letters after a number be factors, as in "18 xy"? "18 km/h" has a unit."""
    names = re.findall(r"[^²³/]+", unit)
    return any(name not in UNITS.values() and FACTOR.fullmatch(name) for name in names)


# --- the process that judges the rest ---


@functools.lru_cache(maxsize=4096)  # completions of one question often agree
def _ask_verifier(gold, given):
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
    return verdict == "right"


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
