"""judges/mathematics.py: equal in mathematics, by math-verify, within a time limit and in
any thread."""

import re
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import pytest

from judges import mathematics
from judges.mathematics import math_accuracy
from tests.helpers.runs import ROOT

pytestmark = pytest.mark.slow

HANGS = "9^{9^{9}}"  # python works on it in one call for minutes


def r1(answer):
    return f"<think>so</think>\n<answer>{answer}</answer>"


def right(given, gold):
    """In both forms that a completion may have."""
    values = math_accuracy([r1(given), f"so \\boxed{{{given}}}."], [gold] * 2)
    assert values[0] == values[1]
    return values[0] == 1.0


def pairs(table):
    """The pairs (given answer, gold answer) of a table, of which each line has one."""
    return [line.split("  ~  ") for line in table.strip().splitlines()]


EQUAL = r"""
\frac12  ~  \frac{1}{2}
1/2  ~  \frac{1}{2}
0.5  ~  \frac{1}{2}
\frac12  ~  $\frac{1}{2}$.
1.5  ~  3/2
6.0  ~  6
$6$  ~  6
x=5  ~  5
5  ~  x=5
x+1.  ~  1+x
2\sqrt{2}  ~  \sqrt{8}
\frac{\sqrt3}{3}  ~  \frac{1}{\sqrt{3}}
-q+p  ~  p - q
0.3x  ~  0.1x+0.2x
3, 7, 5  ~  3,5,7
\{5,3\}  ~  \{3,5\}
(3, 4]  ~  (3,4]
(-\infty,2)\cup(3,\infty)  ~  (-\infty, 2) \cup (3, \infty)
[-2,7]  ~  x \in [-2,7]
\begin{bmatrix}1\\2\end{bmatrix}  ~  \begin{pmatrix} 1 \\ 2 \end{pmatrix}
2 \text{ or } 3  ~  2,3
x=2, x=3  ~  2,3
3  ~  so it is $\boxed{3}$.
C  ~  \text{(C)}
\text{evelyn}  ~  \text{Evelyn}
18\%  ~  18
18  ~  18\%
50%  ~  50
28 percent  ~  28\%
28 pct  ~  28\%
28 percentage  ~  28\%
6\text{ cm}  ~  6
864  ~  864 \mbox{ inches}^2
90  ~  90^\circ
18°  ~  18
18 dollars  ~  18
18 dollars  ~  18\text{ dollars}
\text{18 dollars}  ~  18
18 miles per hour  ~  18
\$5  ~  5
\$32,348  ~  \$32,\!348
€1,800  ~  1800
\textbf{18}  ~  18
**18**  ~  18
18 (eighteen)  ~  18
\varnothing  ~  \emptyset
\emptyset  ~  \varnothing
1\,000  ~  1000
1\;000~000  ~  1{,}000{,}000
3000  ~  3\,000
1 - 1/e  ~  1 - \frac{1}{\mathrm{e}}
3+4\mathrm{i}  ~  3+4i
\pi\mathrm{i}  ~  i\pi
"""
DIFFERENT = r"""
7  ~  6
-6  ~  6
\pm 6  ~  6
\infty  ~  6
1/0  ~  6
0.33  ~  \frac{1}{3}
(3,4)  ~  (3,4]
3,5  ~  3,5,7
3,5,7,9  ~  3,5,7
\text{Navin}  ~  \text{Evelyn}
\text{(A)}  ~  \text{(C)}
A, B, C  ~  \text{(C)}
2x  ~  2y
18 xy  ~  18
18 pi  ~  18
18π  ~  18
18 theta  ~  18
18 eggs  ~  18\text{ dollars}
18 plus seven  ~  18
18 thousand  ~  18
17 dollars  ~  18
-18 dollars  ~  18
28 percent  ~  0.28
1\,00  ~  100
10\,20  ~  1020
1\,000  ~  1
1 + \frac{1}{\mathrm{e}}  ~  1 - \frac{1}{\mathrm{e}}
\{0\}  ~  \varnothing
"""
# neither 5 nor 6: several answers, and questions that are given back
UNDECIDED = r"""
x=5 or x=6
x=5 \text{ or } x=6
x=5 \lor x=6
x=5 \mid x=6
x=5 \text{ xor } x=6
x=5 \quad x=6
x = 5 = 6
5,6
1,2,3,4,5,6
\{5,6\}
5 \cup 6
5 \text{ and } 6
6 or 6 \text{ or } 7
[5,6]
x \in [1,10]
5 \le x \le 6
6 \pm 1
5/6
3*2
3\cdot 2
5+1
3!
\sqrt{36}
|6|
\binom{6}{5}
\sum_{n=1}^{3} n
\int_0^6 1 dx
\lfloor 6.5 \rfloor
6\text{ million}
6 \text{ dozen}
6\text{ hundred}
\text{half of }6
\text{minus }6
\text{not }6
\neq 6
\approx 6
6e0
{6
"""


@pytest.mark.parametrize("given, gold", [*pairs(EQUAL), (" .5 ", "1/2")])
def test_what_is_equal_is_right(given, gold):
    assert right(given, gold)


@pytest.mark.parametrize("given, gold", pairs(DIFFERENT))
def test_what_differs_is_wrong(given, gold):
    assert not right(given, gold)


@pytest.mark.parametrize("given", UNDECIDED.strip().splitlines())
def test_several_answers_and_questions_given_back_are_no_answer(given):
    assert not right(given, "6") and not right(given, "5")


@pytest.mark.parametrize("completion, gold, value", [
    ("\\boxed{(98, 2)} \\quad \\text{and} \\quad \\boxed{(99, 503)}", "(98, 2), (99, 503)", 1.0),
    ("so $\\boxed{2}$, $\\boxed{3}$ and \\(\\boxed{5}\\)", "\\{2, 3, 5\\}", 1.0),
    ("\\boxed{-2,1}", "\\(\\boxed{1}\\) and \\(\\boxed{-2}\\).", 1.0),
    ("\\boxed{\\frac{1}{\\sqrt{2}}} or \\boxed{1}", "1, \\frac{\\sqrt2}{2}", 1.0),
    ("\\boxed{17} or \\boxed{18}", "18", 0.0),  # a hedge
    ("\\boxed{17}. No: \\boxed{18}", "18", 1.0), ("\\boxed{18}\n\\boxed{18}", "18", 1.0),
    ("\\boxed{18" * 5000 + ", \\boxed{18}", "18", 1.0),
])
def test_boxes_that_are_joined_are_one_answer(completion, gold, value):
    assert math_accuracy([completion], [gold]) == [value]


@pytest.mark.parametrize("question, gold, value", [
    ("Which are odd? (A) 1 (B) 2 (C) 3", "AC", 1.0), ("Odd are\nA. 1\nB. 2\nC. 3", "CA", 1.0),
    ("Which side is the longest?", "AC", 0.0), (None, "AC", 0.0), (None, "A, C", 1.0),
])  # fmt: skip
def test_the_question_says_whether_letters_name_options(question, gold, value):
    assert math_accuracy([r1("C and A")], [gold], question=[question]) == [value]


def test_the_sign_before_the_box_counts():
    answers = ["-\\boxed{\\frac12}"] * 2
    assert math_accuracy(answers, ["0.5", "-0.5"]) == [0.0, 1.0]


def test_what_cannot_be_parsed_is_wrong_and_such_a_gold_answer_is_named():
    given = ["6", r1(""), r1("\\frac{"), r1("0" * 1000 + "6")]
    gold = "\\frac{"
    assert math_accuracy(given, ["6"] * 4) == [0.0] * 4
    mathematics._ask_verifier.cache_clear()
    with warnings.catch_warnings(action="error"):  # a text needs no parser
        assert math_accuracy([r1("June 20")], ["June"]) == [0.0]
    with pytest.warns(UserWarning, match=r"\\frac\{"):
        assert math_accuracy([r1("6"), r1("7"), r1(gold)], [gold] * 3) == [0.0, 0.0, 1.0]


# --- the comparison of values, in the process that judges ---


@pytest.fixture(scope="module")
def verdicts():
    """verdict(gold, given) of judges/verifier.py, here and not in its process."""
    return pytest.importorskip("judges.verifier")


@pytest.mark.parametrize("value, fraction", [
    ("0.00012345", Fraction("0.00012345")),
    ("123456789012345678.5", Fraction("123456789012345678.5")),
    ("9.1\\times10^{-31}", Fraction("9.1e-31")), ("3!", 6), ("0!", 1), ("(-2)^{3}", -8),
    ("\\frac{1}{2^{101}}", Fraction(1, 2**101)), ("1-\\frac{1}{3^{40}}", 1 - Fraction(1, 3**40)),
    *((other, None) for other in (
        "\\sqrt{2}", "\\sin{1}", "x", "0^{-1}", HANGS, "10^{10^{10}}", "10^{9}!")),
])  # fmt: skip
def test_a_rational_number_is_read_exactly_and_never_for_long(verdicts, value, fraction):
    [parsed, _] = verdicts.parse(f"\\boxed{{{value}}}", [verdicts.FORM], parsing_timeout=None)
    start = time.perf_counter()
    assert verdicts.exact(parsed) == fraction
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize("text", ["1.5e^2", "x = ", "1-", "A, ", " and", "B1", "x=1, ", "(x"])
def test_a_long_answer_is_compared_in_no_time(text, monkeypatch):
    """The verifier left out, which has a time limit."""
    monkeypatch.setattr(mathematics, "_ask_verifier", lambda gold, given: "wrong")
    long = text * (980 // len(text))
    start = time.process_time()
    given = [r1(f"{long};=1"), r1(f"1={long};=1"), r1("18")]
    assert math_accuracy(given, ["18", "18", long]) == [0.0] * 3
    assert time.process_time() - start < 1


def test_other_numbers_are_compared_relative_to_the_gold_answer(verdicts):
    root = verdicts.Rational(1, 2) ** verdicts.Rational(1, 2)
    for size in (1, 10**-60, 10**60):
        gold = root * verdicts.Rational(Fraction(size))
        near, far = (gold * (1 + verdicts.Rational(n, 10**31)) for n in (5, 20))
        assert verdicts.same_value(gold, near) and not verdicts.same_value(gold, far)


@pytest.fixture
def judge(monkeypatch):
    """The process that judges, which has started and may take half a second for an answer."""
    monkeypatch.setattr(mathematics, "MATH_SECONDS", 0.5)
    mathematics._ask_verifier.cache_clear()
    math_accuracy([r1("2")], ["\\sqrt{4}"])
    return mathematics._process()


def test_what_takes_too_long_is_stopped_in_any_thread(judge):
    answers = [r1(HANGS), r1("\\sqrt{8}"), r1(HANGS)]
    start, before = time.perf_counter(), mathematics.COUNTS["timeouts"]
    with ThreadPoolExecutor(1) as pool:
        values = pool.submit(math_accuracy, answers, ["2\\sqrt{2}"] * 3).result()
    assert values == [0.0, 1.0, 0.0]  # the next answer is judged by a new process
    assert 0.5 < time.perf_counter() - start < 50
    assert mathematics._ask_verifier.cache_info().hits >= 1  # the same answer costs its time once
    assert mathematics.COUNTS["timeouts"] == before + 2  # but it counts each time
    assert judge.returncode is not None  # nothing is left of the old one


def test_the_limit_ends_with_the_answer_and_memory_is_limited(judge):
    limits = Path(f"/proc/{judge.pid}/limits")
    if not limits.exists():
        pytest.skip("no /proc here")
    assert re.search(rf"address space +{mathematics.MATH_MEMORY}", limits.read_text())
    time.sleep(0.8)
    assert judge.poll() is None  # it waits for the next one as long as it takes


MAC = """
import resource, runpy, sys
def refuse(*_): raise ValueError("current limit exceeds maximum limit")
resource.setrlimit, sys.argv = refuse, ["verifier.py", "1"]
runpy.run_module("judges.verifier", run_name="__main__")
"""


def test_a_system_that_refuses_the_limit_of_memory_judges_without_it():
    """macOS does."""
    done = subprocess.run([sys.executable, "-c", MAC], cwd=ROOT, text=True,
                          input='["2\\\\sqrt{2}", "\\\\sqrt{8}", 60]\n', capture_output=True)
    assert done.stdout.split() == ["ready", "right"]


def test_threads_get_their_own_verdicts():
    def run(n):
        answers = [r1(f"\\sqrt{{{i * i}}}x") for i in range(n, n + 5)]
        return math_accuracy(answers, [f"{2 * n}x"] * 5)

    with ThreadPoolExecutor(5) as pool:
        values = list(pool.map(run, range(5)))
    assert values == [[i == 2 * n for i in range(n, n + 5)] for n in range(5)]


def test_without_the_library_it_says_what_to_install(monkeypatch, judge):
    monkeypatch.setattr(mathematics.sys, "executable", "true")  # ends before it is ready
    judge.kill()
    judge.wait()
    mathematics._process.cache_clear()
    with pytest.raises(ImportError, match="pip install math-verify"):
        math_accuracy([r1("\\sqrt{8}")], ["2\\sqrt{2}"])
