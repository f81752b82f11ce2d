"""What PPO promises: the critic turns one score per completion into an advantage for every token.

The order: the reward of each token, the advantages (GAE), whitening, the loss of the policy, the
loss of the critic, and a known mistake.
"""

import statistics

import pytest
import torch

from family.ppo import gae, ppo_loss, token_rewards, value_loss, whiten
from tests.helpers.examples import (
    F64,
    MASK,
    NOT_FINITE,
    OLD,
    ONE_EMPTY,
    RANDOM_WEIGHTS,
    REF,
    assert_loss,
    check_loss,
    either_mask,
    numeric_gradient,
    ours,
    seeded,
)

TOKEN_MEAN = MASK / MASK.sum().double()  # the weights of a mean over the 14 tokens


def tensors(seed, count, scale=1.0):
    """(6, 5) float64 each."""
    generator = seeded(seed)
    return [scale * torch.randn(6, 5, generator=generator, dtype=F64) for _ in range(count)]


# --- the reward of each token ---------------------------------------------------------------------


def test_each_token_pays_for_its_kl_and_the_last_one_earns_the_score():
    """log π − log π_ref is 1, 2 and 3, and β is 0.1. The third token is padding."""
    logp, zero, mask = torch.tensor([[1.0, 2.0, 3.0]]), torch.zeros(1, 3), torch.tensor([[1, 1, 0]])
    rewards = token_rewards(torch.tensor([5.0]), logp, zero, mask, beta=0.1)
    torch.testing.assert_close(rewards, torch.tensor([[-0.1, 5 - 0.2, 0.0]]))


@either_mask
@pytest.mark.parametrize("junk", [50.0, *NOT_FINITE])
def test_the_token_rewards_equal_a_loop_and_ignore_the_padding(junk, mask):
    """An empty row has no token for its score of 100."""
    scores = torch.tensor([1.0, -2.0, 100.0, 0.5, 3.0, 0.0], dtype=F64)
    expected = torch.zeros(6, 5, dtype=F64)
    for i, t in mask.nonzero().tolist():
        score = scores[i] if t == mask[i].sum() - 1 else 0
        expected[i, t] = -0.1 * (OLD[i, t] - REF[i, t]) + score
    rewards = token_rewards(scores, OLD.masked_fill(~mask, junk), REF, mask.long(), beta=0.1)
    torch.testing.assert_close(rewards, expected, rtol=1e-6, atol=1e-6)


# --- the advantages -------------------------------------------------------------------------------


def test_the_advantage_is_the_return_minus_the_value():
    """λ = 1 and γ = ½. The 9 and the 99 stand on padding."""
    rewards, values = torch.tensor([[1.0, 2.0, 4.0, 9.0]]), torch.tensor([[10.0, 20.0, 30.0, 99.0]])
    advantages, returns = gae(rewards, values, torch.tensor([[1, 1, 1, 0]]), gamma=0.5, lam=1.0)
    assert returns.tolist() == [[1 + 2 / 2 + 4 / 4, 2 + 4 / 2, 4, 0]]
    assert advantages.tolist() == [[3 - 10, 4 - 20, 4 - 30, 0]]


@either_mask
@pytest.mark.parametrize("junk", [9.0, *NOT_FINITE])
@pytest.mark.parametrize("options", [
    {"lam": 0.3, "gamma": 0.9}, {"lam": 0.0, "gamma": 0.5}, *ours({})])
def test_gae_is_a_discounted_sum_of_deltas_and_ignores_the_padding(options, junk, mask):
    """A_t = Σ_l (γλ)^l δ_t+l with δ_t = r_t + γ V(s_t+1) − V(s_t). (1506.02438 eq. 16)

    γ is 1 and λ 0.95 by default.
    """
    rewards, values = tensors(1, 2)
    dirty = [rewards.masked_fill(~mask, junk), values.masked_fill(~mask, -junk)]
    gamma, lam = options.get("gamma", 1.0), options.get("lam", 0.95)
    expected = torch.zeros(6, 5, dtype=F64)
    for i, length in enumerate(mask.sum(1).tolist()):
        V = [*values[i, :length].tolist(), 0.0]
        deltas = [rewards[i, t] + gamma * V[t + 1] - V[t] for t in range(length)]
        for t in range(length):
            expected[i, t] = sum((gamma * lam) ** n * x for n, x in enumerate(deltas[t:]))
    advantages, returns = gae(*dirty, mask.long(), **options)
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, (expected + values).masked_fill(~mask, 0.0))


@pytest.mark.ours
def test_tokens_of_a_tool_are_passed_over():
    """The row of five tokens stands in seven columns, and a tool has written two of them."""
    own, five = torch.tensor([[1, 1, 0, 1, 0, 1, 1]]).bool(), torch.ones(1, 5)
    narrow = [x[:1] for x in tensors(4, 3)]
    wide = [torch.full((1, 7), 9.0, dtype=F64).masked_scatter(own, x) for x in narrow]

    def all_of(rewards, logp, values, mask):
        paid = token_rewards(torch.tensor([3.0]), logp, 0 * logp, mask, beta=0.1)
        return [paid, *gae(rewards, values, mask, gamma=0.9)]

    for x, expected in zip(all_of(*wide, own), all_of(*narrow, five)):
        torch.testing.assert_close(x[own], expected[0])
        assert not x[~own].any()


def test_advantages_and_returns_are_targets_without_a_gradient():
    rewards, values = (x.requires_grad_() for x in tensors(10, 2))
    advantages, returns = gae(rewards, values, MASK)
    assert not advantages.requires_grad and not returns.requires_grad, "a gradient flows through"


# --- whitening ------------------------------------------------------------------------------------


@either_mask
@pytest.mark.parametrize("junk", [1e3, *NOT_FINITE])
def test_whitened_tokens_have_mean_0_and_std_1_and_the_padding_is_0(junk, mask):
    x = tensors(5, 1, scale=3.0)[0] + 10
    own = x[mask].tolist()
    mean, std = statistics.fmean(own), statistics.pstdev(own)
    white = whiten(x.masked_fill(~mask, junk), mask.long())
    assert white[mask].tolist() == pytest.approx([(v - mean) / std for v in own], rel=1e-7)
    assert (white[~mask] == 0).all()


def test_tokens_that_are_all_equal_become_0():
    assert (whiten(torch.full((6, 5), 2.0), MASK) == 0).all()


@pytest.mark.ours
def test_a_part_of_a_batch_is_whitened_with_the_mean_and_the_variance_of_the_whole():
    """(5 − 1) / √(4 + 5): eps is added to the variance."""
    white = whiten(torch.full((2, 3), 5.0), torch.ones(2, 3), mean=1.0, variance=4.0, eps=5.0)
    torch.testing.assert_close(white, torch.full((2, 3), 4 / 3))


# --- the loss of the policy -----------------------------------------------------------------------


@pytest.mark.parametrize("options", [
    {"clip_low": 0.2}, {"clip_low": 0.1, "clip_high": 0.4}, {"weights": RANDOM_WEIGHTS},
    *ours({"ref_logp": REF}),  # the KL is in the rewards already: it is only reported
])
def test_the_loss_and_its_gradient_equal_a_loop_over_tokens(options):
    """Every token has an advantage of its own. The mean is over all tokens, without padding."""
    (advantages,) = tensors(9, 1)
    check_loss(
        ppo_loss, options, weights=TOKEN_MEAN, advantages=advantages, junk=50.0, mask=MASK.long())


@pytest.mark.ours
def test_only_the_critic_gets_a_gradient_and_not_what_sampled_or_the_targets():
    values, old, returns = (x.requires_grad_() for x in tensors(10, 3))
    value_loss(values, old, returns, MASK).backward()
    assert values.grad.any() and old.grad is None and returns.grad is None


# --- the loss of the critic -----------------------------------------------------------------------


@pytest.mark.parametrize("value, target, loss, slope", [  # V_old = 1, clip 0.2
    (1.1, 2.0, 0.81 / 2, -0.9),  # inside the range: the plain square
    (1.5, 2.0, 0.64 / 2, 0.0),  # moved beyond 1.2 towards the target: no more gradient
    (0.5, 0.0, 0.64 / 2, 0.0),  # moved below 0.8
    (0.5, 2.0, 2.25 / 2, -1.5),  # moved the wrong way: the way back stays open
    (1.5, 1.3, 0.04 / 2, 0.2),  # moved past the target: its own square is the larger one
])
def test_the_loss_of_the_critic_is_half_the_larger_square(value, target, loss, slope):
    one = torch.ones(1, 1, dtype=F64)
    value = (value * one).requires_grad_()
    assert_loss(value_loss(value, one, target * one, one), (loss, slope * one), value)


@either_mask
@pytest.mark.parametrize("junk", [1e6, *NOT_FINITE])
@pytest.mark.parametrize("options", [{"clip": 0.1}, {"weights": RANDOM_WEIGHTS * ONE_EMPTY}])
def test_the_loss_of_the_critic_and_its_gradient_equal_the_formula(options, junk, mask):
    """½ Σ w max((V − R)², (clip(V) − R)²)."""
    values, old, returns = tensors(7, 3)
    clip, weights = options.get("clip", 0.2), options.get("weights", mask / mask.sum().double())

    def by_hand(values):
        v, o, r = (x[mask] for x in (values, old, returns))
        bounded = torch.minimum(torch.maximum(v, o - clip), o + clip)
        worse = torch.maximum((v - r) ** 2, (bounded - r) ** 2)
        return (weights[mask] * worse).sum().item() / 2

    own = values.masked_fill(~mask, junk).requires_grad_()
    dirty = old.masked_fill(~mask, -junk), returns.masked_fill(~mask, junk)
    loss = value_loss(own, *dirty, mask.long(), **options)
    assert_loss(loss, (by_hand(values), numeric_gradient(by_hand, values)), own)


# --- a known mistake ------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [0, 7])
def test_the_targets_of_the_critic_come_from_raw_advantages_and_not_from_whitened_ones(error):
    """The best critic, V = R, has nothing to learn, and one that expects 7 too much is told so.

    Whitened targets would drive the first away. Whitened, the advantages of −7 would all be 0.
    """
    (rewards,) = tensors(3, 1)
    values = gae(rewards, torch.zeros(6, 5, dtype=F64), MASK, lam=1.0)[1]
    advantages, returns = gae(rewards, values + error, MASK, lam=1.0)
    torch.testing.assert_close(returns, values)
    torch.testing.assert_close(advantages[MASK], torch.full((14,), -float(error), dtype=F64))
