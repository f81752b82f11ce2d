"""Runs the concept tests that speak about one function, with somebody's function in its place."""

import functools
import importlib
import importlib.util
import os
import re
import sys
from pathlib import Path
from types import CodeType, FunctionType

import pytest
import torch

from conformance.theirs import LeftOut

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
# in a checkout they lie beside this folder; `pip install` puts them into it
TESTS = HERE / "tests" if (HERE / "tests").is_dir() else ROOT / "tests"
PROJECT = ("grpo", "cppo", "allocate", "family", "tests", "conformance")
ALONE = ["--noconftest", "-c", os.devnull, "--rootdir", str(ROOT), "-W", "ignore"]
ALONE += [word for plugin in ("terminal", "cacheprovider", "faulthandler", "unraisableexception")
          for word in ("-p", f"no:{plugin}")]
ALONE += ["-o", "verbosity_assertions=2"]  # no list is cut short

# its first call imports half a second of torch: here, before the processes are forked
torch.testing.assert_close(torch.zeros(1), torch.zeros(1))


def forget():
    """Make Python import the project's modules anew: one of them has a function of theirs."""
    for name in [*sys.modules]:
        if any(name == ours or name.startswith(ours + ".") for ours in PROJECT):
            del sys.modules[name]


def import_tests():
    """`tests` is our folder, whichever folders of this name lie elsewhere."""
    if "tests" in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(
        "tests", TESTS / "__init__.py", submodule_search_locations=[str(TESTS)])
    sys.modules["tests"] = importlib.util.module_from_spec(spec)


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


def speaks_of(item, name):
    """Whether a test is about a function: it uses its name, or has the function as a parameter."""
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    parameters = [getattr(value, "__name__", "") for value in values]
    return name in parameters or mentions(item.function, name)


class About:
    """A plugin of pytest: only the tests about one function. results: {test: (outcome, why)}.

    collected: whether the tests run. Before, when their files are imported, ours is called.
    """

    def __init__(self, name):
        self.name, self.results, self.collected = name, {}, False

    def pytest_collection_modifyitems(self, items):
        items[:] = [item for item in items if speaks_of(item, self.name)
                    and not item.get_closest_marker("ours")]
        self.collected = True

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            crash = getattr(report.longrepr, "reprcrash", None)
            why = crash.message if crash else str(report.longrepr or "")
            self.results[report.nodeid] = report.outcome, why


def stand_in(theirs, ours, about):
    """Their function as the tests call it; a test that it cannot be asked is skipped."""

    @functools.wraps(ours)
    def function(*args, **options):
        if not about.collected:
            return ours(*args, **options)
        try:
            return theirs(*args, **options)
        except LeftOut as error:
            pytest.skip(str(error))

    return function


def tested(module, name, theirs):
    """Run the concept tests about a function with theirs in its place: {test: (outcome, why)}."""
    about, speaks = About(name), re.compile(rf"\b{name}\b")
    files = [str(path) for path in sorted((TESTS / "concepts").glob("test_*.py"))
             if speaks.search(path.read_text(encoding="utf-8"))]
    forget()
    import_tests()
    place = importlib.import_module(module)
    setattr(place, name, stand_in(theirs, getattr(place, name), about))
    # plugins and options of other packages have no business here, and may break every run
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ.pop("PYTEST_ADDOPTS", None)
    os.environ.pop("PYTEST_PLUGINS", None)
    code = pytest.main([*ALONE, *files], plugins=[about]) if files else 0
    if code not in (0, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise RuntimeError(f"pytest could not run {', '.join(files)}")
    return about.results
