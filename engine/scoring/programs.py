"""Rewards of programs: what they print, found out in the sandbox. A completion's program is its last ```python block."""

import functools
from fractions import Fraction

from engine.scoring.sandbox import run_many
from rewards import extract_code, gold_answer, same_number, to_number


def code_accuracy(completions, answer, **columns):
    """1.0 where the program runs to its end and prints the gold answer, as text or number, and nothing else; else 0.0.

    Numbers may differ by 1e-9 of their size, as 0.1 + 0.2 and 0.3 do. answer: as in `gsm8k_accuracy`.
    """
    pairs = [(output, gold_answer(gold)) for output, gold in zip(_outputs(tuple(completions)), answer, strict=True)]
    same = lambda output, gold: output == gold or same_number(output, gold, Fraction(1, 10**9))
    return [1.0 if output is not None and same(output, gold) else 0.0 for output, gold in pairs]


def code_runs(completions, **columns):
    """0.5 where the program runs to its end and prints one number, be it wrong; -0.1 otherwise, also without a program."""
    return [-0.1 if output is None or to_number(output) is None else 0.5 for output in _outputs(tuple(completions))]


@functools.lru_cache(maxsize=4)  # several rewards look at the same completions: each program runs once
def _outputs(completions):
    """What the program of each completion prints; None where there is no program or it does not run to its end."""
    programs = [extract_code(completion) for completion in completions]
    distinct = list(dict.fromkeys(program for program in programs if program is not None))
    results = dict(zip(distinct, run_many(distinct), strict=True))
    return [results[p].stdout.strip() if p is not None and results[p].ok else None for p in programs]
