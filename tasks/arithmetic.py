"""Word problems of one and two steps for a small real chat model: made here, without a download.

    Ann has 8 books and gets 7 more. How many books now?                8 + 7 = 15

The questions are short and their numbers are small, so that a model of 135 million parameters gets
some of them right, and a training step is cheap on a CPU. A worked example comes before each
question: without it such a model seldom calculates. A second example makes the prompts longer, and
SmolLM2-135M-Instruct hardly better.

A template is a chain of operations and a text. The chain "+ -" means (a + b) − c.
"""

import random
from operator import add, mul, sub, truediv

TRAIN_QUESTIONS = 2048  # one epoch
TEST_QUESTIONS = 512
MAX_NEW_TOKENS = 16  # enough for a calculation, too few for talk
SYSTEM_PROMPT = "Calculate."
EXAMPLES = [  # turns of the chat before the question; no question has these names or things
    ("user", "Tom has 4 hats and gets 3 more. How many hats now?"),
    ("assistant", "4 + 3 = 7"),
]

OPERATIONS = {"+": add, "-": sub, "×": mul, "÷": truediv}  # (result so far, next number) → result
ONE_STEP = [
    ("+", "{ann} has {a} {things} and gets {b} more. How many {things} now?"),
    ("+", "{ann} has {a} {things} and {ben} has {b}. How many {things} together?"),
    ("-", "{ann} has {a} {things} and loses {b}. How many {things} now?"),
    ("-", "{ann} has {a} {things} and gives {b} to {ben}. How many {things} are left?"),
    ("×", "{ann} has {a} bags with {b} {things} in each. How many {things}?"),
    ("×", "{ann} reads {a} pages a day. How many pages in {b} days?"),
    ("×", "{ann} buys {a} tickets for {b} dollars each. How many dollars?"),
    ("÷", "{ann} shares {a} {things} equally among {b} friends. How many {things} for each?"),
]
TWO_STEPS = [
    ("+ +", "{ann} has {a} {things}, gets {b} more and then {c} more. How many {things} now?"),
    ("+ -", "{ann} has {a} {things}, gets {b} more and loses {c}. How many {things} now?"),
    ("- +", "{ann} has {a} {things}, loses {b} and gets {c} more. How many {things} now?"),
    (
        "- -",
        "{ann} has {a} {things}, loses {b} and gives {c} to {ben}. How many {things} are left?",
    ),
    (
        "× +",
        "{ann} has {a} bags with {b} {things} in each and gets {c} {things} more. How many "
        "{things} now?",
    ),
    (
        "× -",
        "{ann} has {a} bags with {b} {things} in each and loses {c} {things}. How many {things} "
        "now?",
    ),
    (
        "+ ×",
        "{ann} puts {a} red and {b} blue {things} into each bag. How many {things} in {c} bags?",
    ),
]
TWO_STEP_SHARE = 0.2
NAMES = (
    "Ann Ben Carla David Emma Farid Grace Hugo Ivan Julia Kofi Lena Mei Nora Omar Rosa"
).split()
THINGS = (
    "apples balloons books buttons cards coins eggs marbles pencils shells stamps stickers"
).split()


def numbers(operations, rng):
    """([a, b] or [a, b, c], result) for a chain of operations.

    The numbers are from 2 to 9, a dividend up to 20. All intermediate results are whole and above
    0.
    """
    first = 20 if operations[0] == "÷" else 9
    while True:
        total = rng.randint(2, first)
        drawn = [total] + [rng.randint(2, 9) for _ in operations]
        possible = True
        for operation, n in zip(operations, drawn[1:]):
            total = OPERATIONS[operation](total, n)
            possible = possible and total > 0 and total == int(total)
        if possible:
            return drawn, int(total)


def questions(split="train"):
    """Some hundred thousand different questions, as dicts of `question` and `answer`; the same in
    every run.

    split: train or test. A tenth of all questions belongs to test; the text alone decides which.
    """
    rng = random.Random(f"arithmetic {split}")
    seen = set()
    while True:
        templates = TWO_STEPS if rng.random() < TWO_STEP_SHARE else ONE_STEP
        operations, template = rng.choice(templates)
        drawn, result = numbers(operations.split(), rng)
        ann, ben = rng.sample(NAMES, 2)
        things = rng.choice(THINGS)
        text = template.format(ann=ann, ben=ben, things=things, **dict(zip("abc", drawn)))
        held_out = random.Random(text).random() < 0.1
        if held_out == (split == "test") and text not in seen:
            seen.add(text)
            yield {"question": text, "answer": str(result)}
