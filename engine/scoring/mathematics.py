"""The reward of mathematics: is a LaTeX answer equal to the gold one? math-verify judges, in a process of its own."""

import functools
import json
import re
import subprocess
import sys
import threading
import warnings
from collections import Counter
from pathlib import Path

from rewards import MULTIPLE, extract_answer, gold_answer

JUDGE = Path(__file__).with_name("math_judge.py")
MATH_MARKS = re.compile(r"(?<!\\)(?:\\[()\[\]%]|[$%])")  # $…$, \(…\), \[…\], and percent, which is a unit
MATH_LENGTH = 1000  # characters; the longest gold answer of MATH-500 has 53
MATH_SECONDS = 5.0  # of CPU time for one answer; most take a millisecond, few a tenth of a second
MATH_MEMORY = 4 << 30  # bytes
JUDGE_LOCK = threading.Lock()


def math_accuracy(completions, answer, **columns):
    """1.0 where the answer is the gold one's text, or equal to it by the library math-verify; else 0.0.

    answer: LaTeX as in MATH, AMC and AIME ("\\frac{1}{2}", "(3,4]", "27"), or solutions that hold it in a `\\boxed{}`.
    Where it is a number the completion must give one too, not a term of that value ("3*4"). Elsewhere any equal term counts.
    What cannot be parsed, or judged within MATH_SECONDS and MATH_MEMORY, is wrong and no error. `math_accuracy.verdicts`
    counts the completions: right, wrong, none (no answer), unparsed, stopped, no gold. A gold answer that cannot be parsed
    also earns one warning, by name. Raises ImportError where math-verify is not installed. POSIX only.
    """
    verdicts = [_math_verdict(extract_answer(text), gold_answer(gold)) for text, gold in zip(completions, map(str, answer), strict=True)]
    math_accuracy.verdicts.update(verdicts)
    return [1.0 if verdict == "right" else 0.0 for verdict in verdicts]


math_accuracy.verdicts = Counter()


def _math_verdict(given, gold):
    if given is None:
        return "none"
    given, gold = (MATH_MARKS.sub(" ", latex).rstrip(" .").lstrip() for latex in (given, gold))
    if given == gold:
        return "right"
    if len(given) > MATH_LENGTH:
        return "unparsed"
    if MULTIPLE.findall(given) != MULTIPLE.findall(gold):  # "6\text{ million}": math-verify takes any text for a unit
        return "wrong"
    verdict = _ask_judge(gold, given)
    if verdict == "no gold":
        _warn_of_gold(gold)
    return verdict


@functools.cache
def _warn_of_gold(gold):
    warnings.warn(f"math_accuracy cannot parse the gold answer {gold!r}: only that very text scores.", stacklevel=2)


@functools.lru_cache(maxsize=4096)  # completions of one question often agree
def _ask_judge(gold, given):
    with JUDGE_LOCK:
        if _judge().poll() is not None:
            _judge.cache_clear()
        judge = _judge()
        try:
            print(json.dumps([gold, given, MATH_SECONDS]), file=judge.stdin, flush=True)
            verdict = judge.stdout.readline().strip()
        except BaseException:  # interrupted: its verdict would be read as that of the next answer
            judge.kill()
            judge.wait()
            raise
        if not verdict:  # it ran out of time or memory, and is gone
            judge.wait()
        return verdict or "stopped"


@functools.cache
def _judge():
    """A process of its own for sympy, which can work on for hours: from any thread of ours, a process is all that can be stopped."""
    pipe = subprocess.PIPE
    judge = subprocess.Popen([sys.executable, str(JUDGE), str(MATH_MEMORY)], stdin=pipe, stdout=pipe, text=True, start_new_session=True)
    if judge.stdout.readline() != "ready\n":
        raise ImportError("math_accuracy cannot run math-verify: is it installed? pip install math-verify")
    return judge
