"""Judges your functions, and shows a small input with your answer and the right one.

    python notebooks/exercises/judge.py notebooks/exercises/mine/cppo.py          each function
    python notebooks/exercises/judge.py notebooks/exercises/mine/cppo.py prune    this one alone

In a notebook `judge(my_prune)` does the same. Only one function is yours at a time: the tests call
the project's functions in all other places. The words are "green", "not solved yet", or what is
wrong: the name of the mistake if the kit knows it (python -m conformance), else what the first
failing test says.
"""

import argparse
import functools
import importlib
import importlib.util
import os
import re
import signal
import sys
import warnings
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # the project's root

from conformance import compare
from conformance.probes import PROBES
from conformance.properties import ALONE, About, stand_in
from conformance.theirs import NO_ARGUMENT, Theirs
from notebooks.exercises.make import FILES, ROOT, TESTS, blank_ones, exercises
from notebooks.exercises.smallest import smallest

# {function: the project's file that holds it}
PLACES = {
    function.name: file
    for file in FILES
    for function in exercises((ROOT / file).read_text(encoding="utf-8"))
}
LIMIT = 10  # seconds, for a call


def judge(function):
    words = verdict(function, function.__name__.removeprefix("my_"))
    print(words if words == "green" else f"{function.__name__}: {words}")


def verdict(function, name):
    """What the kit and the tests of the project's function say of a function, in words."""
    watched = Watched(function)
    kind, sentence, evidence = known(watched, name)
    results = {} if kind == "mistake" else run(watched, name)
    failed = {test: why for test, (outcome, why) in results.items() if outcome == "failed"}
    if watched.endless:
        return f"✗ a call was stopped after {LIMIT} seconds: is a loop endless?"
    if {*map(type, watched.answers)} == {type(None)}:
        return "not solved yet."
    if not failed and kind in ("", "choice"):
        return "green"

    # an edge is a mistake on few inputs, so some tests hold
    if failed and (kind not in ("choice", "edge") or len(failed) == len(results)):
        kind, sentence, evidence = "", *first(failed, results)
    if kind != "edge":
        calls = [probe[:2] for probe in PROBES.get(name, ())]
        calls += [call for test, *call in watched.calls if test in failed]
        with warnings.catch_warnings(action="ignore"):
            evidence = smallest(name, watched, getattr(ours(name), name), calls) or evidence
    return f"✗ {sentence}.\n    {evidence}".rstrip()


def known(function, name):
    """(kind, sentence, evidence) of what the kit finds on its small inputs; empty if nothing."""
    if name not in compare.OURS:
        return "", "", ""
    theirs = Theirs(function, compare.OURS[name])
    short = patch.object(compare, "SEARCH", 5)  # seconds
    with short, warnings.catch_warnings(action="ignore"):
        found = compare.diagnose(name, theirs)
    if "allowed" in theirs.left.get(NO_ARGUMENT, ()):
        return "mistake", "it has no argument `allowed`", ""
    if found is None or found.sentence == compare.ORDER:  # the order is free
        return "", "", ""
    if found.kind == "unknown":
        return "unknown", "the tests hold, but an answer is not the project's", found.evidence
    # without the numbers of the kit's list, which a student does not have
    sentence = re.sub(r" \[\d+\]", "", found.sentence.removeprefix(f"{compare.ORDER}; "))
    return found.kind, sentence, found.evidence


def first(failed, results):
    """(which test fails first, what it says)"""
    test, why = next(iter(failed.items()))
    file, _, words = test.partition("::test_")
    words = words.partition("[")[0].replace("_", " ")
    sentence = f'{len(failed)} of {len(results)} tests fail. The first one says: "{words}" ({file})'
    return sentence, why.split("\n")[0]


class Watched:
    """Somebody's function. calls: (test, args, options) of each. answers: of those that gave one.
    endless: whether a call was stopped; then each other call is."""

    def __init__(self, function):
        functools.update_wrapper(self, function)  # the kit reads its signature
        self.function, self.calls, self.answers, self.endless = function, [], [], False
        signal.signal(signal.SIGALRM, self.stop)

    def stop(self, *_):
        self.endless = True
        raise TimeoutError

    def __call__(self, *args, **options):
        if self.endless:
            self.stop()
        test = os.environ.get("PYTEST_CURRENT_TEST", "").removesuffix(" (call)")
        self.calls.append((test, args, options))
        signal.alarm(LIMIT)
        try:
            with redirect_stdout(StringIO()):  # it is called many times
                self.answers.append(self.function(*args, **options))
        finally:
            signal.alarm(0)
        return self.answers[-1]


def ours(name):
    """The project's module that has this function."""
    return importlib.import_module(".".join(PLACES[name].with_suffix("").parts))


def run(function, name):
    """{test: (outcome, why)} of the tests that speak of the project's function with this name."""
    module, about = ours(name), About(name)
    files = [str(path) for path in sorted(TESTS.glob(f"test_{PLACES[name].stem}*.py"))]
    # they are imported anew, so that they find this function in the module
    before = {name: sys.modules.pop(name) for name in [*sys.modules]
              if name.startswith("tests.concepts.test_")}
    replaced = patch.object(module, name, stand_in(function, getattr(module, name), about))
    alone = patch.dict(os.environ, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", PYTEST_ADDOPTS="")
    with replaced, alone:
        pytest.main([*ALONE, "-m", "not slow", *files], plugins=[about])
    sys.modules.update(before)
    return about.results


def judge_file(path, only):
    """Print a line for each function of a student's file, or for those named."""
    text = Path(path).read_text(encoding="utf-8")
    spec = importlib.util.spec_from_file_location("mine", path)
    mine = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mine)
    blank = blank_ones(text)
    for name in blank:  # a function that is solved may call it
        setattr(mine, name, getattr(ours(name), name))
    for name in only or [function.name for function in exercises(text) if function.name in PLACES]:
        words = "not solved yet." if name in blank else verdict(getattr(mine, name), name)
        print(f"{name}: {words}", flush=True)


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="one of yours, which `make.py` beside this file makes")
    parser.add_argument("functions", nargs="*", help="of the file; none: all of them")
    words = parser.parse_args(argv)
    if not Path(words.file).is_file():
        parser.error(f"there is no file {words.file}")
    torch.set_num_threads(1)  # the inputs are small
    judge_file(words.file, words.functions)


if __name__ == "__main__":
    main()
