"""What public code does otherwise: known mistakes and known choices, function by function.

A version is a function that makes one mistake, or one choice that is no mistake. If somebody's
function differs from ours, it is compared with them (compare.py). So the verdict can say what is
wrong, and not only that two numbers differ. The numbers in brackets are those of the list of known
mistakes in docs/conformance.md.
"""

import itertools
import math
from collections import namedtuple
from functools import partial

import torch

import cppo
import grpo
from family import gdpo, gfpo, gspo, ppo, tis

# kind: mistake, choice, or edge, which is wrong only where few inputs ever are
Version = namedtuple("Version", "sentence function kind")
wrong = partial(Version, kind="mistake")
choice, edge = partial(Version, kind="choice"), partial(Version, kind="edge")


# --- versions of a loss: each part of it may be another one ---


def without_last(mask):
    return mask.bool() & torch.nn.functional.pad(mask.bool()[:, 1:], (0, 1))


def shifted(mask):
    return torch.nn.functional.pad(mask.bool()[:, :-1], (1, 0))


def without_first(mask):
    return mask.bool() & shifted(mask)


ON = {
    "the last token, the EOS, is not trained on [4]: is the mask shifted by one?": without_last,
    "the first token is not trained on": without_first,
    "the mask is shifted by one: the first token is not trained on, and padding is [3]": shifted,
    "the mask is rolled by 1: padding is trained on, real tokens are not [3]":
        lambda mask: mask.roll(1, 1),
    "the mask is rolled by -1: padding is trained on, real tokens are not [3]":
        lambda mask: mask.roll(-1, 1),
    "padding is trained on like a token [3]": torch.ones_like,
}
WEIGHTS = {
    "mean": lambda mask, L: grpo.sequence_mean_weights(mask),
    "tokens": lambda mask, L: mask.double() / mask.sum().clamp(min=1),
    "constant": lambda mask, L: mask.double() / (len(mask) * L),
    "sum": lambda mask, L: mask.double() / len(mask),
    "all": lambda mask, L: mask.double(),
}
WEIGHTS_SAY = {
    "mean": "a mean over each completion, 1/(N |o|), as in GRPO",
    "tokens": "a mean over all tokens, as in DAPO",
    "sum": "a sum over the tokens of a completion, divided by N alone",
    "all": "a sum over all tokens, divided by nothing that depends on the batch",
}
weigh_is = {False: "other weights", True: "the weights of another algorithm [6]"}


# a bound makes the surrogate of ρ, A, the clip range and log π
def clip(r, a, low, high, p=None):
    return torch.minimum(r * a, r.clamp(1 - low, 1 + high) * a)


def dual(c):
    return lambda r, a, low, high, p=None: torch.where(
        a < 0, torch.maximum(clip(r, a, low, high), c * a), clip(r, a, low, high))


free = lambda r, a, low, high, p: r * a
BOUND = {
    "the clip is turned round for A < 0: max in place of min, or min(ρ, 1+ε)·A [1]":
        lambda r, a, low, high, p: r.clamp(max=1 + high) * a,
    "max in place of min: the clip acts on the wrong side [1]":
        lambda r, a, low, high, p: torch.maximum(r * a, r.clamp(1 - low, 1 + high) * a),
    "clip(ρ)A without the min: the way back has no gradient [1]":
        lambda r, a, low, high, p: r.clamp(1 - low, 1 + high) * a,
    "the ratio is not clipped at all [6]": free,
    "nothing is clipped at A < 0 [1]":
        lambda r, a, low, high, p: torch.where(a < 0, r * a, clip(r, a, low, high)),
    "clip_high is ignored": lambda r, a, low, high, p: clip(r, a, low, low),
    "clip_low and clip_high are exchanged": lambda r, a, low, high, p: clip(r, a, high, low),
    "clip_low and clip_high are exchanged at A < 0: the clip is mirrored there [1]":
        lambda r, a, low, high, p: torch.where(a < 0, clip(r, a, high, low), clip(r, a, low, high)),
}
DUAL = {f"the loss at A < 0 is bounded a second time, at a ratio of {c} (dual clip)": dual(c)
        for c in (2, 3, 5, 10)}


def of_cispo(r, a, low, high, p):
    return r.clamp(1 - low, 1 + high) * a * p


CISPO = {
    "the ratio is not clipped: one token can outweigh all others":
        lambda r, a, low, high, p: r * a * p,
    "the largest weight is clip_high, not 1 + clip_high":
        lambda r, a, low, high, p: r.clamp(1 - low, high) * a * p,
    "ρ in place of log π: the gradient has the ratio twice":
        lambda r, a, low, high, p: of_cispo(r, a, low, high, r * (p - p.detach()).exp()),
    "no gradient outside of the clip range: this is GRPO's clip [6]":
        lambda r, a, low, high, p: (r == r.clamp(1 - low, 1 + high)) * r * a * p,
    "the importance weight is missing: this is REINFORCE [6]": lambda r, a, low, high, p: a * p,
}


def of_sapo(up=1.0, down=1.05, factor=lambda tau: 4 / tau, of=lambda r: r - 1, on=lambda f, p: f):
    def bound(r, a, low, high, p):
        tau = torch.where(a > 0, up, down).to(r.dtype)
        return on(factor(tau) * torch.sigmoid(tau * of(r)), p) * a

    return bound


SAPO = {
    "the factor 4 is missing: at ρ = 1 the slope is ¼": of_sapo(factor=lambda tau: 1 / tau),
    "the factor 4/τ is missing": of_sapo(factor=lambda tau: 1.0),
    "4 in place of 4/τ: at ρ = 1 the slope is τ": of_sapo(factor=lambda tau: 4.0),
    "sigmoid(τ ρ) in place of sigmoid(τ (ρ − 1))": of_sapo(of=lambda r: r),
    "log ρ in place of ρ − 1": of_sapo(of=torch.log),
    "τ for A > 0 and for A < 0 are exchanged": of_sapo(1.05, 1.0),
    "one τ for both signs of A": of_sapo(1.0, 1.0),
    "the gate is detached, and multiplied by log π": of_sapo(on=lambda f, p: f.detach() * p),
    "the clip of GRPO in place of the gate [6]": clip,
}


k3 = lambda p, q, r: grpo.kl_k3(p, q)
KL = {
    "KL upside down: k3 with π/π_ref for π_ref/π, so its mean is not KL(π‖π_ref) [2]":
        lambda p, q, r: grpo.kl_k3(q, p),
    "k3 with the sign of log r turned round: r + log r − 1, which can be negative [2]":
        lambda p, q, r: (q - p).exp() + (q - p) - 1,
    "k1 as a loss: its expected gradient is 0 [2]": lambda p, q, r: p - q,
    "the sign of the KL term is turned round: the policy is driven away from π_ref":
        lambda p, q, r: -grpo.kl_k3(p, q),
    "the KL term is missing": lambda p, q, r: 0 * p,
    "(log r)² without the ½ in place of k3: its gradient is twice that of the KL":
        lambda p, q, r: (p - q) ** 2,
    "|k1| in place of k3: biased, and its gradient is ±1": lambda p, q, r: (p - q).abs(),
    "k3, detached, times log π: the score function of a KL that is not the reward [2]":
        lambda p, q, r: grpo.kl_k3(p, q).detach() * p,
    "the KL term has no gradient": lambda p, q, r: grpo.kl_k3(p, q).detach(),
}
with_itself = lambda p, q, r: (p - p.detach()).exp() * grpo.kl_k3(p, q)
KL_CHOICES = {
    "k2 in place of k3: its gradient is that of KL(π‖π_ref)": lambda p, q, r: grpo.kl_k2(p, q),
    "the KL is clamped to ±10": lambda p, q, r: grpo.kl_k3(p, q).clamp(-10, 10),
    "k3 × ratio: then the gradient, too, is that of KL(π‖π_ref)":
        lambda p, q, r: r * grpo.kl_k3(p, q),
    "k3 × π/sg(π): then the gradient, too, is that of KL(π‖π_ref)": with_itself,
    "k3 × π/sg(π), and the KL is clamped to ±10":
        lambda p, q, r: with_itself(p, q, r).clamp(-10, 10),
}


# a ratio is made of log π, log π_old and the mask; one per completion is expanded to its tokens
token_ratio = lambda p, o, m: (p - o).clamp(max=20).exp()
expand = lambda x, like: x.unsqueeze(1).expand_as(like)
sequence_ratio = lambda p, o, m: expand(gspo.sequence_ratio(p, o, m), p)
unbounded = lambda p, o, m: expand((((p - o) * m).sum(1) / m.sum(1)).clamp(max=20).exp(), p)
DETACHED = "the ratio is detached: no gradient flows through the surrogate"
ALWAYS_1 = "the ratio is always 1 (π_θ over itself): no clip ever acts [6]"
RATIO = {
    "the ratio is upside down: π_old / π_θ": lambda p, o, m: (o - p).exp(),
    ALWAYS_1: lambda p, o, m: (p - p.detach()).exp(),
    "a difference of log-probabilities in place of the ratio": lambda p, o, m: p - o,
    DETACHED: lambda p, o, m: (p - o).exp().detach(),
}
SEQUENCE = {
    "one ratio per token, not per completion: this is GRPO [6]": token_ratio,
    ALWAYS_1: lambda p, o, m: sequence_ratio(p, p, m),
    "the log-ratios of a completion are added up, not divided by |o|":
        lambda p, o, m: expand(((p - o) * m).sum(1).exp(), p),
    "an arithmetic mean of the ratios in place of the geometric one":
        lambda p, o, m: expand(((p - o).exp() * m).sum(1) / m.sum(1), p),
    "the mean of the log-ratios is divided by the padded length [3]":
        lambda p, o, m: expand(((p - o) * m).mean(1).exp(), p),
    DETACHED: lambda p, o, m: sequence_ratio(p, o, m).detach(),
}
detached = lambda p, o, m: token_ratio(p, o, m).detach()
OF_CISPO = {"the weight is not detached: a second gradient flows through the ratio": token_ratio,
            "the ratio is upside down: π_old / π_θ": lambda p, o, m: (o - p).exp().detach()}
REINFORCE = "−A log π, without ratio and clip: right for one update of a batch, wrong for more [6]"
EMPTY = "an empty completion gives NaN (0/0): mask none away as a whole"
RATIO_1 = "an empty completion counts with the ratio 1: a constant in the loss, without a gradient"


def first_counts(mask, L):
    """1/(N |o|), and 1/N on the first place of an empty completion."""
    mask = mask.bool().clone()
    mask[:, 0] |= ~mask.any(1)
    return grpo.sequence_mean_weights(mask)


def loss(ratio, bound, kl, weigh, *, sign=1.0, on=lambda mask: mask, given=True, everywhere=False,
         low=0.2, high=None, beta=0.0):
    """A loss of these parts. on: which tokens are trained on. given: `weights` is used if it is
    given. everywhere: the padding counts as a token of its completion. The numbers are the
    defaults."""
    def function(logp, old_logp, advantages, mask, *, ref_logp=None, beta=beta, clip_low=low,
                 clip_high=high, weights=None, max_tokens=None):
        keep = on(mask.bool())
        seen = torch.ones_like(keep) if everywhere else keep
        p, o = (x.masked_fill(~seen, 0.0) for x in (logp, old_logp.detach()))
        a = advantages if advantages.dim() == 2 else advantages.unsqueeze(1)
        r = ratio(p, o, keep)
        out = bound(r, a, clip_low, clip_low if clip_high is None else clip_high, p)
        if ref_logp is not None and beta:
            p = p.masked_fill(~keep, 0.0)
            out = out - beta * kl(p, ref_logp.detach().masked_fill(~keep, 0.0), r)
        w = weights if given and weights is not None else weigh(keep, max_tokens)
        if everywhere:  # an empty completion counts as one token
            w = w.amax(1, keepdim=True).masked_fill(~keep.any(1, keepdim=True), 1 / len(keep))
        return sign * -(w * out).sum()

    return function


def family(*, weigh, ratio=token_ratio, bound=clip, ratios=RATIO, bounds=BOUND, numbers=(),
           with_kl=True, named=True, **defaults):
    """(parts, others) of a loss whose weights are WEIGHTS[weigh]. others: {group: versions of it},
    whose `function` holds the parts that differ.

    named: with other weights it would be another algorithm. numbers: versions of the defaults."""
    parts = {"ratio": ratio, "bound": bound, "kl": k3, "weigh": WEIGHTS[weigh]} | defaults
    changed = lambda kind, part, row: [kind(words, {part: x}) for words, x in row.items()]
    weights = {f"{weigh_is[named]}: {WEIGHTS_SAY[name]}": WEIGHTS[name]
               for name in WEIGHTS_SAY if name != weigh}
    others = {
        "on": changed(wrong, "on", ON) + [
            wrong("the sum runs over the padding, too, and is divided by |o| [3]",
                  {"everywhere": True})],
        "sign": [wrong("J in place of −J: the sign of the loss is turned round", {"sign": -1.0})],
        "ratio": changed(wrong, "ratio", ratios),
        "bound": changed(wrong, "bound", bounds),
        "numbers": [*numbers],
        "weigh": changed(wrong if named else choice, "weigh", weights) + changed(wrong, "weigh", {
            "the sum over a completion is divided by the padded length, not by |o| [3]":
                lambda mask, L: mask.double() / mask.numel(),
            "summed over completions, not divided by N":
                lambda mask, L: len(mask) * WEIGHTS[weigh](mask, L)}),
        "kl": changed(wrong, "kl", KL) + changed(choice, "kl", KL_CHOICES) if with_kl else [],
        "given": [wrong("`weights` is ignored", {"given": False})],
    }
    if bound is clip:
        others["bound"] += changed(choice, "bound", DUAL)
        others["ratio"].append(choice(REINFORCE, {"ratio": lambda p, o, m: p, "bound": free}))
    if weigh == "mean":
        mean = lambda mask, L: mask.double() / (len(mask) * mask.sum(1, keepdim=True))
        whole = ratio is sequence_ratio
        others["weigh"].append(edge(EMPTY, {"weigh": mean} | dict([("ratio", unbounded)] * whole)))
        others["weigh"] += [edge(RATIO_1, {"weigh": first_counts})] * whole
    return parts, others


def version_of(parts, some):
    """The version of a loss with some parts of `others`."""
    kinds = [one.kind for one in some]
    kind = next((kind for kind in ("mistake", "edge") if kind in kinds), "choice")
    changes = {key: x for one in some for key, x in one.function.items()}
    return Version("; ".join(one.sentence for one in some), loss(**parts | changes), kind)


def some_of(others, most):
    """Those with fewer parts first. No part is changed twice."""
    for n in range(most + 1):
        for groups in itertools.combinations(others, n):
            for some in itertools.product(*(others[group] for group in groups)):
                keys = [key for one in some for key in one.function]
                if len(keys) == len({*keys}):
                    yield some


def taken_apart(name, plain):
    """Versions of a loss with several mistakes. First what it does without a KL and without
    `weights` is found: plain(version) says whether a version does that. Then the rest."""
    parts, others = LOSSES[name]
    late = {group: others[group] for group in ("kl", "given")}
    early = {group: row for group, row in others.items() if group not in late}
    for some in some_of(early, 3):
        if plain(version_of(parts, some).function):
            yield from (version_of(parts, some + more) for more in some_of(late, 2))


# --- the other functions ---


centred = lambda r: r - r.mean(1, keepdim=True)


def plus(eps):
    return f"plus {eps:.2g}" if eps else "without eps"


def std_of(ddof):
    return lambda eps: partial(grpo.group_advantages, eps=eps, ddof=ddof)


def over(divisor):
    return lambda eps: lambda r, **o: centred(r) / divisor(r, eps)


def root_of(ddof):
    return over(lambda r, eps: (r.var(1, keepdim=True, correction=ddof) + eps).sqrt())


def whole_batch(ddof):
    return over(lambda r, eps: r.std(correction=ddof) + eps)


def pooled(ddof):
    return lambda eps: lambda r, **o: (r - r.mean()) / (r.std(correction=ddof) + eps)


def leave_one_out(r, *, divide_by_std=True, eps=1e-6, **options):
    """Mean and std of the other completions of the group. Where they are equal, no division."""
    n = r.shape[1]
    others = r[:, [[j for j in range(n) if j != i] for i in range(n)]]  # (Q, n, n − 1)
    std = others.std(2) if n > 2 and divide_by_std else 0 * r
    advantages = r - others.mean(2)
    return torch.where(std > 1e-12, advantages / (std + eps), advantages)


ADVANTAGES = [
    wrong("the mean over the questions, not over the group [17]",
          lambda r, **o: (r - r.mean(0)) / (r.std(0) + 1e-4)),
    wrong("divided by the variance",
          lambda r, **o: centred(r) / (r.var(1, keepdim=True) + 1e-4)),
    wrong("the mean is not subtracted", lambda r, **o: r / (r.std(1, keepdim=True) + 1e-4)),
    choice("no division by the std, as in Dr. GRPO", lambda r, **o: centred(r)),
    choice("each compared with the mean of the others (RLOO)",
           lambda r, **o: r.shape[1] / (r.shape[1] - 1) * centred(r)),
    choice("mean and std of the other completions (leave-one-out), plus 1e-06", leave_one_out),
]


def decoupled(divisor):
    def with_eps(eps):
        def function(rewards, **options):
            total = gdpo.decoupled_advantages(rewards, normalize_batch=False, eps=eps, **options)
            return (total - total.mean()) / divisor(total, eps)

        return function

    return with_eps


def gather(x, tokens):
    return x.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def logprobs(change=lambda x: x, of=lambda x, T: torch.log_softmax(x / T, -1)):
    return lambda logits, tokens, *, temperature=1.0: gather(
        change(of(logits.float(), temperature)), tokens)


def whitened(rewards, values, mask, **options):
    advantages = ppo.whiten(ppo.gae(rewards, values, mask, **options)[0], mask)
    return advantages, advantages + values.masked_fill(~mask.bool(), 0.0)


def max_value(change=torch.maximum, half=0.5, clipped=True, weigh="tokens"):
    def function(values, old_values, returns, mask, *, clip=0.2):
        w = WEIGHTS[weigh](mask, 0)
        plain = (values - returns) ** 2
        c = (old_values + (values - old_values).clamp(-clip, clip) - returns) ** 2
        return half * (w * (change(plain, c) if clipped else plain).nan_to_num() * mask).sum()

    return function


def surrogate(bound):
    def function(ratio, advantages, *, clip_low=0.2, clip_high=None):
        same = advantages.dim() == ratio.dim()
        a = advantages if same else advantages.unsqueeze(-1)
        return bound(ratio, a, clip_low, clip_low if clip_high is None else clip_high, None)

    return function


def weights_but(own):
    return [wrong(f"{weigh_is[True]}: {words}",
                  lambda mask, *, weigh=WEIGHTS[name], **options: weigh(mask, None))
            for name, words in WEIGHTS_SAY.items() if name != own]


def over_kept(rewards, kept, **options):
    advantages = grpo.group_advantages(rewards.gather(1, kept), **options)
    return torch.zeros_like(rewards).scatter(1, kept, advantages)


VALUE_CHOICES = [("without the ½;", ("half", 1.0)), ("not clipped;", ("clipped", False)),
                 ("a mean over each completion first;", ("weigh", "mean"))]
# {name: versions with an eps: {} stands for it, and the function is made for an eps}
FITTED = {
    "group_advantages": [
        choice("the unbiased std {}", std_of(1)),
        choice("the population std {}", std_of(0)),
        choice("the std of the whole batch (REINFORCE++-baseline), {}", whole_batch(1)),
        choice("the std of the whole batch (REINFORCE++-baseline), the population std, {}",
               whole_batch(0)),
        wrong("mean and std of the whole batch, not of each question's group [8], {}", pooled(1)),
        wrong("mean and std of the whole batch, not of each question's group [8], the population "
              "std, {}", pooled(0)),
        choice("the root of the unbiased variance {}", root_of(1)),
        choice("the root of the population variance {}", root_of(0)),
        choice("divided by the mean of the group, as in MaxRL, {}",
               over(lambda r, eps: r.mean(1, keepdim=True) + eps)),
    ],
    "decoupled_advantages": [
        choice("the unbiased std {}", decoupled(lambda x, eps: x.std() + eps)),
        choice("the unbiased std {}; over the batch, the root of the variance plus 1e-08",
               decoupled(lambda x, eps: (x.var() + 1e-8).sqrt())),
    ],
}
GRPO = family(weigh="mean", beta=0.04, named=False)
LOSSES = {
    "grpo_loss": GRPO,
    "cppo_loss": GRPO,
    "gspo_loss": family(
        weigh="mean", ratio=sequence_ratio, ratios=SEQUENCE, low=3e-4, high=4e-4, numbers=[
            wrong("clip range 0.2, as GRPO's: a ratio per completion never reaches it [6]",
                  {"low": 0.2, "high": None}),
            choice("clip_high is clip_low if it is not given", {"high": None})]),
    "dapo_loss": family(weigh="tokens", high=0.28, numbers=[
        wrong("the clip is not higher above: 0.2 on both sides", {"high": None})]),
    "drgrpo_loss": family(weigh="constant"),
    "ppo_loss": family(weigh="tokens", with_kl=False, named=False),
    "cispo_loss": family(
        weigh="tokens", ratio=detached, ratios=OF_CISPO, bound=of_cispo, bounds=CISPO, low=1.0,
        high=4.0, numbers=[wrong("the clip range is that of GRPO or DAPO: weights above it lose "
                                 "what CISPO keeps [6]", {"low": 0.2, "high": high})
                           for high in (None, 0.28)]),
    "sapo_loss": family(weigh="mean", bound=of_sapo(), bounds=SAPO),
}
VERSIONS = {name: [version_of(parts, some) for some in some_of(others, 1) if some]
            for name, (parts, others) in LOSSES.items()}
VERSIONS |= {
    "kl_k1": [
        wrong("k1 upside down: log π_ref − log π, so its mean is −KL [2]", lambda p, q: q - p),
        wrong("|k1| in place of k1: biased", lambda p, q: (p - q).abs()),
    ],
    "kl_k2": [
        wrong("the ½ is missing: its gradient is twice that of the KL", lambda p, q: (p - q) ** 2),
        wrong("|log r| in place of ½ (log r)²", lambda p, q: (p - q).abs()),
    ],
    "kl_k3": [
        *(wrong(words, lambda p, q, f=f: f(p, q, 1.0)) for words, f in KL.items()),
        wrong("the −1 is missing: not 0 if the policies agree", lambda p, q: grpo.kl_k3(p, q) + 1),
        *(choice(words, lambda p, q, f=f: f(p, q, 1.0)) for words, f in KL_CHOICES.items()
          if "× ratio" not in words),
    ],
    "group_advantages": ADVANTAGES,
    "decoupled_advantages": [
        wrong("the rewards are added up first: this is GRPO [6]",
              lambda r, **o: grpo.group_advantages(r.sum(0))),
        choice("not normalised over the batch",
               partial(gdpo.decoupled_advantages, normalize_batch=False)),
    ],
    "clipped_surrogate": [
        *(wrong(words, surrogate(bound)) for words, bound in BOUND.items()),
        *(choice(words, surrogate(bound)) for words, bound in DUAL.items()),
    ],
    "sequence_mean_weights": [
        wrong("divided by the padded length, not by |o| [3]",
              lambda m, **o: m.double() / m.numel()),
        wrong("padding weighs as much as a token [3]", lambda m, **o: 0 * m + 1 / m.numel()),
        wrong("num_sequences is ignored: a mean of means over micro-batches [3]",
              lambda m, **o: grpo.sequence_mean_weights(m)),
        choice(WEIGHTS_SAY["tokens"], lambda m, **o: m.double() / m.sum()),
        edge(EMPTY, lambda m, *, num_sequences=None:
               m.double() / (num_sequences or len(m)) / m.sum(1, keepdim=True)),
    ],
    "token_mean_weights": weights_but("tokens"),
    "constant_weights": weights_but("constant"),
    "token_logprobs": [
        wrong("the temperature is ignored: another policy is scored than the one that sampled [5]",
              logprobs(of=lambda x, T: torch.log_softmax(x, -1))),
        wrong("log-probabilities are divided by the temperature, logits must be [5]",
              logprobs(of=lambda x, T: torch.log_softmax(x, -1) / T)),
        wrong("logits are multiplied by the temperature [5]",
              logprobs(of=lambda x, T: torch.log_softmax(x * T, -1))),
        *(wrong("shifted by one: the logits at t must predict token t",
                logprobs(change=lambda x, step=step: x.roll(step, -2))) for step in (1, -1)),
    ],
    "token_entropies": [
        wrong("the temperature is ignored", lambda x, **o: grpo.token_entropies(x)),
    ],
    "keep_count": [
        wrong("⌊G(1−P)⌋ in floats: 10·(1−0.9) is below 1 [8]",
              lambda G, P: math.floor(G * (1 - P))),
        wrong("rounded to the nearest, not down [8]", lambda G, P: round(G * (1 - P))),
        edge("int(G·P) are pruned, as in the authors' code: rounded up, not down [8]",
             lambda G, P: G - int(G * P)),
    ],
    "prune": [
        wrong("the largest |A| of all questions together, not of each question [8]",
              lambda a, k: cppo.prune_pooled(a, k * len(a)).view(len(a), k) % a.shape[1]),
        wrong("the largest A, not the largest |A|: wrong answers are never kept",
              lambda a, k: gfpo.retain(-a, k)),
        wrong("the smallest |A| are kept", lambda a, k: gfpo.retain(a.abs(), k)),
    ],
    "prune_pooled": [
        wrong("the largest |A| of each question, not of all together", lambda a, n: cppo.batch_rows(
            a.abs().argsort(1, descending=True)[:, : n // len(a)], a.shape[1])),
        wrong("the largest A, not the largest |A|: wrong answers are never kept",
              lambda a, n: a.flatten().argsort(descending=True)[:n]),
    ],
    "retain": [
        wrong("the size of the metric, without its sign",
              lambda m, k, **o: gfpo.retain(m.abs(), k, **o)),
        wrong("`largest` is turned round",
              lambda m, k, *, largest=False: gfpo.retain(m, k, largest=not largest)),
        wrong("`largest` is ignored", lambda m, k, **o: gfpo.retain(m, k)),
    ],
    "prune_below": [
        choice("|A| > γ: the threshold itself is pruned", lambda a, g: a.abs() > g),
    ],
    "gae": [
        wrong("the last token bootstraps from its own value: V behind the end must be 0",
              lambda r, v, m, gamma=1.0, **o: ppo.gae(
                  r + gamma * v * (m.bool() ^ without_last(m)), v, m, gamma=gamma, **o)),
        wrong("whitened before the returns are taken: the critic learns whitened targets [13]",
              whitened),
        wrong("the returns are the advantages: V is not added", lambda *args, **options: (
            ppo.gae(*args, **options)[0],) * 2),
    ],
    "value_loss": [
        wrong("min in place of max: the optimistic square", max_value(change=torch.minimum)),
        *(choice(" ".join(words for words, _ in parts), max_value(**dict(p for _, p in parts)))
          for n in (1, 2, 3) for parts in itertools.combinations(VALUE_CHOICES, n)),
    ],
    "whiten": [
        choice("the unbiased variance",
               lambda x, m: (x - x[m.bool()].mean()) / (x[m.bool()].var() + 1e-8).sqrt() * m),
    ],
    "overlong_penalty": [
        edge("below −1 beyond max_length: the floor is missing",
             lambda n, *, max_length, cache: ((max_length - cache - n) / cache).clamp(max=0)),
    ],
    "retained_advantages": [
        choice("the unbiased std", over_kept),
        choice("no division by the std",
               lambda r, kept, **o: over_kept(r, kept, divide_by_std=False)),
    ],
    "truncated_importance_weights": [
        wrong("upside down: π_sampler / π_old",
              lambda p, s, m, **o: tis.truncated_importance_weights(s, p, m, **o)),
        wrong("not truncated: one token can outweigh all others", lambda p, s, m, **o:
              tis.truncated_importance_weights(p, s, m, **o | {"cap": math.inf})),
        wrong("a gradient flows through the weights", lambda p, s, m, *, cap:
              (p - s).exp().clamp(max=cap).masked_fill(~m.bool(), 1.0)),
        choice("0 on padding",
               lambda p, s, m, **o: tis.truncated_importance_weights(p, s, m, **o) * m),
    ],
}
