"""The default task: a model learns to think, in minutes, on one CPU core, without a download.

The task is mental arithmetic over five digits, `7+8-3+9-2=?`. First the model gets a supervised
warm start (experiments/library/toy_model.py). Its demonstrations are messy on purpose: some of them
think step by step,

    <think>7+8=15;15-3=12;12+9=21;21-2=19;</think>
    <answer>19</answer>

and most of them only guess, `<answer>19</answer>`. Half of these guesses are wrong by 1 to 3. So
the base model mostly guesses, and its answers are mostly wrong. Nobody tells it to think:
reinforcement learning discovers that thinking pays, and accuracy and length rise together.
"""

import random
from itertools import count
from pathlib import Path

OPERANDS = 5
LARGEST_DIGIT = 9
MAX_NEW_TOKENS = 48  # the longest thoughts need 39
TRAIN_QUESTIONS = 2048  # one epoch
TEST_QUESTIONS = 512
# longer sums: how many numbers they have, and the longest completions of their base models
MIDDLE, MIDDLE_TOKENS = (13, 16), 144
LONG, LONG_TOKENS = (22, 30), 272
# the shipped base models of the data sets toy and toy_code
BASE = str(Path(__file__).with_name("toy_base"))
CODE_BASE = str(Path(__file__).with_name("toy_code_base"))


def question(index, split="train", operands=(OPERANDS, OPERANDS)):
    """Question number `index` of an endless supply: a dict with question, answer, and the thoughts
    that lead to it.

    split: train, test or warm_start. No question of the test split is in another split. No running
    total is negative. operands: how many numbers the sum has, at least and at most.
    """
    numbers = random.Random(f"{split} {index} operands").randint(*operands)
    rng = random.Random(f"{split} {index}")
    while True:
        total = rng.randint(1, LARGEST_DIGIT)
        text, thoughts = str(total), ""
        for _ in range(numbers - 1):
            digit = rng.randint(1, LARGEST_DIGIT)
            sign = "-" if digit <= total and rng.random() < 0.5 else "+"
            result = total + digit if sign == "+" else total - digit
            thoughts += f"{total}{sign}{digit}={result};"
            text += f"{sign}{digit}"
            total = result
        # a tenth of all questions is held out; the text alone decides which
        held_out = random.Random(text).random() < 0.1
        if held_out == (split == "test"):
            return {"question": f"{text}=?", "answer": str(total), "thoughts": thoughts}


def questions(split, operands=(OPERANDS, OPERANDS)):
    """All questions of a split, one after the other, without end."""
    return (question(i, split, operands) for i in count())


def learned(first, last):
    """What a run has learned besides right answers, in a sentence; None: nothing. first, last: the
    lines of its first and of its last step in samples.jsonl."""
    if share_of_thoughts(first) < 0.5 and share_of_thoughts(last) > 0.9:
        return "It thinks now. The reward asked only for right answers."
    return None


def share_of_thoughts(line):
    return sum("<think>" in row["completion"] for row in line["completions"]) / len(
        line["completions"])
