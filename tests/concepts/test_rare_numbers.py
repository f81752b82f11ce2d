"""Rare numbers: ratios that overflow, words without a probability, shapes that torch would repeat.

float32 holds no number above 3e38, so exp(89) is ∞ there. 0 · ∞ is NaN, and one NaN in a gradient
makes a whole update worthless.
"""

import math

import pytest
import torch

from cppo import prune, prune_pooled
from family.cispo import cispo_loss
from family.dapo import dapo_loss
from family.deepseek_v32 import deepseek_v32_loss, off_policy_mask, unbiased_kl
from family.drgrpo import drgrpo_loss
from family.gfpo import retain
from family.gspo import gspo_loss, sequence_ratio, token_ratio
from family.pods import max_variance_subset
from family.ppo import gae, ppo_loss, token_rewards, value_loss
from family.sapo import sapo_loss
from family.tis import CORRECTIONS
from family.unbiased import keep_probabilities
from grpo import (
    LARGEST_LOG_RATIO,
    group_advantages,
    grpo_loss,
    importance_ratio,
    kl_k3,
    surrogate_loss,
    token_entropies,
    token_logprobs,
)
from tests.examples import F64, LOGP, MASK, OLD, REF, mask_of, seeded

LOSSES = {
    "grpo": grpo_loss, "dapo": dapo_loss, "cispo": cispo_loss, "sapo": sapo_loss,
    "deepseek_v32": deepseek_v32_loss, "ppo": ppo_loss, "gspo": gspo_loss,
    "gspo_token": lambda *args, **options: gspo_loss(*args, token_level=True, **options),
    "drgrpo": lambda *args, **options: drgrpo_loss(*args, max_tokens=4, **options),
}
every_loss = pytest.mark.parametrize("name", LOSSES)


def loss_and_gradient(name, gaps, A, **options):
    """Of completions with the log-ratios `gaps` (N, T), in float32."""
    gaps = torch.tensor(gaps)
    logp = gaps.clamp(max=0).requires_grad_()
    old_logp = -gaps.clamp(min=0)
    A = torch.full((len(gaps),), A)
    if name == "ppo":
        A = A[:, None].expand_as(gaps)
    loss, stats = LOSSES[name](logp, old_logp, A, torch.ones_like(gaps), **options)
    loss.backward()
    assert all(x.isfinite() for x in stats.values())
    return loss.item(), logp.grad


# --- ratios that overflow ---


@every_loss
@pytest.mark.parametrize("A", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("gap", [88.0, 89.0, 90.0, 700.0, 3e38, -90.0, -3e38])
def test_loss_and_gradient_are_finite_at_every_log_ratio(name, A, gap):
    loss, gradient = loss_and_gradient(name, [[gap, gap, gap]], A)
    assert math.isfinite(loss) and gradient.isfinite().all()
    if A == 0:
        assert loss == 0 and not gradient.any()
    if A > 0 and gap > 0 and name != "cispo":  # CISPO's tokens keep a gradient
        assert not gradient.any()  # the clip ends it


@every_loss
@pytest.mark.parametrize("A", [1.0, -1.0])
def test_a_token_beyond_the_bound_does_not_touch_the_gradient_of_the_others(name, A):
    if name == "gspo":
        pytest.skip("its ratio belongs to the completion: the token touches all of it")
    _, gradient = loss_and_gradient(name, [[90.0, 0.1, 0.0], [0.0, 0.0, 0.0]], A)
    _, without = loss_and_gradient(name, [[0.0, 0.1, 0.0], [0.0, 0.0, 0.0]], A)
    if name == "gspo_token":  # each token carries the ratio of its completion
        gradient, without = gradient[1:], without[1:]
    else:
        gradient, without = gradient[:, 1:], without[:, 1:]
    torch.testing.assert_close(gradient, without)
    assert gradient.any()


@every_loss
def test_the_kl_is_finite_too(name):
    if name == "ppo":
        pytest.skip("its KL is in the rewards")
    for gap in (-100.0, 100.0):
        ref = torch.full((1, 3), gap)
        for gaps in ([[0.0] * 3], [[90.0] * 3]):
            loss, gradient = loss_and_gradient(name, gaps, 1.0, ref_logp=ref, beta=0.1)
            assert math.isfinite(loss) and gradient.isfinite().all()


def ratio_of(log_ratio):
    """The ratio of tokens with these log-ratios, on no padding."""
    zeros = torch.zeros_like(log_ratio)
    return importance_ratio(log_ratio, zeros, torch.ones_like(zeros))


@pytest.mark.parametrize("x", [-1e4, -87.0, -1.0, 0.0, 1.0, 19.0, 19.999])
def test_inside_the_bound_nothing_changes(x):
    """Value and gradient are those of exp, to the last bit."""
    x = torch.tensor(x, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    ratio_of(x).backward()
    y.exp().backward()
    assert torch.equal(ratio_of(x), y.exp()) and torch.equal(x.grad, y.grad)


@pytest.mark.ours
def test_at_the_bound_the_ratio_stays():
    x = torch.tensor([LARGEST_LOG_RATIO, 21.0, 89.0, torch.inf], requires_grad=True)
    ratio = ratio_of(x)
    ratio[1:].sum().backward()
    assert ratio.tolist() == pytest.approx([math.exp(20)] * 4) and not x.grad.any()


@pytest.mark.ours
@pytest.mark.parametrize("gap", [-100.0, -89.0, 21.0, 100.0])
def test_k3_is_finite(gap):
    """gap: log π − log π_ref. Above the bound k3 is e^20 − 21, below it 1 less than the gap."""
    logp = torch.tensor([[gap]], requires_grad=True)
    kl = kl_k3(logp, torch.zeros(1, 1))
    kl.sum().backward()
    expected = math.exp(20) - 21 if gap < -20 else gap - 1 + math.exp(-gap)
    assert kl.item() == pytest.approx(expected, rel=1e-6)
    assert logp.grad.item() == pytest.approx(0 if gap < -20 else 1, abs=1e-8)


def test_the_unbiased_kl_is_finite_where_ratio_and_k3_are_both_large():
    big = torch.full((1, 1), 100.0)
    assert unbiased_kl(big, 0 * big, 2 * big).isfinite().all()


# --- entropies and log-probabilities ---


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_entropy_is_over_the_words_that_have_a_probability(temperature):
    """−∞ stands at masked words, and at words that pad the vocabulary."""
    finite = torch.randn(2, 3, 5, generator=seeded(0), dtype=F64).float()
    whole = torch.full((2, 3, 8), -torch.inf)
    whole[..., [0, 2, 3, 5, 7]] = finite
    whole.requires_grad_()
    entropy = token_entropies(whole, temperature=temperature)
    torch.testing.assert_close(entropy, token_entropies(finite, temperature=temperature))
    entropy.sum().backward()
    assert whole.grad.isfinite().all() and not whole.grad[..., [1, 4, 6]].any()
    # ∂H/∂x_v = −π_v (log π_v + H) / temperature
    log_pi = (finite / temperature).log_softmax(-1)
    right = -log_pi.exp() * (log_pi + entropy.detach().unsqueeze(-1)) / temperature
    torch.testing.assert_close(whole.grad[..., [0, 2, 3, 5, 7]], right)


def test_a_single_word_has_no_entropy():
    assert token_entropies(torch.tensor([[[0.3, -torch.inf]]])).item() == 0


@pytest.mark.ours
@pytest.mark.parametrize("temperature", [0, 0.0, -1.0, math.nan])
def test_a_temperature_that_is_not_above_0_is_refused(temperature):
    logits, tokens = torch.zeros(1, 2, 4), torch.zeros(1, 2).long()
    for call in (
        lambda: token_logprobs(logits, tokens, temperature=temperature),
        lambda: token_entropies(logits, temperature=temperature),
    ):
        with pytest.raises(ValueError, match="temperature must be above 0"):
            call()


@pytest.mark.ours
@pytest.mark.parametrize("token", [-100, -1, 4])
def test_a_token_outside_of_the_vocabulary_is_refused(token):
    tokens = torch.tensor([[1, token]])
    with pytest.raises(ValueError, match=r"0 … 3. If padding has −100"):
        token_logprobs(torch.zeros(1, 2, 4), tokens)


# --- rewards, advantages and masks of other types ---


@pytest.mark.ours
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.float16])
def test_rewards_may_be_whole_numbers_or_bool(dtype):
    rewards = torch.tensor([[1, 0, 0, 1], [1, 1, 1, 1]])
    found = group_advantages(rewards.to(dtype))
    assert found.is_floating_point()
    torch.testing.assert_close(found.float(), group_advantages(rewards.float()), atol=1e-3, rtol=0)


A = torch.tensor([[0.0, -3.0, 1.0, 0.5], [2.0, -1.0, 0.0, 0.0]])
# the largest |A| of each question, and the largest of all, may not be kept
ALLOWED = torch.tensor([[1, 0, 1, 1], [0, 1, 1, 1]])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_only_allowed_completions_are_kept(dtype):
    allowed = ALLOWED.to(dtype)
    assert prune(A, 2, allowed=allowed).tolist() == [[2, 3], [1, 2]]
    assert prune_pooled(A, 3, allowed=allowed).tolist() == [2, 3, 5]
    # |A| = 0 comes before all that may not be kept
    assert prune_pooled(A, 6, allowed=allowed).tolist() == [0, 2, 3, 5, 6, 7]
    p = keep_probabilities(A.abs(), 2, allowed=allowed)
    assert p.tolist() == [[0, 0, 1, 1], [0, 1, 0.5, 0.5]]


def test_others_are_kept_only_if_too_few_are_allowed():
    allowed = torch.tensor([[0, 0, 0, 1], [0, 0, 0, 0]])
    assert prune(A, 2, allowed=allowed).tolist() == [[0, 3], [0, 1]]
    assert prune_pooled(A, 2, allowed=allowed).tolist() == [0, 3]


RULES = {
    "prune": lambda x: prune(x, 1), "prune_pooled": lambda x: prune_pooled(x, 1),
    "retain": lambda x: retain(x, 1), "max_variance_subset": lambda x: max_variance_subset(x, 1),
    "keep_probabilities": lambda x: keep_probabilities(x, 1),
}


@pytest.mark.ours
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_refuses_rows_without_groups_and_nan(rule):
    with pytest.raises(ValueError, match=r"must be \(Q, G\).*\.view\(-1, G\)"):
        RULES[rule](torch.ones(8))
    with pytest.raises(ValueError, match="NaN"):
        RULES[rule](torch.tensor([[1.0, math.nan, 2.0, 0.0]]))


# --- shapes that torch would repeat in silence ---


@pytest.mark.ours
@every_loss
@pytest.mark.parametrize("wrong", ["old_logp", "mask", "ref_logp", "weights"])
@pytest.mark.parametrize("cut", [(slice(1), slice(None)), (slice(None), slice(1))])
def test_a_loss_refuses_a_shape_that_would_be_repeated(name, wrong, cut):
    x = torch.zeros(6, 5)
    given = {"logp": x, "old_logp": x, "advantages": x, "mask": x + 1, "ref_logp": x, "weights": x}
    given[wrong] = given[wrong][cut]
    with pytest.raises(ValueError, match=rf"{wrong} must have the shape of logp, \(6, 5\), not"):
        LOSSES[name](**given)


@pytest.mark.ours
@every_loss
@pytest.mark.parametrize("shape", [(), (1,), (5,), (1, 5), (2, 3), (6, 5, 1)])
def test_a_loss_refuses_advantages_that_are_not_one_for_each_completion_or_token(name, shape):
    x = torch.zeros(6, 5)
    with pytest.raises(ValueError, match="one for each completion or token"):
        LOSSES[name](x, x, torch.zeros(shape), x + 1)


WHOLE, ROW = torch.zeros(6, 5), torch.zeros(1, 5)
OTHERS = {
    "surrogate_loss": lambda: surrogate_loss(ROW, torch.zeros(6), WHOLE, WHOLE, WHOLE),
    "importance_ratio": lambda: importance_ratio(WHOLE, ROW, WHOLE),
    "sequence_ratio": lambda: sequence_ratio(WHOLE, WHOLE, ROW),
    "token_ratio": lambda: token_ratio(WHOLE, ROW, WHOLE),
    "off_policy_mask": lambda: off_policy_mask(torch.zeros(6), WHOLE, ROW, WHOLE),
    "token_rewards": lambda: token_rewards(torch.zeros(6), WHOLE, ROW, WHOLE, beta=1.0),
    "gae": lambda: gae(WHOLE, ROW, WHOLE),
    "value_loss": lambda: value_loss(WHOLE, WHOLE, ROW, WHOLE),
    **{name: (lambda f=f: f(WHOLE, ROW, WHOLE)) for name, f in CORRECTIONS.items()},
}


@pytest.mark.ours
@pytest.mark.parametrize("name", OTHERS)
def test_the_other_functions_refuse_it_too(name):
    with pytest.raises(ValueError, match="must have the shape of"):
        OTHERS[name]()


# --- a sampler that does not report a token ---


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_token_that_the_sampler_did_not_report_counts_as_equally_likely(name):
    old, sampled = LOGP.detach(), OLD.detach()
    unknown = torch.zeros_like(MASK)
    unknown[0, 2] = unknown[3, 0] = True
    found = CORRECTIONS[name](old, sampled.masked_fill(unknown, math.nan), MASK)
    expected = CORRECTIONS[name](old, torch.where(unknown, old, sampled), MASK)
    torch.testing.assert_close(found, expected)
    if name.startswith("token"):
        assert found[unknown].tolist() == [1, 1]


def test_it_does_not_move_the_mask_of_negative_completions():
    sampled = REF.masked_fill(mask_of([1] * 6, 5), math.nan)
    A = -torch.ones(6)
    found = off_policy_mask(A, LOGP, sampled, MASK, threshold=0.1)
    expected = off_policy_mask(A, LOGP, torch.where(sampled.isnan(), LOGP, REF), MASK,
                               threshold=0.1)
    assert torch.equal(found, expected)
