"""Small inputs, function by function, on which somebody's answers are compared with ours."""

import math
from collections import namedtuple

import torch

from tests.helpers.examples import F64, mask_of, seeded

# atol: how far an answer may be from ours, besides 1e-5 of it. gradient: compare it, too
Probe = namedtuple("Probe", "args options atol gradient", defaults=[{}, 1e-6, True])


def t(*values):
    return torch.tensor(values, dtype=F64)


def normal(seed, *shape):
    return torch.randn(*shape, generator=seeded(seed), dtype=F64)


def probes(*all_args, **options):
    return [Probe(args, options) for args in all_args]


ONE, HALF, QUARTER = torch.ones(1, 1), t([0.5]).log(), t([0.25]).log()
LENGTHS = (5, 1, 3, 2, 4, 2)
MASK, A = mask_of(LENGTHS), t(1.5, -0.7, 2.0, -1.2, 0.9, 0.3)
LOGP = -1 - normal(1, 6, 5).abs()
WEIGHTS = MASK * torch.rand(6, 5, generator=seeded(4), dtype=F64)
OLD, REF = LOGP + 0.4 * normal(2, 6, 5), LOGP + 0.4 * normal(3, 6, 5)


def losses(**options):
    """Probes of a loss: one token, the four corners of the clip, unequal lengths, with a KL."""
    corners = t([1.5], [1.5], [0.5], [0.5]).log()
    signs, zero = t(1, -1, 1, -1), torch.zeros(4, 1, dtype=F64)
    two = t([0.0, 0.0, 0.0, 0.0], [0.0, -7.0, -7.0, -7.0])  # the −7 are on padding
    kl, whole = {"ref_logp": QUARTER, "beta": 1.0}, (LOGP, OLD, A, MASK)
    plain = [
        (HALF, HALF, t(1.0), ONE),
        *((corners[i:i + 1], zero[:1], signs[i:i + 1], ONE) for i in range(4)),
        (corners, zero, signs, ONE.expand(4, 1)),
        (t([5.0, 3.0]).log(), t([0.0, 0.0]), t(-1.0), mask_of([2])),  # a dual clip acts
        (two[:, :2], 0 * two[:, :2], t(1, -2), mask_of([2, 1])),
        (two, 0 * two, t(1, -2), mask_of([4, 1])),
        (t([-1.0], [-2.0]), t([-1.0], [-2.0]), t(1, 1), torch.tensor([[1], [0]])),  # empty
        whole,
    ]
    with_options = [
        *(((t([r]).log(), zero[:1], t(a), ONE), {"clip_low": 0.2, "clip_high": 0.28})
          for r, a in ((1.25, 1.0), (0.75, -1.0))),
        ((HALF, HALF, t(0.0), ONE), kl),
        ((corners[:1] + HALF, HALF, t(0.0), ONE), kl),
        ((two[:1, :2], two[:1, :2], t(0.0), mask_of([2])),
         {"ref_logp": two[:1, :2] + 12, "beta": 1.0}),  # a clamp acts
        (whole, {"ref_logp": REF, "beta": 0.3}),
        (whole, {"weights": WEIGHTS}),
    ]
    return probes(*plain, **options) + [Probe(args, options | more) for args, more in with_options]


def for_each_token(probe):
    """The same probe with advantages (N, T)."""
    logp, old_logp, advantages, mask = probe.args
    return probe._replace(args=(logp, old_logp, advantages[:, None].expand_as(logp), mask))


# --- probes, the smallest first ---


FAR = t([1.0, 2.0, -0.3], [0.2, 9.0, 9.0])
PAIRS = [(HALF, HALF), (HALF, QUARTER), (QUARTER, HALF), (LOGP, REF)]
CORNERS = [(t([r]), t(a)) for a in (1.0, -1.0) for r in (1.0, 1.5, 0.5)]
REWARDS = [t([1, 0]), t([1, 0, 0, 0]), t([1, 0, 0, 0], [5, 9, 5, 5]), normal(5, 3, 6)]
TOKENS = [(t([[0.0, math.log(3)]]), torch.tensor([[1]])),
          (normal(6, 2, 3, 5), torch.tensor([[0, 4, 2], [1, 1, 3]]))]
PPO_ARGS = [(t([1, 1]), t([0.0, 0.5]), ONE.expand(1, 2)),
            (t([1, 2, 4, 9]), t([10, 20, 30, 99]), mask_of([3, 4])[:1]),
            (normal(7, 6, 5), normal(8, 6, 5), MASK)]
VALUES = [(t([v]), t([1.0]), t([r]), ONE) for v, r in
          ((1.1, 2), (1.5, 2), (0.5, 0), (0.5, 2), (1.5, 1.3))]
MASKS = (ONE,), (mask_of([2, 1]),), (MASK,)
LENGTH_ROWS = t([30, 10, 20, 40], [7, 5, 6, 8])
ADVANTAGE_ROWS = [t([0.1, -2.0, 0.5, 1.0]), t([1.0, -1.0, 0.5, -0.25], [0, 0.01, -0.03, 0.02])]
PROBES = {
    "kl_k1": probes(*PAIRS), "kl_k2": probes(*PAIRS), "kl_k3": probes(*PAIRS, (HALF, HALF + 12)),
    "group_advantages": [*probes(*((r,) for r in REWARDS)),
                         Probe((normal(5, 3, 6),), {"divide_by_std": False}),
                         Probe((normal(5, 3, 6),), {"eps": 0.5, "ddof": 0})],
    "decoupled_advantages": [Probe((normal(12, 2, 3, 4),)),
                             Probe((normal(12, 2, 3, 4),), {"weights": [1.0, 0.5]})],
    "clipped_surrogate": [*probes(*CORNERS, (t([1.25]), t(1.0)), (t([4.0]), t(-1.0)),
                                  (t([1.5, 1.5], [0.5, 0.9]), t(1, -2))),
                          *(Probe((t([1.25, 0.75]), t(a)), {"clip_low": 0.2, "clip_high": 0.28})
                            for a in (1.0, -1.0))],
    "sequence_mean_weights": [*probes(*MASKS, (mask_of([2, 0]),)),
                              Probe((mask_of([2, 1]),), {"num_sequences": 4})],
    "token_mean_weights": probes(*MASKS),
    "constant_weights": probes(*MASKS, max_tokens=8),
    "grpo_loss": losses(), "cppo_loss": losses(), "dapo_loss": losses(),
    "cispo_loss": losses(), "sapo_loss": [
        probe for probe in losses() if not {"clip_low", "clip_high"} & probe.options.keys()],
    "ppo_loss": [for_each_token(probe) for probe in losses() if "beta" not in probe.options],
    "gspo_loss": losses() + losses(clip_low=0.2, clip_high=0.3),
    "drgrpo_loss": losses(max_tokens=8),
    "token_logprobs": [*probes(*TOKENS), *(Probe(a, {"temperature": 0.5}) for a in TOKENS)],
    "token_entropies": [Probe((logits,), options) for options in ({}, {"temperature": 0.5})
                        for logits, _ in TOKENS],
    "keep_count": probes(*((16, rate) for rate in (0.5, 0.75, 0.9375, 0.8, 0.9)), (10, 0.9)),
    "prune": probes(*((a, k) for k in (2, 1, 3) for a in ADVANTAGE_ROWS)),
    "prune_below": probes(*((a, g) for g in (0.5, 1.0) for a in ADVANTAGE_ROWS)),
    "prune_pooled": probes(*((a, n) for n in (2, 4) for a in ADVANTAGE_ROWS)),
    "batch_rows": probes((torch.tensor([[0, 3], [1, 2]]), 4), (torch.tensor([[1], [0], [2]]), 3)),
    "gae": [*probes(*PPO_ARGS), *(Probe(a, {"gamma": 0.5, "lam": 0.8}) for a in PPO_ARGS)],
    "value_loss": probes(*VALUES, (normal(9, 6, 5), normal(10, 6, 5), normal(11, 6, 5), MASK)),
    "whiten": probes((t([2, -2]), ONE.expand(1, 2)), (FAR, mask_of([3, 1])), (LOGP, MASK)),
    "overlong_penalty": [Probe((t(4, 16, 17, 20, 25),), {"max_length": 20, "cache": 4})],
    "retain": [*probes((LENGTH_ROWS, 2), (LENGTH_ROWS, 1)),
               Probe((LENGTH_ROWS, 2), {"largest": True})],
    "retained_advantages": probes(
        (t([1, 0, 4]), torch.tensor([[0, 1]])),
        (normal(13, 2, 4), torch.tensor([[0, 1, 3], [1, 2, 3]])),
        (t([2, 2, 0, 5]), torch.tensor([[0, 1]]))),
    "truncated_importance_weights": [
        Probe((t([0.6, 0.2, 0.9]).log(), t([0.4, 0.4, 0.1]).log(), torch.ones(1, 3)), {"cap": 2.0}),
        Probe((LOGP, OLD, MASK), {"cap": 1.5}),
        Probe((LOGP, OLD, MASK), {"cap": 1.5, "low": 0.7})],
}

# Inputs that are rare: {name: [(probe, what is said if the answer or the gradient is another)]}.
OVERFLOW = ("at a log-ratio of 90 in float32 the loss or its gradient is NaN, or not {}: bound the "
            "log-ratio, say at 20")
FAR_AWAY = [torch.tensor([[x]]) for x in (-1.0, -91.0)]
WITH_MINUS_INFINITY = torch.tensor([[[-math.inf, 0.0, math.log(3)]]])
EDGES = {name: [(Probe((*FAR_AWAY, torch.tensor(A), ONE), probes[0].options),
                 OVERFLOW.format(words))
                for A, words in (([1.0], "flat at A > 0"), ([0.0], "0 at A = 0"))]
         for name, probes in PROBES.items() if name.endswith("_loss") and name != "value_loss"}
EDGES["ppo_loss"] = [(for_each_token(probe), words) for probe, words in EDGES["ppo_loss"]]
EDGES["kl_k3"] = [(Probe((torch.tensor([[-1e-6]]), torch.zeros(1, 1)), atol=1e-9, gradient=False),
                   "at a log-ratio of 1e-6 in float32 k3 is rounded to a number that may be "
                   "negative: take expm1(d) − d, not exp(d) − d − 1")]
EDGES["token_logprobs"] = [(Probe((torch.tensor([[[0.0, 200.0]]]), torch.tensor([[0]]))),
                            "a token of the probability e^−200 gets no log-probability of −200: "
                            "take log_softmax, not the log of softmax")]
EDGES["token_entropies"] = [(Probe((WITH_MINUS_INFINITY,)), "the entropy or its gradient is NaN "
                             "if a word has −∞: 0 · −∞ must count 0")]

# Rewards in float32. Those of the first question are all equal, so they must get no
# advantage: one above 0.01 counts.
EQUAL = ("equal rewards get an advantage, or NaN: the rounding error of their mean is divided by "
         "a std close to 0")
SAME = [torch.tensor([[x] * n, [*range(n)]]) for x, n in ((1.0, 3), (0.9, 3), (3.3, 7))]
EDGES["group_advantages"] = [(Probe((r,), atol=0.01), EQUAL) for r in SAME]
EDGES["decoupled_advantages"] = [(Probe((r[None],), atol=0.01), EQUAL) for r in SAME]
# A tiny spread shows the eps of (r − mean)/(std + eps); three spreads show where it is added.
SPREADS = {"group_advantages": probes(*((t([0, d]),) for d in (1e-9, 1e-6, 1.0))),
           "decoupled_advantages": probes(*((t([[0, d]]),) for d in (1e-9, 1e-6, 1.0)))}
