"""Rare numbers: ratios that overflow, words without a probability, shapes that torch would repeat.
And what every loss promises alike.

float32 holds no number above 3e38, so exp(89) is ∞ there. 0 · ∞ is NaN, and one NaN in a gradient
makes a whole update worthless.
"""

import math
from functools import partial

import pytest
import torch

from cppo import prune, prune_pooled
from family.cispo import cispo_loss
from family.dapo import dapo_loss, overlong_penalty, token_mean_weights
from family.deepseek_v32 import deepseek_v32_loss, off_policy_mask, unbiased_kl
from family.drgrpo import constant_weights, drgrpo_loss
from family.gdpo import decoupled_advantages
from family.gfpo import retain, retained_advantages, token_efficiency
from family.gspo import gspo_loss, sequence_ratio, token_ratio
from family.lite_ppo import batch_std_advantages
from family.maxrl import mean_normalized_advantages
from family.nat import random_prefixes
from family.pods import max_variance_subset
from family.ppo import gae, ppo_loss, token_rewards, value_loss, whiten
from family.rloo import leave_one_out_advantages
from family.sapo import sapo_loss
from family.tis import CORRECTIONS
from family.unbiased import draw, keep_probabilities, reweighted
from grpo import (
    group_advantages,
    grpo_loss,
    importance_ratio,
    kl_k3,
    sequence_mean_weights,
    surrogate_loss,
    token_entropies,
    token_logprobs,
)
from tests.helpers.examples import (
    ADVANTAGES,
    F64,
    LOGP,
    MASK,
    OLD,
    ONE_EMPTY,
    REF,
    mask_of,
    per_completion,
    seeded,
)

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
    logp, advantages = gaps.clamp(max=0).requires_grad_(), torch.full(gaps.shape, A)
    loss, stats = LOSSES[name](
        logp, -gaps.clamp(min=0), advantages[:, 0] if name != "ppo" else advantages,
        torch.ones_like(gaps), **options)
    (gradient,) = torch.autograd.grad(loss, logp)
    assert all(x.isfinite() for x in (loss, *gradient.flatten(), *stats.values()))
    return loss.item(), gradient


# --- ratios that overflow ---


@every_loss
@pytest.mark.parametrize("A", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("gap", [90.0, 3e38, -3e38])
def test_loss_and_gradient_are_finite_at_every_log_ratio(name, A, gap):
    loss, gradient = loss_and_gradient(name, [[gap, gap, gap]], A)
    if A == 0:
        assert loss == 0 and not gradient.any()
    if A > 0 and gap > 0 and name != "cispo":  # CISPO's tokens keep a gradient
        assert not gradient.any()  # the clip ends it


@every_loss
@pytest.mark.parametrize("A", [1.0, -1.0])
def test_a_token_beyond_the_bound_does_not_touch_the_gradient_of_the_others(name, A):
    """GSPO's ratio belongs to the completion: the token touches all of it, but no other one."""
    _, gradient = loss_and_gradient(name, [[90.0, 0.1, 0.0], [0.0, 0.0, 0.0]], A)
    _, without = loss_and_gradient(name, [[0.0, 0.1, 0.0], [0.0, 0.0, 0.0]], A)
    touched = torch.zeros(2, 3).bool()
    touched[0, : 3 if "gspo" in name else 1] = True
    torch.testing.assert_close(gradient[~touched], without[~touched])
    assert gradient[~touched].any()


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "ppo"])
@pytest.mark.parametrize("ref", [-100.0, 100.0])
@pytest.mark.parametrize("gap", [0.0, 90.0])
def test_the_kl_is_finite_too(name, gap, ref):
    """PPO's KL is in its rewards."""
    loss_and_gradient(name, [[gap] * 3], 1.0, ref_logp=torch.full((1, 3), ref), beta=0.1)


def test_up_to_the_bound_the_ratio_is_exp_and_above_it_a_constant():
    """To the last bit, and so is the gradient."""
    x = torch.tensor([-1e4, -1.0, 0.0, 19.999, 21.0, torch.inf])
    x.requires_grad_()
    zeros = torch.zeros_like(x)
    ratio, right = importance_ratio(x, zeros, zeros + 1), x.exp()
    own, expected = (torch.autograd.grad(y.sum(), x)[0] for y in (ratio, right))
    assert torch.equal(ratio[:4], right[:4]) and torch.equal(own[:4], expected[:4])
    assert ratio[4:].tolist() == pytest.approx([math.exp(20)] * 2) and not own[4:].any()
    assert importance_ratio(x, zeros, zeros).tolist() == [1] * 6  # padding


@pytest.mark.ours
def test_k3_is_finite():
    """log π − log π_ref is −100 and 21. Above the bound k3 is e^20 − 21."""
    logp = torch.tensor([-100.0, 21.0], requires_grad=True)
    kl = kl_k3(logp, torch.zeros(2))
    (gradient,) = torch.autograd.grad(kl.sum(), logp)
    assert kl.tolist() == pytest.approx([math.exp(20) - 21, 20], rel=1e-6)
    assert gradient.tolist() == pytest.approx([0, 1], abs=1e-8)


# --- empty completions, and parts of a batch ---


@every_loss
@pytest.mark.parametrize("reference", [{}, {"ref_logp": REF}])
def test_an_empty_completion_adds_nothing_and_counts_in_n(name, reference):
    """In a mean over tokens it does not count. The KL is reported, whatever β is."""
    def of(*rows):
        part = {key: x[[*rows]] for key, x in reference.items()}
        four = (x[[*rows]] for x in (LOGP, OLD, ADVANTAGES, ONE_EMPTY))
        loss, stats = LOSSES[name](*four, **part)
        return [loss, torch.autograd.grad(loss, LOGP)[0]], stats

    (whole, stats), (others, expected) = of(0, 1, 2, 3, 4, 5), of(0, 1, 3, 4, 5)
    share = 1 if name in ("dapo", "cispo", "ppo") else 5 / 6
    torch.testing.assert_close(whole, [share * x for x in others], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(stats, expected, rtol=1e-6, atol=1e-9)
    assert (stats["kl"] > 0) == bool(reference)


@every_loss
@pytest.mark.parametrize("junk", [50.0, math.inf, -math.inf, math.nan])
def test_no_statistic_sees_the_padding(name, junk):
    clean = LOGP, OLD, REF
    dirty = (x.masked_fill(~MASK, y) for x, y in zip(clean, (junk, -junk, junk)))
    stats = [LOSSES[name](logp, old_logp, ADVANTAGES, MASK, ref_logp=ref_logp)[1]
             for logp, old_logp, ref_logp in (clean, dirty)]
    torch.testing.assert_close(stats[1], stats[0])


@every_loss
@pytest.mark.parametrize("tokens", [5, 0])
def test_a_batch_of_empty_completions_has_loss_0(name, tokens):
    logp, empty = LOGP[:, :tokens], torch.zeros(6, tokens)
    loss, stats = LOSSES[name](
        logp, logp.detach(), empty + 1, empty, ref_logp=logp.detach())
    assert loss == 0 and not torch.autograd.grad(loss, LOGP)[0].any()
    assert not any(stats.values())


@pytest.mark.ours
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16])
@pytest.mark.parametrize("weights_of, divisor, expected", [
    (sequence_mean_weights, {"num_sequences": 6}, per_completion(ONE_EMPTY)),
    (token_mean_weights, {"total_tokens": 14}, ONE_EMPTY / 14),
    (partial(constant_weights, max_tokens=9), {"num_sequences": 6}, ONE_EMPTY / 54),
], ids=["sequence", "token", "constant"])  # fmt: skip
def test_a_part_of_a_batch_has_the_weights_that_it_has_in_the_whole(
    weights_of, divisor, expected, dtype
):
    """An empty completion weighs nothing, and counts in N."""
    mask = ONE_EMPTY.to(dtype)
    parts = [weights_of(part, **divisor) for part in mask.split([1, 5])]
    for found in (weights_of(mask), torch.cat(parts)):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, check_dtype=False)


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


# --- rewards, advantages and masks of other types ---


def of_all_but_the_last(rewards):
    """GFPO's advantages."""
    kept = torch.arange(rewards.shape[1] - 1).expand(len(rewards), -1)
    return retained_advantages(rewards, kept)


ADVANTAGES_OF = {  # each of rewards (Q, G)
    "grpo": group_advantages, "rloo": leave_one_out_advantages, "lite": batch_std_advantages,
    "maxrl": mean_normalized_advantages, "gfpo": of_all_but_the_last,
    "gdpo": lambda rewards: decoupled_advantages(rewards[None]),
}
every_advantage = pytest.mark.parametrize("name", ADVANTAGES_OF)


@every_advantage
@pytest.mark.parametrize("reward", [-2.0, 0.1, 0.7, 3.3])
@pytest.mark.parametrize("group_size", [7, 16])
def test_equal_rewards_give_exact_zeros(name, reward, group_size):
    """In float32 the mean of equal numbers need not be that number, for example with 3.3.

    The difference would be divided by a std close to 0. A rounding error is not a signal.
    """
    others = torch.rand(3, group_size, generator=seeded(0))
    rewards = torch.cat([torch.full((1, group_size), reward), others])
    found, alone = ADVANTAGES_OF[name](rewards), ADVANTAGES_OF[name](rewards[:1])
    assert not found[0].any() and not alone.any() and found[1].any()


SCORES = torch.tensor([[3, 0, 1, 2], [0, 0, 1, 1], [2, 2, 1, 3], [4, 3, 2, 1]])
CHANCES = torch.tensor([0.25, 0, 0.75, 1])
TAKE_NUMBERS = [  # functions of (4, 4)
    *ADVANTAGES_OF.values(),
    *(lambda x, rule=rule: rule(x, 2) for rule in (
        prune, prune_pooled, retain, max_variance_subset, keep_probabilities)),
    partial(overlong_penalty, max_length=3, cache=2),
    lambda x: gae(x, torch.zeros(4, 4), torch.ones(4, 4), lam=0.5)[0],
    lambda x: reweighted(x, CHANCES.expand(4, 4)),
]


@pytest.mark.ours
@pytest.mark.parametrize("function, dtype", [
    *((function, dtype) for function in TAKE_NUMBERS for dtype in (torch.int64, torch.uint8)),
    *((function, torch.bool) for function in ADVANTAGES_OF.values())])
def test_whole_numbers_count_as_floats(function, dtype):
    """Rewards, scores and lengths. As a byte, −1 is 255."""
    numbers = SCORES.to(dtype)
    torch.testing.assert_close(function(numbers), function(numbers.float()))


@pytest.mark.ours
def test_nothing_to_count_is_not_0_divided_by_0():
    """A batch without tokens, a completion without one, a chance of 0."""
    empty = torch.zeros(2, 3)
    assert torch.equal(token_mean_weights(empty, total_tokens=0), empty)
    assert token_efficiency(torch.tensor([[2.0, 0.0]]), torch.zeros(1, 2)).tolist() == [[2, 0]]
    assert reweighted(torch.ones(1, 2), torch.tensor([[0.0, 1.0]])).tolist() == [[0, 0.5]]
    assert not whiten(empty + 1, empty).any()
    assert value_loss(empty, empty + 1, empty, empty) == 0


@every_advantage
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_makes_its_group_nan(name, bad):
    """A run refuses it at its door: engine/scoring/score.py."""
    found = ADVANTAGES_OF[name](torch.tensor([[1.0, bad, 0.0, 0.0], [1, 0, 0, 0]]))
    assert found[0].isnan().any()


A = torch.tensor([[0.0, -3.0, 1.0, 0.5], [2.0, -1.0, 0.0, 0.0]])
# the largest |A| of each question, and the largest of all, may not be kept
ALLOWED = torch.tensor([[1, 0, 1, 1], [0, 1, 1, 1]])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
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


# --- shapes that torch would repeat in silence, and float16, which holds no number above 65504 ---

X = torch.zeros(6, 5)
WRONG = dict.fromkeys(["old_logp", "mask", "ref_logp", "weights"], [X[:1], X[:, :1]])
WRONG |= {"advantages": [torch.zeros(shape) for shape in ((1,), (5,), (1, 5), (6, 5, 1))]}
WRONG |= {"logp": [X.half()]}


@every_loss
@pytest.mark.parametrize("wrong", WRONG)
def test_a_loss_refuses_what_torch_would_repeat(name, wrong):
    """Each of logp, old_logp, … is (N, T). There is one advantage for each completion or token."""
    given = dict.fromkeys(["logp", "old_logp", "advantages", "ref_logp", "weights"], X)
    for tensor in WRONG[wrong]:
        with pytest.raises(  # where old_logp stands in for sampled_logp, that is the name
            (AssertionError, RuntimeError), match=f"{wrong}|sampled_logp|size of tensor"
        ):
            LOSSES[name](**given | {"mask": X + 1, wrong: tensor})


ROW, ONE_GROUP = X[:1], torch.ones(8)
rewards_of = partial(token_rewards, beta=1.0)
REFUSED = [  # a function, and arguments that torch would repeat, or that keep too many or too few
    (surrogate_loss, ROW, torch.zeros(6), X, X, X),
    (importance_ratio, X, ROW, X), (sequence_ratio, X, X, ROW), (token_ratio, X, ROW, X),
    (off_policy_mask, torch.zeros(6), X, ROW, X),
    (kl_k3, X, ROW), (unbiased_kl, X, ROW, X),
    (rewards_of, torch.zeros(6), X, ROW, X), (rewards_of, torch.zeros(1), X, X, X),
    (rewards_of, torch.zeros(6, 1), X, X, X),
    (gae, X, ROW, X), (value_loss, X, X, ROW, X), (whiten, X, ROW),
    (draw, X, torch.zeros(5)), (random_prefixes, X, torch.zeros(5)),  # one dimension too few
    *((correction, X, ROW, X) for correction in CORRECTIONS.values()),
    # the last position of a model's output predicts no token of the completion: cut it off
    *((token_logprobs, torch.zeros(6, T, 7), X) for T in (4, 6)),
    # rows without groups
    *((rule, ONE_GROUP, 1) for rule in (prune, prune_pooled, retain, max_variance_subset)),
    *((function, ONE_GROUP) for function in (
        group_advantages, leave_one_out_advantages, batch_std_advantages,
        mean_normalized_advantages)),
    (group_advantages, X[None]), (decoupled_advantages, X),
    (reweighted, ONE_GROUP, ONE_GROUP), (reweighted, X, ROW),
    # k is 1 to G
    *((rule, A, k) for rule in (prune, retain, max_variance_subset, keep_probabilities)
      for k in (0, 5, -1)),
    (prune_pooled, A, -1), (prune_pooled, A, 9),
    # what belongs to each completion, question or reward
    *((partial(rule, allowed=few), A, 2) for rule in (prune, prune_pooled, keep_probabilities)
      for few in (ALLOWED[:1], ALLOWED[:, :1])),
    (retained_advantages, A, torch.tensor([[0, 1]])),
    (partial(decoupled_advantages, weights=[1, 1]), A[None]),
]


@pytest.mark.parametrize("call", REFUSED)
def test_the_other_functions_refuse_it(call):
    """In the words of an assert, of `reshape` or of `zip`."""
    function, *arguments = call
    refusals = AssertionError, RuntimeError, ValueError
    with pytest.raises(refusals, match=r"N|Q|shape .* is invalid|zip\(\) argument"):
        function(*arguments)


@every_loss
def test_only_the_current_policy_gets_a_gradient(name):
    """bfloat16 holds numbers as large as those of float32, so a loss takes it."""
    policies = [x.detach().bfloat16().requires_grad_() for x in (LOGP, OLD, REF)]
    logp, old_logp, ref_logp = policies
    LOSSES[name](logp, old_logp, torch.ones(6, 5), MASK, ref_logp=ref_logp)[0].backward()
    assert logp.grad.any() and old_logp.grad is None and ref_logp.grad is None


# --- a sampler that does not report a token ---


def kept_negative_completions(logp, sampled_logp, mask):
    """One is masked, because of its second token."""
    return off_policy_mask(-torch.ones(6), logp, sampled_logp, mask, threshold=0.05)


@pytest.mark.parametrize("function", [*CORRECTIONS.values(), kept_negative_completions])
def test_a_token_that_the_sampler_did_not_report_counts_as_equally_likely(function):
    first = mask_of([1] * 6, 5)
    found = function(LOGP, OLD.masked_fill(first, math.nan), MASK)
    torch.testing.assert_close(found, function(LOGP, torch.where(first, LOGP, OLD), MASK))
