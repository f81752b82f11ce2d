"""The benchmarks run, and what they measure holds: memory falls with k."""

import json
from pathlib import Path

import pytest
import torch

from engine.model import logprobs
from experiments import memory, plan, vs_trl
from experiments.library import rules

pytestmark = pytest.mark.slow


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells peak memory")
def test_memory(tmp_path, monkeypatch):
    small = {"VOCABULARY": 8192, "TOKENS": 64, "KEPT": [16, 2], "MOST_NAIVE": 16}
    for name, value in small.items():
        monkeypatch.setattr(memory, name, value)
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 2**20)
    memory.main(["--output", str(tmp_path)])
    result = json.loads((tmp_path / "memory.json").read_text())
    peak = {(row["k"], row["way"]): row["peak"] for row in result["points"]}
    assert peak[16, "default"] > 2 * peak[2, "default"]
    assert peak[16, "naive"] > 1.3 * peak[16, "default"]
    assert "| ours | " in (tmp_path / "memory.md").read_text()


ROWS = {
    memory: "| naive | – | – | 2,604 | 1,303 | 651 |",
    plan: "| LoRA | 1 | 151,552 | 15.8 / 16.1 | 28.0 / 28.3 | 10.8 | 12.6 | 12.0 | 12.6 | 0.99 |",
    vs_trl: "| 0.945 (0.935–0.957) | 0.659 (0.653–0.674) | 14.8 (14.6–15.0) | 3.70 (3.67–3.80) |",
}


@pytest.mark.parametrize("program", ROWS)
def test_a_page_says_what_is_stored(program):
    name = program.__name__.split(".")[-1]
    stored = Path(program.__file__).parent / f"results/{name}.json"
    assert ROWS[program] in program.page(json.loads(stored.read_text()))


def test_one_of_each_kind():
    A = torch.tensor([[0.5, -1.5, 0.5, 0.5], [0.0, 0.0, 0.0, 0.0], [-0.2, 0.1, 0.4, -0.3]])
    assert rules.distinct(None, A, 2).tolist() == [0, 1, 4, 10, 11]
    assert rules.distinct(None, A, 3).tolist() == [0, 1, 4, 8, 10, 11]
