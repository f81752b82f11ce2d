"""What unbiased pruning promises: k completions of each question, and GRPO's gradient on average.

The order: the chances, the expectation by enumeration, of one question and of two in one batch,
and rows at the edge.
"""

import pytest
import torch

from family.unbiased import draw, keep_probabilities, reweighted
from grpo import group_advantages, sequence_mean_weights
from tests.helpers.examples import F64, ours, seeded

RIGHT = torch.tensor([[1], [5], [8], [15]])  # how many of 16 are right
BINARY = group_advantages((torch.arange(16) < RIGHT).to(F64))
RANDOM = torch.randn(4, 16, generator=seeded(0), dtype=F64)
ADVANTAGES = pytest.mark.parametrize("A", [BINARY, RANDOM], ids=["binary", "random"])
F = torch.randn(16, 3, generator=seeded(5), dtype=F64)  # a gradient of three parameters


def test_the_chances_are_in_proportion_up_to_1():
    p = keep_probabilities(torch.tensor([[3.0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]], dtype=F64), 2)
    third = 1 / 3
    expected = [[1.0, third, third, third], [0.5] * 4, [0.5] * 4]
    torch.testing.assert_close(p, torch.tensor(expected, dtype=F64))


@ADVANTAGES
@pytest.mark.parametrize("k", [1, 4, 16])
def test_the_chances_add_up_to_k_and_keep_the_order(A, k):
    p = keep_probabilities(A.abs(), k)
    torch.testing.assert_close(p.sum(1), torch.full((4,), float(k), dtype=F64))
    for row, a in zip(p, A.abs()):
        ratio = (row / a)[row < 1]
        torch.testing.assert_close(ratio, ratio[:1].expand(len(ratio)))
        assert (row <= 1).all()


def every_draw(p):
    """[(width, draw)]: all outcomes of the draws of one row, p: (G,). They change only where a
    point u, u + 1, … meets the end of an interval, counted from the left or from the right."""
    inside = p.cumsum(0).tolist()
    ends = sorted({0.0, 1.0, *(sign * x % 1 for x in inside for sign in (1, -1))})
    between = zip(ends, ends[1:])
    return [(b - a, draw(p[None], torch.tensor([[(a + b) / 2]]))[0]) for a, b in between]


@ADVANTAGES
@pytest.mark.parametrize("k", [1, 2, 8])
def test_over_all_draws_the_weighed_mean_of_the_kept_is_the_mean_of_all(A, k):
    """Whatever f a completion has: Σ over the kept of A k/(G p) f / k is Σ over all of A f / G."""
    for a in A:
        p = keep_probabilities(a.abs()[None], k)
        counts, mean, chance = reweighted(a[None], p)[0], 0.0, torch.zeros(16, dtype=F64)
        for width, kept in every_draw(p[0]):
            assert kept.sum() == k or width < 1e-9
            mean += width * ((counts * kept) @ F) / k
            chance += width * kept
        torch.testing.assert_close(mean, a @ F / 16, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(chance, p[0], rtol=1e-6, atol=1e-9)


# --- two questions in one batch, whose loss divides by the number of all kept completions ---

# of four completions 4, 3, 2 and 0 have an advantage other than 0
FOUR, THREE, TWO, NONE = [0, 0.1, 0.3, 1], [0, 0, 0.75, 0.25], [0, 0.5, 0.5, 1], [1, 1, 1, 1]


def expected_coefficients(A, k, allowed):
    """(Q·G,): what each completion's mean over its tokens counts in the loss, over all draws.

    The draws of two questions are independent. As in a step, kept completions that are not allowed
    are left out, and the loss divides by the number of the others.
    """
    p = keep_probabilities(A.abs(), k, allowed=allowed)
    counts, expected = reweighted(A, p).flatten(), torch.zeros(A.numel(), dtype=F64)
    for width, first in every_draw(p[0]):
        for other_width, second in every_draw(p[1]):
            rows = (torch.cat([first, second]) & allowed.flatten()).nonzero()[:, 0]
            weights = sequence_mean_weights(torch.ones(len(rows), 3)).sum(1).to(F64)
            expected[rows] += width * other_width * weights * counts[rows]
    return expected


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("rewards", [(FOUR, TWO), (THREE, NONE), (TWO, TWO), (NONE, NONE)], ids=str)
@pytest.mark.parametrize("allowed", [[1, 1, 1, 1], *ours([1, 0, 0, 0])])
def test_two_questions_have_grpos_coefficients_on_average(rewards, k, allowed):
    """GRPO counts each completion A / (2·4), whatever the other question looks like.

    If some of the first question may not be trained on, the coefficients are GRPO's times one
    number: both count each completion A, divided by how many completions they train on.
    """
    A = group_advantages(torch.tensor(rewards, dtype=F64))
    allowed = torch.tensor([allowed, [1, 1, 1, 1]]).bool()
    kept = allowed.sum(1).clamp(max=k).sum()  # of both questions, in each draw
    expected = expected_coefficients(A, k, allowed)
    torch.testing.assert_close(
        expected, k / 4 * (A * allowed).flatten() / kept, rtol=1e-6, atol=1e-9)


# --- rows at the edge ---


@pytest.mark.parametrize("allowed, expected", [
    ([1, 1, 1, 1], [0.5, 1, 0.5, 1]),
    pytest.param([0, 1, 1, 1], [0, 1, 1, 1], marks=pytest.mark.ours),
    pytest.param([0, 1, 0, 0], [2 / 3, 1, 2 / 3, 2 / 3], marks=pytest.mark.ours),
])
def test_places_that_are_left_are_shared_by_those_without_a_score_then_by_those_not_allowed(
    allowed, expected
):
    p = keep_probabilities(torch.tensor([[0.0, 2, 0, 1]]), 3, allowed=torch.tensor([allowed]))
    assert p[0].tolist() == pytest.approx(expected)
    assert draw(p, torch.tensor([[0.3]])).sum() == 3
