"""What MaxRL promises: with more samples of a question, the gradient of log p in place of p.

The order: small examples, the paper's theorem 2 and its algorithm by
enumeration over all groups of a tiny policy, and rewards at the edge.
"""

from itertools import product

import pytest
import torch

from family.maxrl import mean_normalized_advantages
from tests.helpers.examples import F64, seeded

# --- the definition -------------------------------------------------------------------------------


def test_small_examples():
    r = torch.tensor([[1.0, 0, 0, 0], [1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=F64)
    third = 1 / 3
    expected = [[3.0, -1, -1, -1], [third, third, -1, third], [0.0] * 4, [0.0] * 4]
    torch.testing.assert_close(mean_normalized_advantages(r), torch.tensor(expected, dtype=F64))


# --- the gradient, over all groups of a softmax policy over five answers --------------------------

RIGHT = torch.tensor([1.0, 0, 1, 0, 0], dtype=F64)  # two of the five answers are right
THETA = torch.randn(5, generator=seeded(4), dtype=F64)
P = THETA.softmax(0)
p = (P * RIGHT).sum()
SCORES = torch.eye(5, dtype=F64) - P  # ∇ log π(o) of each answer, (5, 5)
GRADIENT_OF_P = (P * RIGHT) @ SCORES


def series(order):
    """∇J_N = Σ_{k=1}^N (1−p)^(k−1) ∇p, the paper's eq. 8 differentiated."""
    return sum((1 - p) ** (k - 1) for k in range(1, order + 1)) * GRADIENT_OF_P


def expected(N, weight):
    """E of Σ_i weight(r)_i ∇ log π(o_i) over all 5^N groups of N answers."""
    total = torch.zeros(5, dtype=F64)
    for group in product(range(5), repeat=N):
        group = list(group)
        total += P[group].prod() * weight(RIGHT[group]) @ SCORES[group]
    return total


def over_the_right(r):
    return r / r.sum() if r.sum() else r


@pytest.mark.parametrize("N", [2, 3, 5])
def test_the_advantages_have_the_gradient_of_order_n_minus_1(N):
    """Theorem 2: the mean score of the right ones of N has the gradient of order N. The paper
    subtracts the mean score of all N, which is 0 on average, so it stays at order N. But its
    algorithm leaves out the groups without a right answer, which costs one order."""
    torch.testing.assert_close(expected(N, over_the_right), series(N))
    torch.testing.assert_close(expected(N, lambda r: over_the_right(r) - 1 / N), series(N))
    as_trained = lambda r: mean_normalized_advantages(r[None])[0] / N
    torch.testing.assert_close(expected(N, as_trained), series(N - 1))


# --- rewards at the edge --------------------------------------------------------------------------


def test_equal_rewards_and_a_mean_of_0_or_less_give_exact_zeros():
    r = torch.tensor([[1.0] * 7, [-1.0, 1, 0, 0, 0, 0, 0], [-1.0, 0, 0, 0, 0, 0, 0]])
    assert (mean_normalized_advantages(r) == 0).all()
