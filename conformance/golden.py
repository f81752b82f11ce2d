"""Fills in the answers that golden.json lacks: small inputs, function by function. See
docs/conformance.md.

    python conformance/golden.py

To add a case, write its line into golden.json without `output` and `gradient`, and run this. The
new answer is that of the files of the paper: calculate it a second time, in another way. The
answers that are there stay as they are. Plain loops over numbers made them, without torch and
without the files of the paper; the gradients are Im f(x + i·h) / h with a tiny h. Commit 5a59a4b
has these loops. Ports to other languages are checked with the file (check.py), and so is Python
code (compare.py).
"""

import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

import allocate
import answers
import grpo
from conformance import compare
from conformance.probes import FILE, LISTS, probe


def answered(name, case):
    """The answers to a case: {"output": …}, and "gradient" if one flows through the function."""
    if name in LISTS:
        function = getattr(allocate, name, None) or getattr(answers, name)
        found = function(*case["inputs"].values(), **case["options"])
        return {"output": float(found) if name == "to_number" and found else found}
    function = compare.OURS.get(name, grpo.importance_ratio)
    learns = compare.learns(name) or name == "importance_ratio"
    found = [in_json(x.tolist()) for x in compare.answers(function, probe(case), learns)]
    gradient = {"gradient": found.pop()} if learns else {}
    return {"output": found[0] if len(found) == 1 else found} | gradient


def in_json(x):
    """JSON has no ∞ and no NaN: they are texts there. A number has 12 digits, because the last ones
    differ between machines."""
    if isinstance(x, list):
        return [in_json(y) for y in x]
    if not isinstance(x, float):
        return x
    return float(f"{x:.12g}") if math.isfinite(x) else str(x)


def main():
    """One case in a line."""
    blocks = []
    for name, known in json.loads(FILE.read_text(encoding="utf-8")).items():
        lines = []
        for case in known.pop("cases"):
            whole = case if "output" in case else case | answered(name, case)
            lines.append(json.dumps(whole, ensure_ascii=False))
        head, cases = json.dumps(known, ensure_ascii=False)[1:-1], ",\n".join(lines)
        blocks.append(f'"{name}": {{{head}, "cases": [\n{cases}\n]}}')
    FILE.write_text("{\n" + ",\n".join(blocks) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
