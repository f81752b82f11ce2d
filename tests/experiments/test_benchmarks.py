"""The benchmarks run, and what they measure holds: memory falls with k, weights are those of the
losses."""

import json
from functools import partial
from pathlib import Path
from statistics import median

import pytest
import torch

from cppo import batch_rows, prune
from experiments import gradients, memory, plan, vs_trl
from experiments.library import rules
from family.dapo import token_mean_weights
from family.drgrpo import constant_weights
from grpo import group_advantages, sequence_mean_weights
from tests.training import at_pace

pytestmark = pytest.mark.slow


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells peak memory")
def test_memory(tmp_path, monkeypatch):
    small = {"VOCABULARY": 8192, "TOKENS": 64, "KEPT": [16, 2], "MOST_NAIVE": 16}
    for name, value in small.items():
        monkeypatch.setattr(memory, name, value)
    at_pace(monkeypatch, chunk_elements=2**20)
    memory.main(["--output", str(tmp_path)])
    result = json.loads((tmp_path / "memory.json").read_text())
    peak = {(row["k"], row["way"]): row["peak"] for row in result["points"]}
    assert peak[16, "default"] > 2 * peak[2, "default"]
    assert peak[16, "naive"] > 1.3 * peak[16, "default"]
    assert "| ours | " in (tmp_path / "memory.md").read_text()


PAGES = {
    "memory": memory, "plan": plan, "vs_trl": vs_trl, "vs_trl_mu2": vs_trl,
    "vs_trl_prompt150": vs_trl,
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_what_is_stored(name):
    stored = Path(memory.__file__).parent / f"results/{name}.json"
    result = json.loads(stored.read_text(encoding="utf-8"))
    page = PAGES[name].page(result)
    assert page == stored.with_suffix(".md").read_text(encoding="utf-8")
    for row in result.get("rows", []):
        assert f"| {row['name']} | {row['devices']} | {row['trained']:,} |" in page
    for row in result.get("points", []):
        assert row["way"] == "whole" or f" {row['peak'] / 1e6:,.0f} |" in page
    for name, steps in result.get("seconds", {}).items():
        middle = median(step["total"] for step in steps)
        assert f"| {vs_trl.NAMES[name]} | {vs_trl.PER_STEP[name]} | {middle:.3f} (" in page


# --- the gradient of the kept ---


def test_the_divisors_are_those_of_the_losses_and_the_inner_products_give_the_cosine():
    rng = torch.Generator().manual_seed(0)
    A = group_advantages(torch.rand(4, 16, generator=rng))
    lengths = torch.randint(1, 9, (4, 16), generator=rng)
    of_each = torch.randn(4, 16, 50, generator=rng)
    mask = torch.arange(48) < lengths[:, :, None]
    written = {
        "1/|o|": sequence_mean_weights, "token mean": token_mean_weights,
        "constant": partial(constant_weights, max_tokens=48),
    }
    figures = gradients.measure(of_each.flatten(0, 1), A, lengths.float(), 1, 0)

    def gradient(those, token_weights):
        weights = A[those].flatten() * token_weights(mask[those].flatten(0, 1))[:, 0]
        return weights @ of_each[those].flatten(0, 1)

    for divisor, token_weights in written.items():
        own, other = (gradient(those, token_weights) for those in ([0, 1], [2, 3]))
        if divisor == "token mean":  # of GRPO's steps, one question each
            other = gradient([2], token_weights) + gradient([3], token_weights)
        # the step has both questions of its half
        cosine = figures["P = 0.875: cosine of a step", gradients.ALL, divisor]
        assert cosine == pytest.approx(torch.cosine_similarity(own, other, dim=0).item(), abs=1e-4)
    weights = partial(gradients.step_weights, A=A[None], lengths=lengths[None].float())
    rows = batch_rows(prune(A, 2), 16)  # only the kept ones count
    kept = weights(gradients.CPPO, 2, "token mean").flatten()
    right = A.flatten()[rows] * token_mean_weights(mask.flatten(0, 1)[rows])[:, 0]
    torch.testing.assert_close(kept[rows], right)
    assert kept.count_nonzero() == 8
    group = weights("random", 16, "group's mean", rng=rng)
    assert group[0, 0, 3] == pytest.approx(A[0, 3] / lengths[0].float().mean() / 64)


@pytest.mark.parametrize("name", ["importance, weighted", "random"])
def test_the_mean_of_many_draws_is_the_gradient_of_all(name):
    right = torch.arange(16) < torch.tensor([1, 5, 8, 15])[:, None]
    A, rng = group_advantages(right.float()), torch.Generator().manual_seed(0)
    times, advantages = gradients.METHODS[name](A.expand(20_000, 4, 16), 2, rng)
    drawn = times * advantages
    assert (times.sum(2) == 2).all()
    assert ((drawn.mean(0) - A / 8).abs() <= 5 * drawn.std(0) / 20_000**0.5 + 1e-6).all()


def test_one_of_each_kind():
    A = torch.tensor([[0.5, -1.5, 0.5, 0.5], [0.0, 0.0, 0.0, 0.0], [-0.2, 0.1, 0.4, -0.3]])
    assert rules.distinct(None, A, 2).tolist() == [0, 1, 4, 10, 11]
    assert rules.distinct(None, A, 3).tolist() == [0, 1, 4, 8, 10, 11]
