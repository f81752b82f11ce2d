"""What several tests share: the toy's base model, in a folder of its own.

And the options --solutions and --function, which test a student's files
(notebooks/exercises/make.py).
"""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch

from conformance.properties import speaks_of
from engine.model.loading import load_model
from notebooks.exercises.make import FILES, ROOT, TESTS, blank_ones, exercises
from tasks import toy
from tests.helpers.browser import CHROMIUM, Browser

torch.set_num_threads(1)
# no test asks the hub
os.environ["HF_HUB_OFFLINE"], huggingface_hub.constants.HF_HUB_OFFLINE = "1", True
sys.argv[0] = "train.py"  # the program whose commands are printed


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """A copy of the toy's base model in a folder: it answers, and now and then rightly."""
    folder = tmp_path_factory.mktemp("small")
    return str(shutil.copytree(toy.BASE, folder, dirs_exist_ok=True))


@pytest.fixture
def loaded(small):
    """(model, tokenizer), freshly loaded."""
    return load_model(small, torch.device("cpu"))


@pytest.fixture(scope="module")
def undrawn():
    """Runs leave out their picture, which takes longer than a few steps of the toy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.run.curves.curves", lambda *_: None)
        yield


@pytest.fixture(scope="module")
def chromium():
    if CHROMIUM is None:
        pytest.skip("no Chromium here to open the page")
    with Browser() as browser:
        yield browser


@pytest.fixture
def browser(chromium):
    """In a test no page of it may throw, or write to the console."""
    chromium.events.clear()
    yield chromium
    assert chromium.problems() == []


LONGEST = ("test_main_job", "test_notebooks", "test_ranks", "test_train", "test_checkpoint")


def pytest_collection_modifyitems(items, config):
    """The files that take longest come first (pytest-xdist keeps this order), so that both
    processes end together."""
    if config.getoption("solutions"):
        items[:] = of_a_student(items, config)
    items.sort(key=lambda item: item.path.stem not in LONGEST)


# --- the student's files ---


def pytest_addoption(parser):
    parser.addoption(
        "--solutions", metavar="FOLDER", help="test the exercises of this folder, and nothing else"
    )
    parser.addoption("--function", metavar="NAME", help="of these, test one function alone")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """A student's file is tested in a second: to start two more processes would take longer."""
    if config.getoption("solutions"):
        config.option.numprocesses, config.option.dist = 0, "no"
        config.option.reportchars += "s"  # which functions are not written yet


def pytest_configure(config):
    folder = config.getoption("solutions")
    if config.getoption("function") and not folder:
        raise pytest.UsageError("--function needs --solutions, the folder of your functions")
    if folder and not any((Path(folder) / file).is_file() for file in FILES):
        missing = "there is no exercise here; `python notebooks/exercises/make.py` makes them"
        raise pytest.UsageError(f"--solutions {folder}: {missing}")


def exercise(path, config):
    """The file of the exercise that a test file tests, relative to the folder of --solutions; None
    without one."""
    folder = config.getoption("solutions")
    if folder and path.parent == TESTS:  # test_grpo_advantages.py tests grpo.py
        found = [
            file for file in FILES
            if f"{path.stem}_".startswith(f"test_{file.stem}_") and (Path(folder) / file).is_file()
        ]
        return found[0] if found else None


def pytest_pycollect_makemodule(module_path, parent):
    if exercise(module_path, parent.config):
        return TestsOfAnExercise.from_parent(parent, path=module_path)


class TestsOfAnExercise(pytest.Module):
    """A test file that is imported while the student's file stands in for the one it tests, and for
    no other. In the place of a blank function stands the project's.

    functions: the names of all functions of the file. tested: of those that are the student's.
    """

    def collect(self):
        file, only = exercise(self.path, self.config), self.config.getoption("function")
        name = ".".join(file.with_suffix("").parts)  # family.gspo
        path, ours = Path(self.config.getoption("solutions")) / file, importlib.import_module(name)
        self.functions = [function.name for function in exercises((ROOT / file).read_text())]
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, name, module)
            spec.loader.exec_module(module)
            written = vars(module).keys() - blank_ones(path.read_text())
            self.tested = {only} if only else written.intersection(self.functions)
            for function in {*self.functions} - self.tested:
                setattr(module, function, getattr(ours, function))
            return super().collect()


def of_a_student(items, config):
    """The tests that speak of a student's functions. No other says anything about them."""
    mine = [item for item in items if item.getparent(TestsOfAnExercise)]
    only, found, solved = config.getoption("function"), [], False
    for item in mine:
        file = item.getparent(TestsOfAnExercise)
        about = [name for name in file.functions if speaks_of(item, name)]
        optional = item.get_closest_marker("ours") and "ours" not in config.option.markexpr
        if not about or only not in (None, *about) or optional:
            continue
        found.append(item)
        if file.tested.intersection(about):
            solved = True
        else:
            item.add_marker(pytest.mark.skip(reason=f"not solved yet: {', '.join(about)}"))
    if not found:
        missing = "`python notebooks/exercises/make.py` makes the files that are missing"
        raise pytest.UsageError(f"none of these tests is about a function of yours; {missing}")
    if not solved:
        raise pytest.UsageError("not solved yet: write one of the functions first")
    return found
