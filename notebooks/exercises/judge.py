"""Judges the exercises of the notebooks: `judge(my_prune)` runs the tests of the project's `prune`
with your function in its place, without their second part (make.py).

It prints "green", "not solved yet", or what the first failing test says.
"""

import importlib
import os
import sys
from unittest.mock import patch

import pytest

from conformance.properties import ALONE, About, stand_in
from notebooks.exercises.make import FILES, ROOT, TESTS, exercises

# {function: the project's file that holds it}
PLACES = {
    function.name: file
    for file in FILES
    for function in exercises((ROOT / file).read_text(encoding="utf-8"))
}


def judge(function):
    answers = []

    def watched(*args, **options):
        answer = function(*args, **options)
        answers.append(answer)
        return answer

    results = run(watched, function.__name__.removeprefix("my_"))
    failed = {test: why for test, (outcome, why) in results.items() if outcome == "failed"}
    if not failed:
        print("green")
    elif answers and all(answer is None for answer in answers):
        print(f"{function.__name__}: not solved yet.")
    else:
        test, why = next(iter(failed.items()))
        file, _, words = test.partition("::test_")
        sentence = words.partition("[")[0].replace("_", " ")
        print(f"{function.__name__}: {len(failed)} of {len(results)} tests fail.",
              f'The first one says: "{sentence}" ({file}).', why.split("\n")[0])


def run(function, name):
    """{test: (outcome, why)} of the tests that speak of the project's function with this name."""
    file, about = PLACES[name], About(name)
    module = importlib.import_module(".".join(file.with_suffix("").parts))
    files = [str(path) for path in sorted(TESTS.glob(f"test_{file.stem}*.py"))]
    # they are imported anew, so that they find this function in the module
    before = {name: sys.modules.pop(name) for name in [*sys.modules]
              if name.startswith("tests.concepts.test_")}
    replaced = patch.object(module, name, stand_in(function, getattr(module, name), about))
    alone = patch.dict(os.environ, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", PYTEST_ADDOPTS="")
    with replaced, alone:
        pytest.main([*ALONE, "-m", "not slow", *files], plugins=[about])
    sys.modules.update(before)
    return about.results
