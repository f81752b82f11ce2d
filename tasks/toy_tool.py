"""Products that are too large for a small model's head: it learns to use a calculator.

A question asks for one product or for a sum of two, `27*43=?` or `27*43+16*12=?`. The base model
has seen texts of two kinds (experiments/library/toy_model.py). About a third of them call a tool,

    <tool>27*43</tool><result>1161</result><tool>1161+16*12</tool><result>1353</result>
    <answer>1353</answer>

and most of them only guess, `<answer>1351</answer>`. The model writes what is between `<tool>` and
`</tool>`. A sampler with a tool writes the result: examples/my_tool.py.
"""

import random
from itertools import count
from pathlib import Path

MAX_NEW_TOKENS = 64  # the longest demonstration needs 47
BASE = str(Path(__file__).with_name("toy_tool_base"))


def question(index, split="train"):
    """Question number `index` of an endless supply: a dict with question, answer, and the calls
    that lead to it: (expression, result) each.

    split: train, test or warm_start. No question of the test split is in another split.
    """
    rng = random.Random(f"tool {split} {index}")
    while True:
        a, b, c, d = (rng.randint(11, 99) for _ in range(4))
        product = a * b
        text, answer = f"{a}*{b}", product
        calls = [(text, product)]
        if rng.random() < 0.5:
            text = f"{text}+{c}*{d}"
            answer = product + c * d
            calls.append((f"{product}+{c}*{d}", answer))
        held_out = random.Random(text).random() < 0.1
        if held_out == (split == "test"):
            return {"question": f"{text}=?", "answer": str(answer), "calls": calls}


def questions(split):
    """All questions of a split, one after the other, without end."""
    return (question(i, split) for i in count())
