"""What `grpo.token_logprobs`, `token_entropies` and the KL estimators promise.

The log-probability of a token is log softmax(logits / temperature), in float32. The estimators are
compared with the KL divergence itself: an expectation over five outcomes is a sum of five, and the
gradient of the KL is taken by finite differences.
"""

import math

import pytest
import torch

from grpo import kl_k1, kl_k2, kl_k3, token_entropies, token_logprobs
from tests.helpers.examples import F64, TinyPolicy, kl_of, numeric_gradient, ours, seeded

# --- log-probabilities and entropies --------------------------------------------------------------


def test_a_logit_that_is_larger_by_log_3_means_three_quarters_of_the_probability():
    logits, tokens = torch.tensor([[[0.0, math.log(3.0)]]]), torch.tensor([[1]])
    assert token_logprobs(logits, tokens).item() == pytest.approx(math.log(0.75), abs=1e-6)


def test_eight_equal_outcomes_have_an_entropy_of_log_8():
    torch.testing.assert_close(token_entropies(torch.zeros(1, 1, 8)), torch.tensor([[math.log(8)]]))


@pytest.mark.parametrize("dtype", [torch.float32, *ours(torch.bfloat16, torch.float64)])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.6}])
def test_logprobs_and_entropies_are_those_of_torchs_categorical(options, autocast, dtype):
    """In float32. The softmax of bfloat16 logits would be wrong in its second digit. And autocast
    would turn an einsum or a matmul into a bfloat16 product: wrong by 0.03 nats."""
    logits = (5 * torch.randn(3, 4, 500, generator=seeded(16))).to(dtype)
    tokens = torch.randint(500, (3, 4), generator=seeded(17))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logp = token_logprobs(logits, tokens, **options)
        entropies = token_entropies(logits, **options)
    assert logp.dtype == entropies.dtype == torch.float32
    heated = logits.double() / options.get("temperature", 1.0)
    right = torch.distributions.Categorical(logits=heated)
    torch.testing.assert_close(logp.double(), right.log_prob(tokens), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies.double(), right.entropy(), rtol=1e-5, atol=1e-5)


def test_the_gradient_of_a_logprob_is_one_hot_minus_softmax():
    """∂ log π(o) / ∂ logit_v = (1[v = o] − π(v)) / temperature."""
    logits = torch.randn(2, 3, 5, generator=seeded(4), requires_grad=True)
    tokens = torch.randint(5, (2, 3), generator=seeded(5))
    logp = token_logprobs(logits, tokens, temperature=0.5)
    (gradient,) = torch.autograd.grad(logp.sum(), logits)
    slope = torch.eye(5)[tokens] - (logits.detach() / 0.5).softmax(-1)
    torch.testing.assert_close(gradient, slope / 0.5)


# --- KL estimators: the definition ----------------------------------------------------------------


def test_the_estimators_by_hand():
    """π = 1/2 and π_ref = 1/4: log(π/π_ref) = log 2 and r = π_ref/π = 1/2.

    A known mistake is the ratio upside down: then k1 and k3 are other numbers.
    """
    logps, log_2 = torch.tensor([0.5, 0.25], dtype=F64).log(), math.log(2)
    found = [estimator(*logps).item() for estimator in (kl_k1, kl_k2, kl_k3)]
    assert found == pytest.approx([log_2, log_2**2 / 2, 0.5 + log_2 - 1])


# --- KL estimators: their exact expectations over five outcomes -----------------------------------

THETA = torch.randn(5, generator=seeded(8), dtype=F64)
OTHER = torch.randn(5, generator=seeded(9), dtype=F64)


@pytest.mark.parametrize("estimator, unbiased", [(kl_k1, True), (kl_k2, False), (kl_k3, True)])
def test_the_expected_value_of_k1_and_of_k3_is_the_kl_and_that_of_k2_is_not(estimator, unbiased):
    values = estimator(THETA.log_softmax(0), OTHER.log_softmax(0))
    expected = (THETA.softmax(0) * values).sum().item()
    assert (expected == pytest.approx(kl_of(THETA, OTHER), rel=1e-6)) == unbiased


@pytest.mark.parametrize("estimator, kl", [
    (kl_k1, lambda x: 0.0), (kl_k2, lambda x: kl_of(x, OTHER)), (kl_k3, lambda x: kl_of(OTHER, x))])
def test_k1_as_a_loss_teaches_nothing_and_k2_and_k3_pull_towards_the_reference(estimator, kl):
    """E_π[∇k1] = 0, E_π[∇k2] = ∇KL(π ‖ π_ref), and of k3 it is the KL the other way round:
    E_π[∇k3] = E_π[(1 − r) ∇log π] = −Σ π_ref ∇log π = ∇KL(π_ref ‖ π).

    So only the value of k3 is unbiased. The probabilities of the samples are held fixed, as in
    training.
    """
    theta = THETA.clone().requires_grad_()
    values = estimator(theta.log_softmax(0), OTHER.log_softmax(0))
    (gradient,) = torch.autograd.grad((THETA.softmax(0) * values).sum(), theta)
    torch.testing.assert_close(gradient, numeric_gradient(kl, THETA), rtol=0, atol=1e-6)


def test_summed_over_tokens_k2_does_not_see_what_a_token_causes():
    """The reference differs only in what follows a first "a". So the KL of whole completions grows
    with the chance of "a", and k2 of whole completions says so. The sum of the tokens' k2 has no
    gradient for the first token."""
    theta = TinyPolicy.table(14).requires_grad_()
    other = TinyPolicy.table(14)
    other[1, 0] -= 3  # the logits behind a first "a"
    logp, ref = (TinyPolicy.logp(x, padding=0.0) for x in (theta, other))
    pi = TinyPolicy.probabilities(theta)
    of_tokens, of_completions, right = (
        torch.autograd.grad(loss, theta, retain_graph=True)[0]
        for loss in (pi.detach() @ kl_k2(logp, ref).sum(1),
                     pi.detach() @ kl_k2(logp.sum(1), ref.sum(1)), pi @ (logp - ref).sum(1)))
    torch.testing.assert_close(of_completions, right)
    assert right[0, 0] > 0.05 and of_tokens[0].abs().max() < 1e-9


# --- KL estimators: properties --------------------------------------------------------------------


def test_k1_can_be_negative():
    assert kl_k1(torch.tensor([-2.0]), torch.tensor([-1.0])).item() == -1


@pytest.mark.parametrize("estimator", [kl_k2, kl_k3])
def test_k2_and_k3_are_never_negative_and_zero_only_if_the_policies_agree(estimator):
    logp = torch.linspace(-8, 0, 81, dtype=F64)
    values = estimator(logp, torch.full_like(logp, -4.0))
    assert (values >= 0).all() and torch.equal(values == 0, logp == -4)


@pytest.mark.ours
def test_k3_is_precise_if_the_policies_are_close():
    """k3 ≈ x²/2 if log r = x. The plain exp(x) − x − 1 in float32 is wrong by up to a tenth."""
    x = torch.tensor([1e-3, -2e-3, 3e-3])
    expected = x**2 / 2 + x**3 / 6 + x**4 / 24
    torch.testing.assert_close(kl_k3(torch.zeros(3), x), expected, rtol=2e-3, atol=0)
