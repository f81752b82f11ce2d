"""judges/programs.py: a program as the answer."""

from collections import Counter

import pytest

from answers import extract_code
from judges import programs
from judges.programs import code_accuracy, code_runs
from rewards import code_format, soft_code_format

pytestmark = pytest.mark.slow


def answer(code, thoughts="so"):
    return f"<think>{thoughts}</think>\n```python\n{code}\n```"


@pytest.mark.parametrize(
    "text, code",
    [
        (answer("print(18)"), "print(18)\n"),
        ("```python\nprint(18)\n```", "print(18)\n"),
        # the last one counts
        ("```python\nprint(17)\n```\nno:\n```python\nprint(18)\n```", "print(18)\n"),
        (answer("a\n\nb"), "a\n\nb\n"),
        (answer(""), "\n"),
        ("<think>```python\nprint(18)\n```</think>", None),
        ("<think>```python\nprint(18)\n```", None),
        ("```python\nprint(18)", None),
        ("```\nprint(18)\n```", None),
        ("print(18)", None),
        ("", None),
        ("```python\nprint(18)\n```\n```python\nprint(17)", None),
    ],
)
def test_the_program_is_the_last_block_after_the_thoughts(text, code):
    assert extract_code(text) == code


@pytest.mark.parametrize(
    "completion",
    [
        answer("print(18)"), answer("x = 9\n\nprint(2 * x)", "\n9\n"),
        answer("a = '<b>'", "```python\n1\n```"),
        answer("print(18)").replace("</think>\n", "</think>\n\n"),
    ],
)
def test_the_code_form_scores_1(completion):
    assert code_format([completion]) == [1.0]


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "```python\nprint(18)\n```",
        answer("print(18)") + "\n",
        " " + answer("print(18)"),
        answer("print(18)") + "\n<answer>18</answer>",
        answer("print(18)") * 2,
        answer("print(17)\n```\n```python\nprint(18)"),
        answer("print(18)").replace("</think>\n", "</think>\n\n\n"),
        answer("print(18)").replace("</think>\n", "</think>"),
        answer("print(18)").replace("python", "py"),
        answer("print(18)")[:-3],
        answer("print(18)", "<think>"),
        "<think>" * 10_000,
        answer("print(18)" * 10_000) + ".",
    ],
)
def test_anything_but_the_code_form_scores_0(completion):
    assert code_format([completion]) == [0.0]


@pytest.mark.parametrize("completion, score", [
    (answer("print(18)"), 1.0), ("Well. " + answer("print(18)") + " So.", 1.0),
    (answer("print(18)")[:-3], 0.75), ("```python\nprint(18)\n```", 0.5),
    ("<think>so</think>", 0.5), ("<think>so</think>\n```\nprint(18)", 0.75),
    ("<think>so", 0.25), ("print(18)", 0.0), ("", 0.0),
    # a mark that comes too early, or twice, earns nothing
    ("```python\nprint(18)\n```\n<think>so</think>", 0.5), (answer("print(18)") * 2, 0.0),
    (answer("print(17)\n```\n```python\nprint(18)"), 0.5), ("<think>" * 1000, 0.0),
])
def test_the_soft_code_form_pays_a_quarter_for_each_mark_in_order_and_once(completion, score):
    assert soft_code_format([completion]) == [score]


PROGRAMS = {  # where 18 is right: (completion, accuracy, runs)
    "right": (answer("print(9 + 9)"), 1.0, 0.5),
    "wrong": (answer("print(17)"), 0.0, 0.5),
    "a float": (answer("print(18.0)"), 1.0, 0.5),
    "rounding": (answer("print(0.1 * 180)"), 1.0, 0.5),
    "rounding more": (answer("print(18.00001)"), 0.0, 0.5),
    "with its currency": (answer("print('$18')"), 1.0, 0.5),
    "several lines of code": (answer("def f(x):\n    return 2 * x\n\n\nprint(f(9))"), 1.0, 0.5),
    "the number in passing": (answer("x = 18"), 0.0, -0.1),
    "in a comment": (answer("# 18\nprint(17)"), 0.0, 0.5),
    "two numbers": (answer("print(17)\nprint(18)"), 0.0, -0.1),
    "many numbers": (answer("for i in range(100): print(i)"), 0.0, -0.1),
    "a hedge": (answer("print('17 or 18')"), 0.0, -0.1),
    "a sentence": (answer("print('It is not 18')"), 0.0, -0.1),
    "a word": (answer("print('eighteen')"), 0.0, -0.1),
    "an exponent": (answer("print('18e0')"), 0.0, -0.1),
    "wide digits": (answer("print('１８')"), 1.0, 0.5),
    "digits of another script": (answer("print('१८')"), 0.0, -0.1),
    "crashes after it has printed": (answer("print(18)\n1 / 0"), 0.0, -0.1),
    "ends by sys.exit": (answer("import sys\nprint(18)\nsys.exit(0)"), 1.0, 0.5),
    "ends by exit": (answer("def main():\n    print(18)\n    exit()\nmain()"), 1.0, 0.5),
    "gives up": (answer("print(18)\nexit(1)"), 0.0, -0.1),
    "leaves early": (answer("import os\nprint(18, flush=True)\nos._exit(0)"), 0.0, -0.1),
    "no Python": (answer("It is 18."), 0.0, -0.1),
    "an empty program": (answer(""), 0.0, -0.1),
    "no program": ("<think>so</think>\n<answer>18</answer>", 0.0, -0.1),
    "asks for the answer": (answer("print(input())"), 0.0, -0.1),
    "prints a great deal": (answer("print('18' * 10**6)"), 0.0, -0.1),
}


def test_programs_get_their_verdicts():
    completions, accuracies, runs = zip(*PROGRAMS.values())
    columns = {"answer": ["9 + 9 = <<9+9=18>>18\n#### 18"] * len(PROGRAMS), "question": None}
    for reward, expected in [(code_accuracy, accuracies), (code_runs, runs)]:
        values = reward(list(completions), **columns)
        assert dict(zip(PROGRAMS, values)) == dict(zip(PROGRAMS, expected))


@pytest.mark.parametrize("gold, value", [("0.3", 1.0), ("1,000", 0.0), ("-0.3", 0.0), ("0", 0.0)])
def test_the_gold_answer_may_be_a_bare_number(gold, value):
    assert code_accuracy([answer("print(0.1 + 0.2)")], [gold]) == [value]


def test_words_are_compared_as_text():
    assert code_accuracy([answer("print('even')")] * 2, ["even", "odd"]) == [1.0, 0.0]


def test_a_column_of_the_wrong_length_is_an_error():
    with pytest.raises(ValueError):
        code_accuracy([answer("print(1)")] * 2, ["1"])


def test_each_program_runs_once_for_all_rewards(monkeypatch):
    ran, run_many = Counter(), programs.run_many
    monkeypatch.setattr(programs, "run_many", lambda codes: ran.update(codes) or run_many(codes))
    programs._outputs.cache_clear()
    completions = [
        answer("print(1 + 0)"), answer("print(2 + 0)"), answer("print(1 + 0)", "another thought"),
        "no program",
    ]
    assert code_accuracy(completions, ["1"] * 4) == [1.0, 0.0, 1.0, 0.0]
    assert code_runs(completions) == [0.5, 0.5, 0.5, -0.1]
    assert ran == {"print(1 + 0)\n": 1, "print(2 + 0)\n": 1}
    assert programs._outputs.cache_info().maxsize <= 16
