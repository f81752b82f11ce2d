"""Judges your functions by the project's tests of them.

    python notebooks/exercises/judge.py notebooks/exercises/mine/cppo.py          each function
    python notebooks/exercises/judge.py notebooks/exercises/mine/cppo.py prune    this one alone

In a notebook `judge(my_prune)` does the same. Only one function is yours at a time: the tests call
the project's functions in all other places. The words are "green", "not solved yet", or what the
first failing test says.
"""

import argparse
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # the project's root

from conformance.properties import ALONE, About, stand_in
from notebooks.exercises.make import FILES, ROOT, TESTS, blank_ones, exercises

# {function: the project's file that holds it}
PLACES = {
    function.name: file
    for file in FILES
    for function in exercises((ROOT / file).read_text(encoding="utf-8"))
}


def judge(function):
    words = verdict(function, function.__name__.removeprefix("my_"))
    print(words if words == "green" else f"{function.__name__}: {words}")


def verdict(function, name):
    """What the tests of the project's function with this name say of a function, in words."""
    answers = []

    def watched(*args, **options):
        answer = function(*args, **options)
        answers.append(answer)
        return answer

    results = run(watched, name)
    failed = {test: why for test, (outcome, why) in results.items() if outcome == "failed"}
    if not failed:
        return "green"
    if answers and all(answer is None for answer in answers):
        return "not solved yet."
    test, why = next(iter(failed.items()))
    file, _, words = test.partition("::test_")
    sentence = words.partition("[")[0].replace("_", " ")
    first_line, *_ = why.split("\n")
    return (f"{len(failed)} of {len(results)} tests fail. The first one says: "
            f'"{sentence}" ({file}). {first_line}')


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


def main(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="one of yours, which `make.py` beside this file makes")
    parser.add_argument("functions", nargs="*", help="of the file; none: all of them")
    words = parser.parse_args(argv)
    if not Path(words.file).is_file():
        parser.error(f"there is no file {words.file}")
    judge_file(words.file, words.functions)


if __name__ == "__main__":
    main(sys.argv[1:])
