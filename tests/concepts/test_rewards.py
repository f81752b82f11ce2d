"""rewards.py: what counts as an answer, what it is worth, and the known ways to cheat."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.scoring.mathematics import math_accuracy
from rewards import (
    extract_answer,
    format_reward,
    gsm8k_accuracy,
    number_accuracy,
    soft_format_reward,
    to_number,
    toy_accuracy,
)

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"


def r1(answer, thoughts="9+9=18"):
    return f"<think>{thoughts}</think>\n<answer>{answer}</answer>"


def gsm8k(completion, gold):
    return gsm8k_accuracy([completion], [gold])[0]


# --- extract_answer ---


@pytest.mark.parametrize(
    "text, answer",
    [
        ("<answer>18</answer>", "18"),
        ("<answer>\n 18 \n</answer>", "18"),
        ("so \\boxed{18}.", "18"),
        ("so $\\boxed{\\frac{1}{2}}$.", "\\frac{1}{2}"),
        ("She has 9 + 9.\n#### 18", "18"),
        ("#### 18\nthat is all", "18"),
        ("The answer is 18", "18"),
        ("the Answer is: 18", "18"),
    ],
)
def test_each_form_of_an_answer_is_found(text, answer):
    assert extract_answer(text) == answer


def test_boxed_may_hold_braces_within_braces():
    assert extract_answer("\\boxed{\\frac{\\sqrt{3}}{3}}") == "\\frac{\\sqrt{3}}{3}"


@pytest.mark.parametrize(
    "text",
    ["<answer>17</answer> or <answer>18</answer>", "\\boxed{17} or \\boxed{18}",
     "#### 17\n#### 18", "the answer is 17\nthe answer is 18"],
)
def test_the_last_answer_wins(text):
    assert extract_answer(text) == "18"


def test_the_last_answer_wins_within_a_line():
    assert extract_answer("The answer is 17. No, the answer is 18") == "18"


def test_the_answer_tag_goes_before_the_other_forms():
    assert extract_answer("\\boxed{16} <answer>18</answer> The answer is 17") == "18"


@pytest.mark.parametrize(
    "text, answer",
    [("#### 17\n####", "17"), ("#### 17\n#### \n", "17"),
     ("The answer is 17. I am sure the answer is", "17. I am sure the"),
     ("\\boxed{17} \\boxed{}", None), ("-\\boxed{}", None),
     ("<answer>17</answer><answer></answer>", None)],
)
def test_a_mark_that_nothing_follows_is_no_answer_but_an_empty_pair_is_an_empty_one(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    "before",
    ["-", "- ", "−", "-$", "= -\\$", "-(", "-{", "-\\,", "-**", "x = –"],
)
def test_a_minus_before_the_box_belongs_to_the_answer(before):
    assert extract_answer(before + "\\boxed{5}") == "-5"
    assert gsm8k(before + "\\boxed{5}", "5") == 0.0
    assert gsm8k(before + "\\boxed{5}", "-5") == 2.0


@pytest.mark.parametrize(
    "before",
    ["", "x = ", "so — ", "-x = ", "---\n", "7-2 is ", "so -- ", "so --"],
)
def test_another_dash_before_the_box_does_not(before):
    assert extract_answer(before + "\\boxed{5}") == "5"


BULLETS_AND_DASHES = [
    "Final answer:\n- ", "Final answer:\n- $", "Final answer:\n\n– **", "The answer – $",
    "The answer - ", "Answer:- ", "**Answer**- ",
]
SUBTRACTIONS = [
    "30 - ", "30-", "30 -", "$30$ - $", "$30-", "$30$- ", "30\\% -", "(2+3) -", "7 - 12 = 7 - ",
    "x-", "3x -", "Covid-", "f(x)-",
]
MINUSES = [
    "It is -", "= - ", "7 - 12 = -", "( - ", "\\[ - ", "5 apples: −", "= 30\n-", "is $-", "is $- ",
    "\\text{is }-", "答案是-", "<answer>-", "<answer>- ", "-$", "- ",
]


@pytest.mark.parametrize("before", BULLETS_AND_DASHES)
def test_a_bullet_or_a_dash_is_no_minus(before):
    assert extract_answer(before + "\\boxed{5}") == "5"
    assert number_accuracy([before + "5"] * 2, ["5", "-5"]) == [1.0, 0.0]


@pytest.mark.parametrize("before", SUBTRACTIONS)
def test_a_subtraction_is_no_minus(before):
    assert extract_answer(before + "\\boxed{5}") == "5"
    assert number_accuracy([before + "5"] * 2, ["5", "-5"]) == [1.0, 0.0]


@pytest.mark.parametrize("before", MINUSES)
def test_a_sign_belongs_to_the_box_or_the_number_that_follows_it(before):
    # None: an answer tag that is not closed
    assert extract_answer(before + "\\boxed{5}") in ("-5", None)
    assert number_accuracy([before + "5"] * 2, ["5", "-5"]) == [0.0, 1.0]


@pytest.mark.parametrize(
    "completion, number",
    [("7 - 12 = -5", -5), ("12 - 7", 7), ("-5", -5), ("−5", -5), ("It is -$5.", -5),
     ("It is $-5.", -5), ("It fell from 3 to -5.", -5), ("-5 and 4", 4), ("2024-05-12", 12),
     ("-1,234.50 dollars", -1234.5), ("7 - 12 = **-5**", -5), ("<think>-4</think>\n- 5", -5)],
)
def test_the_last_number_has_its_sign(completion, number):
    golds = [str(number), f"so it is\n#### {number}", str(-number)]
    assert number_accuracy([completion] * 3, golds) == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    "inside",
    ["\\boxed{18}", "It is \\boxed{18}.", "17\n#### 18", "The answer is 18"],
)
def test_an_answer_tag_may_hold_another_form(inside):
    assert extract_answer(f"<answer>{inside}</answer>") == "18"


@pytest.mark.parametrize(
    "text",
    ["", "18", "9 + 9 = 18", "<answer></answer>", "<answer> \n</answer>", "<answer>18",
     "18</answer>", "</answer>18<answer>", "<ANSWER>18</ANSWER>", "\\boxed{18", "\\boxed{}",
     "####", "####\n18"],
)
def test_a_text_without_an_answer_gives_none(text):
    assert extract_answer(text) is None


@pytest.mark.parametrize(
    "form",
    ["<answer>18</answer>", "\\boxed{18}", "#### 18", "the answer is 18"],
)
def test_what_is_thought_is_not_answered(form):
    assert extract_answer(f"<think>{form}</think>") is None
    assert extract_answer(f"<think>{form}</think>\n<answer>17</answer>") == "17"
    assert extract_answer(f"<think>a</think> wait <think>{form}</think>") is None
    assert extract_answer(f"<think>{form}") is None  # cut off while it thought
    # where the prompt ends in <think>, a completion has the closing tag only
    assert extract_answer(f"{form}</think>") is None
    assert extract_answer(f"{form}</think>\n<answer>17</answer>") == "17"


def test_thinking_again_hides_an_answer_again():
    assert extract_answer("<think>a</think> wait <think>b <answer>18</answer>") is None


# --- gsm8k_accuracy ---


@pytest.mark.parametrize(
    "given, gold",
    [("18", "18"), ("-5", "-5"), ("0.5", "0.5"), ("1,000", "1000"), ("1000", "1,000"),
     ("1,234,567", "1,234,567"), ("-1,234", "-1234")],
)
def test_exactly_the_gold_answer_scores_2_whether_or_not_thousands_have_commas(given, gold):
    assert gsm8k(r1(given), gold) == 2.0


@pytest.mark.parametrize(
    "given, gold",
    [("18.0", "18"), ("18.", "18"), ("018", "18"), ("+18", "18"), (".5", "0.5"), ("0.50", "0.5"),
     ("1,234.50", "1234.5"), ("-5.0", "-5")],
)
def test_another_spelling_of_the_same_number_scores_1_5(given, gold):
    assert gsm8k(r1(given), gold) == 1.5


@pytest.mark.parametrize(
    "given, gold",
    [("$18", "18"), ("$18.00", "18"), ("18 dollars", "18"), ("18%", "18"), ("18\\%", "18"),
     ("**18**", "18"), ("\\text{18}", "18"), ("x = 18", "18"), ("€1,800", "1800"), ("-$5", "-5"),
     ("$-5", "-5"), ("- 5", "-5"), ("−5", "-5"), ("-5 degrees", "-5"), ("18 eggs", "18"),
     ("18 miles per hour", "18"), ("18 km/h.", "18"), ("18 sq. ft.", "18"), ("18 people.", "18"),
     ("18 m", "18"), ("18 percent", "18"), ("18 (eighteen)", "18"), ("18°", "18"),
     ("18^\\circ", "18"), ("£18", "18"), ("18 €", "18"), ("18元", "18"), ("Answer: 18", "18"),
     ("**Answer:** $18", "18"), ("Total cost = $18.00.", "18"), ("答案：18", "18"), ("$18$", "18"),
     ("\\(18\\)", "18"), ("\\$18", "18"), ("\\text{18 dollars}", "18"), ("18\\text{ cm}", "18"),
     ("18\\,\\mathrm{cm}", "18"), ("\\$1{,}800", "1800"), ("-\\$5", "-5"), ("-(5)", "-5"),
     ("-{5}", "-5"), ("-**5**", "-5")],
)
def test_a_number_with_a_currency_or_a_unit_scores_1_5(given, gold):
    assert gsm8k(r1(given), gold) == 1.5


@pytest.mark.parametrize(
    "given",
    ["17", "118", "180", "1 8", "18.5", "0.18", "..18", "1.8.0", "18,000", "", "eighteen", "-",
     "nan", "inf"],
)
def test_a_wrong_answer_scores_0(given):
    assert gsm8k(r1(given), "18") == 0.0


@pytest.mark.parametrize(
    "given, gold",
    [("-5", "5"), ("5", "-5"), ("- 5", "5"), ("−5", "5"), ("-$5", "5"), ("$-5", "5"),
     ("-1,234", "1,234")],
)
def test_a_sign_is_never_lost(given, gold):
    assert gsm8k(r1(given), gold) == 0.0


@pytest.mark.parametrize(
    "given",
    ["–5", "‑5", "－5", "-  5", "-€5", "-\\$5", "-{5}", "-(5)", "-**5**"],
)
def test_a_sign_is_not_lost_behind_another_dash_or_a_symbol(given):
    assert gsm8k(r1(given), "5") == 0.0


@pytest.mark.parametrize(
    "given, gold",
    [("12 or 13", "12"), ("12 or 13", "13"), ("12, 13", "12"), ("12; 13", "13"), ("12\n13", "13"),
     ("10-5", "10"), ("10-5", "5"), ("10-5", "-5"), ("10 - 5", "5"), ("5 − 3", "-3"),
     ("1/2", "1"), ("1/2", "2"), ("36/2", "18"), ("1 1/2", "1"), ("18:30", "18"),
     ("\\frac{36}{2}", "18"), ("10^3", "10"), ("3*6", "18"), ("1e3", "1000"), ("1e3", "1"),
     ("0x12", "18"), ("1_000", "1000"), ("5²", "5"), ("5²", "25"), ("2**3", "23"), ("3(6)", "36"),
     ("1 000", "1000"), ("1\\frac{1}{2}", "5.5"), ("1,23", "123")],
)
def test_two_numbers_a_sum_a_division_or_a_power_is_no_answer(given, gold):
    assert gsm8k(r1(given), gold) == 0.0


@pytest.mark.parametrize(
    "given, gold",
    [("1/2", "0.5"), ("3/4", "0.75"), ("0.75", "3/4"), ("6/8", "0.75"), ("\\frac{3}{4}", "0.75"),
     ("\\dfrac{3}{4}", "0.75"), ("3 / 4 cup", ".75"), ("-3/4", "-0.75"),
     ("-\\frac{3}{4}", "-0.75"), ("\\frac{-3}{4}", "-0.75"), ("$\\frac{3}{4}$", "0.75"),
     ("1,001/2", "500.5"), ("1/3", "2/6")],
)
def test_a_fraction_is_a_number(given, gold):
    assert gsm8k(r1(given), gold) == 1.5
    assert gsm8k(r1(given), "0.7") == gsm8k(r1(given), "3") == 0.0


@pytest.mark.parametrize("given", ["36/2", "\\frac{36}{2}", "18/1", "18/0", "0/18"])
def test_a_division_left_to_do_is_no_number(given):
    assert to_number(given) is None


@pytest.mark.parametrize(
    "given",
    ["minus 18", "negative 18", "not 18", "not 18.", "half of 18", "a third of 18", "twice 18",
     "about 18", "at least 18", "ten times 18", "half of x = 18", "Ann has 18", "18 million",
     "18 Million", "18 millions", "18\\text{ million}", "18 thousand", "18 hundred", "18k",
     "18 K", "18M", "18 dozen", "18 halves", "18 tenths", "18 squared", "18 thousandths",
     "18 fourths", "18 sixteenths of it", "18 fourth", "a fourth of 18", "18 mn", "18 mil",
     "18 mln", "18 (two)", "18 (three) dollars", "1.8 (eight)", "18 and a half", "18 or nineteen",
     "18 dollars and fifty cents", "18 plus two", "18 minus two", "18 less than twenty",
     "18 times two", "18 it is not", "18万", "18个半", "18½", "18²", "18!", "√18", "\\sqrt{18}",
     "~18", "≠18", "18\\pi", "5 18", "18-", "18+"],
)
def test_words_and_signs_that_change_the_value_are_no_unit(given):
    assert gsm8k(r1(given), "18") == 0.0


@pytest.mark.parametrize(
    "given, gold",
    [("2 (two)", "2"), ("$10 (Ten) dollars", "10"), ("25 cm²", "25"), ("25 m³.", "25"),
     ("3 m²/s", "3"), ("5 months", "5"), ("5 quarters", "5"), ("5 seconds", "5"), ("5 ml", "5"),
     ("5 seventh graders", "5")],
)
def test_a_number_said_twice_and_a_power_of_a_unit_change_nothing(given, gold):
    assert gsm8k(r1(given), gold) == 1.5


@pytest.mark.parametrize(
    "given",
    ["5²", "5 ²", "5 (²)", "2 (three)", "1.2 (two)", "12 (two)", "x² = 25", "2 two", "two (2)"],
)
def test_a_power_of_the_number_and_another_number_in_words_do(given):
    assert to_number(given) is None


def test_a_mixed_fraction_is_not_its_whole_part():
    assert gsm8k(r1("1½"), "1") == 0.0


@pytest.mark.parametrize("given", ["１８", "١٨", "१८", "1８", "¹⁸"])
def test_digits_of_other_scripts_score_0(given):
    assert gsm8k(r1(given), "18") == 0.0


@pytest.mark.parametrize(
    "completion",
    ["18", "It is 18.", "<think>18</think>", "<think>18</think>\n18", "18\n" + r1("17"),
     r1("17", "9+9=18"), r1("17") + " 18"],
)
def test_the_gold_number_in_passing_scores_0(completion):
    assert gsm8k(completion, "9 + 9 = 18\n#### 18") == 0.0


@pytest.mark.parametrize(
    "completion, score",
    [
        ("<answer>12</answer><answer>18</answer>", 2.0),  # the last one counts
        ("<answer>18</answer><answer>12</answer>", 0.0),
        ("<answer>18</answer><answer></answer>", 0.0),
        ("<answer>12 <answer>18</answer></answer>", 2.0),  # the innermost one counts
        ("<answer>18 <answer>12</answer></answer>", 0.0),
        ("</answer>18<answer>", 0.0),
        ("<think><answer>18</answer></think>", 0.0),
        ("<think>\\boxed{18}</think>\n<answer>12</answer>", 0.0),
        ("<think>9+9\n<answer>18</answer>", 0.0),
        ("<answer>18</think></answer>", 0.0),
        ("<answer>12 \\boxed{18}</answer>", 2.0),  # a box inside the tag is the answer
    ],
)
def test_tags_that_are_repeated_nested_or_reversed(completion, score):
    assert gsm8k(completion, "18") == score


@pytest.mark.parametrize("junk", [" 99", "\n99", "</answer> 99", "\n\n" + "junk 99 " * 1000])
def test_what_follows_the_answer_tag_does_not_count(junk):
    assert gsm8k(r1("18") + junk, "18") == 2.0


@pytest.mark.parametrize("given", ["18 99", "18\n99", "99\n18", "#### 18 99"])
def test_a_second_number_inside_the_answer_tag_spoils_it(given):
    assert gsm8k(r1(given), "18") == 0.0


def test_the_whole_completion_is_read_not_only_its_end():
    assert gsm8k(r1("18" + " " * 1000), "18") == 2.0
    assert gsm8k("<answer>18</answer>" + "." * 1000, "18") == 2.0
    assert gsm8k("<think>" + "." * 1000 + "<answer>18</answer>", "18") == 0.0


def test_the_gold_answer_may_be_a_whole_solution():
    assert gsm8k(r1("18"), "She makes 9 * 2 = $<<9*2=18>>18.\n#### 18") == 2.0
    assert gsm8k(r1("9"), "She makes 9 * 2 = $<<9*2=18>>18.\n#### 18") == 0.0


def test_the_gold_answer_may_be_a_number():
    assert (
        gsm8k(r1("18"), 18) == 2.0 and gsm8k(r1("18"), 18.0) == 1.5 and gsm8k(r1("17"), 18) == 0.0
    )
    assert number_accuracy(["so 18", "so 17"], [18, 18]) == [1.0, 0.0]
    assert toy_accuracy([r1("18"), r1("17")], [18, 18]) == [1.0, 0.0]


def test_words_are_equal_only_as_text():
    assert gsm8k(r1("eleven"), "twelve") == 0.0
    assert gsm8k(r1("twelve"), "twelve") == 2.0


def test_numbers_are_compared_exactly():
    assert to_number("0.1") == to_number("$0.10") != to_number("0.1000000000000000000001")
    assert to_number("9007199254740993") != to_number("9007199254740992")  # equal as floats


def test_an_answer_of_thousands_of_digits_is_just_wrong():
    assert gsm8k_accuracy([r1("1" * 5000), r1("18")], ["18", "18"]) == [0.0, 2.0]


# --- the form of a reward ---


@pytest.mark.parametrize("reward", [gsm8k_accuracy, toy_accuracy, math_accuracy])
@pytest.mark.parametrize("answer", [[], ["18"], ["18"] * 3])
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
    "tags",
    ["<answer>1</answer>", r1("1"), "<think>", "</answer>", "\\boxed{", "#### 1 ", "answer is ",
     "<answer>"],
)
def test_ten_thousand_tags_are_judged_in_no_time(tags):
    start = time.perf_counter()
    for reward in (gsm8k_accuracy, format_reward, soft_format_reward, toy_accuracy):
        reward([tags * 10_000], answer=["18"])
    assert time.perf_counter() - start < 0.5
    assert math_accuracy([tags * 10_000], answer=["18"]) == [0.0]


@pytest.mark.parametrize(
    "text",
    ["1", "a", " ", "-", "$", "{", "/", "18 ", "\\frac{", "a=", "####", "\n", "answer is",
     "\\boxed{1}"],
)
def test_a_hundred_thousand_characters_are_judged_in_no_time(text):
    start = time.perf_counter()
    for completion in (text * (100_000 // len(text)), r1(text * (100_000 // len(text)))):
        for reward in (gsm8k_accuracy, format_reward, soft_format_reward, toy_accuracy):
            formatted = completion[0] == "<" and "format" in reward.__name__
            assert reward([completion], answer=["18"]) == [1.0 if formatted else 0.0]
    assert time.perf_counter() - start < 1.0


# --- the known ways to cheat ---

# 12 is right. What each completion is worth: by GSM8K's reward, by MATH's, by the toy's.

HACKS = {
    "a right answer, to compare": (r1("12"), 2.0, 1.0, 1.0),
    "junk after the answer": (r1("12") + " 13 14", 2.0, 1.0, 1.0),  # it costs the format reward
    "two tags, the last one wrong": ("<answer>12</answer><answer>13</answer>", 0.0, 0.0, 0.0),
    "two tags, the last one right": ("<answer>13</answer><answer>12</answer>", 2.0, 1.0, 1.0),
    "every number in a tag of its own": (
        "".join(f"<answer>{i}</answer>" for i in range(100)), 0.0, 0.0, 0.0),
    "the gold number in passing": ("It is 12.", 0.0, 0.0, 0.0),
    "the gold number before the answer": ("12 " + r1("13"), 0.0, 0.0, 0.0),
    "tags nested": ("<answer>12 <answer>13</answer></answer>", 0.0, 0.0, 0.0),
    "tags reversed": ("</answer>12<answer>", 0.0, 0.0, 0.0),
    "a tag unclosed": ("<think>9</think><answer>12", 0.0, 0.0, 0.0),
    "the answer inside the thoughts": ("<think><answer>12</answer></think>", 0.0, 0.0, 0.0),
    "a box inside the thoughts": ("<think>\\boxed{12}</think> done", 0.0, 0.0, 0.0),
    "a box inside the thoughts, another answer": (
        "<think>\\boxed{12}</think>\\boxed{13}", 0.0, 0.0, 0.0),
    "thoughts unclosed": ("<think>\\boxed{12}", 0.0, 0.0, 0.0),
    "digits of another script": (r1("１２"), 0.0, 0.0, 0.0),
    "Arabic digits": (r1("١٢"), 0.0, 0.0, 0.0),
    "superscript digits": (r1("¹²"), 0.0, 0.0, 0.0),
    "an empty answer": (r1(""), 0.0, 0.0, 0.0),
    "an empty box": ("\\boxed{}", 0.0, 0.0, 0.0),
    "nothing": ("", 0.0, 0.0, 0.0),
    "a box unclosed": ("\\boxed{12", 0.0, 0.0, 0.0),
    "ten thousand tags": ("<answer>" * 10_000, 0.0, 0.0, 0.0),
    "ten thousand answers": ("<answer>12</answer>" * 10_000 + "<answer>13</answer>", 0.0, 0.0, 0.0),
    "an exponent": (r1("12e0"), 0.0, 0.0, 0.0),
    "two numbers": (r1("12 or 13"), 0.0, 0.0, 0.0),
    "two numbers, the other way round": (r1("13 or 12"), 0.0, 0.0, 0.0),
    "two numbers in words": (r1("12 or thirteen"), 0.0, 0.0, 0.0),
    "two numbers as LaTeX": (r1("12 \\text{ or } 13"), 0.0, 0.0, 0.0),
    "two equations": (r1("x=13 or x=12"), 0.0, 0.0, 0.0),
    "many numbers": (r1(", ".join(map(str, range(20)))), 0.0, 0.0, 0.0),
    "many numbers in a box": ("\\boxed{10,11,12,13}", 0.0, 0.0, 0.0),
    "a range": (r1("10-14"), 0.0, 0.0, 0.0),
    "a minus before the box": ("-\\boxed{12}", 0.0, 0.0, 0.0),
    "a minus in words": (r1("minus 12"), 0.0, 0.0, 0.0),
    "a denial": (r1("not 12"), 0.0, 0.0, 0.0),
    "a denial as LaTeX": (r1("\\text{not }12"), 0.0, 0.0, 0.0),
    "a multiple": (r1("12\\text{ million}"), 0.0, 0.0, 0.0),
    "a part": (r1("half of 12"), 0.0, 0.0, 0.0),
    "a hundred thousand characters": ("12 " * 33_333, 0.0, 0.0, 0.0),
    "a hundred thousand characters in a tag": (r1("12 " * 33_333), 0.0, 0.0, 0.0),
    "a hundred thousand digits": (r1("12" + "0" * 100_000), 0.0, 0.0, 0.0),
    "a product left to do": (r1("3*4"), 0.0, 0.0, 0.0),
}


@pytest.mark.parametrize("name", HACKS)
def test_a_known_hack_gets_its_verdict(name):
    completion, gsm8k_value, math_value, toy_value = HACKS[name]
    start = time.perf_counter()
    assert gsm8k_accuracy([completion], ["12"]) == [gsm8k_value]
    assert toy_accuracy([completion], ["12"]) == [toy_value]
    assert time.perf_counter() - start < 0.5
    assert math_accuracy([completion], ["12"]) == [math_value]


@pytest.mark.parametrize("name, count", [("gsm8k_train", 7473), ("gsm8k_test", 1319)])
def test_every_gold_answer_of_gsm8k_scores_2_against_itself(name, count):
    path = DATA / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    with path.open(encoding="utf-8") as lines:
        golds = [json.loads(line)["answer"] for line in lines]
    answers = [gold.split("####")[1].strip() for gold in golds]
    assert gsm8k_accuracy([r1(answer) for answer in answers], golds) == [2.0] * count
    assert gsm8k_accuracy([r1(f"${answer}.00") for answer in answers], golds) == [1.5] * count
    assert gsm8k_accuracy([r1(f"1{answer}") for answer in answers], golds) == [0.0] * count
    assert gsm8k_accuracy(answers, golds) == [0.0] * count  # no tag, no answer


# --- format ---


@pytest.mark.parametrize(
    "completion",
    [r1("18"), r1("18", ""), r1("\n18\n", "\n9+9\n\n=18\n"), r1("a < b", "x<y; <b>18</b>")],
)
def test_the_r1_form_scores_1(completion):
    assert format_reward([completion]) == [1.0]


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "18",
        "<answer>18</answer>",
        "<think>9+9</think>",
        "<think>9+9</think>\n<answer>18",
        "<answer>18</answer>\n<think>9+9</think>",
        "</think>9+9<think>\n</answer>18<answer>",
        "<think>9+9</think><answer>18</answer>",  # no newline between
        "<think>9+9</think> <answer>18</answer>",
        "<think>9+9</think>\n\n<answer>18</answer>",
        "<think>9+9</think>\r\n<answer>18</answer>",
        "<think>9+9</think>\nso\n<answer>18</answer>",
        " " + r1("18"),
        "Sure!\n" + r1("18"),
        r1("18") + "\n",  # `$` would let a trailing newline pass
        r1("18") + "\njunk",
        r1("18") + r1("18"),
        r1("18") + "\n<answer>18</answer>",
        "<think>" + r1("18"),
        r1("18") + "</answer>",
        r1("<answer>18</answer>"),
        r1("<think>18</think>"),
        "<think>\n" + r1("18") + "\n</think>\n<answer>18</answer>",
        "<THINK>9+9</THINK>\n<ANSWER>18</ANSWER>",
    ],
)
def test_anything_but_the_r1_form_scores_0(completion):
    assert format_reward([completion]) == [0.0]


@pytest.mark.parametrize(
    "completion, score",
    [
        (r1("18"), 1.0),
        ("well " + r1("18") + " so", 1.0),  # text outside the tags costs nothing here
        ("<think>9+9</think>\n<answer>18", 0.75),
        ("<think>9+9</think>", 0.5),
        ("<think>9+9", 0.25),
        ("18", 0.0),
        ("", 0.0),
        ("<answer>18</answer>", 0.5),
        ("<answer>18</answer><think>9+9</think>", 0.5),  # the answer's tags come too early
        ("</answer><answer></think><think>", 0.25),
        # a tag that occurs twice earns nothing
        ("<think><think>9+9</think><answer>18</answer>", 0.75),
        (r1("18") + "</answer>", 0.75),
        (r1("18") + r1("18"), 0.0),
        ("<think>" * 1000, 0.0),
    ],
)
def test_soft_format_pays_a_quarter_for_each_tag_in_order_and_once(completion, score):
    assert soft_format_reward([completion]) == [score]


# --- the toy, and the import ---


@pytest.mark.parametrize(
    "completion, score",
    [("<answer>19</answer>", 1.0), (r1("19"), 1.0), (r1("18"), 0.0), (r1("19.0"), 0.0),
     (r1("119"), 0.0), (r1(""), 0.0), ("19", 0.0)],
)
def test_toy_accuracy_is_1_for_exactly_the_gold_answer(completion, score):
    assert toy_accuracy([completion], ["19"]) == [score]


def test_rewards_imports_with_nothing_but_python():
    others = ["torch", "transformers", "math_verify", "sympy", "engine", "numpy"]
    use = "import rewards; print(rewards.toy_accuracy(['<answer>1</answer>'], ['1']))"
    code = f"import sys; sys.modules.update(dict.fromkeys({others})); {use}"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout == "[1.0]\n", result.stderr
