"""Rewards for programs, by what they print in the sandbox. A completion's program is its last
```python block."""

import functools
from fractions import Fraction

from engine.scoring.sandbox import run_many
from rewards import extract_code, gold_answer, same_number, to_number


def code_accuracy(completions, answer, **columns):
    """1.0 if the program runs to its end and prints only the gold answer, as text or as a number;
    else 0.0.

    Numbers may differ by 1e-9 of their size, because 0.1 + 0.2 is not exactly 0.3. answer: as in
    `gsm8k_accuracy`.
    """
    pairs = zip(_outputs(tuple(completions)), map(gold_answer, answer), strict=True)
    return [
        1.0 if output == gold or same_number(output or "", gold, Fraction(1, 10**9)) else 0.0
        for output, gold in pairs
    ]


def code_runs(completions, **columns):
    """0.5 if the program runs to its end and prints one number, right or wrong; else -0.1, also
    without a program."""
    return [
        -0.1 if to_number(output or "") is None else 0.5
        for output in _outputs(tuple(completions))
    ]


# several rewards look at the same completions, and each program runs only once
@functools.lru_cache(maxsize=4)
def _outputs(completions):
    """What the program of each completion prints. None if there is no program, or if it does not
    run to its end."""
    programs = [extract_code(completion) for completion in completions]
    distinct = list(dict.fromkeys(filter(None, programs)))
    results = dict(zip(distinct, run_many(distinct), strict=True))
    return [results[p].stdout.strip() if p and results[p].ok else None for p in programs]
