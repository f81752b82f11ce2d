"""The reward for mathematics: is a LaTeX answer equal to the gold answer? math-verify judges, in
its own process."""

import functools
import json
import logging
import re
import resource
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

from rewards import DRESS, MULTIPLE, extract_answer, gold_answer, same_number

SPELLINGS = [  # the same in mathematics: (pattern, how math-verify reads it)
    # $…$, \(…\), \[…\], and percent, which is a unit
    (re.compile(r"(?<!\\)(?:\\[()\[\]%]|[$%])"), " "),
    (re.compile(r"\\varnothing\b"), r"\\emptyset"),
    (re.compile(r"(?<=[a-z])(?=\\mathrm\{[ei]\})"), " "),
    (re.compile(r"\\mathrm\{([ei])\}"), r"\1"),
    (re.compile(r"(?<=\d)(?:\\[,;:! ]|~)(?=\d{3}(?!\d))"), ""),  # 1\,000
]
BOX = r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})*)\}"
SPACE = r"[\s$]|\\[()\[\],;:! ]|\\q?quad"
AND = r"[,;]|and|or|\\text *\{[\s,]*(?:and|or)\s*\}"
BOXES = re.compile(rf"{BOX}(?:(?:{SPACE})*(?:{AND})(?:{SPACE}|{AND})*{BOX})+")
# letters beside a number that may be factors, and no unit: 18 xy, 18 pi, 18π, 18 theta
FACTOR = re.compile(
    r"(?!(?:per|pct)$)[a-z]{1,3}|alpha|beta|gamma|delta|epsilon|zeta|theta|kappa|lambda|sigma|omega"
    r"|.*[^a-z].*",
    re.IGNORECASE,
)
MATH_LENGTH = 1000  # characters; the longest gold answer of MATH-500 has 53
MATH_SECONDS = 5.0  # of CPU time for one answer; most take a millisecond, few a tenth of a second
MATH_MEMORY = 4 << 30  # bytes
VERIFIER_LOCK = threading.Lock()


def math_accuracy(completions, answer, **columns):
    """1.0 if the answer has the same text as the gold answer, or equals it by the library
    math-verify; else 0.0.

    answer: LaTeX as in MATH, AMC and AIME ("\\frac{1}{2}", "(3,4]", "27"), or a solution that holds
    it in `\\boxed{}`. If the gold answer is a number, the completion must give a number too, not an
    expression ("3*4"); a unit may follow ("18 dollars"). Otherwise, any equal expression counts.
    Boxes joined by commas, "and" or "or" are one answer. An answer is wrong if it cannot be parsed,
    or not judged within MATH_SECONDS and MATH_MEMORY. If the gold answer cannot be parsed, a
    warning names it. Raises ImportError if math-verify is not installed. POSIX only.
    """
    return [
        float(_is_right(extract_answer(_one_box(text)), gold_answer(_one_box(str(gold)))))
        for text, gold in zip(completions, answer, strict=True)
    ]


def _is_right(given, gold):
    if given is None:
        return False
    for pattern, same in SPELLINGS:
        given, gold = pattern.sub(same, given), pattern.sub(same, gold)
    given, gold = given.rstrip(" .").lstrip(), gold.rstrip(" .").lstrip()
    if given == gold or _same_quantity(given, gold):
        return True
    # "6\text{ million}": to math-verify any text is a unit
    same_multiples = MULTIPLE.findall(given) == MULTIPLE.findall(gold)
    return len(given) <= MATH_LENGTH and same_multiples and _ask_verifier(gold, given)


def _one_box(text):
    """`\\boxed{2} and \\boxed{3}` as `\\boxed{2, 3}`."""
    return BOXES.sub(lambda boxes: "\\boxed{" + ", ".join(re.findall(BOX, boxes[0])) + "}", text)


def _same_quantity(given, gold):
    """Do both state the same number, as gsm8k_accuracy reads it, and no other unit than the gold
    answer's, if it has one?

    "18 dollars" is 18, and 18 xy is not.
    """
    words, of_gold = (re.findall(r"[^\W\d_]+", DRESS.sub(" ", latex)) for latex in (given, gold))
    return (
        given.count("{") == given.count("}") and of_gold in ([], words)
        and not any(map(FACTOR.fullmatch, words)) and same_number(given, gold)
    )


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
        [sys.executable, "-m", "engine.scoring.mathematics"], cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )
    if verifier.stdout.readline() != "ready\n":
        raise ImportError(
            "math_accuracy cannot run math-verify: is it installed? pip install math-verify"
        )
    return verifier


# --- the process that judges ---


def _verdict(gold, given):
    """The verdict: right, wrong, or "no gold" if the gold answer cannot be parsed."""
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy import FiniteSet, Number

    form = LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)
    golds, found = (
        parse(f"\\boxed{{{latex}}}", [form], "no_fallback", "first_match", parsing_timeout=None)
        for latex in (gold, given)
    )
    if not golds or not found:
        return "wrong" if golds else "no gold"
    value = getattr(found[0], "rhs", found[0])  # the 5 of "x=5"
    # math-verify reads only the last equation of "x=5 \\lor x=6", unless it reads all of them as a
    # set
    several = given.count("=") > max(1, gold.count("=")) and not isinstance(value, FiniteSet)
    # "3*4" equals 12, but often it only repeats the question. math-verify computes binomials while
    # it reads them
    computed = isinstance(value, Number) and "binom" not in given
    if several or isinstance(golds[0], Number) and not computed:
        return "wrong"
    return "right" if verify(golds, found, timeout_seconds=None) else "wrong"


if __name__ == "__main__":
    # It answers each line of [gold, given, seconds] with a verdict, until the end of its input, or
    # until the alarm kills it
    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (MATH_MEMORY, MATH_MEMORY))
    _verdict("1", "1")  # the libraries are there
    print("ready", flush=True)
    for line in sys.stdin:
        gold, given, seconds = json.loads(line)
        # CPU time: other work of the machine does not change the verdict
        signal.setitimer(signal.ITIMER_PROF, seconds)
        print(_verdict(gold, given), flush=True)
