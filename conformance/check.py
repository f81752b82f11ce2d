"""Compares the answers of code in any language with golden.json. It needs Python, and nothing else.

    python conformance/check.py ANSWERS.json                  all functions of golden.json
    python conformance/check.py ANSWERS.json kl_k3 grpo_loss  these functions

ANSWERS.json is {"kl_k3": [answer, …], …}: an answer for each case, in the order of golden.json. An
answer is the output alone, or {"output": …, "gradient": …}. A loss needs both. If your code cannot
be asked, write null. ∞ and NaN are the texts "inf", "-inf" and "nan". The exit code is

    0  all cases agree
    1  a case differs
    2  no case differs, but an answer is missing, too much or of another form, or there is no file
"""

import json
import math
import sys
from pathlib import Path

GOLDEN = Path(__file__).with_name("golden.json")
NUMBERS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def form(x):
    """Lists of lists, with a word for what stands in them."""
    if isinstance(x, list):
        return [form(y) for y in x]
    return "number" if x in NUMBERS or isinstance(x, (int, float)) else "text"


def same(yours, right, tolerance):
    """Whether two answers of one form agree. Numbers: by the tolerance, relative above 1."""
    if isinstance(right, list):
        return all(same(y, r, tolerance) for y, r in zip(yours, right))
    if form(right) == "text":
        return yours == right
    y, r = NUMBERS.get(yours, yours), NUMBERS.get(right, right)
    if math.isnan(r) or math.isinf(r):
        return str(y) == str(r)
    return abs(y - r) <= tolerance * max(1, abs(r))


def judged(case, answer, parts):
    """("", "") if an answer agrees. Else "differs", "form" or "missing", and a sentence."""
    if not isinstance(answer, dict):
        answer = {"output": answer} | dict.fromkeys(parts[1:])
    for part in ("output", "gradient"):
        if part not in case or part not in {*answer, *parts}:
            continue
        yours, right = answer.get(part), case[part]
        if yours is None and right is not None:
            return "missing", f"no {part}"
        if form(yours) != form(right):
            return "form", f"the {part} has another form: yours {yours}, right {right}"
        if not same(yours, right, case["tolerance"]):
            return "differs", f"{part}: yours {yours}, right {right}"
    return "", ""


def check(name, known, answers):
    """The lines about one function, and its exit code."""
    cases = known["cases"]
    if not isinstance(answers, list) or len(answers) != len(cases):
        count = len(answers) if isinstance(answers, list) else "no list of"
        return [f"{name}: {count} answers, {len(cases)} are needed: one for each case"], 2
    lines, found = [], []
    parts = ("output", "gradient")[:1 + name.endswith("_loss")]
    for number, (case, answer) in enumerate(zip(cases, answers)):
        kind, words = judged(case, answer, parts)
        found.append(kind)
        if kind:
            given = json.dumps(case["inputs"] | case["options"], ensure_ascii=False)
            lines += [f"    case {number}, {case['asks']}", f"        {given}", f"        {words}"]
    agree = found.count("")
    lines = [f"{name}: {agree} of {len(cases)} cases agree", *lines]
    if agree < len(cases):
        notes = f" ({known['notes']})" if "notes" in known else ""
        lines.insert(1, f"    right is {known['equation']}{notes}")
    return lines, 1 if "differs" in found else 2 * (agree < len(cases))


def main(argv):
    if not argv or argv[0].startswith("-"):
        print(__doc__)
        return 2
    file, *names = argv
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    try:
        answers = json.loads(Path(file).read_text(encoding="utf-8"))
        assert isinstance(answers, dict), "it must be {function: [answer, …]}"
    except (OSError, ValueError, AssertionError) as error:
        print(f"{file} cannot be read: {error}")
        return 2
    codes = []
    for name in [*answers] + [name for name in names or golden if name not in answers]:
        if name not in golden:
            lines, code = [f"{name}: golden.json has no such function"], 2
        elif names and name not in names:
            continue
        elif name not in answers:
            lines, code = [f"{name}: not answered"], 2
        else:
            lines, code = check(name, golden[name], answers[name])
        print("\n".join(lines))
        codes.append(code)
    return 1 if 1 in codes else max(codes, default=2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
