"""What unbiased pruning promises: k completions of each question, and GRPO's gradient on average.

The order: the chances, the expectation by enumeration, and rows at the edge.
"""

import pytest
import torch

from family.unbiased import chances, draw, weighed
from grpo import group_advantages
from tests.examples import F64, seeded

RIGHT = torch.tensor([[1], [5], [8], [15]])  # how many of 16 are right
BINARY = group_advantages((torch.arange(16) < RIGHT).to(F64))
RANDOM = torch.randn(4, 16, generator=seeded(0), dtype=F64)
ADVANTAGES = pytest.mark.parametrize("A", [BINARY, RANDOM], ids=["binary", "random"])
F = torch.randn(16, 3, generator=seeded(5), dtype=F64)  # a gradient of three parameters


def test_the_chances_are_in_proportion_up_to_1():
    p = chances(torch.tensor([[3.0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]], dtype=F64), 2)
    third = 1 / 3
    expected = [[1.0, third, third, third], [0.5] * 4, [0.5] * 4]
    torch.testing.assert_close(p, torch.tensor(expected, dtype=F64))


@ADVANTAGES
@pytest.mark.parametrize("k", [1, 2, 4, 8, 16])
def test_the_chances_add_up_to_k_and_keep_the_order(A, k):
    p = chances(A.abs(), k)
    torch.testing.assert_close(p.sum(1), torch.full((4,), float(k), dtype=F64))
    for row, a in zip(p, A.abs()):
        ratio = (row / a)[row < 1]
        torch.testing.assert_close(ratio, ratio[:1].expand(len(ratio)))
        assert (row <= 1).all()


def every_draw(p):
    """[(width, draw)]: all outcomes of the draws of one row, p: (G,). They change only where a
    point u, u + 1, … meets the end of an interval."""
    ends = sorted({0.0, 1.0, *(x % 1 for x in p.cumsum(0).tolist())})
    between = zip(ends, ends[1:])
    return [(b - a, draw(p[None], torch.tensor([[(a + b) / 2]]))[0]) for a, b in between]


@ADVANTAGES
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_over_all_draws_the_weighed_mean_of_the_kept_is_the_mean_of_all(A, k):
    """Whatever f a completion has: Σ over the kept of A k/(G p) f / k is Σ over all of A f / G."""
    for a in A:
        p = chances(a.abs()[None], k)
        counts, mean, chance = weighed(a[None], p)[0], 0.0, torch.zeros(16, dtype=F64)
        for width, kept in every_draw(p[0]):
            assert kept.sum() == k or width < 1e-9
            mean += width * ((counts * kept) @ F) / k
            chance += width * kept
        torch.testing.assert_close(mean, a @ F / 16, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(chance, p[0], rtol=1e-6, atol=1e-9)


def test_cppos_choice_is_biased():
    """The same mean for the largest |A|: without it, the tests above would say nothing."""
    kept = RANDOM.abs().argsort(1, descending=True)[:, :4]
    mean = torch.stack([a[rows] @ F[rows] / 4 for a, rows in zip(RANDOM, kept)])
    assert ((mean - RANDOM @ F / 16).norm(dim=1) > 0.1).all()


def test_a_row_with_few_that_may_be_kept_keeps_only_these():
    p = chances(torch.tensor([[0.0, 2, 0, 1]], dtype=F64), 3)
    assert p.tolist() == [[0.0, 1.0, 0.0, 1.0]]
    assert draw(p, torch.tensor([[0.3]])).tolist() == [[False, True, False, True]]
