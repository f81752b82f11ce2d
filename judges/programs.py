"""Rewards for programs, by what they print in the sandbox. A completion's program is its last
```python block."""

import functools
from fractions import Fraction

from answers import extract_code, gold_answer, same_number, to_number
from judges.sandbox import run_many


def code_accuracy(completions, answer, **columns):
    """1.0 if the program runs to its end and prints only the gold answer, as text or as a number;
    else 0.0.

    Numbers may differ by 1e-9 of their size, because 0.1 + 0.2 is not exactly 0.3. answer: as in
    `gsm8k_accuracy`.
    """
    outputs = _outputs(tuple(completions))
    return [_accuracy(*pair) for pair in zip(outputs, answer, strict=True)]


def _accuracy(output, answer):
    gold = gold_answer(answer)
    if output is None:
        return 0.0
    return float(_lines(output) == _lines(gold) or same_number(output, gold, Fraction(1, 10**9)))


def _lines(text):
    """The lines without the spaces at their ends, and without the \\r of Windows."""
    return [line.rstrip() for line in text.split("\n")]


def code_runs(completions, **columns):
    """0.5 if the program runs to its end and prints one number, right or wrong; else -0.1, also
    without a program."""
    outputs = _outputs(tuple(completions))
    return [-0.1 if to_number(output or "") is None else 0.5 for output in outputs]


_errors = {}  # {program: why it did not run to its end, or None}, of the newest ones


# several rewards look at the same completions, and each program runs only once
@functools.lru_cache(maxsize=4)
def _outputs(completions):
    """What the program of each completion prints. None if there is no program, or if it does not
    run to its end."""
    programs = [extract_code(completion) for completion in completions]
    distinct = list(dict.fromkeys(filter(None, programs)))
    printed = {}
    if len(_errors) > 10_000:
        _errors.clear()
    for program, result in zip(distinct, run_many(distinct), strict=True):
        printed[program] = result.stdout.strip() if result.ok else None
        _errors[program] = result.error
    return [printed.get(program) for program in programs]


def program_errors(completions):
    """Why the program of each completion did not run to its end. None: it did, or no reward of this
    file has run it."""
    return [_errors.get(extract_code(completion)) for completion in completions]
