"""The benchmarks run, and what they measure holds: memory falls with k."""

from pathlib import Path

import pytest
import torch

from experiments import memory, vs_trl
from experiments.library import rules
from tests.helpers.runs import json_of
from tests.helpers.training import at_pace

pytestmark = pytest.mark.slow


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells peak memory")
def test_memory(tmp_path, monkeypatch):
    small = {"VOCABULARY": 8192, "TOKENS": 64, "KEPT": [16, 2], "MOST_NAIVE": 16}
    for name, value in small.items():
        monkeypatch.setattr(memory, name, value)
    at_pace(monkeypatch, chunk_elements=2**20)
    memory.main(["--output", str(tmp_path)])
    result = json_of(tmp_path / "memory.json")
    peak = {(row["k"], row["way"]): row["peak"] for row in result["points"]}
    assert peak[16, "default"] > 2 * peak[2, "default"]
    assert peak[16, "naive"] > 1.3 * peak[16, "default"]
    assert "| ours | " in (tmp_path / "memory.md").read_text()


PAGES = {
    "memory": memory, "vs_trl": vs_trl, "vs_trl_mu2": vs_trl, "vs_trl_prompt150": vs_trl,
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_what_is_stored(name):
    stored = Path(memory.__file__).parent / f"results/{name}.json"
    result = json_of(stored)
    page = PAGES[name].page(result)
    assert page == stored.with_suffix(".md").read_text()


def test_one_of_each_kind():
    A = torch.tensor([[0.5, -1.5, 0.5, 0.5], [0.0, 0.0, 0.0, 0.0], [-0.2, 0.1, 0.4, -0.3]])
    assert rules.distinct(None, A, 2).tolist() == [0, 1, 4, 10, 11]
    assert rules.distinct(None, A, 3).tolist() == [0, 1, 4, 8, 10, 11]
