"""The word problems: every answer is worked out again from the words alone."""

import random
import re
from fractions import Fraction
from itertools import islice

import pytest

from engine.data.questions import load_questions
from rewards import number_accuracy
from tasks import arithmetic
from tasks.arithmetic import EXAMPLES, NAMES, THINGS, questions

FIRST = {"question": "Mei has 3 cards, gets 5 more and loses 7. How many cards now?", "answer": "1"}
TRAIN, TEST = (list(islice(questions(split), 3000)) for split in ("train", "test"))

# What a text says, in the reader's own words: a formula in the numbers x, y, z in the order in
# which the text names them.
READINGS = [
    (r"has \d+ \w+ and gets \d+ more\.", "x + y"),
    (r"together\?", "x + y"),
    (r"has \d+ \w+ and loses \d+\.", "x - y"),
    (r"has \d+ \w+ and gives \d+ to \w+\.", "x - y"),
    (r"(bags|boxes) with \d+ \w+ in each\. How many \w+\?", "x * y"),
    (r"reads \d+ pages a day\.", "x * y"),
    (r"tickets for \d+ dollars each\.", "x * y"),
    (r"equally among \d+ friends", "x / y"),
    (r", gets \d+ more and then \d+ more\.", "x + y + z"),
    (r", gets \d+ more and loses \d+\.", "x + y - z"),
    (r", loses \d+ and gets \d+ more\.", "x + z - y"),
    (r", loses \d+ and gives \d+ to \w+\.", "x - (y + z)"),
    (r"in each and gets \d+ \w+ more\.", "z + x * y"),
    (r"in each and loses \d+ \w+\.", "x * y - z"),
    (r"red and \d+ blue \w+ into each bag\. How many \w+ in \d+ bags", "z * x + z * y"),
]


def read(text):
    """(formula, value) of the one reading that fits the text."""
    fitting = [formula for pattern, formula in READINGS if re.search(pattern, text)]
    assert len(fitting) == 1, (text, fitting)
    numbers = [Fraction(n) for n in re.findall(r"\d+", text)]
    return fitting[0], eval(fitting[0], dict(zip("xyz", numbers)))  # of the table above


def numbers_of(text):
    return [*map(int, re.findall(r"\d+", text))]


def test_every_answer_is_what_the_words_say_and_sums_stay_small_and_whole():
    for row in TRAIN + TEST:
        question = row["question"]
        assert row["answer"] == str(read(question)[1]) and 1 <= int(row["answer"]) <= 162
        most = 20 if "shares" in question else 9
        assert all(2 <= n <= most for n in numbers_of(question)) and "{" not in question
    for seed in range(500):  # on the way, too: nobody gives away more than is left
        (a, b, c), result = arithmetic.numbers(["-", "+"], random.Random(seed))
        assert a > b and a - b + c == result


def test_the_example_is_right_and_no_question_of_the_supply():
    (asks, question), (answers, answer) = EXAMPLES
    terms, result = answer.split(" = ")
    assert (asks, answers) == ("user", "assistant")
    assert eval(terms) == int(result) == read(question)[1]
    assert numbers_of(terms) == numbers_of(question)
    assert not set(re.findall(r"\w+", question)) & {*NAMES, *THINGS}


def test_the_examples_stand_before_the_question(loaded):
    _, tokenizer = loaded
    tokenizer.chat_template, seen = "{{ messages[-1]['content'] }}", []
    render = tokenizer.apply_chat_template
    tokenizer.apply_chat_template = lambda chat, **more: seen.append(chat) or render(chat, **more)
    load_questions("arithmetic", tokenizer, limit=1, system_prompt="S")
    turns = [("system", "S"), *EXAMPLES, ("user", TRAIN[0]["question"])]
    assert seen == [[{"role": role, "content": content} for role, content in turns]]


def test_no_question_comes_twice_and_none_of_the_test_split_is_trained_on():
    assert len({row["question"] for row in TRAIN + TEST}) == 6000
    for row in TRAIN:  # nobody gives anything to himself
        names = [word for word in re.findall(r"\w+", row["question"]) if word in NAMES]
        assert len(names) == len(set(names)) in (1, 2)


def test_the_supply_is_the_same_every_time():
    # in every process and for ever: saved runs count on it
    assert list(islice(questions("train"), 50)) == TRAIN[:50] and TRAIN[0] == FIRST


@pytest.mark.parametrize("completion, score", [
    ("3 + 4 = 7.", 1), ("7.0", 1), ("<think>9</think>7 apples", 1), ("7 of 9", 0), ("7.5", 0),
    ("seven", 0), ("<think>7", 0),
])  # fmt: skip
def test_the_last_number_counts(completion, score):
    assert number_accuracy([completion], ["7"]) == [score]
