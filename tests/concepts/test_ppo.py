"""What PPO promises: the critic turns one score per completion into an advantage for every token.

The order: the reward of each token, the advantages (GAE), whitening, the loss of the policy, the
loss of the critic, known mistakes, micro-batches, and input at the edge.
"""

import math
import statistics

import pytest
import torch

from family.ppo import gae, ppo_loss, token_rewards, value_loss, whiten
from tests.examples import F64, LENGTHS, NOT_FINITE, mask_of, seeded

MASK = mask_of(LENGTHS)
WHOLE = MASK / MASK.sum()  # the weights of a mean over the 14 tokens
TOKENS = [(i, t) for i, length in enumerate(LENGTHS) for t in range(length)]


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


@pytest.mark.parametrize("junk", [0.0, 50.0, *NOT_FINITE])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_the_token_rewards_equal_a_loop_and_ignore_the_padding(beta, junk):
    """The empty row has no token for its score of 100."""
    logp, ref_logp = tensors(0, 2)
    scores = torch.tensor([1.0, -2.0, 100.0, 0.5, 3.0, 0.0], dtype=F64)
    expected = torch.zeros(6, 5, dtype=F64)
    for i, t in TOKENS:
        score = scores[i] if t == LENGTHS[i] - 1 else 0
        expected[i, t] = -beta * (logp[i, t] - ref_logp[i, t]) + score
    dirty = logp.masked_fill(~MASK, junk)
    rewards = token_rewards(scores, dirty, ref_logp, MASK.long(), beta=beta)
    torch.testing.assert_close(rewards, expected, rtol=1e-6, atol=1e-6)


# --- the advantages -------------------------------------------------------------------------------


def test_with_lambda_1_the_advantage_is_the_return_minus_the_value():
    rewards, values = torch.tensor([[1.0, 2.0, 4.0, 9.0]]), torch.tensor([[10.0, 20.0, 30.0, 99.0]])
    mask = torch.tensor([[1, 1, 1, 0]])
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=1.0)
    assert returns.tolist() == [[1 + 2 / 2 + 4 / 4, 2 + 4 / 2, 4.0, 0.0]]
    assert advantages.tolist() == [[3.0 - 10, 4.0 - 20, 4.0 - 30, 0.0]]


def test_with_lambda_0_the_advantage_is_one_delta():
    rewards, values = torch.tensor([[1.0, 2.0, 4.0, 9.0]]), torch.tensor([[10.0, 20.0, 30.0, 99.0]])
    mask = torch.tensor([[1, 1, 1, 0]])
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=0.0)
    assert advantages.tolist() == [[1 + 20 / 2 - 10, 2 + 30 / 2 - 20, 4.0 - 30, 0.0]]
    assert returns.tolist() == [[11.0, 17.0, 4.0, 0.0]]


def gae_by_double_loop(rewards, values, gamma, lam):
    """A_t = Σ_l (γλ)^l δ_t+l with δ_t = r_t + γ V(s_t+1) − V(s_t). (1506.02438 eq. 16)"""
    advantages = torch.zeros(6, 5, dtype=F64)
    for i, t in TOKENS:
        for step in range(LENGTHS[i] - t):
            s = t + step
            value_after = values[i, s + 1] if s + 1 < LENGTHS[i] else 0.0
            delta = rewards[i, s] + gamma * value_after - values[i, s]
            advantages[i, t] += (gamma * lam) ** step * delta
    return advantages


@pytest.mark.parametrize("junk", [0.0, 9.0, *NOT_FINITE])
@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
@pytest.mark.parametrize("lam", [1.0, 0.95, 0.3, 0.0])
def test_gae_is_a_discounted_sum_of_deltas_and_ignores_the_padding(lam, gamma, junk):
    rewards, values = tensors(1, 2)
    dirty = rewards.masked_fill(~MASK, junk), values.masked_fill(~MASK, -junk)
    advantages, returns = gae(*dirty, MASK.long(), gamma=gamma, lam=lam)
    expected = gae_by_double_loop(rewards, values, gamma, lam)
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, (expected + values).masked_fill(~MASK, 0.0))


@pytest.mark.ours
def test_gamma_is_1_and_lambda_095_by_default():
    rewards, values = tensors(2, 2)
    expected = gae_by_double_loop(rewards, values, 1.0, 0.95)
    torch.testing.assert_close(gae(rewards, values, MASK)[0], expected)


def test_advantages_and_returns_have_no_gradient():
    rewards, values = (x.requires_grad_() for x in tensors(4, 2))
    assert not any(x.requires_grad for x in gae(rewards, values, MASK))


# --- whitening ------------------------------------------------------------------------------------


@pytest.mark.parametrize("junk", [0.0, 1e3, *NOT_FINITE])
def test_whitened_tokens_have_mean_0_and_std_1_and_the_padding_is_0(junk):
    x = tensors(5, 1, scale=3.0)[0] + 10
    own = x[MASK].tolist()
    mean, std = statistics.fmean(own), statistics.pstdev(own)
    white = whiten(x.masked_fill(~MASK, junk), MASK.long())
    assert white[MASK].tolist() == pytest.approx([(v - mean) / std for v in own], rel=1e-7)
    assert (white[~MASK] == 0).all()


def test_eps_is_added_to_the_variance():
    """The values ±2 have the variance 4; with 5 on top, √9 = 3."""
    x = torch.tensor([[2.0, -2.0]])
    assert whiten(x, torch.ones(1, 2), eps=5.0)[0].tolist() == pytest.approx([2 / 3, -2 / 3])


def test_tokens_that_are_all_equal_become_0():
    assert (whiten(torch.full((6, 5), 2.0), MASK) == 0).all()


@pytest.mark.parametrize("cut", [[1] * 6, [2, 4], [3, 2, 1]])
def test_micro_batches_are_whitened_like_the_whole_if_given_its_mean_and_variance(cut):
    (x,) = tensors(11, 1, scale=3.0)
    own = x[MASK].tolist()
    whole = {"mean": statistics.fmean(own), "variance": statistics.pvariance(own)}
    parts = [whiten(part, mask, **whole) for part, mask in zip(x.split(cut), MASK.split(cut))]
    torch.testing.assert_close(torch.cat(parts), whiten(x, MASK))


def test_a_given_mean_and_variance_are_used():
    white = whiten(torch.full((2, 3), 5.0), torch.ones(2, 3), mean=1.0, variance=4.0)
    assert (white == 2).all()


# --- the loss of the policy -----------------------------------------------------------------------


@pytest.mark.parametrize("low, high", [(0.2, None), (0.1, 0.4), (0.3, 0.1)])
def test_the_loss_and_its_gradient_equal_a_loop_over_tokens(low, high):
    """Every token has an advantage of its own. The mean is over all tokens, without padding."""
    old_logp, change, advantages = tensors(9, 3)
    logp = (old_logp + 0.5 * change).requires_grad_()
    dirty = old_logp.masked_fill(~MASK, -math.inf), advantages.masked_fill(~MASK, 1e6)
    loss, stats = ppo_loss(logp, *dirty, MASK.long(), clip_low=low, clip_high=high)
    loss.backward()
    expected, gradient, clips = 0.0, torch.zeros(6, 5, dtype=F64), [0, 0]
    high = low if high is None else high
    for i, t in TOKENS:
        ratio, a = math.exp(logp[i, t].item() - old_logp[i, t]), advantages[i, t].item()
        above, below = a > 0 and ratio > 1 + high, a < 0 and ratio < 1 - low
        clips = [clips[0] + above, clips[1] + below]
        expected -= (1 + high if above else 1 - low if below else ratio) * a / 14
        gradient[i, t] = -(0 if above or below else ratio) * a / 14
    assert min(clips) > 0  # the example is clipped on both sides
    assert stats["clip_fraction"] == pytest.approx(sum(clips) / 14)
    assert loss.item() == pytest.approx(expected, abs=1e-7)  # the weights are float32
    torch.testing.assert_close(logp.grad, gradient, rtol=1e-6, atol=1e-9)


@pytest.mark.ours
def test_the_clip_range_is_a_fifth_by_default():
    logp = torch.tensor([[1.19, 1.21, 0.81, 0.79]], dtype=F64).log()
    zero, one = torch.zeros(1, 4, dtype=F64), torch.ones(1, 4, dtype=F64)
    good, bad = (ppo_loss(logp, zero, advantages, one)[0].item() for advantages in (one, -one))
    assert good == pytest.approx(-(1.19 + 1.2 + 0.81 + 0.79) / 4)
    assert bad == pytest.approx((1.19 + 1.21 + 0.81 + 0.8) / 4)


@pytest.mark.ours
def test_the_kl_to_a_reference_is_reported_and_changes_nothing():
    """The KL is in the rewards already. The statistics give k3 = r − log r − 1, r = π_ref / π."""
    logp, old_logp, ref_logp, advantages = tensors(12, 4, scale=0.5)
    logp.requires_grad_()
    batch = logp, old_logp, advantages, MASK
    (loss, stats), (other, without) = (ppo_loss(*batch, ref_logp=ref) for ref in (ref_logp, None))
    r = [math.exp(ref_logp[at] - logp[at].item()) for at in TOKENS]
    assert stats["kl"] == pytest.approx(sum(x - math.log(x) - 1 for x in r) / 14)
    assert without["kl"] == 0 and loss == other
    assert torch.equal(*(torch.autograd.grad(x, logp)[0] for x in (loss, other)))


@pytest.mark.ours
def test_the_policy_that_sampled_gets_no_gradient():
    logp, old_logp = (x.requires_grad_() for x in tensors(10, 2))
    ppo_loss(logp, old_logp, torch.ones(6, 5), MASK)[0].backward()
    assert logp.grad is not None and old_logp.grad is None


# --- the loss of the critic -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "value, target, loss, gradient",
    [  # V_old = 1, clip 0.2
        (1.1, 2.0, 0.81 / 2, -0.9),  # inside the range: the plain square
        (1.5, 2.0, 0.64 / 2, 0.0),  # moved beyond 1.2 towards the target: no more gradient
        (0.5, 0.0, 0.64 / 2, 0.0),  # moved below 0.8
        (0.5, 2.0, 2.25 / 2, -1.5),  # moved the wrong way: the way back stays open
        (1.5, 0.0, 2.25 / 2, 1.5),
        (1.5, 1.3, 0.04 / 2, 0.2),  # moved past the target: its own square is the larger one
    ],
)
def test_the_loss_of_the_critic_is_half_the_larger_square(value, target, loss, gradient):
    value = torch.tensor([[value]], dtype=F64, requires_grad=True)
    old, target = torch.ones(1, 1, dtype=F64), torch.tensor([[target]], dtype=F64)
    out = value_loss(value, old, target, torch.ones(1, 1))
    out.backward()
    assert (out.item(), value.grad.item()) == pytest.approx((loss, gradient))


@pytest.mark.ours
def test_neither_the_old_values_nor_the_targets_get_a_gradient():
    value, old, target = (x.requires_grad_() for x in tensors(6, 3))
    value_loss(value, old, target, MASK).backward()
    assert value.grad is not None and old.grad is None and target.grad is None


@pytest.mark.parametrize("junk", [0.0, 1e6, *NOT_FINITE])
@pytest.mark.parametrize("clip", [0.1, 1.0])
def test_the_loss_of_the_critic_and_its_gradient_equal_a_loop_over_tokens(clip, junk):
    values, old, returns = tensors(7, 3)
    values.requires_grad_()
    dirty = old.masked_fill(~MASK, -junk), returns.masked_fill(~MASK, junk)
    loss = value_loss(values, *dirty, MASK.long(), clip=clip)
    loss.backward()
    expected, gradient = 0.0, torch.zeros(6, 5, dtype=F64)
    for at in TOKENS:
        v, o, r = (x[at].item() for x in (values, old, returns))
        bounded = min(max(v, o - clip), o + clip)
        expected += max((v - r) ** 2, (bounded - r) ** 2) / 2 / 14
        gradient[at] = 0 if (bounded - r) ** 2 > (v - r) ** 2 else (v - r) / 14
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(values.grad, gradient, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("junk", [1e6, *NOT_FINITE])
def test_what_the_critic_says_on_padding_changes_nothing(junk):
    values, old, returns = tensors(7, 3)
    dirty = values.masked_fill(~MASK, junk).requires_grad_()
    loss = value_loss(dirty, old, returns, MASK)
    loss.backward()
    assert loss == value_loss(values, old, returns, MASK)
    assert (dirty.grad[~MASK] == 0).all() and dirty.grad.isfinite().all()


# --- known mistakes -------------------------------------------------------------------------------


def test_the_targets_of_the_critic_come_from_raw_advantages_and_not_from_whitened_ones():
    """The best critic, V = R, has nothing to learn. Whitened targets would drive it away."""
    (rewards,) = tensors(3, 1)
    values = gae(rewards, torch.zeros(6, 5, dtype=F64), MASK, lam=1.0)[1]
    returns = gae(rewards, values, MASK)[1]
    torch.testing.assert_close(returns, values)
    assert value_loss(values, values, returns, MASK).item() == pytest.approx(0, abs=1e-12)


def test_a_critic_that_expects_7_too_much_is_told_so():
    """Its targets stay what they were. Whitened, the advantages of −7 would all be 0."""
    (rewards,) = tensors(3, 1)
    values = gae(rewards, torch.zeros(6, 5, dtype=F64), MASK, lam=1.0)[1]
    advantages, returns = gae(rewards, values + 7, MASK, lam=1.0)
    torch.testing.assert_close(returns, values)
    torch.testing.assert_close(advantages[MASK], torch.full((14,), -7.0, dtype=F64))


# --- micro-batches --------------------------------------------------------------------------------


def policy_loss(*batch, **options):
    return ppo_loss(*batch, **options)[0]


@pytest.mark.parametrize("loss", [policy_loss, value_loss])
@pytest.mark.parametrize("cut", [[1] * 6, [2, 4], [3, 2, 1]])
def test_micro_batches_add_up_to_the_whole(cut, loss):
    now, old, other = tensors(8, 3, scale=0.4)
    now.requires_grad_()
    rows = zip(*(x.split(cut) for x in (now, old, other, MASK, WHOLE)), strict=True)
    parts = sum(loss(*part, weights=own) for *part, own in rows)
    whole = loss(now, old, other, MASK)
    assert parts.item() == pytest.approx(whole.item(), rel=1e-6)
    torch.testing.assert_close(*(torch.autograd.grad(x, now)[0] for x in (parts, whole)))


# --- input at the edge ----------------------------------------------------------------------------


@pytest.mark.ours
def test_a_batch_without_tokens_has_loss_0_and_whitens_to_0():
    x, empty = torch.ones(2, 3), torch.zeros(2, 3)
    assert policy_loss(x, x, x, empty) == 0 and value_loss(x, 2 * x, x, empty) == 0
    assert (whiten(x, empty) == 0).all()
