"""The process that judges for math_accuracy: math-verify, but numbers are compared exactly.

mathematics.py starts it and tells it how much memory it may have, in bytes. It answers each line of
[gold, given, seconds] with a verdict, until the end of its input, or until the alarm kills it.

math-verify 0.9 compares numbers with an absolute tolerance, so 2^-98 would be 2^-99. So its two
comparisons of values are replaced by those below.
"""

import json
import logging
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from math import factorial, prod

from math_verify import LatexExtractionConfig, grader, parse, verify
from sympy import FiniteSet, Float, MatrixBase, Number, Rational, oo, solve

try:
    import resource
except ImportError:
    raise SystemExit("math_accuracy needs Linux or macOS: on Windows use WSL.") from None

# mathematics.py has read the units; math-verify would drop the h of 2\pi h, too
FORM = LatexExtractionConfig(
    boxed_match_priority=0, try_extract_without_anchor=False,
    normalization_config=replace(LatexExtractionConfig().normalization_config, units=False))
BITS = 100_000  # of the largest number that is computed exactly: 9^{9^9} has more
DIGITS = 40  # to which other numbers are computed


def judge_pair(gold, given):
    """The verdict: right, wrong, or "no gold" if the gold answer cannot be parsed."""
    expected, found = (
        parse(f"\\boxed{{{latex}}}", [FORM], "no_fallback", "first_match", parsing_timeout=None)
        for latex in (gold, given)
    )
    if not expected or not found:
        return "wrong" if expected else "no gold"
    value = getattr(found[0], "rhs", found[0])  # the 5 of "x=5"
    left = getattr(found[0], "lhs", None)  # the 2+2 of "2+2=5"
    if getattr(left, "is_number", False) and not same_value(value, left):
        return "wrong"
    # math-verify reads only the last equation of "x=5 \\lor x=6", unless it reads all of them as a
    # set
    several = given.count("=") > max(1, gold.count("=")) and not isinstance(value, FiniteSet)
    # "3*4" equals 12, but often it only repeats the question
    if several or isinstance(expected[0], Number) and not isinstance(value, Number):
        return "wrong"
    return "right" if verify(expected, found, timeout_seconds=None) else "wrong"


# --- the comparison of values ---


def exact(value):
    """The Fraction that a sympy expression is; None if it has letters or roots, or is too large."""
    if isinstance(value, Float):
        return Fraction(str(value))  # its decimals, not the nearest binary number
    if isinstance(value, Rational):
        return Fraction(value.p, value.q)
    parts = [exact(part) for part in getattr(value, "args", ())]
    if not parts or None in parts:
        return None
    compute = RATIONAL.get(type(value).__name__)
    return compute and compute(*parts)


def power(base, exponent):
    """base ** exponent as a Fraction; None if it is irrational, infinite or too large."""
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if exponent.denominator != 1 or abs(exponent) * bits > BITS or not base and exponent < 0:
        return None
    return base**exponent


def small_factorial(n):
    return Fraction(factorial(int(n))) if n.denominator == 1 and 0 <= n < 5000 else None


# what is computed of rational numbers
RATIONAL = {
    "UnevaluatedExpr": Fraction, "Add": lambda *parts: sum(parts),
    "Mul": lambda *parts: prod(parts), "Pow": power, "factorial": small_factorial}


def same_value(gold, given, *options):
    """Are both the same number, matrix or expression? Rational numbers are compared exactly, others
    relative to the gold answer."""
    if isinstance(gold, MatrixBase) and isinstance(given, MatrixBase):
        pairs = zip(gold.flat(), given.flat())
        return gold.shape == given.shape and all(grader.sympy_expr_eq(*p, *options) for p in pairs)
    a, b = exact(gold), exact(given)
    if None not in (a, b):
        return a == b
    try:
        distance = abs((gold - given).evalf(DIGITS))
        # |gold − given| ≤ 10^-30 · |gold|, but ∞ is equal only to ∞
        bound = Rational(1, 10**30) * abs(gold.evalf(DIGITS))
        return bool(distance <= bound < oo) or gold == given
    except TypeError:  # it has letters
        return False


def same_symbols(gold, given):
    """Is their difference 0 when it is simplified? In letters; decimals are exact."""
    if None not in (exact(gold), exact(given)):
        return False  # same_value has said so
    return simplifies_to_0(with_fractions(gold), with_fractions(given))


def with_fractions(value):
    fractions = {number: Rational(str(number)) for number in value.atoms(Float)}
    return value.xreplace(fractions) if fractions else value


def same_solutions(gold, given, *options):
    """Two equations without solutions are not the same equation."""
    return bool(solve(gold, gold.free_symbols)) and have_same_solutions(gold, given, *options)


simplifies_to_0, have_same_solutions = grader.sympy_symbolic_eq, grader.sympy_solve_and_compare
grader.sympy_numeric_eq, grader.sympy_symbolic_eq = same_value, same_symbols
grader.sympy_solve_and_compare = same_solutions


if __name__ == "__main__":
    if sys.argv[1:] in ([], ["--help"]):
        sys.exit(print(__doc__))
    logging.disable()
    memory = int(sys.argv[1])
    with suppress(ValueError, OSError):  # macOS refuses this limit
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    judge_pair("1", "1")  # the libraries are there
    print("ready", flush=True)
    for line in sys.stdin:
        gold, given, seconds = json.loads(line)
        # CPU time: other work of the machine does not change the verdict
        signal.setitimer(signal.ITIMER_PROF, seconds)
        print(judge_pair(gold, given), flush=True)
