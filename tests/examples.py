"""What several tests share: six completions and their loss token by token, a policy that is small
enough to list all its completions, and functions as rewards."""

import math

import pytest
import torch

F64 = torch.float64


def ours(*values):
    """Values of a parameter with which a test asks for more than a docstring promises."""
    return [pytest.param(value, marks=pytest.mark.ours) for value in values]


# what may stand on padding here, and where other code, by no mistake, makes 0 · NaN of it
NOT_FINITE = ours(math.inf, -math.inf, math.nan)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


# --- six completions ------------------------------------------------------------------------------

# Of different lengths: two have one token, one is empty. 14 tokens in all.
LENGTHS = [5, 1, 0, 3, 1, 4]
# Both signs, and one completion without signal.
ADVANTAGES = torch.tensor([1.5, -0.7, 2.0, -1.2, 0.9, 0.0], dtype=F64)


def mask_of(lengths, width=None):
    return torch.arange(width or max(lengths)) < torch.tensor(lengths)[:, None]


def example(spread=0.4):
    """logp (with a gradient), old_logp, ref_logp: (6, 5) float64.

    With the spread of 0.4, ratios lie on both sides outside of the usual clip range.
    """
    generator = seeded(11)
    base = -1 - torch.rand(6, 5, generator=generator, dtype=F64)
    old, ref = (base + spread * torch.randn(6, 5, generator=generator, dtype=F64) for _ in range(2))
    return base.requires_grad_(), old, ref


LOGP, OLD, REF = example()
MASK = mask_of(LENGTHS)
# 1 / (N |o_i|) on each token
PER_COMPLETION = torch.tensor([[1 / (6 * max(n, 1))] for n in LENGTHS], dtype=F64) * MASK
RANDOM_WEIGHTS = torch.rand(6, 5, generator=seeded(3), dtype=F64) * MASK


def by_loop(
    weights, *, advantages=ADVANTAGES, logps=(LOGP, OLD), ratios=None, ref_logp=None, beta=0.0,
    clip_low=0.2, clip_high=None,
):
    """−Σ_it weights · (min(ρA, clip(ρ)A) − β k3) in Python floats, and its gradient by hand.

    weights: (N, T), 0 on padding. advantages: (N,) or (N, T). ratios: (N, T); None: of each token.
    """
    logp, old_logp = (x.detach() for x in logps)
    ratios = (logp - old_logp).exp() if ratios is None else ratios
    high = clip_low if clip_high is None else clip_high
    loss, gradient = 0.0, torch.zeros_like(logp)
    for at in map(tuple, weights.nonzero().tolist()):
        w, rho, p = weights[at].item(), ratios[at].item(), logp[at].item()
        a = (advantages[at[0]] if advantages.dim() == 1 else advantages[at]).item()
        open_ = not (a > 0 and rho > 1 + high or a < 0 and rho < 1 - clip_low)
        bounded = rho if open_ else 1 + high if a > 0 else 1 - clip_low
        loss -= w * bounded * a
        # dρ/dlogp = ρ
        gradient[at] = -w * open_ * rho * a
        if ref_logp is not None and beta:
            r = math.exp(ref_logp[at].item() - p)  # π_ref / π; d k3/dlogp = 1 − r
            loss += w * beta * (r - math.log(r) - 1)
            gradient[at] += w * beta * (1 - r)
    return loss, gradient


def assert_loss(loss, expected, logp=LOGP):
    """A loss and its gradient are the expected ones. (The weights in a loss are float32.)"""
    value, gradient = expected
    assert abs(loss.item() - value) < 1e-7, f"loss {loss.item():.6g}, right {value:.6g}"
    found = torch.autograd.grad(loss, logp)[0]
    torch.testing.assert_close(found, gradient, rtol=1e-6, atol=1e-9)


# --- three completions of 3, 2 and 1 tokens, of which tests say what verl makes of them -----------

THREE = {
    "logp": torch.tensor([[-0.5, -1.0, -2.0], [-0.3, -3.0, -0.7], [-1.5, -0.2, -0.9]], dtype=F64),
    "old_logp": torch.tensor([[-2.5, -1.1, -1], [-0.4, -0.5, -0.7], [-0.5, -0.3, -9]], dtype=F64),
    "advantages": torch.tensor([1.0, -2.0, 0.5], dtype=F64),
    "mask": mask_of([3, 2, 1]),
}


# --- a tiny policy --------------------------------------------------------------------------------


class TinyPolicy:
    """Three tokens (a, b, EOS) and at most three tokens per completion: 15 completions in all.

    It has one row of logits for each prefix. An expectation over its completions is a sum of 15.
    """

    EOS = 2
    PREFIXES = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    COMPLETIONS = [(2,), (0, 2), (1, 2)]
    COMPLETIONS += [(x, y, z) for x in (0, 1) for y in (0, 1) for z in (0, 1, 2)]
    LENGTHS = [len(o) for o in COMPLETIONS]
    MASK = mask_of(LENGTHS)
    REWARDS = torch.randn(15, generator=seeded(13), dtype=F64)

    @staticmethod
    def table(seed):
        return torch.randn(7, 3, generator=seeded(seed), dtype=F64)

    @classmethod
    def logp(cls, theta):
        """(15, 3): log π of each token of each completion, and NaN on padding."""
        rows = []
        for o in cls.COMPLETIONS:
            logits = [theta[cls.PREFIXES.index(o[:t])] for t in range(len(o))]
            known = [x.log_softmax(0)[token] for x, token in zip(logits, o, strict=True)]
            rows.append(torch.stack(known + [torch.tensor(math.nan, dtype=F64)] * (3 - len(o))))
        return torch.stack(rows)

    @classmethod
    def probabilities(cls, theta):
        """π(o) of each of the 15 completions."""
        rows = zip(cls.logp(theta), cls.LENGTHS, strict=True)
        return torch.stack([row[:length].sum() for row, length in rows]).exp()

    @classmethod
    def expected_gradient(cls, loss, theta, advantages, token_weights, **options):
        """E_π[∇ loss] on-policy, exactly: each completion counts with its probability."""
        logp = cls.logp(theta)
        weights = cls.probabilities(theta).detach()[:, None] * token_weights
        value, _ = loss(logp, logp.detach(), advantages, cls.MASK, weights=weights, **options)
        return torch.autograd.grad(value, theta)[0]


def kl_of(theta, ref):
    """KL(π ‖ π_ref) of two rows of logits."""
    p, q = theta.softmax(0).tolist(), ref.softmax(0).tolist()
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def numeric_gradient(function, x, step=1e-6):
    """Central differences of a function of a tensor."""
    gradient = torch.zeros(x.numel(), dtype=x.dtype)
    for i in range(x.numel()):
        e = torch.zeros(x.numel(), dtype=x.dtype)
        e[i] = step
        e = e.view_as(x)
        gradient[i] = (function(x + e) - function(x - e)) / (2 * step)
    return gradient.view_as(x)


# --- rewards --------------------------------------------------------------------------------------


def named(*functions):
    """Functions as rewards of the engine, under their own names."""
    from engine.scoring.score import Reward  # here, so that the tests of the paper load no engine

    return [Reward(function.__name__, function) for function in functions]
