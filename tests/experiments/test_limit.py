"""experiments/limit.py: the operations that it counts by hand, and what it says of a step."""

import json

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from experiments import limit


def test_operations_of_products_are_those_that_torch_counts():
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3, bias=False))
    x = torch.randn(4, 5, requires_grad=True)
    with FlopCounterMode(display=False) as counted, limit.Calls() as calls:
        (model(x).T @ model(x)).sum().backward()
    found = sum(limit.operations(call) * n for call, n in calls.found[None].items())
    assert found == counted.get_total_flops() > 0


def test_operations_of_attention_are_those_of_its_products():
    """Written out: q kᵀ and p v; backward: ∂v, ∂p, p again, ∂q and ∂k."""
    q = torch.randn(2, 3, 4, 8, requires_grad=True)
    k, v = (torch.randn(2, 3, 6, 8, requires_grad=True) for _ in range(2))
    with limit.Calls() as calls:
        scaled_dot_product_attention(q, k, v).sum().backward()
    one = 2 * (2 * 3) * 4 * 6 * 8
    found = {call[0]: limit.operations(call) for call in calls.found[None]}
    assert found == {limit.ATTENTION[0]: 2 * one, limit.ATTENTION[1]: 5 * one}


@pytest.mark.slow
def test_the_table_and_the_picture(tmp_path):
    limit.main(["--steps", "1", "--output", str(tmp_path)])
    found = json.loads((tmp_path / "limit.json").read_text())["found"]
    assert list(found) == ["toy, GRPO", "toy, CPPO"] and (tmp_path / "limit.png").stat().st_size
    for phases in found.values():
        for row in phases.values():
            # a completion's first token costs nothing in sampling: its prompt has computed it
            assert 0 < row["useful"] < 1.1 * row["product operations"]
            assert row["product seconds"] + row["attention seconds"] < 3 * row["seconds"]
