"""Checks other people's GRPO against the concept tests of this project.

    python -m conformance MINE.py                 # see docs/conformance.md
    python -m conformance MINE.py --json out.json
    python -m conformance conformance/adapters/cppo_trl.py --path ../CPPO

MINE.py maps names of ours to your own code, with our arguments and results: `kl_k3`, `grpo_loss`,
`gae`, … What it does not define is left out. Two things are done with each function, while all
others are ours:

1. the tests of tests/concepts that speak about it, without those of our own argument checks;
2. probes: small inputs, on which its answers and gradients are compared with ours. If they differ,
   they are compared with the known mistakes and the known choices (conformance/mistakes.py).

Each test and each probe is a property. ✓ needs all of them.

Each function runs in a process of its own, with a time limit. Needs torch and pytest, on Linux or
macOS. The exit code is

    0  every property of every function was checked, and holds or is a choice
    1  a function is wrong
    2  none is wrong, but one could not be checked at all
    3  what was checked is right, but a property was left out: your function lacks its argument
    4  none is wrong, but one is at an edge: on inputs that are rare
"""

import argparse
import difflib
import importlib.util
import json
import os
import sys
from collections import namedtuple
from functools import partial
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # a process with threads is not forked safely
if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # with a GPU, autograd starts threads
THEIR_PATH = [*sys.path]
# ours, also if a grpo.py lies in the folder of the caller
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from conformance import properties  # noqa: E402

properties.import_tests()
from conformance import compare  # noqa: E402
from conformance.apart import Apart, Stopped  # noqa: E402
from conformance.theirs import Broken, Theirs  # noqa: E402

IMPORT_LIMIT = 120  # seconds: some packages take long to import
# seconds, for one function; the slowest of ours takes 1
LIMIT = 60 + compare.SEARCH
SIGNS = {"mistake": "✗", "edge": "△", "broken": "–", "unknown": "–", "choice": "≈"}
CODES = {"✗": 1, "△": 4, "–": 2, "◐": 3}  # the first of these signs that occurs
LEGEND = ("✓ holds   ≈ differs by choice   ◐ holds as far as it was asked\n"
          "△ wrong at an edge only   ✗ wrong   – not checked, or not known")
# held, asked: how many properties. left: how many were not asked, and why, or "". lines: evidence
Verdict = namedtuple("Verdict", "sign sentence held asked left lines")


def load(path, folder=None):
    """The module of a file. folder: a checkout that its imports look into first."""
    spec = importlib.util.spec_from_file_location("mine", path)
    module = importlib.util.module_from_spec(spec)
    ours = [*sys.path]
    checkout = [str(folder)] * bool(folder)
    properties.forget()  # a checkout may have a grpo.py of its own
    sys.path[:] = checkout + THEIR_PATH
    spec.loader.exec_module(module)
    sys.path[:] = ours + checkout  # for what they import later
    properties.forget()
    return module


# --- the verdict on one function ---


def verdict(name, function):
    """What the tests and the probes say about one function of theirs."""
    try:
        theirs = Theirs(function, compare.OURS[name])
    except Broken as error:
        return Verdict("–", str(error), 0, 0, "", [])
    results = properties.tested(compare.MODULES[name], name, theirs)
    tried = compare.answered(name, theirs)
    found = compare.diagnose(name, theirs, tried)

    outcomes = [outcome for outcome, _ in results.values()]
    for probe, got, right in tried:
        outcomes.append("passed" if compare.same(got, right, probe.atol) else "failed")
    outcomes += ["skipped"] * (len(compare.PROBES.get(name, ())) - len(tried))
    held, skipped = outcomes.count("passed"), outcomes.count("skipped")
    asked = len(outcomes) - skipped
    left = f"{skipped} not asked: {theirs.why_left_out()}" if skipped else ""
    found_to_be = partial(Verdict, held=held, asked=asked, left=left)

    failed = sentences(compare.MODULES[name], results)
    if not theirs.answered:
        why = theirs.broken[0] if theirs.broken else theirs.why_left_out()
        return found_to_be("–", f"nothing could be checked: {why}", lines=[])
    if found:
        lines = [found.evidence] + failed[:3] * (found.kind in ("mistake", "unknown"))
        # a loss may be right in many ways, so a test that it fails shows nothing
        if found.kind == "unknown" and failed and not name.endswith("_loss"):
            return found_to_be("✗", f"a test does not hold; {found.sentence}", lines=lines)
        return found_to_be(SIGNS[found.kind], found.sentence, lines=lines)
    if failed:
        return found_to_be("✗", "a test does not hold", lines=failed[:3])
    if skipped:
        return found_to_be("◐", left, lines=[])
    return found_to_be("✓", "", lines=[])


def sentences(module, results):
    """What does not hold: test_k1_can_be_negative is the sentence "k1 can be negative". If tests of
    the function's own file fail, those of other files, which use it, say nothing more."""
    failed = [test for test, (outcome, _) in results.items() if outcome == "failed"]
    own = [test for test in failed if f"/test_{module.split('.')[-1]}" in test]
    found = dict.fromkeys(test.partition("[")[0] for test in own or failed)
    rows = [test.split("::test_") for test in found]
    return [f"does not hold: {words.replace('_', ' ')} ({file})" for file, words in rows]


# --- all functions, each in a process of its own ---


def check_file(send, path, folder):
    """Sends (names, notes) of the file, or a sentence, and then the verdict on each function."""
    try:
        mine = load(path, folder)
    except BaseException as error:
        return send(why_not_loaded(path, error))
    names = [name for name in compare.OURS if callable(getattr(mine, name, None))]
    send((names, misspelt(mine)))
    for name in names:
        with Apart(send_verdict, name, getattr(mine, name)) as one:
            try:
                send(one.receive(LIMIT))
            except Stopped as error:
                send(Verdict("–", f"{error}", 0, 0, "", []))


def send_verdict(send, name, function):
    send(verdict(name, function))


def why_not_loaded(path, error):
    if isinstance(error, SystemExit):
        return (f"{path} ends the program when it is imported (sys.exit): put what runs a program "
                'under `if __name__ == "__main__":`')
    if isinstance(error, ImportError):
        return f"{path}: {error}. Install it, or name its checkout: --path"
    if isinstance(error, SyntaxError):
        return f"{path}: SyntaxError in {error.filename}, line {error.lineno}: {error.msg}"
    first_line, *_ = f"{error}".split("\n")
    return f"{path} raises {type(error).__name__} when it is imported: {first_line}"


def misspelt(mine):
    """{their name: the name of ours that it may mean}"""
    near = {}
    for name, value in vars(mine).items():
        if callable(value) and name not in compare.OURS and not name.startswith("_"):
            found = difflib.get_close_matches(name, compare.OURS, n=1, cutoff=0.85)
            if found and not hasattr(mine, found[0]):
                near[name] = found[0]
    return near


def checked(path, folder):
    """(name, verdict) of each function of the file, as soon as it is known. Raises Stopped, if
    nothing can be checked."""
    print(f"importing {path}, at most {IMPORT_LIMIT} seconds", file=sys.stderr)
    with Apart(check_file, path, folder) as process:
        try:
            said = process.receive(IMPORT_LIMIT)
        except Stopped as error:
            raise Stopped(f"{path}, when it is imported: {error}") from error
        if isinstance(said, str):
            raise Stopped(said)
        names, near = said
        for name, other in near.items():
            words = f"no function of ours has this name: do you mean `{other}`?"
            yield name, Verdict("–", words, 0, 0, "", [])
        if not names and not near:
            raise Stopped(f"{path} defines none of our functions: {', '.join(compare.OURS)}")
        for name in names:
            try:
                yield name, Verdict(*process.receive(None))
            except Stopped as error:
                raise Stopped(f"{path}: {error}") from error


def stop(sentence, file=None):
    """Prints a sentence on why nothing can be checked. Returns the exit code."""
    print(sentence, file=sys.stderr)
    write(file, CODES["–"], {}, sentence)
    return CODES["–"]


def write(file, code, functions, error=""):
    """--json. functions: {name: Verdict}."""
    if file:
        rows = [{"function": name} | found._asdict() for name, found in functions.items()]
        whole = {"exit_code": code, "error": error, "functions": rows}
        words = json.dumps(whole, ensure_ascii=False, indent=2)
        Path(file).write_text(words + "\n", encoding="utf-8")


def show(name, found):
    counts = f"{found.held} of {found.asked} hold"
    print(f"{name:30}{counts:>15}   {found.sign} {found.sentence}", flush=True)
    lines = [*found.lines]
    if found.sign in "≈△✗":
        lines.append(found.left)
    for line in filter(None, lines):
        print(f"      {line}")


def main(argv=None):
    parser = argparse.ArgumentParser(
        usage="""python -m conformance MINE.py [--path FOLDER] [--json FILE]

Checks your GRPO against this project's tests.
MINE.py holds your functions under our names, for example these two lines:

    from my_trainer import kl_estimate as kl_k3
    from my_trainer import advantages as group_advantages""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=__doc__[__doc__.index("The exit code is"):])
    parser.add_argument("mine", metavar="MINE.py", help="maps our names to your functions")
    parser.add_argument("--path", metavar="FOLDER", help="a checkout that MINE.py imports from")
    parser.add_argument("--json", metavar="FILE", help="write the verdicts to this file, too")
    options = parser.parse_args(argv)
    if not Path(options.mine).is_file() or not options.mine.endswith(".py"):
        return stop(f"there is no Python file {options.mine}: write one that maps your functions "
                    "to ours: docs/conformance.md", options.json)
    if options.path and not Path(options.path).is_dir():
        return stop(f"--path {options.path}: there is no such folder", options.json)
    if options.json and not Path(options.json).absolute().parent.is_dir():
        return stop(f"--json {options.json}: its folder does not exist")
    functions = {}
    try:
        for name, found in checked(options.mine, options.path):
            if not functions:
                print(f"{'function':30}{'properties':>15}   verdict")
            functions[name] = found
            show(name, found)
    except Stopped as error:
        return stop(str(error), options.json)
    print(f"\n{LEGEND}")
    signs = {"◐" if one.sign == "≈" and one.left else one.sign for one in functions.values()}
    code = next((code for sign, code in CODES.items() if sign in signs), 0)
    write(options.json, code, functions)
    return code


if __name__ == "__main__":
    sys.exit(main())
