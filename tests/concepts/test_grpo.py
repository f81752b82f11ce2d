"""What the loss of GRPO promises: loss = −Σ weights · (min(ρA, clip(ρ)A) − β k3).

The order: the ratio and the clipped surrogate, the weights, the loss against a loop over tokens,
the exact expected gradient of a policy that is small enough to list, the first step, known
mistakes, and the statistics. The advantages have a file of their own, and so have the
log-probabilities with the KL estimators. Empty completions are in test_rare_numbers.py.
"""

import math

import pytest
import torch

from grpo import (
    clipped_surrogate,
    group_advantages,
    grpo_loss,
    importance_ratio,
    sequence_mean_weights,
    surrogate_loss,
)
from tests.helpers.examples import (
    ADVANTAGES,
    F64,
    LOGP,
    MASK,
    NOT_FINITE,
    OLD,
    PER_COMPLETION,
    RANDOM_WEIGHTS,
    REF,
    TinyPolicy,
    check_loss,
    mask_of,
    numeric_gradient,
    ours,
    per_completion,
    seeded,
)

# --- the ratio and the clipped surrogate: min(ρA, clip(ρ)A) ---------------------------------------


def test_the_ratio_is_that_of_the_probabilities():
    """0.6 / 0.4 and 0.1 / 0.4. The third token is padding."""
    logp, old_logp = torch.tensor([[[0.6, 0.1, 0.9]], [[0.4, 0.4, 0.2]]], dtype=F64).log()
    ratio = importance_ratio(logp, old_logp, mask_of([2], width=3))
    assert ratio[0, :2].tolist() == pytest.approx([1.5, 0.25])


QUADRANTS = pytest.mark.parametrize("ratio, A, clip, value, slope", [
    # min(ρA, clip(ρ)A), and its derivative in ρ
    (0.7, 2.0, (0.2, None), 1.4, 2.0),  # A > 0, below: the way back stays open
    (1.1, 2.0, (0.2, None), 2.2, 2.0),
    (1.5, 2.0, (0.2, None), 2.4, 0.0),  # A > 0, above: clipped
    (0.7, -2.0, (0.2, None), -1.6, 0.0),  # A < 0, below: clipped
    (0.9, -2.0, (0.2, None), -1.8, -2.0),
    (1.5, -2.0, (0.2, None), -3.0, -2.0),  # A < 0, above: the way back stays open
    (1.25, 1.0, (0.2, 0.28), 1.25, 1.0),  # clip-higher: a range of its own above
    (1.35, 1.0, (0.2, 0.28), 1.28, 0.0),
    (0.75, -1.0, (0.3, 0.1), -0.75, -1.0),
    (1.15, 1.0, (0.2, 0.0), 1.0, 0.0),  # 0 is a value, not None
    pytest.param(1.21, 1.0, (), 1.2, 0.0, marks=pytest.mark.ours),  # 0.2 by default
    pytest.param(1.5, 0.0, (), 0.0, 0.0, marks=pytest.mark.ours),
    pytest.param(1.0, 1.0, (0.2, 0.0), 1.0, 1.0, marks=pytest.mark.ours),  # just at the clip
])


@QUADRANTS
def test_the_clipped_surrogate_in_every_quadrant(ratio, A, clip, value, slope):
    """A known mistake: an inverted clip (max for min) has no gradient at ρ = 1.5 and A < 0. There
    the token must become less likely again, so its gradient must stay."""
    ratio = torch.tensor([[ratio]], dtype=F64, requires_grad=True)
    options = dict(zip(("clip_low", "clip_high"), clip))
    out = clipped_surrogate(ratio, torch.tensor([A], dtype=F64), **options)
    (gradient,) = torch.autograd.grad(out.sum(), ratio)
    assert (out.item(), gradient.item()) == pytest.approx((value, slope), abs=1e-12)


A = torch.tensor([1.0, -2.0, 0.5], dtype=F64)


@pytest.mark.parametrize("advantages", [A, A[:, None], A.outer(A)])
def test_an_advantage_may_be_that_of_a_completion_or_of_a_token(advantages):
    """(N,), (N, 1) and (N, T). N = T = 3, so a wrong broadcast raises no error."""
    ratio = 2 * torch.rand(3, 3, generator=seeded(10), dtype=F64)
    whole = advantages.view(3, -1).expand(3, 3)
    alone = clipped_surrogate(ratio.flatten(), whole.flatten())  # one ratio per completion
    torch.testing.assert_close(clipped_surrogate(ratio, advantages), alone.view(3, 3))


# --- the weights: 1 / (N |o_i|) -------------------------------------------------------------------


def test_the_weights_are_a_mean_over_tokens_and_then_over_completions():
    expected = torch.tensor([[1 / 6, 1 / 6, 0], [1 / 3, 0, 0], [1 / 9, 1 / 9, 1 / 9]])
    torch.testing.assert_close(
        sequence_mean_weights(mask_of([2, 1, 3])), expected, check_dtype=False)


# --- the loss -------------------------------------------------------------------------------------


def test_the_loss_of_two_completions_and_its_gradient_by_hand():
    """Ratios 1.5 and 1.1 with A = 1; ratio 1.5 with A = −2. The 9.0 stands on padding.

    −(½ (1.2 + 1.1) / 2 + ½ · 1.5 · (−2)) = 0.925, with one 1.5 clipped to 1.2. A known mistake is
    the loss −A log π. It has neither a ratio nor a clip: the gradient would be −¼, −¼ and 1.
    """
    logp = torch.tensor([[1.5, 1.1], [1.5, 9.0]]).log().requires_grad_()
    advantages = torch.tensor([1.0, -2.0])
    loss, _ = grpo_loss(logp, torch.zeros(2, 2), advantages, mask_of([2, 1]))
    assert loss.item() == pytest.approx(0.925)
    (gradient,) = torch.autograd.grad(loss, logp)
    torch.testing.assert_close(gradient, torch.tensor([[0, -1.1 / 4], [1.5, 0]]))


OPTIONS = pytest.mark.parametrize("options", [
    {"clip_low": 0.3}, {"clip_low": 0.2, "clip_high": 0.28}, {"clip_low": 0.3, "clip_high": 0.1},
    {"ref_logp": REF, "beta": 1.0}, {"ref_logp": REF, "beta": 0.0}, {"beta": 5.0},  # no KL term
    {"weights": RANDOM_WEIGHTS},
    *ours({"ref_logp": REF}),  # β is 0.04 and the clip 0.2 by default
    *ours({"ref_logp": torch.full((6, 5), -math.inf, dtype=F64), "beta": 0.0}),
])


@OPTIONS
def test_the_loss_and_its_gradient_equal_a_loop_over_tokens(options):
    """2402.03300 eq. 3, with the sign of a loss."""
    check_loss(grpo_loss, options, beta=0.04)


@pytest.mark.ours
def test_each_token_may_have_an_advantage_of_its_own():
    check_loss(grpo_loss, {}, advantages=ADVANTAGES.outer(A.repeat(2)[:5]))


@pytest.mark.parametrize("options", [
    {"clip_low": 0.1, "clip_high": 0.4}, {"clip_low": 0.2, "ref_logp": REF, "beta": 0.3},
    *ours({"ref_logp": REF}),  # the clip is 0.2, and there is no KL by default
])
def test_the_loss_of_the_family_takes_any_ratio_and_any_weights(options):
    def loss(logp, old_logp, advantages, mask, **options):
        ratio = (logp - old_logp).exp()
        return surrogate_loss(ratio, advantages, logp, mask, PER_COMPLETION, **options)

    check_loss(loss, options)


# --- the exact gradient: a sum over all completions of a tiny policy ------------------------------


@pytest.mark.parametrize("weight_of, baseline", [
    (lambda n: 1.0, 0.7), (lambda n: 1 / n, 0.0)])
def test_the_expected_gradient_is_that_of_the_expected_reward(weight_of, baseline):
    """With weight 1 on each token, E_π[∇loss] = −∇J with J(θ) = Σ_o π(o) r(o).

    The baseline in A = r − baseline changes nothing. With 1/|o| on each token, as in GRPO, it is
    the gradient of the mean of r/|o|: the length gets in. Dr. GRPO changes this.
    """
    theta, rewards = TinyPolicy.table(14).requires_grad_(), TinyPolicy.REWARDS
    of_length = torch.tensor([weight_of(n) for n in TinyPolicy.LENGTHS], dtype=F64)
    weights = of_length[:, None] * TinyPolicy.MASK
    gradient = TinyPolicy.expected_gradient(grpo_loss, theta, rewards - baseline, weights)
    J = lambda x: (TinyPolicy.probabilities(x) * rewards * of_length).sum()
    expected = numeric_gradient(J, theta.detach())
    torch.testing.assert_close(gradient, -expected, rtol=0, atol=1e-8)


def test_the_gradient_is_the_product_of_cppos_section_3_2():
    """∇loss = −Σ 1/(N|o|) [ρA·1(not clipped) + β(π_ref/π − 1)] ∇log π (2503.22342, section 3.2).

    The policy has moved since it sampled, so tokens lie on both sides of the clip, with both signs
    of A. ∇log π is a difference quotient. A clipped token keeps its KL term.
    """
    theta, A, beta = TinyPolicy.table(14), TinyPolicy.REWARDS[:, None], 0.3
    logp, old_logp, ref_logp = (TinyPolicy.logp(TinyPolicy.table(i), 0.0) for i in (14, 15, 16))
    rho, mask = (logp - old_logp).exp(), TinyPolicy.MASK
    low, high = mask & (rho < 0.8), mask & (rho > 1.2)
    assert all((side & (sign * A > 0)).any() for side in (low, high) for sign in (1, -1))
    clipped = high & (A > 0) | low & (A < 0)
    factor = rho * A * ~clipped + beta * ((ref_logp - logp).exp() - 1)
    J = lambda x: (per_completion(mask) * factor * TinyPolicy.logp(x, 0.0)).sum()
    theta.requires_grad_()
    loss, _ = grpo_loss(
        TinyPolicy.logp(theta), old_logp, A[:, 0], mask, ref_logp=ref_logp, beta=beta,
        clip_low=0.2)
    (gradient,) = torch.autograd.grad(loss, theta)
    torch.testing.assert_close(
        gradient, -numeric_gradient(J, theta.detach()), rtol=0, atol=1e-7)


# --- the first step: π_θ is still π_old -----------------------------------------------------------


def test_at_the_first_step_the_loss_is_0_and_its_gradient_is_the_policy_gradient():
    """The ratio is 1, so the loss is −mean of A over the completions, and this mean is 0.

    The gradient of each token is −A / (N |o|), and this is not 0. So a loss of 0 is not a bug.
    """
    rewards = torch.tensor([[1.0, 0.0, 0.0], [2.0, 1.5, 0.0]], dtype=F64)
    advantages, mask = group_advantages(rewards).flatten(), mask_of([4, 1, 2, 5, 3, 3])
    loss, _ = grpo_loss(LOGP, LOGP.detach(), advantages, mask)
    assert loss.item() == pytest.approx(0, abs=1e-7)
    expected = mask * (-advantages / (6 * mask.sum(1)))[:, None]
    torch.testing.assert_close(torch.autograd.grad(loss, LOGP)[0], expected, rtol=1e-6, atol=0)


# --- known mistakes -------------------------------------------------------------------------------


@pytest.mark.parametrize("junk", [100.0, *NOT_FINITE])
def test_what_stands_on_the_padding_changes_nothing(junk):
    check_loss(grpo_loss, {"ref_logp": REF, "beta": 0.1}, junk=junk, mask=MASK.long())


def test_the_eos_is_trained_and_nothing_behind_it():
    """The EOS is the last token of each completion. Without it the policy never learns to stop.

    A < 0 and all ratios are above 0.01, so nothing is clipped."""
    gradient = torch.autograd.grad(
        grpo_loss(LOGP, OLD, -torch.ones(6), MASK, clip_low=0.99)[0], LOGP)[0]
    assert torch.equal(gradient != 0, MASK)


def test_micro_batches_add_up_to_the_mean_and_not_to_a_mean_of_means():
    """A = +1, −1, −1 have the mean −1/3. Here the mean of the means of two parts would be 0."""
    mask, A, zero = mask_of([10, 990, 990]), torch.tensor([1.0, -1.0, -1.0]), torch.zeros(3, 990)
    weights, total = sequence_mean_weights(mask), 0
    for part in (slice(0, 1), slice(1, 3)):
        loss, _ = grpo_loss(zero[part], zero[part], A[part], mask[part], weights=weights[part])
        total += loss.item()
    assert total == pytest.approx(1 / 3, abs=1e-5)


# --- the statistics -------------------------------------------------------------------------------


@pytest.mark.ours
@pytest.mark.parametrize("share", [1.0, 0.1])
def test_the_statistics_by_hand(share):
    """Ratios 0.9, 0.7 (A > 0) and 0.5 (A < 0); weights 1/4, 1/4, 1/2, or a share of them, as in a
    micro-batch. The 9.0 are on padding, where the ratio is 1."""
    ratio = torch.tensor([[0.9, 0.7], [0.5, 9.0]], dtype=F64)
    r = torch.tensor([[2.0, 1.0], [0.5, 9.0]], dtype=F64)  # π_ref / π
    mask, A = mask_of([2, 1]), torch.tensor([1.0, -1.0])
    logp = ratio.log().requires_grad_()
    _, stats = grpo_loss(
        logp, torch.zeros(2, 2), A, mask, ref_logp=(ratio * r).log(),
        weights=share * sequence_mean_weights(mask))
    assert not any(x.requires_grad for x in stats.values())
    k3 = (2 - math.log(2) - 1) / 4 + (0.5 + math.log(2) - 1) / 2
    assert {name: x.item() for name, x in stats.items()} == pytest.approx({
        "ratio_mean": 0.9 / 4 + 0.7 / 4 + 0.5 / 2, "ratio_max": 0.9, "kl": k3,
        "clip_fraction": 1 / 2})


@pytest.mark.ours
@QUADRANTS
def test_the_clip_fraction_counts_only_tokens_that_lost_their_gradient(
    ratio, A, clip, value, slope
):
    one = torch.ones(1, 1)
    options = dict(zip(("clip_low", "clip_high"), clip))
    _, stats = grpo_loss((ratio * one).log(), 0 * one, A * one, one, **options)
    assert stats["clip_fraction"] == (A != 0 and slope == 0)
