"""What NAT promises: a random prefix of each completion, and the whole gradient on average.

The order: the chances and the cuts by hand, the chances by enumeration of all cuts, the gradient
over all completions and cuts of a tiny policy, what is not computed, and rows at the edge. A loss
is linear in the weights of its tokens. So a token that is inside with the chance p, and then counts
1/p, has its whole gradient on average.
"""

import math
from fractions import Fraction

import pytest
import torch

from family.nat import prefix_chances, prefix_factors, random_prefixes
from grpo import grpo_loss
from tests.helpers.examples import (
    F64,
    TinyPolicy,
    mask_of,
)

SHARES = pytest.mark.parametrize("share", [0.0, 0.3, 1.0])


def every_cut(mask, share):
    """[(chance, which tokens are inside)]: all cuts of one completion, (1, T). The cut changes only
    where u passes a multiple of 1/n, n the number of cuts."""
    n = 60  # a multiple of each number of cuts here
    u = (torch.arange(n, dtype=F64)[:, None] + 0.5) / n
    cuts, times = random_prefixes(mask.expand(n, -1), u, share=share).unique(
        dim=0, return_counts=True)
    return [(count / n, inside[None]) for inside, count in zip(cuts, times.tolist())]


# --- by hand --------------------------------------------------------------------------------------


@pytest.mark.parametrize("share, chances", [
    (0.0, [1, 3 / 4, 1 / 2, 1 / 4, 1]), (0.5, [1, 1, 2 / 3, 1 / 3, 1])])
def test_the_chances_of_four_tokens(share, chances):
    found = prefix_chances(mask_of([4], width=5), share=share)
    torch.testing.assert_close(found, torch.tensor([chances]))


@pytest.mark.ours
@pytest.mark.parametrize("share", ["0", "0.07", "0.1", "0.3", "0.55", "0.9", "1"])
def test_the_shortest_prefix_is_exact_for_every_length(share):
    """m = ⌈share · |o|⌉ in fractions. In floats 0.07 · 100 is 7.000000000000001.

    So many tokens have the chance 1.
    """
    lengths = range(1, 1025)
    mask = mask_of(lengths)
    cuts = random_prefixes(mask, torch.zeros(1024, 1), share=float(share)).sum(1)
    certain = (prefix_chances(mask, share=float(share)) == 1) & mask
    shortest = [max(1, math.ceil(Fraction(share) * n)) for n in lengths]
    assert cuts.tolist() == certain.sum(1).tolist() == shortest


# --- over all cuts --------------------------------------------------------------------------------


@SHARES
def test_a_token_is_inside_as_often_as_its_chance_says(share):
    for length in range(1, 6):
        mask = mask_of([length], width=6)
        chance = sum(p * inside.to(F64) for p, inside in every_cut(mask, share))
        torch.testing.assert_close(chance, prefix_chances(mask, share=share).to(F64) * mask)


@pytest.mark.ours
def test_the_tokens_of_a_tool_are_not_counted():
    """A tool wrote the second and the third token: they never get a chance of their own."""
    mask = torch.tensor([[1, 0, 0, 1, 1, 0]])
    torch.testing.assert_close(
        prefix_chances(mask), torch.tensor([[1, 1, 1, 2 / 3, 1 / 3, 1]]))
    cuts = {tuple(inside[0].nonzero()[:, 0].tolist()) for _, inside in every_cut(mask, 0.0)}
    assert cuts == {(0,), (0, 3), (0, 3, 4)}


def gradient(loss, theta):
    return torch.autograd.grad(loss, theta, retain_graph=True)[0]


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_over_all_completions_and_cuts_of_a_tiny_policy_it_is_the_gradient_of_the_reward(share):
    """E_o E_c Σ_{t ≤ c} A ∇ log π(o_t) / p_t = ∇ E[A], as a sum over 15 completions and their cuts.
    """
    theta, mask = TinyPolicy.table(1).requires_grad_(), TinyPolicy.MASK
    P = TinyPolicy.probabilities(theta)
    logp, mean = TinyPolicy.logp(theta), 0.0
    for u in (torch.arange(6) + 0.5) / 6:  # completions have 1, 2 or 3 tokens
        factors = prefix_factors(mask, u.expand(15, 1), share=share)
        loss, _ = grpo_loss(
            logp, logp.detach(), TinyPolicy.REWARDS, factors > 0, beta=0.0,
            weights=P.detach()[:, None] * factors / 6)
        mean -= gradient(loss, theta)
    torch.testing.assert_close(mean, gradient((P * TinyPolicy.REWARDS).sum(), theta))


@pytest.mark.parametrize("share, expected", [(0.0, 20.5), (0.5, 30.0)])
def test_half_of_the_tokens_are_computed(share, expected):
    """A completion of n tokens keeps (n + 1) / 2 of them on average, and of a share s of them
    (n + ⌈s n⌉) / 2."""
    u = (torch.arange(840)[:, None] + 0.5) / 840
    assert random_prefixes(mask_of([40] * 840), u, share=share).sum() / 840 == expected


# --- rows at the edge -----------------------------------------------------------------------------


@pytest.mark.ours
def test_an_empty_row_keeps_nothing_and_gives_no_nan():
    mask = mask_of([0, 1], width=3)
    assert prefix_chances(mask).tolist() == [[1, 1, 1], [1, 1, 1]]
    assert random_prefixes(mask, torch.full((2, 1), 0.99)).sum(1).tolist() == [0, 1]
