"""The process that judges LaTeX answers by math-verify. sympy may work for hours; only a process
can be stopped."""

import json
import logging
import resource
import signal
import sys

from math_verify import LatexExtractionConfig, parse, verify
from sympy import FiniteSet, Number


def serve(memory):
    """Read lines of [gold, given, seconds], and answer each line with a verdict. memory: the limit
    in bytes.

    The process ends at the end of its input, or when the alarm kills it.
    """
    logging.disable()
    # the alarm must kill, whatever the parent process did with it
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    form = [LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)]
    options = dict(fallback_mode="no_fallback", extraction_mode="first_match", parsing_timeout=None)
    print("ready", flush=True)
    for line in sys.stdin:
        *texts, seconds = json.loads(line)
        # CPU time: other work of the machine does not change the verdict
        signal.setitimer(signal.ITIMER_PROF, seconds)
        gold, given = (parse(f"\\boxed{{{latex}}}", form, **options) for latex in texts)
        value = getattr(given[0], "rhs", given[0]) if given else None  # the 5 of "x=5"
        # math-verify reads only the last equation of "x=5 \lor x=6", unless it reads all of them as
        # a set
        several = texts[1].count("=") > max(1, texts[0].count("=")) and not isinstance(
            value, FiniteSet
        )
        # "3*4" equals 12, but often it only repeats the question. math-verify computes binomials
        # while it reads them
        computed = isinstance(value, Number) and "binom" not in texts[1]
        not_computed = gold and isinstance(gold[0], Number) and not computed
        right = (
            gold
            and given
            and not several
            and not not_computed
            and verify(gold, given, timeout_seconds=None)
        )
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(
            "no gold" if not gold else "unparsed" if not given else "right" if right else "wrong",
            flush=True,
        )


if __name__ == "__main__":
    serve(int(sys.argv[1]))
