"""What several tests share: the toy's base model, in a folder of its own."""

import os
import shutil
import sys

import huggingface_hub.constants
import pytest
import torch

from engine.model.loading import load_model
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
        patch.setattr("engine.report.curves.curves", lambda *_: None)
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


def pytest_configure(config):
    """With `-n 2` each of two processes takes whole files, because the tests of a file share what
    they make."""
    if getattr(config.option, "dist", None) == "load":
        config.option.dist = "loadfile"
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items):
    """The files that take longest come first (pytest-xdist keeps this order), so that both
    processes end together."""
    items.sort(key=lambda item: item.path.stem not in LONGEST)
