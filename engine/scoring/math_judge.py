"""The process that judges LaTeX answers by math-verify. sympy may work for hours; only a process
can be stopped."""

import json
import logging
import resource
import signal
import sys

from math_verify import LatexExtractionConfig, parse, verify
from sympy import FiniteSet, Number

FORM = dict(
    extraction_config=[
        LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)],
    fallback_mode="no_fallback", extraction_mode="first_match", parsing_timeout=None,
)


def judge(gold, given):
    """The verdict: right, wrong, unparsed, or "no gold" if the gold answer cannot be parsed."""
    golds, found = (parse(f"\\boxed{{{latex}}}", **FORM) for latex in (gold, given))
    if not golds or not found:
        return "unparsed" if golds else "no gold"
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
    # It reads lines of [gold, given, seconds], and answers each line with a verdict, until the end
    # of its input, or until the alarm kills it. Its argument: the limit of memory in bytes
    logging.disable()
    # the alarm must kill, whatever the parent process did with it
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]), int(sys.argv[1])))
    print("ready", flush=True)
    for line in sys.stdin:
        gold, given, seconds = json.loads(line)
        # CPU time: other work of the machine does not change the verdict
        signal.setitimer(signal.ITIMER_PROF, seconds)
        print(judge(gold, given), flush=True)
        signal.setitimer(signal.ITIMER_PROF, 0)
