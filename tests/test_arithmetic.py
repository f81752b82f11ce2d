"""The word problems: every answer is worked out again from the words alone."""

import random
import re
from fractions import Fraction
from itertools import islice

import pytest

from engine import arithmetic, config, data
from engine.arithmetic import ONE_STEP, PLAIN, TWO_STEPS, questions
from eval import main as evaluate
from rewards import number_accuracy
from train import ALGORITHMS

TRAIN, TEST = (list(islice(questions(split), 3000)) for split in ("train", "test"))

# What a text says, in the reader's own words: a formula in the numbers x, y, z in the order in which the text names them.
READINGS = [
    (r"what is \d+ plus|what is the sum of", "x + y"),
    (r"what is \d+ minus", "x - y"),
    (r"what does taking \d+ from", "y - x"),
    (r"what is \d+ times|what is the product of", "x * y"),
    (r"what is \d+ divided by", "x / y"),
    (r"how many times does \d+ go into", "y / x"),
    (r"has \d+ \w+ and buys \d+ more\. How many", "x + y"),
    (r"do they have together\?", "x + y"),
    (r"How many \w+ does it sell that day", "x + y"),
    (r"A jar holds .* puts in", "x + y"),
    (r"has \d+ \w+ and gives \d+ to \w+\. How many \w+ does \w+ have left", "x - y"),
    (r"had \d+ \w+ and lost \d+\.", "x - y"),
    (r"wants \d+ \w+ and has \d+ so far", "x - y"),
    (r"which is \d+ more than", "x - y"),
    (r"^\w+ buys \d+ bags with \d+ \w+ in each\. How many", "x * y"),
    (r"^\w+ buys \d+ tickets for", "x * y"),
    (r"reads \d+ pages? a day", "x * y"),
    (r"rows with \d+ chairs? in each", "x * y"),
    (r"^\w+ shares \d+ \w+ equally among \d+ friends\. How many", "x / y"),
    (r"into bags of", "x / y"),
    (r"into \d+ equal rows", "x / y"),
    (r"How many dollars does one ticket cost", "x / y"),
    (r"the three have together", "x + y + z"),
    (r"buys \d+ more and gives", "x + y - z"),
    (r"red .* blue .* into every bag", "z * x + z * y"),
    (r"gets \d+ more\. \w+ shares all of them", "(x + y) / z"),
    (r"lost \d+ and then found", "x + z - y"),
    (r"A shop has .* sells", "x - (y + z)"),
    (r"cheaper", "z * x - z * y"),
    (r"keeps \d+ and shares the others", "(x - y) / z"),
    (r"has \d+ \w+ and buys \d+ bags", "x + y * z"),
    (r"buys \d+ bags .* and gives", "x * y - z"),
    (r"buys \d+ bags .* and shares all of them", "x * y / z"),
    (r"dollars? and buys \d+ tickets for", "x - y * z"),
    (r"One of them is \w+, who finds", "z + x / y"),
    (r"One of them is \w+, who loses", "x / y - z"),
    (r"pays \d+ dollars? for \d+ tickets\. How many dollars do ", "z * x / y"),
]


def read(text):
    """(formula, value) of the one reading that fits the text."""
    fitting = [formula for pattern, formula in READINGS if re.search(pattern, text)]
    assert len(fitting) == 1, (text, fitting)
    numbers = [Fraction(n) for n in re.findall(r"\d+", text)]
    return fitting[0], eval(fitting[0], dict(zip("xyz", numbers)))  # of the table above


@pytest.mark.parametrize("rows", [TRAIN, TEST], ids=["train", "test"])
def test_every_answer_is_what_the_words_say(rows):
    for row in rows:
        assert row["answer"] == str(read(row["question"])[1]), row


def test_every_template_and_every_reading_occurs():
    assert len(ONE_STEP) >= 12 and len(TWO_STEPS) >= 12
    assert len(READINGS) == len({text for _, text in PLAIN + ONE_STEP + TWO_STEPS}) - 2  # plus and sum, times and product: one each
    assert {read(row["question"])[0] for row in TRAIN} == {formula for _, formula in READINGS}
    assert all(any(re.search(pattern, row["question"]) for row in TRAIN) for pattern, _ in READINGS)


def test_sums_stay_small_whole_and_exact():
    for row in TRAIN + TEST:
        numbers = [int(n) for n in re.findall(r"\d+", row["question"])]
        assert 2 <= len(numbers) <= 3 and all(1 <= n <= 20 for n in numbers)
        assert 0 <= int(row["answer"]) <= arithmetic.LARGEST == 100
    draw = random.Random(0)
    for operations in {chain for chain, _ in ONE_STEP + TWO_STEPS}:  # on the way, too: a shop cannot sell what it has not
        for _ in range(200):
            (first, *others), _ = arithmetic.numbers(operations.split(), draw)
            for operation, n in zip(operations.split(), others):
                sign = {"×": "*", "÷": "/"}.get(operation, operation)
                first = Fraction(n) - first if sign == "from" else eval(f"first {sign} n", {"first": Fraction(first), "n": n})
                assert first.denominator == 1 and 0 <= first <= 100


def test_one_is_followed_by_a_singular_and_every_other_number_by_a_plural():
    ones = 0
    for row in TRAIN + TEST:
        for number, noun in re.findall(r"(\d+) (?:red |blue )?(\w+)", row["question"]):
            if noun.rstrip("s") in {word.rstrip("s") for word in (*arithmetic.THINGS, "dollars", "pages", "chairs", "tickets", "bags")}:
                assert noun.endswith("s") == (number != "1"), row
                ones += number == "1"
        assert not re.search(r"[{}]|  ", row["question"])
    assert ones > 20
    assert any(re.search(r"\b11 \w+s\b", row["question"]) for row in TRAIN)


def test_no_question_comes_twice_and_none_of_the_test_split_is_trained_on():
    train, test = ({row["question"] for row in rows} for rows in (TRAIN, TEST))
    assert len(train) == len(test) == 3000
    assert not train & test
    names = [set(re.findall(r"\b[A-Z]\w+", row["question"])) & {*arithmetic.NAMES} for row in TRAIN]
    assert max(map(len, names)) == 2


def test_the_supply_is_the_same_every_time():
    assert list(islice(questions("train"), 50)) == TRAIN[:50] != list(islice(questions("test"), 50))
    random.seed(7)
    assert next(questions("train")) == TRAIN[0]


def test_a_load_is_the_beginning_of_the_supply(loaded):
    _, tokenizer = loaded
    rows, notes = data.load("arithmetic", tokenizer, split="test", limit=9)
    assert [{"question": row["question"], "answer": row["answer"]} for row in rows] == TEST[:9] and not notes
    assert len(data.load("arithmetic", tokenizer)[0]) == arithmetic.TRAIN_QUESTIONS
    assert len(data.load("arithmetic", tokenizer, split="test")[0]) == arithmetic.TEST_QUESTIONS
    assert len(data.load("arithmetic", tokenizer, limit=2500)[0]) == 2500  # without end


def test_the_data_set_brings_its_defaults_and_the_user_has_the_last_word():
    chosen, _ = config.open_run(["--dataset", "arithmetic"], ALGORITHMS)
    assert chosen.rewards == ["number_accuracy"] and chosen.lr == 1e-5 and chosen.eval_dataset is None
    assert (chosen.system_prompt, chosen.max_new_tokens) == (arithmetic.SYSTEM_PROMPT, arithmetic.MAX_NEW_TOKENS)
    own = config.open_run(["--dataset", "arithmetic", "--system_prompt", "Be brief.", "--max_new_tokens", "9"], ALGORITHMS)[0]
    assert (own.system_prompt, own.max_new_tokens) == ("Be brief.", 9)
    assert config.open_run(["--dataset", "gsm8k"], ALGORITHMS)[0].system_prompt is None


def test_eval_takes_it_as_a_benchmark(small, tmp_path):
    evaluate(["--model", small, "--benchmark", "arithmetic", "--questions", "3", "--samples", "1", "--output_dir", str(tmp_path)])
    setting = (tmp_path / "eval-arithmetic.json").read_text()
    assert '"judge": "number_accuracy"' in setting and arithmetic.SYSTEM_PROMPT in setting and '"max_new_tokens": 32' in setting


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("7", 1), ("3 + 4 = 7.", 1), ("The answer is 7", 1), ("7.0", 1), ("**7** apples", 1), ("<think>9</think>7", 1), ("\\boxed{7}", 1),
        ("7 of 9", 0), ("17", 0), ("7.5", 0), ("0.7", 0), ("seven", 0), ("", 0), ("<think>7", 0), ("7, no: 8", 0),
    ],
)
def test_the_last_number_counts(completion, score):
    assert number_accuracy([completion], ["7"]) == [score]
    assert number_accuracy(["1,207 of them"], ["3 * 402.33 = 1207\n#### 1207"]) == [1.0]
