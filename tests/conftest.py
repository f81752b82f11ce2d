"""What several tests share: one small model that has seen a little of the toy, in a folder, made once per session."""

import os

import huggingface_hub
import pytest
import torch

from engine.model.loading import load_model
from engine.tasks.toy_model import make_model, make_tokenizer, warm_start

torch.set_num_threads(1)
os.environ["HF_HUB_OFFLINE"], huggingface_hub.constants.HF_HUB_OFFLINE = "1", True  # no test asks the hub


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """Folder of a toy model after a short warm start: it answers, and now and then rightly."""
    folder = tmp_path_factory.mktemp("small")
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    warm_start(model, tokenizer, steps=80, batch_size=32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def loaded(small):
    """(model, tokenizer), freshly loaded."""
    return load_model(small, torch.device("cpu"))


LONGEST = ("test_main_job", "test_notebooks", "test_ranks", "test_train", "test_checkpoint")


def pytest_collection_modifyitems(items):
    """The files that take longest come first (pytest-xdist keeps this order), so that both processes end together."""
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))
