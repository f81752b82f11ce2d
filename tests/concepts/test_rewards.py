"""answers/, rewards.py: what counts as an answer, what it is worth, and the known ways to cheat.

verdicts.jsonl holds a completion and its gold answer in each line, with what both accuracy rewards
pay, and whether a person calls it right. A new report is a new line there. answers.jsonl holds what
one function says about a text in each line: the answer that is read, or what a reward pays.
"""

import json
import os
import time
from collections import defaultdict
from pathlib import Path

import pytest

from answers import extract_answer, same_number, to_number
from judges.mathematics import math_accuracy
from rewards import (
    format_reward,
    gsm8k_accuracy,
    number_accuracy,
    soft_format_reward,
    toy_accuracy,
)

ROOT = Path(__file__).parents[2]
REWARDS = [
    format_reward, gsm8k_accuracy, math_accuracy, number_accuracy, soft_format_reward, toy_accuracy]


def lines_of(file, key):
    """{value of the key: the lines with this value}"""
    lines = defaultdict(list)
    for text in (ROOT / "tests/concepts" / file).open(encoding="utf-8"):
        line = json.loads(text)
        lines[line[key]].append(line)
    return lines


CASES = lines_of("verdicts.jsonl", "form")
LINES = lines_of("answers.jsonl", "what") | CASES
DATA = os.environ.get("CPPO_DATA")  # a folder with data sets, see .github/CONTRIBUTING.md


def r1(answer, thoughts="9+9=18"):
    return f"<think>{thoughts}</think>\n<answer>{answer}</answer>"


def gsm8k(completion, gold):
    return gsm8k_accuracy([completion], [gold])[0]


# --- the files of cases ---


@pytest.mark.parametrize("what", LINES)
def test_each_line_of_both_files(what):
    for case in LINES[what]:
        if "extract_answer" in case:
            assert extract_answer(case["completion"]) == case["extract_answer"], case
        for reward in REWARDS:  # each that the line names
            if reward.__name__ in case:
                paid = reward([case["completion"]], answer=[case.get("answer")])
                assert paid == [case[reward.__name__]], (reward.__name__, case)


@pytest.mark.parametrize("form", CASES)
def test_no_wrong_answer_is_paid_and_a_right_one_is_unless_its_form_is_strict_by_choice(form):
    for case in CASES[form]:
        paid = case["gsm8k_accuracy"], case["math_accuracy"]
        strict = form.startswith("strict: ")
        assert case["math_accuracy"] == (case["right"] and not strict), case
        assert case["right"] and not strict or not any(paid), case


@pytest.mark.parametrize("file, reward, most", [
    ("gsm8k_train.jsonl", gsm8k_accuracy, 2.0), ("gsm8k_train.jsonl", math_accuracy, 1.0),
    ("gsm8k_test.jsonl", gsm8k_accuracy, 2.0), ("gsm8k_test.jsonl", math_accuracy, 1.0),
    *(pytest.param(f"{name}.jsonl", math_accuracy, 1.0, marks=pytest.mark.slow)
      for name in ("math500", "amc23", "aime24")),
])
def test_each_gold_answer_of_a_data_set_pays_for_itself_and_not_for_its_neighbour(
    file, reward, most
):
    if not DATA:
        pytest.skip(f"needs CPPO_DATA: the folder of {file}")
    lines = Path(DATA, file).open(encoding="utf-8")
    solutions = [str(json.loads(line)["answer"]) for line in lines]
    golds = [solution.split("####")[-1].strip() for solution in solutions]
    answers = [r1(f"\\boxed{{{gold}}}") for gold in golds]
    assert reward(answers, solutions) == [most] * len(golds)
    values = [gold.replace(",", "").removeprefix("x=") for gold in golds]
    same = [value == other for value, other in zip(values, values[1:] + values[:1])]
    assert reward(answers[1:] + answers[:1], solutions) == [most * x for x in same]


# --- long texts, and numbers ---


@pytest.mark.parametrize("completion", [
    r1("18") + "\n\n" + "junk 99 " * 1000, r1("18" + " " * 1000), r1("18") + "." * 1000])
def test_the_whole_completion_is_read_and_not_only_its_end(completion):
    assert gsm8k(completion, "18") == 2


def test_a_text_of_more_than_100_characters_is_no_number():
    assert to_number(f"18 {'a' * 96}s") == 18 and to_number(f"18 {'a' * 97}s") is None


@pytest.mark.parametrize("given, same", [(74, False), (75, True), (125, True), (126, False)])
def test_the_tolerance_is_a_share_of_the_gold_number(given, same):
    assert same_number(str(given), "100", tolerance=0.25) == same


WORDS = (
    "0 zero 1 one 2 two 3 three 4 four 5 five 6 six 7 seven 8 eight 9 nine 10 ten 11 eleven"
    " 12 twelve 13 thirteen 14 fourteen 15 fifteen 16 sixteen 17 seventeen 18 eighteen 19 nineteen"
    " 20 twenty 30 thirty 40 forty 50 fifty 60 sixty 70 seventy 80 eighty 90 ninety").split()


def test_a_number_may_be_said_twice_in_digits_and_in_a_word():
    for digits, word in zip(WORDS[::2], WORDS[1::2]):
        assert to_number(f"{digits} ({word})") == int(digits)
        assert to_number(f"{int(digits) + 1} ({word})") is None


def test_numbers_are_compared_exactly():
    assert to_number("0.1") == to_number("$0.10") != to_number("0.1000000000000000000001")
    assert to_number("9007199254740993") != to_number("9007199254740992")  # equal as floats


# --- the form of a reward ---


@pytest.mark.parametrize("reward", [gsm8k_accuracy, toy_accuracy, math_accuracy])
@pytest.mark.parametrize("answer", [["18"], ["18"] * 3])
def test_a_column_of_the_wrong_length_is_an_error(reward, answer):
    with pytest.raises(ValueError):
        reward([r1("18"), r1("18")], answer)


@pytest.mark.parametrize(
    "reward, values",
    [(gsm8k_accuracy, [2.0, 0.0]), (math_accuracy, [1.0, 0.0]), (format_reward, [1.0, 0.0]),
     (soft_format_reward, [1.0, 0.5]), (toy_accuracy, [1.0, 0.0])],
)
def test_a_reward_takes_named_columns_and_ignores_the_rest(reward, values):
    completions = [r1("18"), "<answer>17</answer>"]
    columns = {"answer": ["18", "18"], "question": ["9+9?", "9+9?"], "level": [1, 1]}
    assert reward(completions=completions, **columns) == values


@pytest.mark.parametrize(
    "text",
    ["1", "a", " ", "-", "$", "{", "/", "18 ", "\\frac{", "a=", "####", "\n", "answer is",
     "\\boxed{1}", "<answer>1</answer>", r1("1"), "<think>", "</answer>", "\\boxed{", "#### 1 ",
     "answer is ", "<answer>"],
)
def test_a_hundred_thousand_characters_are_judged_in_no_time(text):
    start = time.process_time()
    for completion in (text * (100_000 // len(text)), r1(text * (100_000 // len(text)))):
        assert gsm8k(completion, "18") == toy_accuracy([completion], ["18"])[0] == 0
        format_reward([completion]), soft_format_reward([completion])
    assert time.process_time() - start < 1.0


# --- the known ways to cheat ---

# 12 is right. answers.jsonl holds the others.
LONG_HACKS = {
    "every number in a tag of its own": "".join(f"<answer>{i}</answer>" for i in range(100)),
    "ten thousand answers": "<answer>12</answer>" * 10_000 + "<answer>13</answer>",
    "a hundred thousand characters in a tag": r1("12 " * 33_333),
    "a hundred thousand digits": r1("12" + "0" * 100_000),
    "thousands of tags": "<think>" * 1000,
}


@pytest.mark.parametrize("name", LONG_HACKS)
def test_a_long_hack_earns_nothing(name):
    for reward in (gsm8k_accuracy, math_accuracy, toy_accuracy):
        assert reward([LONG_HACKS[name]], answer=["12"]) == [0.0]
