"""The benchmarks say what is stored, and a rule of theirs keeps one completion of each kind."""

from pathlib import Path

import pytest
import torch

from experiments import vs_trl
from experiments.library import rules
from tests.helpers.runs import json_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["vs_trl", "vs_trl_mu2", "vs_trl_prompt150"])
def test_a_page_says_what_is_stored(name):
    stored = Path(vs_trl.__file__).parent / f"results/{name}.json"
    assert vs_trl.page(json_of(stored)) == stored.with_suffix(".md").read_text()


def test_one_of_each_kind():
    A = torch.tensor([[0.5, -1.5, 0.5, 0.5], [0.0, 0.0, 0.0, 0.0], [-0.2, 0.1, 0.4, -0.3]])
    assert rules.distinct(None, A, 2).tolist() == [0, 1, 4, 10, 11]
    assert rules.distinct(None, A, 3).tolist() == [0, 1, 4, 8, 10, 11]
