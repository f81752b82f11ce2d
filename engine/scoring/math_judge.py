"""The process that judges LaTeX answers by math-verify: sympy can work on for hours, and only a process can be stopped."""

import json
import logging
import resource
import signal
import sys

from math_verify import LatexExtractionConfig, parse, verify
from sympy import FiniteSet, Number


def serve(memory):
    """Lines of [gold, given, seconds] in, a line with the verdict out. It ends with its input or by the alarm. memory: bytes."""
    logging.disable()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the alarm kills, whatever it did in the process that started this one
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    form = [LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)]
    options = dict(fallback_mode="no_fallback", extraction_mode="first_match", parsing_timeout=None)
    print("ready", flush=True)
    for line in sys.stdin:
        *texts, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # of CPU time: a verdict does not depend on what else the machine does
        gold, given = (parse(f"\\boxed{{{latex}}}", form, **options) for latex in texts)
        value = getattr(given[0], "rhs", given[0]) if given else None  # the 5 of "x=5"
        # of "x=5 \lor x=6" only the last equation is read, unless all are read as a set
        several = texts[1].count("=") > max(1, texts[0].count("=")) and not isinstance(value, FiniteSet)
        # "3*4" is 12 and no answer: often it is the question. Binomials are worked out while they are read
        worked_out = isinstance(value, Number) and "binom" not in texts[1]
        undone = gold and isinstance(gold[0], Number) and not worked_out
        right = gold and given and not several and not undone and verify(gold, given, timeout_seconds=None)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print("no gold" if not gold else "unparsed" if not given else "right" if right else "wrong", flush=True)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
