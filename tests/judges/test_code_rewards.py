"""judges/programs.py: a program as the answer."""

from collections import Counter
from types import SimpleNamespace

import pytest

from algorithms import resolve
from answers import extract_code
from engine.report.preview import print_preview
from judges import programs
from judges.programs import code_accuracy, code_runs
from rewards import code_format, soft_code_format
from tests.helpers.training import a_rollout

pytestmark = pytest.mark.slow


def answer(code, thoughts="so"):
    return f"<think>{thoughts}</think>\n```python\n{code}\n```"


RIGHT = answer("print(18)")
TWO_BLOCKS = answer("print(17)\n```\n```python\nprint(18)")


@pytest.mark.parametrize("text, code", [
    (TWO_BLOCKS, "print(18)\n"),  # the last one counts
    (answer("a\n\nb"), "a\n\nb\n"), (answer(""), "\n"),
    ("<think>```python\nprint(18)\n```</think>", None),
    ("```python\nprint(18)", None), ("```json\nprint(18)\n```", None),
    # ```python3 and ```py, and ``` if it opens the only block
    ("```python3\nprint(18)\n```", "print(18)\n"), ("```Py\nprint(18)\n```", "print(18)\n"),
    ("so\n```\nprint(18)\n```", "print(18)\n"), ("```\nprint(18)", None),
    ("```python\nprint(18)\n```\nIt prints\n```\n18\n```", "print(18)\n"),
    ("```\nprint(18)\n```\nIt prints\n```\n18\n```", None),
    ("```pyx\nprint(18)\n```", None), ("<python>\nprint(18)\n```", None),
    ("```python\nprint(18)\n```\n```python\nprint(17)", None),
])  # fmt: skip
def test_the_program_is_the_last_block_after_the_thoughts(text, code):
    assert extract_code(text) == code


@pytest.mark.parametrize("completion", [
    RIGHT, answer("x = 9\n\nprint(2 * x)", "\n9\n"), answer("a = '<b>'", "```python\n1\n```"),
    RIGHT.replace("</think>\n", "</think>\n\n"),
])  # fmt: skip
def test_the_code_form_scores_1(completion):
    assert code_format([completion]) == [1.0]


@pytest.mark.parametrize("completion", [
    "```python\nprint(18)\n```", RIGHT + "\n", " " + RIGHT, RIGHT * 2, TWO_BLOCKS,
    RIGHT.replace("</think>\n", "</think>\n\n\n"), RIGHT.replace("</think>\n", "</think>"),
    RIGHT.replace("python", "py"), RIGHT[:-3], answer("print(18)", "<think>"),
    "<think>" * 10_000, answer("print(18)" * 10_000) + ".",
])  # fmt: skip
def test_anything_but_the_code_form_scores_0(completion):
    assert code_format([completion]) == [0.0]


@pytest.mark.parametrize("completion, score", [
    (f"Well. {RIGHT} So.", 1.0), (RIGHT[:-3], 0.75), ("<think>so</think>\n```\nprint(18)", 0.75),
    ("```python\nprint(18)\n```", 0.5), ("<think>so", 0.25),
    # the fences that code_accuracy reads, and others
    (RIGHT.replace("python", "python3"), 1.0), (RIGHT.replace("python", "py"), 1.0),
    (RIGHT.replace("python", ""), 1.0), (RIGHT.replace("python", "json"), 0.5),
    # a mark that comes too early, or twice, earns nothing
    ("```python\nprint(18)\n```\n<think>so</think>", 0.5), (RIGHT * 2, 0.0), (TWO_BLOCKS, 0.5),
])  # fmt: skip
def test_the_soft_code_form_pays_a_quarter_for_each_mark_in_order_and_once(completion, score):
    assert soft_code_format([completion]) == [score]


# programs that print 18, another number, or no number
PRINT_18 = [
    "print(9 + 9)", "print(18.0)", "print(0.1 * 180)", "print('$18')", "print('１８')",
    "print('1.8e+01')",
    "def f(x):\n    return 2 * x\n\n\nprint(f(9))", "import sys\nprint(18)\nsys.exit(0)",
]
PRINT_ANOTHER = ["# 18\nprint(17)", "print(18.00001)"]
FAIL = [
    "x = 18", "print(17)\nprint(18)", "print('17 or 18')", "print('It is not 18')",
    "print('eighteen')", "print('18e0')", "print('१८')", "print(18)\n1 / 0", "print(18)\nexit(1)",
    "import os\nprint(18, flush=True)\nos._exit(0)", "It is 18.", "", "print(input())",
    "print('18' * 10**6)",
]


@pytest.mark.parametrize("codes, right, runs", [
    (PRINT_18, 1.0, 0.5), (PRINT_ANOTHER, 0.0, 0.5), (FAIL, 0.0, -0.1),
])  # fmt: skip
def test_programs_get_their_verdicts(codes, right, runs):
    completions = [answer(code) for code in codes]
    columns = {"answer": ["9 + 9 = <<9+9=18>>18\n#### 18"] * len(codes), "question": None}
    for reward, value in [(code_accuracy, right), (code_runs, runs)]:
        assert dict(zip(codes, reward(completions, **columns))) == dict.fromkeys(codes, value)


@pytest.mark.parametrize("code, gold, value", [
    ("0.1 + 0.2", "0.3", 1.0), ("0.1 + 0.2", "-0.3", 0.0), ("0.1 + 0.2", "0", 0.0),
    ("'even'", "even", 1.0), ("'even'", "odd", 0.0),  # words are compared as text
    ("1 / 0", "", 0.0),  # it prints nothing, because it fails
    # floats as Python prints them
    ("1e20", "100000000000000000000", 1.0), ("5e-05", "0.00005", 1.0), ("5e-05", "0.0005", 0.0),
    # what nobody sees at the end of a line
    ("'1 2 \\r\\n3'", "1 2\n3", 1.0), ("'1  2'", "1 2", 0.0), ("'1\\n\\n2'", "1\n2", 0.0),
])  # fmt: skip
def test_the_gold_answer_may_be_a_bare_number_or_a_word(code, gold, value):
    assert code_accuracy([answer(f"print({code})")], [gold]) == [value]


def test_a_column_of_the_wrong_length_is_an_error():
    with pytest.raises(ValueError):
        code_accuracy([RIGHT] * 2, ["18"])


def test_each_program_runs_once_for_all_rewards(monkeypatch):
    ran = Counter()
    run_many = programs.run_many
    monkeypatch.setattr(programs, "run_many", lambda codes: ran.update(codes) or run_many(codes))
    programs._outputs.cache_clear()
    completions = [
        answer("print(1)"), answer("print(2)"), answer("print(1)", "another"), "no program"]
    assert code_accuracy(completions, ["1"] * 4) == [1.0, 0.0, 1.0, 0.0]
    assert code_runs(completions) == [0.5, 0.5, 0.5, -0.1]
    assert ran == {"print(1)\n": 1, "print(2)\n": 1}
    assert programs._outputs.cache_info().maxsize <= 16


def test_a_run_says_why_programs_fail_and_its_preview_the_commonest_error(capsys):
    """The sandbox has the standard library only, whatever is installed."""
    numpy = answer("import numpy\nprint(18)")
    texts = [numpy, RIGHT, answer("print(1 / 0)"), numpy]
    rewards = [code_accuracy(texts, ["18"] * 4)]
    assert rewards == [[0.0, 1.0, 0.0, 0.0]]
    rollout = a_rollout(
        rewards, texts=texts, questions=[{"prompt": [1], "question": "?", "answer": "18"}])
    _, sample = print_preview(
        rollout, resolve("grpo", group_size=4), SimpleNamespace(decode=lambda tokens: "?"))
    no_numpy = "ModuleNotFoundError: No module named 'numpy'"
    assert [row["error"] for row in sample["completions"]] == [
        no_numpy, None, "ZeroDivisionError: division by zero", no_numpy]
    assert f"3 programs failed, most often with: {no_numpy}\n" in capsys.readouterr().out
