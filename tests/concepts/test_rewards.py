"""answers.py, rewards.py: what counts as an answer, what it is worth, and the known ways to cheat.

verdicts.jsonl holds a completion and its gold answer in each line, with what both accuracy rewards
pay, and whether a person calls it right. A new report is a new line there.
"""

import json
import time
from collections import defaultdict
from pathlib import Path

import pytest

from answers import extract_answer, to_number
from judges.mathematics import math_accuracy
from rewards import (
    format_reward,
    gsm8k_accuracy,
    number_accuracy,
    soft_format_reward,
    toy_accuracy,
)

ROOT = Path(__file__).parents[2]
CASES = defaultdict(list)  # {form: its lines}
for line in (ROOT / "tests/concepts/verdicts.jsonl").open(encoding="utf-8"):
    CASES[json.loads(line)["form"]].append(json.loads(line))
DATA = ROOT / "../shared/data"


def r1(answer, thoughts="9+9=18"):
    return f"<think>{thoughts}</think>\n<answer>{answer}</answer>"


def gsm8k(completion, gold):
    return gsm8k_accuracy([completion], [gold])[0]


# --- the file of cases ---


@pytest.mark.parametrize("form", CASES)
def test_an_answer_that_somebody_met_is_paid_as_the_file_of_cases_says(form):
    for case in CASES[form]:
        for reward in (gsm8k_accuracy, math_accuracy, format_reward):
            [value] = reward([case["completion"]], answer=[case["answer"]])
            assert value == case.get(reward.__name__, value), (reward.__name__, case)


@pytest.mark.parametrize("form", CASES)
def test_no_wrong_answer_is_paid_and_a_right_one_is_unless_its_form_is_strict_by_choice(form):
    for case in CASES[form]:
        paid = case["gsm8k_accuracy"], case["math_accuracy"]
        strict = form.startswith("strict: ")
        assert case["math_accuracy"] == (case["right"] and not strict), case
        assert case["right"] and not strict or not any(paid), case


@pytest.mark.parametrize("page", ["docs/rewards.md", "docs/zh/rewards.md"])
def test_the_page_shows_a_case_of_each_form(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for form, cases in CASES.items():
        assert any(f"`{case['completion']}`" in text for case in cases), form


def column(file, name):
    if not (DATA / file).exists():
        pytest.skip(f"there is no {DATA / file}")
    return [json.loads(line)[name] for line in (DATA / file).open(encoding="utf-8")]


@pytest.mark.parametrize("file", ["gsm8k_train.jsonl", "gsm8k_test.jsonl"])
def test_each_gold_answer_of_gsm8k_pays_for_itself_and_not_for_its_neighbour(file):
    golds = column(file, "answer")
    bare = [gold.split("####")[1].strip() for gold in golds]
    others = [*bare[1:], bare[0]]
    for reward, most in ((gsm8k_accuracy, 2.0), (math_accuracy, 1.0)):
        assert set(reward([r1(number) for number in bare], golds)) == {most}
        for number, other, value in zip(bare, others, reward([r1(x) for x in others], golds)):
            assert value == most * (number.replace(",", "") == other.replace(",", ""))


@pytest.mark.slow
@pytest.mark.parametrize("file", ["math500.jsonl", "amc23.jsonl", "aime24.jsonl"])
def test_each_gold_answer_in_latex_pays_for_itself_and_not_for_its_neighbour(file):
    golds = [str(gold) for gold in column(file, "answer")]
    others = [*golds[1:], golds[0]]
    assert math_accuracy([r1(f"${gold}$") for gold in golds], golds) == [1.0] * len(golds)
    values = math_accuracy([f"\\boxed{{{other}}}" for other in others], golds)
    for gold, other, value in zip(golds, others, values):
        same = gold.removeprefix("x=") == other.removeprefix("x=")
        assert value == same, (gold, other)


# --- extract_answer ---


@pytest.mark.parametrize(
    "text, answer",
    [
        # each form of an answer
        ("<answer>18</answer>", "18"), ("<answer>\n 18 \n</answer>", "18"),
        ("so \\boxed{18}.", "18"), ("so $\\boxed{\\frac{1}{2}}$.", "\\frac{1}{2}"),
        ("\\boxed{\\frac{\\sqrt{3}}{3}}", "\\frac{\\sqrt{3}}{3}"),
        ("She has 9 + 9.\n#### 18", "18"), ("#### 18\nthat is all", "18"),
        ("The answer is 18", "18"), ("the Answer is: 18", "18"),
        # of each form the last one wins, also within a line
        ("<answer>17</answer> or <answer>18</answer>", "18"),
        ("\\boxed{17}. No: \\boxed{18}", "18"), ("#### 17\n#### 18", "18"),
        ("the answer is 17\nthe answer is 18", "18"),
        ("The answer is 17. No, the answer is 18", "18"),
        # the tag goes before the other forms, and may hold one of them
        ("\\boxed{16} <answer>18</answer> The answer is 17", "18"),
        ("<answer>\\boxed{18}</answer>", "18"), ("<answer>It is \\boxed{18}.</answer>", "18"),
        ("<answer>17\n#### 18</answer>", "18"), ("<answer>The answer is 18</answer>", "18"),
        # a mark that nothing follows is no answer, but an empty pair is an empty one
        ("#### 17\n####", "17"), ("#### 17\n#### \n", "17"),
        ("The answer is 17. I am sure the answer is", "17"),
        ("\\boxed{17} \\boxed{}", None), ("-\\boxed{}", None),
        ("<answer>17</answer><answer></answer>", None),
        # a text without an answer
        ("", None), ("18", None), ("9 + 9 = 18", None), ("<answer></answer>", None),
        ("<answer> \n</answer>", None), ("<answer>18", None), ("18</answer>", None),
        ("</answer>18<answer>", None), ("<ANSWER>18</ANSWER>", None), ("\\boxed{18", None),
        ("\\boxed{}", None), ("####", None), ("####\n18", None),
    ],
)
def test_what_is_read_as_the_answer(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    "form",
    ["<answer>18</answer>", "\\boxed{18}", "#### 18", "the answer is 18"],
)
def test_what_is_thought_is_not_answered(form):
    assert extract_answer(f"<think>{form}</think>") is None
    assert extract_answer(f"<think>{form}</think>\n<answer>17</answer>") == "17"
    assert extract_answer(f"<think>a</think> wait <think>{form}") is None  # it thinks again
    # where the prompt ends in <think>, a completion has the closing tag only
    assert extract_answer(f"{form}</think>\n<answer>17</answer>") == "17"


BEFORE = {
    "a sign": (
        "-5", ["-", "- ", "−", "-$", "= -\\$", "-(", "-{", "-\\,", "-**", "x = –", "It is -",
               "= - ", "7 - 12 = -", "( - ", "\\[ - ", "5 apples: −", "= 30\n-", "is $-", "is $- ",
               "\\text{is }-", "答案是-", "<answer>-", "<answer>- "]),
    "a bullet or a dash": (
        "5", ["", "x = ", "so — ", "-x = ", "---\n", "7-2 is ", "so -- ", "so --",
              "Final answer:\n- ", "Final answer:\n- $", "Final answer:\n\n– **", "The answer – $",
              "The answer - ", "Answer:- ", "**Answer**- "]),
    "a subtraction": (
        "5", ["30 - ", "30-", "30 -", "$30$ - $", "$30-", "$30$- ", "30\\% -", "(2+3) -",
              "7 - 12 = 7 - ", "x-", "3x -", "Covid-", "f(x)-"]),
}


@pytest.mark.parametrize("what", BEFORE)
def test_whether_a_minus_before_a_box_or_a_number_is_its_sign(what):
    answer, befores = BEFORE[what]
    for before in befores:
        assert extract_answer(before + "\\boxed{5}") == answer, before
        assert number_accuracy([before + "5"] * 2, ["5", "-5"]) == [answer == "5", answer == "-5"]


@pytest.mark.parametrize(
    "completion, number",
    [("7 - 12 = -5", -5), ("12 - 7", 7), ("-5", -5), ("−5", -5), ("It is -$5.", -5),
     ("It is $-5.", -5), ("It fell from 3 to -5.", -5), ("-5 and 4", 4), ("2024-05-12", 12),
     ("-1,234.50 dollars", -1234.5), ("7 - 12 = **-5**", -5), ("<think>-4</think>\n- 5", -5)],
)
def test_the_last_number_has_its_sign(completion, number):
    golds = [str(number), f"so it is\n#### {number}", str(-number)]
    assert number_accuracy([completion] * 3, golds) == [1.0, 1.0, 0.0]


# --- gsm8k_accuracy ---


def to(gold, answers):
    return [(answer, gold) for answer in answers]


# each answer, in its tag, with its gold answer
WORTH = {
    "exactly the gold answer, with or without commas": (2.0, [
        ("18", "18"), ("-5", "-5"), ("0.5", "0.5"), ("1,000", "1000"), ("1000", "1,000"),
        ("1,234,567", "1,234,567"), ("-1,234", "-1234"), ("twelve", "twelve"),
        ("Answer: 18", "18"), ("答案：18", "18")]),
    "another spelling of the same number": (1.5, [
        ("18.0", "18"), ("18.", "18"), ("018", "18"), ("+18", "18"), (".5", "0.5"),
        ("0.50", "0.5"), ("1,234.50", "1234.5"), ("-5.0", "-5")]),
    "a number with a currency or a unit": (1.5, [
        ("$18", "18"), ("$18.00", "18"), ("18 dollars", "18"), ("18%", "18"), ("18\\%", "18"),
        ("**18**", "18"), ("\\text{18}", "18"), ("x = 18", "18"), ("€1,800", "1800"),
        ("-$5", "-5"), ("$-5", "-5"), ("- 5", "-5"), ("−5", "-5"), ("-5 degrees", "-5"),
        ("18 eggs", "18"), ("18 miles per hour", "18"), ("18 km/h.", "18"), ("18 sq. ft.", "18"),
        ("18 people.", "18"), ("18 m", "18"), ("18 percent", "18"), ("18 (eighteen)", "18"),
        ("18°", "18"), ("18^\\circ", "18"), ("£18", "18"), ("18 €", "18"), ("18元", "18"),
        ("**Answer:** $18", "18"), ("Total cost = $18.00.", "18"),
        ("$18$", "18"), ("\\(18\\)", "18"), ("\\$18", "18"),
        ("\\text{18 dollars}", "18"), ("18\\text{ cm}", "18"), ("18\\,\\mathrm{cm}", "18"),
        ("\\$1{,}800", "1800"), ("-\\$5", "-5"), ("-(5)", "-5"), ("-{5}", "-5"), ("-**5**", "-5")]),
    "a fraction": (1.5, [
        ("1/2", "0.5"), ("3/4", "0.75"), ("0.75", "3/4"), ("6/8", "0.75"),
        ("\\frac{3}{4}", "0.75"), ("\\dfrac{3}{4}", "0.75"), ("3 / 4 cup", ".75"),
        ("-3/4", "-0.75"), ("-\\frac{3}{4}", "-0.75"), ("\\frac{-3}{4}", "-0.75"),
        ("$\\frac{3}{4}$", "0.75"), ("1,001/2", "500.5"), ("1/3", "2/6")]),
    "a number said twice, or a power of a unit": (1.5, [
        ("2 (two)", "2"), ("$10 (Ten) dollars", "10"), ("25 cm²", "25"), ("25 m³.", "25"),
        ("3 m²/s", "3"), ("5 months", "5"), ("5 quarters", "5"), ("5 seconds", "5"),
        ("5 ml", "5"), ("5 seventh graders", "5")]),
    "a wrong answer": (0.0, [
        ("17", "18"), ("118", "18"), ("180", "18"), ("1 8", "18"), ("18.5", "18"), ("0.18", "18"),
        ("..18", "18"), ("1.8.0", "18"), ("18,000", "18"), ("", "18"), ("eighteen", "18"),
        ("-", "18"), ("nan", "18"), ("inf", "18"), ("eleven", "twelve"), ("3/4", "0.7"),
        ("3/4", "3"), ("1½", "1")]),
    "a sign that is lost": (0.0, [
        ("-5", "5"), ("5", "-5"), ("- 5", "5"), ("−5", "5"), ("-$5", "5"), ("$-5", "5"),
        ("-1,234", "1,234"), ("–5", "5"), ("‑5", "5"), ("－5", "5"), ("-  5", "5"), ("-€5", "5"),
        ("-\\$5", "5"), ("-{5}", "5"), ("-(5)", "5"), ("-**5**", "5")]),
    "two numbers, a sum, a division or a power": (0.0, [
        ("12 or 13", "12"), ("12 or 13", "13"), ("12, 13", "12"), ("12; 13", "13"),
        ("12\n13", "13"), ("10-5", "10"), ("10-5", "5"), ("10-5", "-5"), ("10 - 5", "5"),
        ("5 − 3", "-3"), ("1/2", "1"), ("1/2", "2"), ("36/2", "18"), ("1 1/2", "1"),
        ("18:30", "18"), ("\\frac{36}{2}", "18"), ("10^3", "10"), ("3*6", "18"), ("1e3", "1000"),
        ("1e3", "1"), ("0x12", "18"), ("1_000", "1000"), ("5²", "5"), ("5²", "25"),
        ("2**3", "23"), ("3(6)", "36"), ("1 000", "1000"), ("1\\frac{1}{2}", "5.5"),
        ("1,23", "123"), ("18 99", "18"), ("18\n99", "18"), ("99\n18", "18"),
        ("#### 18 99", "18")]),
    "words and signs that change the value": (0.0, to("18", [
        "minus 18", "negative 18", "not 18", "not 18.", "half of 18", "a third of 18", "twice 18",
        "about 18", "at least 18", "ten times 18", "half of x = 18", "Ann has 18", "18 million",
        "18 Million", "18 millions", "18\\text{ million}", "18 thousand", "18 hundred", "18k",
        "18 K", "18M", "18 dozen", "18 halves", "18 tenths", "18 squared", "18 thousandths",
        "18 fourths", "18 sixteenths of it", "18 fourth", "a fourth of 18", "18 mn", "18 mil",
        "18 mln", "18 (two)", "18 (three) dollars", "1.8 (eight)", "18 and a half",
        "18 or nineteen", "18 dollars and fifty cents", "18 plus two", "18 minus two",
        "18 less than twenty", "18 times two", "18 it is not", "18万", "18个半", "18½", "18²",
        "18!", "√18", "\\sqrt{18}", "~18", "≠18", "18\\pi", "5 18", "18-", "18+"])),
    "digits as Chinese keyboards type them": (1.5, to("18", ["１８", "1８", "１８．０"])),
    "digits of other scripts": (0.0, to("18", ["١٨", "१८", "¹⁸"])),
}


@pytest.mark.parametrize("what", WORTH)
def test_what_an_answer_is_worth(what):
    score, pairs = WORTH[what]
    scores = {(given, gold): gsm8k(r1(given), gold) for given, gold in pairs}
    assert scores == dict.fromkeys(pairs, score)


@pytest.mark.parametrize(
    "given",
    ["36/2", "\\frac{36}{2}", "18/1", "18/0", "0/18",  # a division that is left to do
     # a power of the number, or another number in words
     "5²", "5 ²", "5 (²)", "2 (three)", "1.2 (two)", "12 (two)", "x² = 25", "2 two", "two (2)"],
)
def test_what_is_no_number(given):
    assert to_number(given) is None


@pytest.mark.parametrize(
    "completion, score",
    [
        # the gold number in passing
        ("18", 0.0), ("It is 18.", 0.0), ("<think>18</think>\n18", 0.0), ("18\n" + r1("17"), 0.0),
        (r1("17") + " 18", 0.0),
        # what follows the answer tag does not count
        (r1("18") + " 99", 2.0), (r1("18") + "\n99", 2.0), (r1("18") + "</answer> 99", 2.0),
        (r1("18") + "\n\n" + "junk 99 " * 1000, 2.0),
        # the whole completion is read, not only its end
        (r1("18" + " " * 1000), 2.0), ("<answer>18</answer>" + "." * 1000, 2.0),
        ("<think>" + "." * 1000 + "<answer>18</answer>", 0.0),
        ("<answer>12 \\boxed{18}</answer>", 2.0),  # a box inside the tag is the answer
    ],
)
def test_only_the_answer_counts(completion, score):
    """The gold answer may be a whole solution."""
    assert gsm8k(completion, "She makes 9 * 2 = $<<9*2=18>>18.\n#### 18") == score


@pytest.mark.parametrize("gold, score", [(18, 2.0), (18.0, 1.5), (17, 0.0)])
def test_the_gold_answer_may_be_a_number(gold, score):
    assert gsm8k(r1("18"), gold) == score
    assert number_accuracy(["so 18"], [gold]) == [score > 0]
    assert toy_accuracy([r1("18")], [gold]) == [score == 2]


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

# 12 is right. What each completion is worth: by GSM8K's reward, by MATH's, by the toy's.

HACKS = {
    "a right answer, to compare": (r1("12"), 2.0, 1.0, 1.0),
    "junk after the answer": (r1("12") + " 13 14", 2.0, 1.0, 1.0),  # it costs the format reward
    "two tags, the last one wrong": ("<answer>12</answer><answer>13</answer>", 0.0, 0.0, 0.0),
    "two tags, the last one right": ("<answer>13</answer><answer>12</answer>", 2.0, 1.0, 1.0),
    "every number in a tag of its own": (
        "".join(f"<answer>{i}</answer>" for i in range(100)), 0.0, 0.0, 0.0),
    "the gold number before the answer": ("12 " + r1("13"), 0.0, 0.0, 0.0),
    "tags nested": ("<answer>12 <answer>13</answer></answer>", 0.0, 0.0, 0.0),
    "a tag around the end of the thoughts": ("<answer>12</think></answer>", 0.0, 0.0, 0.0),
    "the answer inside the thoughts": ("<think><answer>12</answer></think>", 0.0, 0.0, 0.0),
    "a box inside the thoughts": ("<think>\\boxed{12}</think> done", 0.0, 0.0, 0.0),
    "a box inside the thoughts, another answer": (
        "<think>\\boxed{12}</think>\\boxed{13}", 0.0, 0.0, 0.0),
    "thoughts unclosed": ("<think>\\boxed{12}", 0.0, 0.0, 0.0),
    "wide digits": (r1("１２"), 1.5, 1.0, 0.0),  # a Chinese keyboard types them
    "Arabic digits": (r1("١٢"), 0.0, 0.0, 0.0),
    "superscript digits": (r1("¹²"), 0.0, 0.0, 0.0),
    "ten thousand answers": ("<answer>12</answer>" * 10_000 + "<answer>13</answer>", 0.0, 0.0, 0.0),
    "two numbers in words": (r1("12 or thirteen"), 0.0, 0.0, 0.0),
    "many numbers in a box": ("\\boxed{10,11,12,13}", 0.0, 0.0, 0.0),
    "a hundred thousand characters in a tag": (r1("12 " * 33_333), 0.0, 0.0, 0.0),
    "a hundred thousand digits": (r1("12" + "0" * 100_000), 0.0, 0.0, 0.0),
}


@pytest.mark.parametrize("name", HACKS)
def test_a_known_hack_gets_its_verdict(name):
    completion, gsm8k_value, math_value, toy_value = HACKS[name]
    assert gsm8k_accuracy([completion], ["12"]) == [gsm8k_value]
    assert toy_accuracy([completion], ["12"]) == [toy_value]
    assert math_accuracy([completion], ["12"]) == [math_value]


# --- format ---


@pytest.mark.parametrize(
    "completion",
    [r1("18"), r1("18", ""), r1("\n18\n", "\n9+9\n\n=18\n"), r1("a < b", "x<y; <b>18</b>"),
     "<think>9+9</think>\n\n<answer>18</answer>"],  # as Qwen3 writes it
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
        "<think>9+9</think>\n\n\n<answer>18</answer>",
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


# --- the toy ---


@pytest.mark.parametrize(
    "completion, score",
    [("<answer>19</answer>", 1.0), (r1("19"), 1.0), (r1("18"), 0.0), (r1("19.0"), 0.0),
     (r1("119"), 0.0), (r1(""), 0.0), ("19", 0.0)],
)
def test_toy_accuracy_is_1_for_exactly_the_gold_answer(completion, score):
    assert toy_accuracy([completion], ["19"]) == [score]
