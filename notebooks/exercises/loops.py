"""Five broken loops: seams.py five times, each with one mistake. Find it.

    python notebooks/exercises/loops.py                # writes mine/loop_1.py to mine/loop_5.py
    python notebooks/exercises/loops.py --measure 40   # trains each on the toy, writes loops.json
    python notebooks/exercises/loops.py --show         # the table: first step, mean of the last 8

Read a loop, 42 lines without its docstrings, and say which number in its table cannot be right. The
metrics are those of `train_step` in seams.py. The mistakes are in solutions.md.
"""

import argparse
import copy
import inspect
import json
import sys
from itertools import count, islice
from pathlib import Path
from types import ModuleType

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # the project's root

import nano

HERE = Path(__file__).parent
RIGHT = (HERE / "seams.py").read_text(encoding="utf-8")
BUGS = {  # loop: (what the right loop says, what it says)
    1: ("logits[:, -T - 1 : -1]", "logits[:, -T:]"),
    2: ("is_eos.cumsum(1) - is_eos == 0", "is_eos.cumsum(1) == 0"),
    3: ("T), old_logp[i], A[i]", "T), ref_logp[i], A[i]"),
    4: ("advantages.flatten()[rows]", "advantages.flatten()[: len(rows)]"),
    5: ("weights=weights[i])", "weights=sequence_mean_weights(m[i]) / len(parts))"),
}


def source(loop):
    """The text of a loop; 0 is the right one."""
    return RIGHT.replace(*BUGS[loop]) if loop else RIGHT


def module(loop):
    """A loop, to call its functions."""
    made = ModuleType(f"loop_{loop}")
    exec(source(loop), vars(made))
    return made


def train(train_step, steps):
    """The metrics of each step on the toy."""
    torch.manual_seed(nano.SEED)
    model, tokenizer = nano.load(nano.TOY_BASE)
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=nano.TOY["lr"], weight_decay=0.0)
    questions = map(nano.toy_question, count())
    arguments = model, reference, optimizer, tokenizer, nano.TOY
    return [train_step(*arguments, [*islice(questions, nano.Q)]) for _ in range(steps)]


def measure(steps):
    """{loop: (metrics of the first step, their means over the last 8)}"""
    table = {}
    for loop in (0, *BUGS):
        log = train(module(loop).train_step, steps)
        last = {name: sum(row[name] for row in log[-8:]) / len(log[-8:]) for name in log[0]}
        table[loop] = [{k: round(v, 3) for k, v in row.items()} for row in (log[0], last)]
        print(loop, *table[loop], flush=True)
    return table


def table():
    """The lines of loops.json: (loop, (metrics of the first step, their means over the last 8))."""
    return json.loads((HERE / "loops.json").read_text(encoding="utf-8"))


def main(argv=None):
    parser = argparse.ArgumentParser(description="Five broken training loops.")
    parser.add_argument("--measure", type=int, metavar="STEPS", help="train each on the toy")
    parser.add_argument("--show", action="store_true", help="show what they have measured")
    options = parser.parse_args(argv)
    if options.measure:
        rows = [json.dumps(row, ensure_ascii=False) for row in measure(options.measure).items()]
        (HERE / "loops.json").write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")
    elif options.show:
        *_, columns = inspect.getdoc(module(0).train_step).split("\n\n")
        print(f"{columns}\nTwo numbers of each: in the first step, and the mean of the last 8.\n")
        for loop, (first, last) in table():
            name = f"loop {loop}" if loop else "right"
            print(f"{name:7}", *(f"{key:>15}" for key in first))
            print(" " * 7, *(f"{first[key]:7.3f} {last[key]:7.3f}" for key in first))
    else:
        (HERE / "mine").mkdir(exist_ok=True)
        for loop in BUGS:
            (HERE / "mine" / f"loop_{loop}.py").write_text(source(loop), encoding="utf-8")
        print(f"written: {HERE / 'mine'}/loop_1.py to loop_{max(BUGS)}.py")


if __name__ == "__main__":
    main()
