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

# Of different lengths: three have one token. 14 tokens in all.
LENGTHS = [5, 1, 1, 2, 1, 4]
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
# the third is empty: none of a paper is
ONE_EMPTY = mask_of([5, 1, 0, 3, 1, 4])
either_mask = pytest.mark.parametrize("mask", [MASK, *ours(ONE_EMPTY)], ids=["six", "one empty"])


def per_completion(mask):
    """1 / (N |o_i|) on each token."""
    return mask / (len(mask) * mask.sum(1, keepdim=True).clamp(min=1)).double()


PER_COMPLETION = per_completion(MASK)
RANDOM_WEIGHTS = torch.rand(6, 5, generator=seeded(3), dtype=F64) * MASK


# --- the loss of the family, token by token -------------------------------------------------------


def clipped(low, high):
    """min(ρA, clip(ρ, 1 − low, 1 + high)A) of one token. high=None: as low."""
    high = low if high is None else high
    return lambda ratio, A: min(ratio * A, min(max(ratio, 1 - low), 1 + high) * A)


def k3(ratio, r):
    """r − log r − 1 of one token, with r = π_ref / π."""
    return r - math.log(r) - 1


def token_ratios(logp, old_logp):
    return (logp - old_logp).exp()


def by_loop(
    weights, *, surrogate=None, kl=k3, ratios=token_ratios, advantages=ADVANTAGES,
    logps=(LOGP, OLD), ref_logp=None, beta=0.0, clip_low=0.2, clip_high=None,
):
    """−Σ_it weights · (surrogate(ρ, A) − β KL) in Python floats, and its gradient in log π_θ, a
    difference quotient.

    weights: (N, T), 0 on padding. advantages: (N,) or (N, T). surrogate(ρ, A), kl(ρ, π_ref/π): of
    one token. surrogate=None: the clipped one. ratios(logp, old_logp): (N, T), ρ of each token.
    """
    logp, old_logp = (x.detach() for x in logps)
    surrogate = surrogate or clipped(clip_low, clip_high)
    advantages = advantages.view(len(logp), -1).expand(logp.shape)
    places = [tuple(place) for place in weights.nonzero().tolist()]

    def loss(logp):
        total, ratio = 0.0, ratios(logp, old_logp)
        for at in places:
            rho, A = ratio[at].item(), advantages[at].item()
            objective = surrogate(rho, A)
            if ref_logp is not None and beta:
                objective -= beta * kl(rho, math.exp(ref_logp[at] - logp[at]))
            total -= weights[at].item() * objective
        return total

    return loss(logp), numeric_gradient(loss, logp)


def assert_loss(loss, expected, logp=LOGP):
    """A loss and its gradient are the expected ones. (The weights in a loss are float32.)"""
    value, gradient = expected
    assert abs(loss.item() - value) < 1e-7, f"loss {loss.item():.6g}, right {value:.6g}"
    found = torch.autograd.grad(loss, logp)[0]
    torch.testing.assert_close(found, gradient, rtol=1e-6, atol=1e-9)


def check_loss(
    loss, options, *, junk=None, mask=MASK, advantages=ADVANTAGES, logps=(LOGP, OLD), **formula
):
    """The loss of the six completions, and its gradient, equal the loop. Returns its statistics.

    options: what the loss is given, besides. formula: what `by_loop` is given, besides. junk:
    stands on the padding of all that the loss is given, except of weights.
    """
    given = {"logp": logps[0], "old_logp": logps[1], "advantages": advantages} | options
    if junk is not None:
        for name in given.keys() - {"weights"}:
            if torch.is_tensor(given[name]) and given[name].shape == mask.shape:
                other = -junk if name == "old_logp" else junk
                given[name] = given[name].masked_fill(~mask.bool(), other)
    given["logp"] = given["logp"].detach().requires_grad_()
    value, stats = loss(mask=mask, **given)
    formula = {"weights": per_completion(mask), "advantages": advantages, "logps": logps} | formula
    assert_loss(value, by_loop(**formula | options), given["logp"])
    return stats


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
    def logp(cls, theta, padding=math.nan):
        """(15, 3): log π of each token of each completion, and a number on padding."""
        rows = []
        for o in cls.COMPLETIONS:
            logits = [theta[cls.PREFIXES.index(o[:t])] for t in range(len(o))]
            known = [x.log_softmax(0)[token] for x, token in zip(logits, o, strict=True)]
            rows.append(torch.stack(known + [torch.tensor(padding, dtype=F64)] * (3 - len(o))))
        return torch.stack(rows)

    @classmethod
    def after(cls, prefix):
        """Whether each completion begins with a prefix, and goes on."""
        n = len(prefix)
        return torch.tensor([o[:n] == prefix and len(o) > n for o in cls.COMPLETIONS])

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
