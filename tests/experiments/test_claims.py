"""What experiments/claims.py computes, beside loops over explicit gradients and enumerations."""

from itertools import product

import pytest
import torch

from cppo import prune
from engine.data.questions import load_questions
from engine.model.logprobs import Policy
from experiments import claims
from experiments.library.toy_model import answered
from grpo import group_advantages, kl_k1, kl_k3
from tests.helpers.examples import F64, seeded

R = torch.tensor([[1.0, 0, 0, 0, 1, 0], [0, 1, 1, 1, 1, 1]], dtype=F64)
OF_EACH = torch.randn(2, 6, 5, generator=seeded(0), dtype=F64)  # ∇ log π(o) of each completion


def test_the_score_of_a_completion_is_the_gradient_of_its_log_probability(loaded):
    """Here one forward pass scores all completions."""
    model, tokenizer = loaded
    batch, _ = answered(model, tokenizer, load_questions("toy", tokenizer, limit=2)[0], 3, seed=1)
    logp, parameters = Policy(model).logprobs(batch), list(model.parameters())
    for row, own in zip(claims.scores(model, batch), logp, strict=True):
        gradients = torch.autograd.grad(own.sum(), parameters, retain_graph=True)
        expected = torch.cat([g.flatten() for g in gradients])
        torch.testing.assert_close(row, expected, atol=1e-4, rtol=1e-3)


def test_the_share_of_the_kept_is_that_of_explicit_gradients():
    A, lengths = group_advantages(R), torch.arange(1.0, 13, dtype=F64).view(2, 6)
    found = claims.kept_share(A / lengths, A, OF_EACH @ OF_EACH.mT, 2)
    for q, kept in enumerate(prune(A, 2).tolist()):
        parts = [A[q, i] / lengths[q, i] * OF_EACH[q, i] for i in range(6)]
        of_kept, whole = sum(parts[i] for i in kept), sum(parts)
        norms = [part.norm() for part in parts]
        expected = [sum(norms[i] for i in kept) / sum(norms), of_kept.norm() / whole.norm(),
                    torch.cosine_similarity(of_kept, whole, dim=0)]
        torch.testing.assert_close([x[q] for x in found], expected)


def test_the_variance_is_that_of_all_samples():
    """Two questions, each with three answers; a group has 2 of them. The mean of the estimate over
    all samples is the variance over all groups."""
    chances = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]], dtype=F64)
    of_answer = torch.randn(2, 3, 4, generator=seeded(2), dtype=F64)
    groups = [(chances[q, a] * chances[q, b] / 2, of_answer[q, [a, b]])
              for q, a, b in product(range(2), range(3), range(3))]
    W = torch.tensor([[0.7, -0.2]], dtype=F64)
    mean = sum(p * W @ s for p, s in groups)
    expected = sum(p * (W @ s - mean).square().sum() for p, s in groups), mean.square().sum()
    found = torch.zeros(2, dtype=F64)
    for (p, s), (p2, s2) in product(groups, groups):
        both = torch.cat([s, s2])
        found += p * p2 * torch.stack(claims.variance(W.expand(2, 2), both, 2))
    torch.testing.assert_close(found, torch.stack(expected))


def test_the_moments_of_the_estimators_are_sums_over_the_words():
    logp, ref = torch.randn(2, 3, 5, generator=seeded(3), dtype=F64).log_softmax(2)
    p, x = logp.exp() / 3, logp - ref
    for estimator, k in ((kl_k1, x), (kl_k3, (-x).exp() + x - 1)):
        mean = (p * k).sum()
        std = (p * (k - mean) ** 2).sum().sqrt()
        torch.testing.assert_close(claims.mean_and_std(estimator, logp, ref), (mean, std))
    # both are unbiased
    assert claims.compare(logp, ref)["k3 − KL"].item() == pytest.approx(0, abs=1e-12)
