"""experiments/collapse.py: the guard is really lifted, and what counts as collapsed."""

import json
from pathlib import Path

import pytest

from engine.model import shards
from experiments import collapse
from experiments.library.bench import pm, spread


@pytest.mark.parametrize("guard", ["bare", collapse.GRADIENT_CLIP])
def test_only_one_row_clips_its_gradients(guard, tmp_path, monkeypatch):
    norms = []

    def spied(network, longest, clip=shards.clip_gradients):
        before = clip(network, longest)
        grads = [p.grad.norm() for p in network.parameters()]
        norms.append((before.item(), sum(g**2 for g in grads).sqrt().item()))
        return before

    monkeypatch.setattr(shards, "clip_gradients", spied)
    monkeypatch.setattr(collapse, "FOLDER", tmp_path)
    monkeypatch.setitem(collapse.BARE, "steps", 4)
    monkeypatch.setitem(collapse.BARE, "eval_questions", 8)
    collapse.of_guard(guard, 1e-4, 1)
    assert len(norms) > 8 and max(before for before, _ in norms) > 1.5
    for before, after in norms:
        expected = before if guard == "bare" else min(before, 1)
        assert after == pytest.approx(expected, rel=1e-3)


def test_the_edge_is_before_the_first_collapsed_run():
    good, bad = {"base": 0.4, "sampled": 0.41}, {"base": 0.4, "sampled": 0.39}
    assert collapse.has_collapsed(bad) and not collapse.has_collapsed(good)
    of_rates = {"0.1": [good, good], "0.2": [good, good], "0.3": [good, bad], "0.4": [good, good]}
    assert collapse.edge(of_rates) == "0.2"
    assert collapse.edge({"0.1": [bad, good]}) == "none"
    assert collapse.seeds_of([good, bad]) == "0.41 · **0.39**"


def test_the_page_says_what_was_stored():
    """The edge of each row and its accuracy at 0.0004, in the order of the page."""
    root = Path(__file__).parents[2]
    stored = json.loads((root / "experiments/results/collapse.json").read_text())
    section = (root / "docs/claims.md").read_text().split("and collapses\n")[1]
    lines = [line.split(" | ")[1:] for line in section.splitlines() if line.startswith("| ")][1:9]
    for line, runs in zip(lines, stored["rows"].values(), strict=True):
        accuracy = pm(spread([run["sampled"] for run in runs["0.0004"]]))
        assert line == [collapse.edge(runs), f"{accuracy} |"]
