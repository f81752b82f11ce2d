"""grpo.py against closed forms, plain float64 loops, and sums over every outcome of a tiny policy."""

import math

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from grpo import clipped_surrogate, group_advantages, grpo_loss, kl_k1, kl_k2, kl_k3, sequence_mean_weights, token_entropies, token_logprobs

torch.set_num_threads(1)
F64 = torch.float64


def seeded(seed):
    return torch.Generator().manual_seed(seed)


# --- group advantages -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("eps", [1e-4, 0.5])
@pytest.mark.parametrize("divide_by_std", [True, False])
def test_advantages_equal_a_loop_over_groups(divide_by_std, eps, ddof):
    rewards = torch.randn(4, 6, generator=seeded(0), dtype=F64)
    advantages = group_advantages(rewards, divide_by_std=divide_by_std, eps=eps, ddof=ddof)
    for group, row in zip(rewards.tolist(), advantages.tolist(), strict=True):
        mean = sum(group) / 6
        std = math.sqrt(sum((r - mean) ** 2 for r in group) / (6 - ddof))
        expected = [(r - mean) / (std + eps) if divide_by_std else r - mean for r in group]
        assert row == pytest.approx(expected, rel=1e-12)


def test_advantages_use_the_unbiased_std_and_eps_1e_4_by_default():
    # mean 1, squared deviations 1 + 1, divided by G − 1 = 1
    assert group_advantages(torch.tensor([[0.0, 2.0]], dtype=F64))[0, 1].item() == pytest.approx(1 / (math.sqrt(2) + 1e-4), rel=1e-12)


@pytest.mark.parametrize("reward", [0.0, 1.0, -2.0, 0.1, 1.1, 3.3])
@pytest.mark.parametrize("group_size", [2, 7, 16])
@pytest.mark.parametrize("eps", [1e-4, 1e-8])
def test_equal_rewards_give_exactly_zero(reward, group_size, eps):
    """Also where the float32 mean of equal numbers is not that number (3.3): rounding is not a signal."""
    assert (group_advantages(torch.full((2, group_size), reward), eps=eps) == 0).all()


def test_a_constant_added_to_all_rewards_of_a_question_changes_nothing():
    rewards = torch.randn(3, 5, generator=seeded(1), dtype=F64)
    shift = torch.tensor([[10.0], [-3.0], [0.5]], dtype=F64)
    torch.testing.assert_close(group_advantages(rewards + shift), group_advantages(rewards), rtol=1e-10, atol=1e-10)


def test_each_question_has_statistics_of_its_own():
    rewards = torch.tensor([[0.0, 1.0, 0.0, 1.0], [5.0, 9.0, 5.0, 5.0]], dtype=F64)
    both = group_advantages(rewards)
    torch.testing.assert_close(both[1:], group_advantages(rewards[1:]))
    torch.testing.assert_close(both.sum(dim=1), torch.zeros(2, dtype=F64))


@pytest.mark.parametrize("shape, ddof", [((4,), 1), ((2, 3, 4), 1), ((2, 1), 1), ((2, 0), 0), ((), 0)])
def test_rewards_of_a_wrong_shape_or_too_small_a_group_are_refused(shape, ddof):
    with pytest.raises(ValueError, match="rewards must be"):
        group_advantages(torch.ones(shape), ddof=ddof)


def test_a_group_of_one_is_allowed_with_the_population_std():
    assert group_advantages(torch.ones(2, 1), ddof=0).tolist() == [[0.0], [0.0]]


# --- log-probabilities ------------------------------------------------------------------------------------------------


def logprob_by_hand(logits, token, temperature):
    """log softmax of one position, in Python floats."""
    scaled = [x / temperature for x in logits]
    return scaled[token] - math.log(sum(math.exp(x) for x in scaled))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
def test_token_logprobs_are_float32_and_equal_log_softmax(dtype, temperature):
    """For bf16 logits too the softmax is taken in float32: in bf16 it would be wrong in the second digit."""
    logits = (3 * torch.randn(2, 3, 7, generator=seeded(2))).to(dtype)
    tokens = torch.randint(7, (2, 3), generator=seeded(3))
    logp = token_logprobs(logits, tokens, temperature=temperature)
    assert logp.dtype == torch.float32
    for n in range(2):
        for t in range(3):
            expected = logprob_by_hand(logits[n, t].tolist(), tokens[n, t].item(), temperature)
            assert logp[n, t].item() == pytest.approx(expected, abs=1e-5)


def test_token_logprobs_divide_by_one_by_default():
    logits, tokens = torch.tensor([[[0.0, math.log(3.0)]]]), torch.tensor([[1]])
    assert token_logprobs(logits, tokens).item() == pytest.approx(math.log(0.75), abs=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_gradient_of_token_logprobs_is_one_hot_minus_softmax(temperature):
    """∂ log π(o) / ∂ logit_v = (1[v = o] − π(v)) / temperature."""
    logits = torch.randn(2, 3, 5, generator=seeded(4), requires_grad=True)
    tokens = torch.randint(5, (2, 3), generator=seeded(5))
    upstream = torch.randn(2, 3, generator=seeded(6))
    (token_logprobs(logits, tokens, temperature=temperature) * upstream).sum().backward()
    for n in range(2):
        for t in range(3):
            for v in range(5):
                probability = math.exp(logprob_by_hand(logits[n, t].tolist(), v, temperature))
                expected = upstream[n, t].item() * ((v == tokens[n, t].item()) - probability) / temperature
                assert logits.grad[n, t, v].item() == pytest.approx(expected, abs=1e-5)


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of all tensors made inside it that are alive at the same time."""

    def __init__(self):
        super().__init__()
        self.made, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}  # a view makes nothing new
        for tensor in out if isinstance(out, list | tuple) else [out]:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                self.made[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        self.made = {key: (ref, size) for key, (ref, size) in self.made.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self.made.values()))
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_logprobs_make_one_copy_of_the_logits_at_most(dtype):
    """The plain `logits.float().log_softmax(-1)` holds two, and the logits are the largest tensor of the training step."""
    logits = torch.randn(16, 8, 500, generator=seeded(7)).to(dtype).requires_grad_()
    one_float32_copy = 16 * 8 * 500 * 4
    with PeakMemory() as plain:
        (logits.float() / 0.9).log_softmax(-1)
    with PeakMemory() as ours:
        token_logprobs(logits, torch.zeros(16, 8, dtype=torch.long), temperature=0.9)
    assert plain.peak >= 2 * one_float32_copy  # the meter sees the second copy where there is one
    assert ours.peak < 1.3 * one_float32_copy


# --- KL estimators: exact expectations over a categorical distribution ------------------------------------------------


@pytest.fixture
def categorical():
    """Logits of π (with a gradient) and π_ref over 5 outcomes, in float64."""
    return torch.randn(5, generator=seeded(8), dtype=F64, requires_grad=True), torch.randn(5, generator=seeded(9), dtype=F64)


def kl_of(theta, ref):
    p, q = theta.softmax(0).tolist(), ref.softmax(0).tolist()
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def numeric_gradient(function, x, step=1e-6):
    """Central differences of a function of a tensor."""
    gradient = torch.zeros(x.numel(), dtype=x.dtype)
    for i in range(x.numel()):
        e = torch.zeros(x.numel(), dtype=x.dtype)
        e[i] = step
        gradient[i] = (function(x + e.view_as(x)) - function(x - e.view_as(x))) / (2 * step)
    return gradient.view_as(x)


@pytest.mark.parametrize("estimator", [kl_k1, kl_k3])
def test_k1_and_k3_are_unbiased(estimator, categorical):
    theta, ref = categorical
    estimate = (theta.softmax(0) * estimator(theta.log_softmax(0), ref.log_softmax(0))).sum()
    assert estimate.item() == pytest.approx(kl_of(theta, ref), rel=1e-12)


def expected_gradient(estimator, theta, ref):
    """E_π[∇ estimator]: the samples' probabilities are held fixed, as in training."""
    expectation = (theta.softmax(0).detach() * estimator(theta.log_softmax(0), ref.log_softmax(0))).sum()
    return torch.autograd.grad(expectation, theta)[0]


def test_k1_as_a_loss_has_no_gradient_on_policy(categorical):
    theta, ref = categorical
    torch.testing.assert_close(expected_gradient(kl_k1, theta, ref), torch.zeros(5, dtype=F64), rtol=0, atol=1e-15)
    assert numeric_gradient(lambda x: kl_of(x, ref), theta.detach()).abs().max() > 0.05  # though the KL has one


def test_gradient_of_k2_is_that_of_the_kl_on_policy(categorical):
    theta, ref = categorical
    expected = numeric_gradient(lambda x: kl_of(x, ref), theta.detach())
    torch.testing.assert_close(expected_gradient(kl_k2, theta, ref), expected, rtol=0, atol=1e-8)


def test_gradient_of_k3_is_that_of_the_kl_the_other_way_round(categorical):
    """E_π[∇k3] = E_π[(1 − r) ∇log π] = −Σ π_ref ∇log π = ∇KL(π_ref ‖ π): k3 is unbiased in value only."""
    theta, ref = categorical
    expected = numeric_gradient(lambda x: kl_of(ref, x), theta.detach())
    torch.testing.assert_close(expected_gradient(kl_k3, theta, ref), expected, rtol=0, atol=1e-8)


def test_k2_and_k3_are_never_negative_and_zero_only_at_equality():
    logp = torch.linspace(-8, 0, 81, dtype=F64)
    for estimator in (kl_k2, kl_k3):
        values = estimator(logp, torch.full_like(logp, -4.0))
        assert (values >= 0).all() and (values == 0).sum() == 1 and values[40] == 0


@pytest.mark.parametrize("x", [1e-3, -2e-3, 3e-3])
def test_k3_keeps_its_digits_where_the_policies_are_close(x):
    """k3 ≈ x²/2 for log r = x: in float32 the plain exp(x) − x − 1 is off by up to a tenth."""
    k3 = kl_k3(torch.tensor([0.0]), torch.tensor([x])).item()
    assert k3 == pytest.approx(x**2 / 2 + x**3 / 6 + x**4 / 24, rel=2e-3)


def test_kl_estimators_by_hand():
    """π = 1/2, π_ref = 1/4, so log(π/π_ref) = log 2 and r = 1/2: with the ratio upside down each of these is another number."""
    logp, ref_logp = torch.tensor([[0.5]], dtype=F64).log(), torch.tensor([[0.25]], dtype=F64).log()
    assert kl_k1(logp, ref_logp).item() == pytest.approx(math.log(2))
    assert kl_k2(logp, ref_logp).item() == pytest.approx(math.log(2) ** 2 / 2)
    assert kl_k3(logp, ref_logp).item() == pytest.approx(0.5 + math.log(2) - 1)


# --- the clipped surrogate --------------------------------------------------------------------------------------------


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
        (1.5, -2.0, (0.2, None), -3.0, -2.0),  # A < 0, above: never clipped. The inverted clip gives −2.4 and gradient 0
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
def test_clipped_surrogate_in_every_quadrant(ratio, advantage, clip, value, gradient):
    ratio = torch.tensor([[ratio]], dtype=F64, requires_grad=True)
    out = clipped_surrogate(ratio, torch.tensor([advantage], dtype=F64), clip_low=clip[0], clip_high=clip[1])
    out.backward(torch.ones_like(out))
    assert out.item() == pytest.approx(value, abs=1e-12)
    assert ratio.grad.item() == pytest.approx(gradient, abs=1e-12)


def test_clip_range_is_a_fifth_by_default():
    ratio = torch.tensor([[1.19, 1.21, 0.81, 0.79]], dtype=F64)
    assert clipped_surrogate(ratio, torch.ones(1, dtype=F64))[0].tolist() == pytest.approx([1.19, 1.2, 0.81, 0.79])
    assert clipped_surrogate(ratio, -torch.ones(1, dtype=F64))[0].tolist() == pytest.approx([-1.19, -1.21, -0.81, -0.8])


@pytest.mark.parametrize("tokens", [1, 3, 4])
def test_one_advantage_per_completion_is_broadcast_over_its_tokens(tokens):
    """(N,), (N, 1) and (N, T) mean the same; also where T = N, where a wrong broadcast would go unseen."""
    ratio = torch.rand(3, tokens, generator=seeded(10), dtype=F64) * 2
    per_sequence = torch.tensor([1.0, -2.0, 0.5], dtype=F64)
    expected = [[min(r * a, min(max(r, 0.8), 1.2) * a) for r in row] for row, a in zip(ratio.tolist(), per_sequence.tolist(), strict=True)]
    for advantages in (per_sequence, per_sequence[:, None], per_sequence[:, None].expand(3, tokens).clone()):
        out = clipped_surrogate(ratio, advantages)
        assert out.shape == (3, tokens)
        torch.testing.assert_close(out, torch.tensor(expected, dtype=F64))


def test_advantages_may_differ_from_token_to_token():
    ratio = torch.tensor([[1.5, 1.5, 0.5]], dtype=F64)
    assert clipped_surrogate(ratio, torch.tensor([[1.0, -1.0, -2.0]], dtype=F64))[0].tolist() == pytest.approx([1.2, -1.5, -1.6])


def test_one_ratio_per_sequence():
    ratio = torch.tensor([1.5, 0.5, 1.5], dtype=F64)
    out = clipped_surrogate(ratio, torch.tensor([1.0, -1.0, -1.0], dtype=F64))
    assert out.tolist() == pytest.approx([1.2, -0.8, -1.5])


# --- weights ----------------------------------------------------------------------------------------------------------


def mask_of(lengths, width=None):
    return torch.tensor([[t < n for t in range(width or max(lengths))] for n in lengths])


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32, torch.bfloat16])
def test_weights_are_a_mean_over_tokens_then_over_completions(dtype):
    """The empty row weighs nothing and still counts in N = 3."""
    weights = sequence_mean_weights(mask_of([2, 1, 0], width=3).to(dtype))
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, torch.tensor([[1 / 6, 1 / 6, 0], [1 / 3, 0, 0], [0, 0, 0]]))


def test_num_sequences_is_the_divisor_where_the_mask_is_a_part_of_the_batch():
    mask = mask_of([3, 1, 0, 2, 3])
    whole = sequence_mean_weights(mask)
    parts = torch.cat([sequence_mean_weights(part, num_sequences=5) for part in mask.split([1, 4])])
    torch.testing.assert_close(parts, whole, rtol=0, atol=0)


LENGTHS_10_AND_990 = mask_of([10, 990, 990]), torch.tensor([1.0, -1.0, -1.0])


def test_parts_add_up_to_the_mean_and_not_to_a_mean_of_means():
    """A = +1, −1, −1 have the mean −1/3; the mean of the two parts' means would be 0."""
    mask, advantages = LENGTHS_10_AND_990
    zero = torch.zeros(mask.shape)
    losses = [
        grpo_loss(zero[rows], zero[rows], advantages[rows], mask[rows], weights=sequence_mean_weights(mask[rows], num_sequences=3))[0]
        for rows in (slice(0, 1), slice(1, 3))
    ]
    assert sum(losses).item() == pytest.approx(1 / 3, abs=1e-5)


def test_a_token_mean_over_10_and_990_tokens_is_098():
    """Weights of one over all tokens: −(10 − 990) / 1000, in one piece or in two. The mean of the two means would be 0."""
    mask, advantages = LENGTHS_10_AND_990[0][:2], LENGTHS_10_AND_990[1][:2]
    zero, weights = torch.zeros(mask.shape), mask / mask.sum()
    whole = grpo_loss(zero, zero, advantages, mask, weights=weights)[0]
    parts = [grpo_loss(zero[i], zero[i], advantages[i], mask[i], weights=weights[i])[0] for i in ([0], [1])]
    assert whole.item() == pytest.approx(0.98, abs=1e-5)
    assert sum(parts).item() == pytest.approx(0.98, abs=1e-5)


# --- the loss against a loop ------------------------------------------------------------------------------------------


LENGTHS = [5, 1, 0, 3, 1, 4]  # ragged, two of one token, one empty
ADVANTAGES = [1.5, -0.7, 2.0, -1.2, 0.9, 0.0]  # both signs, and a completion of a group without signal


def example(seed=11):
    """logp, old_logp, ref_logp (6, 5) float64, far enough apart that the clip acts on both sides."""
    base = -1 - torch.rand(6, 5, generator=seeded(seed), dtype=F64)
    old, ref = (base + 0.4 * torch.randn(6, 5, generator=seeded(seed + i), dtype=F64) for i in (1, 2))
    return base, old, ref


def loss_and_gradient_by_loop(logp, old_logp, ref_logp, beta, clip_low, clip_high):
    """2402.03300 eq. 3 (with the sign of a loss) token by token in Python floats, and ∂loss/∂logp by hand."""
    loss, gradient = 0.0, torch.zeros(6, 5, dtype=F64)
    for i, (length, advantage) in enumerate(zip(LENGTHS, ADVANTAGES, strict=True)):
        for t in range(length):
            ratio = math.exp(logp[i, t] - old_logp[i, t])
            if advantage > 0 and ratio > 1 + clip_high:
                surrogate, slope = (1 + clip_high) * advantage, 0.0
            elif advantage < 0 and ratio < 1 - clip_low:
                surrogate, slope = (1 - clip_low) * advantage, 0.0
            else:
                surrogate, slope = ratio * advantage, ratio * advantage  # dρ/dlogp = ρ
            kl, kl_slope = 0.0, 0.0
            if ref_logp is not None:
                r = math.exp(ref_logp[i, t] - logp[i, t])  # π_ref / π
                kl, kl_slope = r - math.log(r) - 1, 1 - r
            loss -= (surrogate - beta * kl) / length / len(LENGTHS)
            gradient[i, t] = -(slope - beta * kl_slope) / length / len(LENGTHS)
    return loss, gradient


@pytest.mark.parametrize("clip_low, clip_high", [(0.2, None), (0.2, 0.28), (0.3, 0.1)])
@pytest.mark.parametrize("beta", [None, 0.04, 1.0])
def test_loss_and_gradient_equal_a_loop_over_completions_and_tokens(beta, clip_low, clip_high):
    logp, old_logp, ref_logp = example()
    logp.requires_grad_()
    kl_term = {} if beta is None else {"ref_logp": ref_logp, "beta": beta}
    loss, stats = grpo_loss(
        logp, old_logp, torch.tensor(ADVANTAGES, dtype=F64), mask_of(LENGTHS), clip_low=clip_low, clip_high=clip_high, **kl_term
    )
    loss.backward()
    high = clip_low if clip_high is None else clip_high
    expected, gradient = loss_and_gradient_by_loop(logp.detach(), old_logp, kl_term.get("ref_logp"), beta or 0.0, clip_low, high)
    assert stats["clip_fraction"] > 0.1  # the example does clip
    assert loss.item() == pytest.approx(expected, abs=1e-7)  # the weights are float32
    torch.testing.assert_close(logp.grad, gradient, rtol=1e-6, atol=1e-9)


def test_beta_is_004_and_the_clip_02_by_default():
    logp, old_logp, ref_logp = example()
    loss, _ = grpo_loss(logp, old_logp, torch.tensor(ADVANTAGES, dtype=F64), mask_of(LENGTHS), ref_logp=ref_logp)
    assert loss.item() == pytest.approx(loss_and_gradient_by_loop(logp, old_logp, ref_logp, 0.04, 0.2, 0.2)[0], abs=1e-7)


@pytest.mark.parametrize("options", [{}, {"beta": 5.0}, {"beta": 0.0, "ref_logp": torch.full((6, 5), -9.0, dtype=F64)}])
def test_without_a_reference_or_with_beta_zero_there_is_no_kl_in_the_loss(options):
    logp, old_logp, _ = example()
    loss, stats = grpo_loss(logp, old_logp, torch.tensor(ADVANTAGES, dtype=F64), mask_of(LENGTHS), **options)
    assert loss.item() == pytest.approx(loss_and_gradient_by_loop(logp, old_logp, None, 0.0, 0.2, 0.2)[0], abs=1e-7)
    assert (stats["kl"] > 0) == ("ref_logp" in options)  # it is still reported


def test_with_beta_zero_a_reference_that_rules_a_token_out_does_no_harm():
    logp, old_logp, _ = example()
    logp.requires_grad_()
    ref_logp = torch.full((6, 5), -math.inf, dtype=F64)
    loss, _ = grpo_loss(logp, old_logp, torch.tensor(ADVANTAGES, dtype=F64), mask_of(LENGTHS), beta=0.0, ref_logp=ref_logp)
    loss.backward()
    assert loss.isfinite() and logp.grad.isfinite().all()


def run(logp, old_logp, ref_logp, mask, advantages=None, **options):
    """Loss, gradient on logp, stats."""
    logp = logp.detach().clone().requires_grad_()
    advantages = torch.tensor(ADVANTAGES, dtype=F64) if advantages is None else advantages
    loss, stats = grpo_loss(logp, old_logp, advantages, mask, ref_logp=ref_logp, beta=0.1, **options)
    loss.backward()
    return loss.item(), logp.grad, {name: x.item() for name, x in stats.items()}


@pytest.mark.parametrize("junk", [0.0, -50.0, 100.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", ["logp", "old_logp", "ref_logp", "all three"])
def test_what_stands_on_the_padding_changes_nothing(where, junk):
    mask = mask_of(LENGTHS)
    clean = example()
    dirty = [
        x.masked_fill(~mask, junk) if where in (name, "all three") else x
        for name, x in zip(("logp", "old_logp", "ref_logp"), clean, strict=True)
    ]
    (loss, gradient, stats), (dirty_loss, dirty_gradient, dirty_stats) = run(*clean, mask), run(*dirty, mask)
    assert dirty_loss == loss and dirty_stats == stats
    assert torch.equal(dirty_gradient, gradient)  # NaN equals nothing, so this says finite as well
    assert (gradient[~mask] == 0).all()


def test_more_padding_changes_nothing():
    widen = torch.nn.functional.pad
    clean, mask = example(), mask_of(LENGTHS)
    loss, gradient, stats = run(*clean, mask)
    wide_loss, wide_gradient, wide_stats = run(*(widen(x, (0, 7), value=3.0) for x in clean), widen(mask, (0, 7)))
    assert wide_loss == pytest.approx(loss, rel=1e-12) and wide_stats == pytest.approx(stats, rel=1e-6)
    torch.testing.assert_close(wide_gradient[:, :5], gradient)
    assert (wide_gradient[:, 5:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.long, torch.float32])
def test_a_mask_of_zeros_and_ones_is_as_good_as_a_boolean_one(dtype):
    mask = mask_of(LENGTHS)
    assert run(*example(), mask.to(dtype))[0] == run(*example(), mask)[0]


@pytest.mark.parametrize("cut", [[1, 3, 2], [1] * 6, [5, 1]])
def test_micro_batches_with_their_part_of_the_weights_add_up_to_the_whole(cut):
    batch, mask, advantages = example(), mask_of(LENGTHS), torch.tensor(ADVANTAGES, dtype=F64)
    loss, gradient, _ = run(*batch, mask)
    weights = sequence_mean_weights(mask)
    parts = [run(*(x[rows] for x in batch), mask[rows], advantages[rows], weights=weights[rows]) for rows in torch.arange(6).split(cut)]
    assert sum(part[0] for part in parts) == pytest.approx(loss, abs=1e-9)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), gradient)


def test_gradient_reaches_the_last_real_token_and_none_behind_it():
    """The EOS is the last token of each completion; it must be trained, or the policy never learns to stop."""
    _, gradient, _ = run(*example(), mask_of(LENGTHS))
    for i, length in enumerate(LENGTHS):
        if length:
            assert gradient[i, length - 1] != 0
        assert (gradient[i, length:] == 0).all()


def test_a_batch_of_empty_completions_has_loss_zero():
    loss, gradient, stats = run(*example(), mask_of([0] * 6, width=5))
    assert loss == 0 and (gradient == 0).all() and all(value == 0 for value in stats.values())


# --- the first, on-policy step ----------------------------------------------------------------------------------------


def test_at_the_first_step_the_loss_is_zero_and_its_gradient_is_the_policy_gradient():
    """Ratio 1: loss = −Σ weights·A = −mean of A over the completions, which is 0 whatever their lengths (none empty).

    The gradient on each token's logp is −A / (N |o|), the policy gradient, and that is not 0.
    """
    lengths = [4, 1, 2, 5, 3, 3]
    logp = -torch.rand(6, 5, generator=seeded(12), dtype=F64)
    advantages = group_advantages(torch.tensor([[1.0, 0.0, 0.0], [2.0, 1.5, 0.0]], dtype=F64)).flatten()
    loss, gradient, stats = run(logp, logp, None, mask_of(lengths), advantages)
    assert loss == pytest.approx(0, abs=1e-7)
    for i, length in enumerate(lengths):
        expected = [-advantages[i].item() / (6 * length)] * length + [0.0] * (5 - length)
        assert gradient[i].tolist() == pytest.approx(expected, rel=1e-6)
    assert stats["clip_fraction"] == 0 and stats["ratio_mean"] == pytest.approx(1) and stats["ratio_max"] == 1


def test_at_the_first_step_the_loss_is_beta_times_the_kl():
    lengths = [4, 1, 2, 5, 3, 3]
    logp, _, ref_logp = example()
    loss, _, stats = run(logp, logp, ref_logp, mask_of(lengths), torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0, -2.0], dtype=F64))
    per_completion = [sum(kl_k3(logp, ref_logp)[i, :n].tolist()) / n for i, n in enumerate(lengths)]
    assert stats["kl"] == pytest.approx(sum(per_completion) / 6, rel=1e-6)
    assert loss == pytest.approx(0.1 * stats["kl"], rel=1e-5)


# --- stats ------------------------------------------------------------------------------------------------------------


def test_stats_by_hand():
    """Ratios 1.5, 1.0 (A > 0) and 0.5 (A < 0, one token); weights 1/4, 1/4, 1/2. The 9.0 stands on padding."""
    ratio, r = torch.tensor([[1.5, 1.0], [0.5, 9.0]], dtype=F64), torch.tensor([[2.0, 1.0], [0.5, 9.0]], dtype=F64)
    _, stats = grpo_loss(ratio.log(), torch.zeros(2, 2, dtype=F64), torch.tensor([1.0, -1.0]), mask_of([2, 1]), ref_logp=(ratio * r).log())
    assert all(x.dim() == 0 and not x.requires_grad for x in stats.values())
    assert stats["ratio_mean"] == pytest.approx(1.5 / 4 + 1.0 / 4 + 0.5 / 2)
    assert stats["ratio_max"] == pytest.approx(1.5)
    assert stats["clip_fraction"] == pytest.approx(1 / 4 + 1 / 2)
    assert stats["kl"] == pytest.approx((2 - math.log(2) - 1) / 4 + (0.5 + math.log(2) - 1) / 2)


def test_ratio_is_new_over_old():
    logp, old_logp = torch.tensor([[0.6]]).log(), torch.tensor([[0.5]]).log()
    assert grpo_loss(logp, old_logp, torch.ones(1), mask_of([1]))[1]["ratio_mean"] == pytest.approx(1.2, rel=1e-6)


def test_clip_fraction_counts_only_where_the_gradient_is_gone():
    """ρ outside on the side that the clip leaves alone (A > 0 below, A < 0 above), or A = 0: not clipped."""
    ratio = torch.tensor([[0.5], [1.5], [0.5], [1.5], [1.5]])
    _, stats = grpo_loss(ratio.log(), torch.zeros(5, 1), torch.tensor([1.0, -1.0, 0.0, 0.0, 1.0]), mask_of([1] * 5))
    assert stats["clip_fraction"] == pytest.approx(1 / 5)


@pytest.mark.parametrize("ratio, clip_high, clipped", [(1.25, None, 1), (1.25, 0.28, 0), (1.1, None, 0), (1.1, 0.05, 1), (1.1, 0.0, 1)])
def test_clip_fraction_knows_the_upper_range(ratio, clip_high, clipped):
    _, stats = grpo_loss(torch.tensor([[ratio]]).log(), torch.zeros(1, 1), torch.ones(1), mask_of([1]), clip_high=clip_high)
    assert stats["clip_fraction"] == clipped


def test_ratio_max_does_not_see_the_ones_on_padding():
    _, stats = grpo_loss(torch.full((2, 3), 0.5).log(), torch.zeros(2, 3), torch.ones(2), mask_of([3, 1]))
    assert stats["ratio_max"] == pytest.approx(0.5)


def test_stats_stay_means_where_the_weights_are_a_part_of_the_batch():
    batch, mask = example(), mask_of(LENGTHS)
    *_, stats = run(*batch, mask)
    *_, part = run(*batch, mask, weights=sequence_mean_weights(mask, num_sequences=60))
    assert part == pytest.approx(stats, rel=1e-5)


@pytest.mark.parametrize("per_token", [False, True])
def test_advantages_per_token_give_the_same_loss_and_stats(per_token):
    advantages = torch.tensor(ADVANTAGES, dtype=F64)
    advantages = advantages[:, None].expand(6, 5) if per_token else advantages[:, None]
    loss, gradient, stats = run(*example(), mask_of(LENGTHS), advantages)
    expected_loss, expected_gradient, expected_stats = run(*example(), mask_of(LENGTHS))
    assert loss == expected_loss and stats == expected_stats
    assert torch.equal(gradient, expected_gradient)


# --- the exact gradient: every completion of a tiny policy ------------------------------------------------------------


class TinyPolicy:
    """Three tokens (a, b, EOS), at most three to a completion, one row of logits for each prefix: 15 completions in all."""

    EOS = 2
    PREFIXES = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    COMPLETIONS = [(2,), (0, 2), (1, 2)] + [(x, y, z) for x in (0, 1) for y in (0, 1) for z in (0, 1, 2)]
    LENGTHS = [len(o) for o in COMPLETIONS]

    @staticmethod
    def table(seed):
        return torch.randn(7, 3, generator=seeded(seed), dtype=F64)

    @classmethod
    def logp(cls, theta):
        """(15, 3): log π of each token of each completion; junk on padding."""
        rows = []
        for o in cls.COMPLETIONS:
            known = [theta[cls.PREFIXES.index(o[:t])].log_softmax(0)[o[t]] for t in range(len(o))]
            rows.append(torch.stack(known + [torch.tensor(math.nan, dtype=F64)] * (3 - len(o))))
        return torch.stack(rows)

    @classmethod
    def probabilities(cls, theta):
        """π(o) of each of the 15 completions."""
        return torch.stack([row[:n].sum() for row, n in zip(cls.logp(theta), cls.LENGTHS, strict=True)]).exp()


REWARDS = torch.randn(15, generator=seeded(13), dtype=F64)
TINY_MASK = mask_of(TinyPolicy.LENGTHS)


def expected_loss_gradient(theta, advantages, token_weights, **options):
    """E_π[∇ grpo_loss], exactly: all 15 completions, each weighted with its probability, on-policy."""
    logp = TinyPolicy.logp(theta)
    weights = TinyPolicy.probabilities(theta).detach()[:, None] * token_weights
    loss, _ = grpo_loss(logp, logp.detach(), advantages, TINY_MASK, weights=weights, **options)
    return torch.autograd.grad(loss, theta)[0]


def test_the_tiny_policy_is_a_distribution():
    assert TinyPolicy.probabilities(TinyPolicy.table(14)).sum().item() == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("baseline", [0.0, 0.7, -3.0])
def test_expected_gradient_is_that_of_the_expected_reward(baseline):
    """With weight 1 on each token E_π[∇loss] = −∇J, J(θ) = Σ_o π(o) r(o), whatever the baseline in A = r − baseline."""
    theta = TinyPolicy.table(14).requires_grad_()
    gradient = expected_loss_gradient(theta, REWARDS - baseline, TINY_MASK.double())
    expected = numeric_gradient(lambda x: (TinyPolicy.probabilities(x) * REWARDS).sum().item(), theta.detach())
    torch.testing.assert_close(gradient, -expected, rtol=0, atol=1e-8)


def test_expected_gradient_with_the_weights_of_grpo_is_that_of_the_advantage_per_token():
    """With weight 1/|o| on each token E_π[∇loss] = −∇ Σ_o π(o) A(o)/|o|: the length bias that Dr. GRPO takes away."""
    theta = TinyPolicy.table(14).requires_grad_()
    per_sequence = sequence_mean_weights(TINY_MASK, num_sequences=1).double()
    gradient = expected_loss_gradient(theta, REWARDS, per_sequence)
    lengths = torch.tensor(TinyPolicy.LENGTHS, dtype=F64)
    expected = numeric_gradient(lambda x: (TinyPolicy.probabilities(x) * REWARDS / lengths).sum().item(), theta.detach())
    torch.testing.assert_close(gradient, -expected, rtol=0, atol=1e-7)


def test_expected_gradient_of_the_kl_term():
    """With weight 1 on each token the KL term's part of E_π[∇loss] is β Σ_prefix d(prefix) ∇KL(π_ref(·|prefix) ‖ π(·|prefix)).

    d(prefix) is the probability of getting there under π, held fixed, as the samples are.
    """
    theta, ref, beta = TinyPolicy.table(14).requires_grad_(), TinyPolicy.table(15), 0.3
    gradient = expected_loss_gradient(theta, torch.zeros(15, dtype=F64), TINY_MASK.double(), ref_logp=TinyPolicy.logp(ref), beta=beta)
    pi = theta.detach().softmax(1)
    for row, prefix in enumerate(TinyPolicy.PREFIXES):
        reached = math.prod(pi[TinyPolicy.PREFIXES.index(prefix[:t]), token].item() for t, token in enumerate(prefix))
        expected = beta * reached * numeric_gradient(lambda x, row=row: kl_of(ref[row], x), theta[row].detach())
        torch.testing.assert_close(gradient[row], expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_entropies_are_those_of_torchs_categorical(temperature):
    logits = 5 * torch.randn(3, 4, 50, generator=torch.Generator().manual_seed(0))
    expected = torch.distributions.Categorical(logits=logits.double() / temperature).entropy()
    torch.testing.assert_close(token_entropies(logits, temperature=temperature).double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(token_entropies(torch.zeros(1, 1, 8)), torch.tensor([[math.log(8)]]))


def test_what_is_computed_from_logits_is_float32_under_autocast_too():
    """Autocast would make a bfloat16 product of an einsum or a matmul: off by 0.03 nats."""
    logits, tokens = 5 * torch.randn(3, 4, 500, generator=seeded(16)), torch.randint(500, (3, 4), generator=seeded(17))
    with torch.autocast("cpu", torch.bfloat16):
        entropies, logp = token_entropies(logits), token_logprobs(logits, tokens)
    expected = torch.distributions.Categorical(logits=logits.double())
    torch.testing.assert_close(entropies.double(), expected.entropy(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logp.double(), expected.log_prob(tokens), rtol=1e-5, atol=1e-5)
