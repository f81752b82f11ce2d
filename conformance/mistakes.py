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
    "tokens": lambda mask, L: mask.double() / mask.sum(),
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


def clip(r, a, low, high):
    return torch.minimum(r * a, r.clamp(1 - low, 1 + high) * a)


free = lambda r, a, low, high: r * a
BOUND = {
    "the clip is turned round for A < 0: max in place of min, or min(ρ, 1+ε)·A [1]":
        lambda r, a, low, high: r.clamp(max=1 + high) * a,
    "max in place of min: the clip acts on the wrong side [1]":
        lambda r, a, low, high: torch.maximum(r * a, r.clamp(1 - low, 1 + high) * a),
    "clip(ρ)A without the min: the way back has no gradient [1]":
        lambda r, a, low, high: r.clamp(1 - low, 1 + high) * a,
    "the ratio is not clipped at all [6]": free,
    "clip_high is ignored": lambda r, a, low, high: clip(r, a, low, low),
    "clip_low and clip_high are exchanged": lambda r, a, low, high: clip(r, a, high, low),
}
DUAL = "the loss at A < 0 is bounded a second time, at a ratio of 3 (dual clip)"
dual = lambda r, a, low, high: torch.where(
    a < 0, torch.maximum(clip(r, a, low, high), 3 * a), clip(r, a, low, high))


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
REINFORCE = "−A log π, without ratio and clip: right for one update of a batch, wrong for more [6]"
EMPTY = "an empty completion gives NaN (0/0): mask none away as a whole"
RATIO_1 = "an empty completion counts with the ratio 1: a constant in the loss, without a gradient"


def first_counts(mask, L):
    """1/(N |o|), and 1/N on the first place of an empty completion."""
    mask = mask.bool().clone()
    mask[:, 0] |= ~mask.any(1)
    return grpo.sequence_mean_weights(mask)


def loss(ratio, bound, kl, weigh, *, sign=1.0, on=lambda mask: mask, given=True, low=0.2, high=None,
         beta=0.0):
    """A loss of these parts. on: which tokens are trained on. given: `weights` is used if it is
    given. The numbers are the defaults."""
    def function(logp, old_logp, advantages, mask, *, ref_logp=None, beta=beta, clip_low=low,
                 clip_high=high, weights=None, max_tokens=None):
        keep = on(mask.bool())
        p, o = (x.masked_fill(~keep, 0.0) for x in (logp, old_logp.detach()))
        a = advantages if advantages.dim() == 2 else advantages.unsqueeze(1)
        r = ratio(p, o, keep)
        out = bound(r, a, clip_low, clip_low if clip_high is None else clip_high)
        if ref_logp is not None and beta:
            out = out - beta * kl(p, ref_logp.detach().masked_fill(~keep, 0.0), r)
        w = weights if given and weights is not None else weigh(keep, max_tokens)
        return sign * -(w * out).sum()

    return function


def versions(*, weigh, ratio=token_ratio, ratios=RATIO, with_kl=True, named=True, **numbers):
    """All versions of a loss whose weights are WEIGHTS[weigh]: those with one other part, with two,
    with three. One of them may be a mistake.

    named: with other weights it would be another algorithm."""
    base = {"ratio": ratio, "bound": clip, "kl": k3, "weigh": WEIGHTS[weigh]} | numbers
    weights = [(f"{weigh_is[named]}: {words}", {"weigh": WEIGHTS[name]})
               for name, words in WEIGHTS_SAY.items() if name != weigh]
    choices = [(DUAL, {"bound": dual}), (REINFORCE, {"ratio": lambda p, o, m: p, "bound": free})]
    if weigh == "mean":
        mean = lambda mask, L: mask.double() / (len(mask) * mask.sum(1, keepdim=True))
        empty = {"weigh": mean} if ratio is token_ratio else {"ratio": unbounded, "weigh": mean}
        choices.append((EMPTY, empty))
        choices += [(RATIO_1, {"weigh": first_counts})] * (ratio is sequence_ratio)
    choices += [(words, {"kl": other}) for words, other in KL_CHOICES.items() if with_kl]
    others = {
        "sign": {"J in place of −J: the sign of the loss is turned round": -1.0},
        "ratio": ratios, "bound": BOUND, "kl": KL if with_kl else {},
        "on": ON,
        "weigh": {
            "the sum over a completion is divided by the padded length, not by |o| [3]":
                lambda mask, L: mask.double() / mask.numel(),
            "summed over completions, not divided by N":
                lambda mask, L: len(mask) * base["weigh"](mask, L),
        },
        "given": {"`weights` is ignored": False},
    }
    mistakes = [(words, {part: other}) for part, row in others.items()
                for words, other in row.items()]
    right = choices + weights * (not named)
    kinds = dict.fromkeys((words for words, _ in right), "choice")
    kinds |= {EMPTY: "edge", RATIO_1: "edge"}

    def made(*parts):
        changes = {key: part for _, change in parts for key, part in change.items()}
        found = {kinds.get(words, "mistake") for words, _ in parts}
        kind = next(kind for kind in ("mistake", "edge", "choice") if kind in found)
        return Version("; ".join(words for words, _ in parts), loss(**base | changes), kind)

    def apart(parts):
        keys = [key for _, change in parts for key in change]
        return len(keys) == len({*keys}) and not any(part in mistakes for part in parts[1:])

    every = [*mistakes, *weights, *choices]
    together = [parts for n in (1, 2, 3) for parts in itertools.combinations(every, n)]
    return [made(*parts) for parts in together if apart(parts)]


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
    wrong("the sign is turned round", lambda r, **o: -grpo.group_advantages(r)),
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
        return bound(ratio, a, clip_low, clip_low if clip_high is None else clip_high)

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
GRPO = versions(weigh="mean", beta=0.04, named=False)
GSPO = versions(weigh="mean", ratio=sequence_ratio, ratios=SEQUENCE, low=3e-4, high=4e-4)
VERSIONS = {
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
        wrong("a loss in place of the objective: the sign is turned round",
              lambda r, a, **o: -grpo.clipped_surrogate(r, a, **o)),
        choice(DUAL, surrogate(dual)),
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
    "grpo_loss": GRPO,
    "cppo_loss": GRPO,
    "gspo_loss": [
        wrong("clip range 0.2, as GRPO's: a ratio per completion never reaches it [6]",
              loss(sequence_ratio, clip, k3, WEIGHTS["mean"], low=0.2)),
        choice("clip_high is clip_low if it is not given",
               loss(sequence_ratio, clip, k3, WEIGHTS["mean"], low=3e-4)),
        *GSPO,
    ],
    "dapo_loss": [
        wrong("the clip is not higher above: 0.2 on both sides",
              loss(token_ratio, clip, k3, WEIGHTS["tokens"], low=0.2)),
        *versions(weigh="tokens", high=0.28),
    ],
    "drgrpo_loss": versions(weigh="constant"),
    "ppo_loss": versions(weigh="tokens", with_kl=False, named=False),
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
        wrong("the sign is turned round", lambda x, **o: -grpo.token_entropies(x, **o)),
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
