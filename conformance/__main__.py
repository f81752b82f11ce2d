"""Checks other people's GRPO against the concept tests of this project.

    python -m conformance MINE.py                 # see docs/conformance.md
    python -m conformance conformance/adapters/tiny_grpo.py --path ../tiny-grpo

MINE.py maps names of ours to your own code, with our arguments and results: `kl_k3`, `grpo_loss`,
`gae`, … What it does not define is left out, and so is a test that needs an argument that your
function does not take. Two things are done with each function, while all others are ours:

1. the tests of tests/concepts that speak about it, without those of our own argument checks;
2. probes: small inputs, on which its answers and gradients are compared with ours. If they differ,
   they are compared with the known mistakes and the known choices (conformance/mistakes.py).

Needs torch and pytest. The exit code is 0 if everything is held or a choice, and 1 if not.
"""

import argparse
import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
from pathlib import Path
from types import CodeType, FunctionType

import pytest

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests" / "concepts"
OURS = ("grpo", "cppo", "allocate", "micro_batches", "family", "tests", "conformance")


def forget():
    """Make Python import the project's modules anew: a function of theirs stands in one of them."""
    for name in [*sys.modules]:
        if any(name == ours or name.startswith(ours + ".") for ours in OURS):
            del sys.modules[name]


def load(path, folder=None):
    """The module of a file. folder: a checkout that its imports look into first."""
    spec = importlib.util.spec_from_file_location("mine", path)
    if spec is None or not Path(path).is_file():
        raise SystemExit(f"{path} is no Python file; write one that maps your functions to ours: "
                         "docs/conformance.md")
    module = importlib.util.module_from_spec(spec)
    forget()  # a checkout may have a grpo.py of its own
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(folder)] * bool(folder) + sys.path)
        try:
            spec.loader.exec_module(module)
        except ImportError as error:
            sentence = f"{path}: {error}. Install it, or name its checkout: --path"
            raise SystemExit(sentence) from error
    forget()
    return module


def stand_in(theirs, ours):
    """Their function as the tests call it.

    A call with an argument that it does not take skips the test, unless this is an option that is
    off, None or False, by default; so does a NotImplementedError. The dtype of an answer becomes
    ours, and the statistics of a loss are ours: nobody else promises the same.
    """
    signature = inspect.signature(theirs)
    off = {name for name, parameter in inspect.signature(ours).parameters.items()
           if name not in signature.parameters
           and (parameter.default is None or parameter.default is False)}

    @functools.wraps(ours)
    def function(*args, **options):
        options = {name: x for name, x in options.items()
                   if name not in off or not (x is None or x is False)}
        try:
            signature.bind(*args, **options)
        except TypeError as error:
            pytest.skip(str(error))
        try:
            answer, right = theirs(*args, **options), ours(*args, **options)
        except NotImplementedError as error:
            pytest.skip(str(error))
        if isinstance(right, tuple):  # (loss, stats), or (advantages, returns)
            answer = answer if isinstance(answer, tuple) else (answer,)
            return tuple(
                b if isinstance(b, dict) else a.to(b.dtype)
                for a, b in zip((*answer, None)[: len(right)], right))
        return answer.to(right.dtype) if hasattr(right, "dtype") else answer

    return function


# --- 1. the tests that speak about a function ---


def names_in(code):
    """The names that a piece of code uses, also in the functions within it."""
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return {*code.co_names}.union(*map(names_in, inner))


def mentions(function, name):
    """Whether a test or a helper of its file uses a name."""
    names, file = names_in(function.__code__), vars(sys.modules[function.__module__])
    helpers = [file[other] for other in names - {function.__name__} if other in file]
    return name in names or any(
        mentions(helper, name) for helper in helpers
        if isinstance(helper, FunctionType) and helper.__module__ == function.__module__)


class About:
    """A plugin of pytest: only the tests about one function. results: {test: (outcome, why)}."""

    def __init__(self, name):
        self.name, self.results = name, {}

    def pytest_collection_modifyitems(self, items):
        def chosen(item):
            values = item.callspec.params.values() if hasattr(item, "callspec") else ()
            names = [getattr(value, "__name__", "") for value in values]
            about = self.name in names or mentions(item.function, self.name)
            return about and not item.get_closest_marker("ours")

        items[:] = filter(chosen, items)

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            crash = getattr(report.longrepr, "reprcrash", None)
            why = crash.message if crash else str(report.longrepr or "")
            self.results[report.nodeid.split("::")[-1]] = report.outcome, why


def tested(module, name, theirs):
    """Run the concept tests about a function with theirs in its place: {test: (outcome, why)}."""
    about, speaks = About(name), re.compile(rf"\b{name}\b")
    files = [str(path) for path in sorted(TESTS.glob("test_*.py"))
             if speaks.search(path.read_text(encoding="utf-8"))]
    forget()
    place = importlib.import_module(module)
    setattr(place, name, stand_in(theirs, getattr(place, name)))
    options = ["--noconftest", "-c", os.devnull, "--rootdir", str(ROOT), "-p", "no:terminal"]
    options += ["-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore"]
    if files and pytest.main([*options, *files], plugins=[about]) > pytest.ExitCode.TESTS_FAILED:
        raise SystemExit(f"pytest could not run {files}")
    forget()
    return about.results


# --- 2. the verdict ---

SIGNS = {"choice": "≈", "edge": "△"}


def verdict(name, theirs):
    """(sign, sentence, lines): what the tests and the probes say about one function of theirs."""
    from conformance import compare  # only now, because `load` must import their modules first

    module = compare.MODULES[name]
    results = tested(module, name, theirs)
    failed = {test: why for test, (outcome, why) in results.items() if outcome == "failed"}
    held = sum(outcome == "passed" for outcome, _ in results.values())
    counts = f"{held} of {held + len(failed)}"
    lines = [  # test_k1_can_be_negative is the sentence "k1 can be negative"
        f"does not hold: {test.removeprefix('test_').replace('_', ' ')}: {why.splitlines()[0]:.100}"
        for test, why in failed.items()]
    found = compare.diagnose(name, theirs)
    if found and found.kind in SIGNS:
        return SIGNS[found.kind], counts, found.sentence, [found.evidence]
    if found:
        return "✗", counts, found.sentence, [found.evidence, *lines[:3]]
    if failed:
        return "✗", counts, "a test does not hold", lines[:3]
    if not held and name not in compare.PROBES:
        return "–", counts, "no test could be run: it takes other arguments", []
    return "✓", counts, "", []


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m conformance", description="Checks your GRPO against this project's tests.")
    parser.add_argument("mine", metavar="MINE.py", help="maps our names to your functions")
    parser.add_argument("--path", metavar="FOLDER", help="a checkout that MINE.py imports from")
    options = parser.parse_args(argv)
    sys.path.insert(0, str(ROOT))
    mine = load(options.mine, options.path)
    from conformance.compare import MODULES

    names = [name for name in MODULES if callable(getattr(mine, name, None))]
    if not names:
        raise SystemExit(f"{options.mine} defines none of our functions: {', '.join(MODULES)}")
    print(f"{'function':30}{'properties':>12}   verdict")
    bad = 0
    for name in names:
        sign, counts, words, lines = verdict(name, getattr(mine, name))
        bad += sign in "✗△–"
        print(f"{name:30}{counts:>12}   {sign} {words}", flush=True)
        print(*(f"      {line:.240}\n" for line in lines), sep="", end="")
    print("\n✓ held   ≈ differs by choice   △ wrong at an edge only   ✗ wrong   – not checked")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
