"""experiments/collapse.py: the guard is really lifted, and what counts as collapsed."""

import pytest

from engine.model import shards
from experiments import collapse


@pytest.mark.parametrize("guard", ["bare", collapse.GRADIENT_CLIP])
def test_only_one_row_clips_its_gradients(guard, tmp_path, monkeypatch):
    norms = []

    def spied(network, longest, clip=shards.clip_gradients):
        before = clip(network, longest)
        grads = [p.grad.norm() for p in network.parameters()]
        norms.append((before.item(), sum(g**2 for g in grads).sqrt().item()))
        return before

    monkeypatch.setattr(shards, "clip_gradients", spied)
    monkeypatch.setitem(collapse.BARE, "steps", 4)
    monkeypatch.setitem(collapse.BARE, "eval_questions", 8)
    collapse.of_guard(tmp_path / "run", (guard, "0.0001"), 1)
    assert len(norms) > 8 and max(before for before, _ in norms) > 1.5
    for before, after in norms:
        expected = before if guard == "bare" else min(before, 1)
        assert after == pytest.approx(expected, rel=1e-3)


def test_a_collapsed_run_goes_on_from_its_model(tmp_path, monkeypatch):
    """The base of such a run is the toy's; `before` is what the collapsed model can do."""
    asked, known = [], {"base": 0.4, "sampled": 0.1}
    monkeypatch.setattr(collapse, "train_or_read", lambda folder, options, clipped: (
        asked.append((options["model"], clipped)) or {"base": 0.1, "sampled": 0.2}))
    monkeypatch.setattr(collapse, "figures", lambda folder: known)
    run = collapse.of_back(tmp_path, ("healthy", "0.001"), 2)
    assert run == {"base": 0.4, "before": 0.1, "sampled": 0.2}
    collapse.of_back(tmp_path, ("bare, 0.0001", "0.001"), 2)
    bare = str(collapse.WITH_GUARDS.place("bare, 0.001", 2))
    assert asked == [(bare, True), (bare, False)]


def test_the_edge_is_before_the_first_collapsed_run():
    def row(*sampled):
        return {"sampled": {"values": sampled}, "base": {"values": [0.4, 0.3]}}

    rows = {f"x, {rate}": row(0.41, 0.31) for rate in collapse.RATES}
    rows["x, 0.0003"] = row(0.41, 0.29)  # the next rates are safe again
    assert collapse.edge(rows, "x") == "0.0002"
    rows["x, 0.0001"] = row(0.39, 0.31)
    assert collapse.edge(rows, "x") == "none"
    assert collapse.seeds_of(row(0.41, 0.29)) == "0.41 · **0.29**"
