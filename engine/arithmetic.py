"""Sums in words, for a small real chat model: plain ones and stories of one or two steps, without end and without a download.

    Ann has 12 apples, buys 5 more and gives 3 to Ben. How many apples does Ann have now?

A template is the chain of its operations and its text: "+ -" is (a + b) − c, "× from" is c − a × b. The nouns of the text are
plurals in -s: behind a 1 they lose it.
"""

import random
import re

TRAIN_QUESTIONS = 2048  # one epoch
TEST_QUESTIONS = 512
MAX_NEW_TOKENS = 32  # room for a sentence with its sum; what SmolLM2-135M says in more is seldom right
SYSTEM_PROMPT = "Answer briefly."
LARGEST = 100  # no number and no result on the way is larger

OPERATIONS = {  # (result so far, next number) → result; a negative one is refused
    "+": lambda total, n: total + n,
    "-": lambda total, n: total - n,
    "×": lambda total, n: total * n,
    "÷": lambda total, n: -1 if total % n else total // n,
    "from": lambda total, n: n - total,
}
PLAIN = [
    ("+", "Help {ann}: what is {a} plus {b}?"),
    ("+", "Help {ann}: what is the sum of {a} and {b}?"),
    ("-", "Help {ann}: what is {a} minus {b}?"),
    ("-", "Help {ann}: what does taking {b} from {a} leave?"),
    ("×", "Help {ann}: what is {a} times {b}?"),
    ("×", "Help {ann}: what is the product of {a} and {b}?"),
    ("÷", "Help {ann}: what is {a} divided by {b}?"),
    ("÷", "Help {ann}: how many times does {b} go into {a}?"),
]
ONE_STEP = [
    ("+", "{ann} has {a} {things} and buys {b} more. How many {things} does {ann} have now?"),
    ("+", "{ann} has {a} {things} and {ben} has {b} {things}. How many {things} do they have together?"),
    ("+", "A shop sells {a} {things} in the morning and {b} {things} in the afternoon. How many {things} does it sell that day?"),
    ("+", "A jar holds {a} {things}. {ann} puts in {b} more. How many {things} does it hold now?"),
    ("-", "{ann} has {a} {things} and gives {b} to {ben}. How many {things} does {ann} have left?"),
    ("-", "{ann} had {a} {things} and lost {b}. How many {things} are left?"),
    ("-", "{ann} wants {a} {things} and has {b} so far. How many more {things} does {ann} need?"),
    ("-", "{ann} has {a} {things}, which is {b} more than {ben} has. How many {things} does {ben} have?"),
    ("×", "{ann} buys {a} bags with {b} {things} in each. How many {things} does {ann} buy?"),
    ("×", "{ann} buys {a} tickets for {b} dollars each. How many dollars does {ann} pay?"),
    ("×", "{ann} reads {a} pages a day. How many pages does {ann} read in {b} days?"),
    ("×", "{ann} sets out {a} rows with {b} chairs in each. How many chairs does {ann} set out?"),
    ("÷", "{ann} shares {a} {things} equally among {b} friends. How many {things} does each friend get?"),
    ("÷", "{ann} packs {a} {things} into bags of {b}. How many bags does {ann} fill?"),
    ("÷", "{ann} puts {a} {things} into {b} equal rows. How many {things} are in each row?"),
    ("÷", "{ann} pays {a} dollars for {b} tickets. How many dollars does one ticket cost?"),
]
TWO_STEPS = [
    ("+ +", "{ann} has {a} {things}, {ben} has {b} and their teacher has {c}. How many {things} do the three have together?"),
    ("+ -", "{ann} has {a} {things}, buys {b} more and gives {c} to {ben}. How many {things} does {ann} have now?"),
    ("+ ×", "{ann} puts {a} red {things} and {b} blue {things} into every bag. How many {things} are in {c} bags?"),
    ("+ ÷", "{ann} has {a} {things} and gets {b} more. {ann} shares all of them equally among {c} friends. "
            "How many {things} does each friend get?"),
    ("- +", "{ann} had {a} {things}, lost {b} and then found {c}. How many {things} does {ann} have now?"),
    ("- -", "A shop has {a} {things}. It sells {b} in the morning and {c} in the afternoon. How many {things} are left?"),
    ("- ×", "A ticket costs {a} dollars, but today it is {b} dollars cheaper. How many dollars do {c} tickets cost today?"),
    ("- ÷", "{ann} has {a} {things}, keeps {b} and shares the others equally among {c} friends. How many {things} does each friend get?"),
    ("× +", "{ann} has {c} {things} and buys {a} bags with {b} {things} in each. How many {things} does {ann} have now?"),
    ("× -", "{ann} buys {a} bags with {b} {things} in each and gives {c} {things} to {ben}. How many {things} does {ann} have left?"),
    ("× ÷", "{ann} buys {a} bags with {b} {things} in each and shares all of them equally among {c} friends. "
            "How many {things} does each friend get?"),
    ("× from", "{ann} has {c} dollars and buys {a} tickets for {b} dollars each. How many dollars does {ann} have left?"),
    ("÷ +", "{ann} shares {a} {things} equally among {b} friends. One of them is {ben}, who finds {c} more. "
            "How many {things} does {ben} have now?"),
    ("÷ -", "{ann} shares {a} {things} equally among {b} friends. One of them is {ben}, who loses {c}. "
            "How many {things} does {ben} have left?"),
    ("÷ ×", "{ann} pays {a} dollars for {b} tickets. How many dollars do {c} tickets cost?"),
]
NAMES = ["Ann", "Ben", "Carla", "David", "Emma", "Farid", "Grace", "Hugo", "Ivan", "Julia", "Kofi", "Lena", "Mei", "Nora", "Omar", "Rosa"]
THINGS = ["apples", "balloons", "books", "buttons", "cards", "coins", "eggs", "marbles", "pencils", "shells", "stamps", "stickers"]
ONE = re.compile(rf"(\b1 (?:red |blue )?(?:{'|'.join(noun[:-1] for noun in (*THINGS, 'dollars'))}))s\b")  # 1 apples, which is 1 apple


def numbers(operations, draw):
    """Numbers a, b (, c) for a chain of operations, and its result: whole and in 0 … LARGEST after every step."""
    small, large = (2, 9), (1, 20)
    while True:
        drawn = [draw.randint(*(small if operations[0] == "×" else large))]
        drawn += [draw.randint(*(small if operation in "×÷" else large)) for operation in operations]
        totals = drawn[:1]
        for operation, n in zip(operations, drawn[1:]):
            totals.append(OPERATIONS[operation](totals[-1], n))
        if all(0 <= total <= LARGEST for total in totals):
            return drawn, totals[-1]


def questions(split="train"):
    """The endless supply as columns `question` and `answer`, no question twice: the same in every run and on every device.

    split: train or test. A tenth of all questions, told by their text alone, belongs to test.
    """
    draw, seen = random.Random(f"arithmetic {split}"), set()
    while True:
        operations, template = draw.choice(draw.choice([PLAIN, ONE_STEP, TWO_STEPS]))
        drawn, result = numbers(operations.split(), draw)
        ann, ben = draw.sample(NAMES, 2)
        text = template.format(ann=ann, ben=ben, things=draw.choice(THINGS), **dict(zip("abc", drawn)))
        text = ONE.sub(r"\1", text)
        held_out = random.Random(text).random() < 0.1
        if held_out == (split == "test") and text not in seen:
            seen.add(text)
            yield {"question": text, "answer": str(result)}
