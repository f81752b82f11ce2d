"""What the loss of GRPO promises: loss = −Σ weights · (min(ρA, clip(ρ)A) − β k3).

The order: the clipped surrogate, the weights, the loss against a loop over tokens, the exact
expected gradient of a policy that is small enough to list, the first step, known mistakes, the
statistics, and input at the edge. The advantages have a file of their own, and so have the
log-probabilities with the KL estimators.
"""

import math

import pytest
import torch

from grpo import (
    clipped_surrogate,
    group_advantages,
    grpo_loss,
    kl_k3,
    sequence_mean_weights,
)
from tests.examples import (
    ADVANTAGES,
    F64,
    LENGTHS,
    NOT_FINITE,
    TinyPolicy,
    by_loop,
    example,
    kl_of,
    mask_of,
    numeric_gradient,
    seeded,
)

MASK = mask_of(LENGTHS)


def run(logp, old_logp, ref_logp, mask, advantages=ADVANTAGES, **options):
    """Loss, gradient on logp, stats, with β = 0.1."""
    logp = logp.detach().clone().requires_grad_()
    loss, stats = grpo_loss(
        logp, old_logp, advantages, mask, ref_logp=ref_logp, **{"beta": 0.1} | options
    )
    loss.backward()
    return loss.item(), logp.grad, {name: x.item() for name, x in stats.items()}


# --- the clipped surrogate: min(ρA, clip(ρ)A) -----------------------------------------------------


@pytest.mark.parametrize(
    "ratio, advantage, clip, value, gradient",
    [
        # clip (low, high)         min(ρA, clip(ρ)A)   d/dρ
        (0.7, 2.0, (0.2, None), 1.4, 2.0),  # A > 0, below: the way back stays open
        (0.9, 2.0, (0.2, None), 1.8, 2.0),
        (1.0, 2.0, (0.2, None), 2.0, 2.0),
        (1.1, 2.0, (0.2, None), 2.2, 2.0),
        (1.5, 2.0, (0.2, None), 2.4, 0.0),  # A > 0, above: clipped
        (0.7, -2.0, (0.2, None), -1.6, 0.0),  # A < 0, below: clipped
        (0.9, -2.0, (0.2, None), -1.8, -2.0),
        (1.0, -2.0, (0.2, None), -2.0, -2.0),
        (1.1, -2.0, (0.2, None), -2.2, -2.0),
        (1.5, -2.0, (0.2, None), -3.0, -2.0),  # A < 0, above: the way back stays open
        (1.5, 0.0, (0.2, None), 0.0, 0.0),
        (0.5, 0.0, (0.2, None), 0.0, 0.0),
        (1.25, 1.0, (0.2, 0.28), 1.25, 1.0),  # clip-higher: a range of its own above
        (1.35, 1.0, (0.2, 0.28), 1.28, 0.0),
        (0.75, -1.0, (0.2, 0.28), -0.8, 0.0),
        (0.75, -1.0, (0.3, 0.1), -0.75, -1.0),
        (1.15, 1.0, (0.3, 0.1), 1.1, 0.0),
        (1.25, 1.0, (0.3, None), 1.25, 1.0),  # clip_high=None means clip_low
        (1.35, 1.0, (0.3, None), 1.3, 0.0),
        (1.15, 1.0, (0.2, 0.0), 1.0, 0.0),  # 0 is a value, not None
    ],
)
def test_the_clipped_surrogate_in_every_quadrant(ratio, advantage, clip, value, gradient):
    ratio = torch.tensor([[ratio]], dtype=F64, requires_grad=True)
    advantage = torch.tensor([advantage], dtype=F64)
    out = clipped_surrogate(ratio, advantage, clip_low=clip[0], clip_high=clip[1])
    out.backward(torch.ones_like(out))
    assert out.item() == pytest.approx(value, abs=1e-12)
    assert ratio.grad.item() == pytest.approx(gradient, abs=1e-12)


@pytest.mark.ours
def test_the_clip_range_is_a_fifth_by_default():
    ratio, one = torch.tensor([[1.19, 1.21, 0.81, 0.79]], dtype=F64), torch.ones(1, dtype=F64)
    good, bad = clipped_surrogate(ratio, one)[0], clipped_surrogate(ratio, -one)[0]
    assert good.tolist() == pytest.approx([1.19, 1.2, 0.81, 0.79])
    assert bad.tolist() == pytest.approx([-1.19, -1.21, -0.81, -0.8])


@pytest.mark.parametrize("tokens", [1, 3, 4])
def test_one_advantage_per_completion_counts_for_all_its_tokens(tokens):
    """(N,), (N, 1) and (N, T) mean the same. If T = N = 3, a wrong broadcast raises no error."""
    ratio = torch.rand(3, tokens, generator=seeded(10), dtype=F64) * 2
    advantages = torch.tensor([1.0, -2.0, 0.5], dtype=F64)
    expected = [
        [min(r * a, min(max(r, 0.8), 1.2) * a) for r in row]
        for row, a in zip(ratio.tolist(), advantages.tolist(), strict=True)
    ]
    column = advantages[:, None]
    for form in (advantages, column, column.expand(3, tokens).clone()):
        out = clipped_surrogate(ratio, form)
        assert out.shape == (3, tokens)
        torch.testing.assert_close(out, torch.tensor(expected, dtype=F64))


def test_each_token_may_have_an_advantage_of_its_own():
    ratio = torch.tensor([[1.5, 1.5, 0.5]], dtype=F64)
    out = clipped_surrogate(ratio, torch.tensor([[1.0, -1.0, -2.0]], dtype=F64))
    assert out[0].tolist() == pytest.approx([1.2, -1.5, -1.6])


def test_there_may_be_one_ratio_per_completion():
    ratio = torch.tensor([1.5, 0.5, 1.5], dtype=F64)
    out = clipped_surrogate(ratio, torch.tensor([1.0, -1.0, -1.0], dtype=F64))
    assert out.tolist() == pytest.approx([1.2, -0.8, -1.5])


# --- the weights: 1 / (N |o_i|) -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32, torch.bfloat16])
def test_the_weights_are_a_mean_over_tokens_and_then_over_completions(dtype):
    """The empty row weighs nothing, and it still counts in N = 3."""
    weights = sequence_mean_weights(mask_of([2, 1, 0], width=3).to(dtype))
    assert weights.dtype == torch.float32
    expected = torch.tensor([[1 / 6, 1 / 6, 0], [1 / 3, 0, 0], [0, 0, 0]])
    torch.testing.assert_close(weights, expected)


def test_num_sequences_is_the_divisor_if_the_mask_is_only_a_part_of_the_batch():
    mask = mask_of([3, 1, 0, 2, 3])
    parts = [sequence_mean_weights(part, num_sequences=5) for part in mask.split([1, 4])]
    assert torch.equal(torch.cat(parts), sequence_mean_weights(mask))


# --- the loss -------------------------------------------------------------------------------------


def test_the_loss_of_two_completions_by_hand():
    """Ratios 1.5 and 1.0 with A = 1; ratio 0.5 with A = −2. The 9.0 stands on padding.

    −(½ (1.2 + 1.0) / 2 + ½ · 0.8 · (−2)) = 0.25, with 1.5 clipped to 1.2 and 0.5 clipped to 0.8.
    """
    ratio = torch.tensor([[1.5, 1.0], [0.5, 9.0]])
    advantages = torch.tensor([1.0, -2.0])
    loss, _ = grpo_loss(ratio.log(), torch.zeros(2, 2), advantages, mask_of([2, 1]))
    assert loss.item() == pytest.approx(0.25)


@pytest.mark.parametrize("clip_low, clip_high", [(0.2, None), (0.2, 0.28), (0.3, 0.1)])
@pytest.mark.parametrize("beta", [None, 0.04, 1.0])
def test_the_loss_and_its_gradient_equal_a_loop_over_tokens(beta, clip_low, clip_high):
    """2402.03300 eq. 3, with the sign of a loss."""
    logp, old_logp, ref_logp = example()
    kl_term = {} if beta is None else {"ref_logp": ref_logp, "beta": beta}
    clip = {"clip_low": clip_low, "clip_high": clip_high}
    loss, stats = grpo_loss(logp, old_logp, ADVANTAGES, MASK, **clip, **kl_term)
    loss.backward()
    expected, gradient = by_loop(
        logp.detach(), old_logp, ref_logp, weight=lambda length: 1 / (6 * length), low=clip_low,
        high=clip_low if clip_high is None else clip_high, beta=beta or 0.0,
    )
    assert stats["clip_fraction"] > 0.1  # the example does clip
    assert loss.item() == pytest.approx(expected, abs=1e-7)  # the weights are float32
    torch.testing.assert_close(logp.grad, gradient, rtol=1e-6, atol=1e-9)


def loss_by_loop(beta):
    logp, old_logp, ref_logp = example()
    weight = lambda length: 1 / (6 * length)
    return by_loop(
        logp.detach(), old_logp, ref_logp, weight=weight, low=0.2, high=0.2, beta=beta
    )[0]


@pytest.mark.ours
def test_beta_is_004_and_the_clip_02_by_default():
    logp, old_logp, ref_logp = example()
    loss, _ = grpo_loss(logp, old_logp, ADVANTAGES, MASK, ref_logp=ref_logp)
    assert loss.item() == pytest.approx(loss_by_loop(beta=0.04), abs=1e-7)


FAR = torch.full((6, 5), -9.0, dtype=F64)


@pytest.mark.parametrize("options", [{}, {"beta": 5.0}, {"beta": 0.0, "ref_logp": FAR}])
def test_without_a_reference_or_with_beta_0_the_loss_has_no_kl_term(options):
    logp, old_logp, _ = example()
    loss, stats = grpo_loss(logp, old_logp, ADVANTAGES, MASK, **options)
    assert loss.item() == pytest.approx(loss_by_loop(beta=0.0), abs=1e-7)
    assert (stats["kl"] > 0) == ("ref_logp" in options)  # the statistics still report it


@pytest.mark.parametrize("per_token", [False, True])
def test_advantages_per_token_give_the_same_loss_and_stats(per_token):
    advantages = ADVANTAGES[:, None].expand(6, 5) if per_token else ADVANTAGES[:, None]
    loss, gradient, stats = run(*example(), MASK, advantages)
    expected_loss, expected_gradient, expected_stats = run(*example(), MASK)
    assert loss == expected_loss and stats == expected_stats
    assert torch.equal(gradient, expected_gradient)


@pytest.mark.ours
def test_only_the_current_policy_gets_a_gradient():
    logp, old_logp, ref_logp = (x.detach().requires_grad_() for x in example())
    grpo_loss(logp, old_logp, ADVANTAGES, MASK, ref_logp=ref_logp)[0].backward()
    assert logp.grad is not None and old_logp.grad is None and ref_logp.grad is None


# --- the exact gradient: a sum over all completions of a tiny policy ------------------------------


THETA = TinyPolicy.table(14)


def test_the_tiny_policy_is_a_distribution():
    assert TinyPolicy.probabilities(THETA).sum().item() == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("baseline", [0.0, 0.7, -3.0])
def test_the_expected_gradient_is_that_of_the_expected_reward(baseline):
    """With weight 1 on each token, E_π[∇loss] = −∇J with J(θ) = Σ_o π(o) r(o).

    The baseline in A = r − baseline changes nothing.
    """
    theta, rewards = THETA.clone().requires_grad_(), TinyPolicy.REWARDS
    one = TinyPolicy.MASK.double()
    gradient = TinyPolicy.expected_gradient(grpo_loss, theta, rewards - baseline, one)
    expected = numeric_gradient(lambda x: (TinyPolicy.probabilities(x) * rewards).sum(), THETA)
    torch.testing.assert_close(gradient, -expected, rtol=0, atol=1e-8)


def test_the_weights_of_grpo_have_a_length_bias():
    """With weight 1/|o| on each token, E_π[∇loss] = −∇ Σ_o π(o) A(o)/|o|. Dr. GRPO changes this."""
    theta, rewards = THETA.clone().requires_grad_(), TinyPolicy.REWARDS
    weights = sequence_mean_weights(TinyPolicy.MASK, num_sequences=1).double()
    gradient = TinyPolicy.expected_gradient(grpo_loss, theta, rewards, weights)
    per_token = rewards / torch.tensor(TinyPolicy.LENGTHS, dtype=F64)
    expected = numeric_gradient(lambda x: (TinyPolicy.probabilities(x) * per_token).sum(), THETA)
    torch.testing.assert_close(gradient, -expected, rtol=0, atol=1e-7)


def test_the_expected_gradient_of_the_kl_term():
    """The KL term's part of E_π[∇loss] is β Σ_prefix d(prefix) ∇KL(π_ref(·|prefix) ‖ π(·|prefix)).

    d(prefix) is the probability to reach the prefix under π. It is held fixed, as samples are.
    """
    theta, ref, beta = THETA.clone().requires_grad_(), TinyPolicy.table(15), 0.3
    gradient = TinyPolicy.expected_gradient(
        grpo_loss, theta, torch.zeros(15, dtype=F64), TinyPolicy.MASK.double(),
        ref_logp=TinyPolicy.logp(ref), beta=beta,
    )
    pi, row_of = THETA.softmax(1), TinyPolicy.PREFIXES.index
    for row, prefix in enumerate(TinyPolicy.PREFIXES):
        steps = [pi[row_of(prefix[:t]), token].item() for t, token in enumerate(prefix)]
        kl_gradient = numeric_gradient(lambda x, row=row: kl_of(ref[row], x), THETA[row])
        expected = beta * math.prod(steps) * kl_gradient
        torch.testing.assert_close(gradient[row], expected, rtol=0, atol=1e-8)


# --- the first step: π_θ is still π_old -----------------------------------------------------------

SIX = [4, 1, 2, 5, 3, 3]


def test_at_the_first_step_the_loss_is_0_and_its_gradient_is_the_policy_gradient():
    """The ratio is 1, so the loss is −mean of A over the completions, and this mean is 0.

    The gradient of each token is −A / (N |o|), and this is not 0. So a loss of 0 is not a bug.
    """
    logp = -torch.rand(6, 5, generator=seeded(12), dtype=F64)
    rewards = torch.tensor([[1.0, 0.0, 0.0], [2.0, 1.5, 0.0]], dtype=F64)
    advantages = group_advantages(rewards).flatten()
    loss, gradient, stats = run(logp, logp, None, mask_of(SIX), advantages)
    assert loss == pytest.approx(0, abs=1e-7)
    for i, length in enumerate(SIX):
        expected = [-advantages[i].item() / (6 * length)] * length + [0.0] * (5 - length)
        assert gradient[i].tolist() == pytest.approx(expected, rel=1e-6)
    assert stats["ratio_mean"] == pytest.approx(1)
    assert stats["clip_fraction"] == 0 and stats["ratio_max"] == 1


def test_at_the_first_step_the_loss_is_beta_times_the_kl():
    logp, _, ref_logp = example()
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0, -2.0], dtype=F64)
    loss, _, stats = run(logp, logp, ref_logp, mask_of(SIX), advantages)
    k3 = kl_k3(logp.detach(), ref_logp)
    means = [k3[i, :length].mean().item() for i, length in enumerate(SIX)]
    assert stats["kl"] == pytest.approx(sum(means) / 6, rel=1e-6)
    assert loss == pytest.approx(0.1 * stats["kl"], rel=1e-5)


# --- known mistakes -------------------------------------------------------------------------------


def test_the_clip_is_not_inverted_for_negative_advantages():
    """A < 0 and ρ = 1.5: the token must become less likely again, so its gradient must stay.

    An inverted clip, max for min, gives −1.2 and no gradient.
    """
    ratio = torch.tensor([[1.5]], dtype=F64, requires_grad=True)
    out = clipped_surrogate(ratio, -torch.ones(1, dtype=F64))
    out.backward(torch.ones_like(out))
    assert out.item() == -1.5 and ratio.grad.item() == -1


def test_after_an_update_the_ratio_and_the_clip_matter():
    """The loss −A log π has neither: its gradient would be −A = −1 on all three tokens."""
    logp = torch.tensor([[0.5, 1.1, 1.5]], dtype=F64).log().requires_grad_()
    loss, _ = grpo_loss(logp, torch.zeros(1, 3), torch.ones(1, dtype=F64), torch.ones(1, 3))
    loss.backward()
    assert (3 * logp.grad[0]).tolist() == pytest.approx([-0.5, -1.1, 0.0])


@pytest.mark.ours
def test_the_ratio_is_new_over_old_and_not_the_other_way_round():
    logp, old_logp = torch.tensor([[0.6]]).log(), torch.tensor([[0.5]]).log()
    _, stats = grpo_loss(logp, old_logp, torch.ones(1), mask_of([1]))
    assert stats["ratio_mean"] == pytest.approx(1.2, rel=1e-6)


@pytest.mark.parametrize("junk", [0.0, -50.0, 100.0, *NOT_FINITE])
@pytest.mark.parametrize("where", ["logp", "old_logp", "ref_logp", "all three"])
def test_what_stands_on_the_padding_changes_nothing(where, junk):
    clean = example()
    dirty = [
        x.masked_fill(~MASK, junk) if where in (name, "all three") else x
        for name, x in zip(("logp", "old_logp", "ref_logp"), clean, strict=True)
    ]
    loss, gradient, stats = run(*clean, MASK)
    dirty_loss, dirty_gradient, dirty_stats = run(*dirty, MASK)
    assert dirty_loss == loss and dirty_stats == stats
    assert torch.equal(dirty_gradient, gradient)  # NaN equals nothing: so all are finite
    assert (gradient[~MASK] == 0).all()


def test_more_padding_changes_nothing():
    widen = torch.nn.functional.pad
    wide = [widen(x, (0, 7), value=3.0) for x in example()]
    loss, gradient, stats = run(*example(), MASK)
    wide_loss, wide_gradient, wide_stats = run(*wide, widen(MASK, (0, 7)))
    assert wide_loss == pytest.approx(loss, rel=1e-12)
    assert wide_stats == pytest.approx(stats, rel=1e-6)
    torch.testing.assert_close(wide_gradient[:, :5], gradient)
    assert (wide_gradient[:, 5:] == 0).all()


def test_the_eos_is_trained_and_nothing_behind_it():
    """The EOS is the last token of each completion. Without it the policy never learns to stop."""
    _, gradient, _ = run(*example(), MASK)
    for i, length in enumerate(LENGTHS):
        assert length == 0 or gradient[i, length - 1] != 0
        assert (gradient[i, length:] == 0).all()


MASK_10_990_990 = mask_of([10, 990, 990])


def test_micro_batches_add_up_to_the_mean_and_not_to_a_mean_of_means():
    """A = +1, −1, −1 have the mean −1/3. Here the mean of the means of two parts would be 0."""
    mask, advantages = MASK_10_990_990, torch.tensor([1.0, -1.0, -1.0])
    zero, weights = torch.zeros(mask.shape), sequence_mean_weights(mask, num_sequences=3)
    losses = [
        grpo_loss(zero[rows], zero[rows], advantages[rows], mask[rows], weights=weights[rows])[0]
        for rows in (slice(0, 1), slice(1, 3))
    ]
    assert sum(losses).item() == pytest.approx(1 / 3, abs=1e-5)


def test_a_mean_over_10_and_990_tokens_is_098():
    """The same weight on all tokens: −(10 − 990) / 1000, in one piece or in two."""
    mask, advantages = MASK_10_990_990[:2], torch.tensor([1.0, -1.0])
    zero, weights = torch.zeros(mask.shape), mask / mask.sum()
    whole = grpo_loss(zero, zero, advantages, mask, weights=weights)[0]
    parts = [
        grpo_loss(zero[i], zero[i], advantages[i], mask[i], weights=weights[i])[0]
        for i in ([0], [1])
    ]
    assert whole.item() == pytest.approx(0.98, abs=1e-5)
    assert sum(parts).item() == pytest.approx(0.98, abs=1e-5)


@pytest.mark.parametrize("cut", [[1, 3, 2], [1] * 6, [5, 1]])
def test_micro_batches_with_their_part_of_the_weights_add_up_to_the_whole(cut):
    batch, weights = example(), sequence_mean_weights(MASK)
    loss, gradient, _ = run(*batch, MASK)
    parts = [
        run(*(x[rows] for x in batch), MASK[rows], ADVANTAGES[rows], weights=weights[rows])
        for rows in torch.arange(6).split(cut)
    ]
    assert sum(part[0] for part in parts) == pytest.approx(loss, abs=1e-9)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), gradient)


# --- the statistics -------------------------------------------------------------------------------


@pytest.mark.ours
def test_the_statistics_by_hand():
    """Ratios 1.5, 1.0 (A > 0) and 0.5 (A < 0); weights 1/4, 1/4, 1/2. The 9.0 are on padding."""
    ratio = torch.tensor([[1.5, 1.0], [0.5, 9.0]], dtype=F64)
    r = torch.tensor([[2.0, 1.0], [0.5, 9.0]], dtype=F64)  # π_ref / π
    zero, advantages = torch.zeros(2, 2, dtype=F64), torch.tensor([1.0, -1.0])
    logp = ratio.log().requires_grad_()
    _, stats = grpo_loss(logp, zero, advantages, mask_of([2, 1]), ref_logp=(ratio * r).log())
    assert all(x.dim() == 0 and not x.requires_grad for x in stats.values())
    assert stats["ratio_mean"] == pytest.approx(1.5 / 4 + 1.0 / 4 + 0.5 / 2)
    assert stats["ratio_max"] == pytest.approx(1.5)
    assert stats["clip_fraction"] == pytest.approx(1 / 4 + 1 / 2)
    k3 = (2 - math.log(2) - 1) / 4 + (0.5 + math.log(2) - 1) / 2
    assert stats["kl"] == pytest.approx(k3)


@pytest.mark.ours
def test_the_clip_fraction_counts_only_tokens_that_lost_their_gradient():
    """Not clipped: ρ on the side that the clip leaves alone, or A = 0."""
    ratio = torch.tensor([[0.5], [1.5], [0.5], [1.5], [1.5]])
    advantages = torch.tensor([1.0, -1.0, 0.0, 0.0, 1.0])
    _, stats = grpo_loss(ratio.log(), torch.zeros(5, 1), advantages, mask_of([1] * 5))
    assert stats["clip_fraction"] == pytest.approx(1 / 5)


@pytest.mark.ours
@pytest.mark.parametrize(
    "ratio, clip_high, clipped",
    [(1.25, None, 1), (1.25, 0.28, 0), (1.1, None, 0), (1.1, 0.05, 1), (1.1, 0.0, 1)],
)
def test_the_clip_fraction_knows_the_upper_bound(ratio, clip_high, clipped):
    logp, zero = torch.tensor([[ratio]]).log(), torch.zeros(1, 1)
    _, stats = grpo_loss(logp, zero, torch.ones(1), mask_of([1]), clip_high=clip_high)
    assert stats["clip_fraction"] == clipped


@pytest.mark.ours
@pytest.mark.parametrize(
    "ratio, clip_low, clipped", [(0.75, 0.2, 1), (0.75, 0.3, 0), (0.9, 0.05, 1)]
)
def test_the_clip_fraction_knows_the_lower_bound(ratio, clip_low, clipped):
    logp, zero = torch.tensor([[ratio]]).log(), torch.zeros(1, 1)
    clip = {"clip_low": clip_low, "clip_high": 0.5}
    _, stats = grpo_loss(logp, zero, -torch.ones(1), mask_of([1]), **clip)
    assert stats["clip_fraction"] == clipped


@pytest.mark.ours
def test_ratio_max_does_not_see_the_ones_on_padding():
    half = torch.full((2, 3), 0.5).log()
    _, stats = grpo_loss(half, torch.zeros(2, 3), torch.ones(2), mask_of([3, 1]))
    assert stats["ratio_max"] == pytest.approx(0.5)


@pytest.mark.ours
def test_the_statistics_are_means_even_if_the_weights_are_a_part_of_the_batch():
    *_, stats = run(*example(), MASK)
    *_, part = run(*example(), MASK, weights=sequence_mean_weights(MASK, num_sequences=60))
    assert part == pytest.approx(stats, rel=1e-5)


# --- input at the edge ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.long, torch.float32])
def test_a_mask_of_zeros_and_ones_is_as_good_as_a_boolean_one(dtype):
    assert run(*example(), MASK.to(dtype))[0] == run(*example(), MASK)[0]


@pytest.mark.ours
def test_a_batch_of_empty_completions_has_loss_0():
    loss, gradient, stats = run(*example(), mask_of([0] * 6, width=5))
    assert loss == 0 and (gradient == 0).all() and all(value == 0 for value in stats.values())


@pytest.mark.ours
def test_a_batch_without_any_token_has_loss_0():
    """T = 0: the largest ratio of no tokens is 0."""
    none = torch.zeros(6, 0, dtype=F64)
    loss, _, stats = run(none, none, none, none)
    assert loss == 0 and all(value == 0 for value in stats.values())


@pytest.mark.ours
def test_with_beta_0_a_reference_that_excludes_a_token_does_no_harm():
    excluded = torch.full((6, 5), -math.inf, dtype=F64)
    logp, old_logp, _ = example()
    loss, gradient, _ = run(logp, old_logp, excluded, MASK, beta=0.0)
    assert math.isfinite(loss) and gradient.isfinite().all()
