"""Fills in the answers of golden.json: small inputs, function by function. See docs/conformance.md.

    python conformance/golden.py

To add a case, write its line into golden.json without `output` and `gradient`, and run this. Ports
to other languages are checked with the file (check.py), and so is Python code (compare.py). Each
answer comes from a plain loop over numbers, without torch and without the files of the paper. A
gradient is Im f(x + i·h) / h with a tiny h. This is exact up to rounding. Functions without a loop
here, such as extract_answer, have answers that were written by hand.
"""

import json
import math
from cmath import exp, log
from functools import partial
from pathlib import Path

FILE = Path(__file__).with_name("golden.json")
TINY = 1e-30  # h
# besides the losses, functions through which a gradient flows
LEARN = ("kl_k1", "kl_k2", "kl_k3", "importance_ratio", "clipped_surrogate", "token_logprobs",
         "token_entropies", "truncated_importance_weights", "value_loss")


# --- the functions. rows: a list for each question or completion ---


def each(function, *rows):
    """A function of the numbers at each place."""
    return [[function(*numbers) for numbers in zip(*row)] for row in zip(*rows)]


def normalised(group, eps=1e-4, ddof=1):
    """(x − mean) / (std + eps)"""
    mean = sum(x - group[0] for x in group) / len(group)
    centred = [x - group[0] - mean for x in group]
    std = math.sqrt(sum(x * x for x in centred) / (len(group) - ddof))
    return [x / (std + eps) for x in centred]


def group_advantages(rewards, *, divide_by_std=True, eps=1e-4, ddof=1):
    if divide_by_std:
        return [normalised(group, eps, ddof) for group in rewards]
    return [[r - sum(group) / len(group) for r in group] for group in rewards]


def decoupled_advantages(rewards, *, weights=None, eps=1e-4):
    each_reward = [group_advantages(rows, eps=eps) for rows in rewards]
    weights = weights or [1.0] * len(rewards)
    total = each(lambda *A: sum(w * a for w, a in zip(weights, A)), *each_reward)
    numbers = sum(total, [])
    std = math.sqrt(sum(a * a for a in numbers) / (len(numbers) - 1))  # their mean is 0
    return each(lambda a: a / (std + eps), total)


def retained_advantages(rewards, kept, *, eps=1e-4):
    found = each(lambda r: 0.0, rewards)
    for row, group, places in zip(found, rewards, kept):
        for i, a in zip(places, normalised([group[i] for i in places], eps, 0)):
            row[i] = a
    return found


def bound(x, low, high):
    return low if x.real < low else high if x.real > high else x


def k3(p, q):
    log_r = bound(q - p, -math.inf, 20.0)
    return exp(log_r) - log_r - 1


def kl_k1(logp, ref_logp):
    return each(lambda p, q: p - q, logp, ref_logp)


def kl_k2(logp, ref_logp):
    return each(lambda p, q: (p - q) ** 2 / 2, logp, ref_logp)


def kl_k3(logp, ref_logp):
    return each(k3, logp, ref_logp)


def importance_ratio(logp, old_logp, mask):
    return each(lambda p, o, m: exp(bound(p - o, -math.inf, 20.0)) if m else 1.0,
                logp, old_logp, mask)


def sequence_ratio(logp, old_logp, mask):
    found = []
    for p, o, m in zip(logp, old_logp, mask):
        logs = [x - y for x, y, real in zip(p, o, m) if real]
        mean = sum(logs) / max(len(logs), 1)
        found.append([exp(bound(mean, -math.inf, 20.0))] * len(m))
    return found


def clipped(ratio, A, low, high):
    bounded = bound(ratio, 1 - low, 1 + (low if high is None else high))
    return min(ratio * A, bounded * A, key=lambda x: x.real)


def clipped_surrogate(ratio, advantages, *, clip_low=0.2, clip_high=None):
    return [clipped(r, A, clip_low, clip_high) for r, A in zip(ratio, advantages)]


def sequence_mean_weights(mask, *, num_sequences=None, max_tokens=None):
    N = num_sequences or len(mask)
    return [[m / (N * max(sum(row), 1)) for m in row] for row in mask]


def token_mean_weights(mask, *, total_tokens=None, max_tokens=None):
    total = total_tokens or max(sum(map(sum, mask)), 1)
    return [[m / total for m in row] for row in mask]


def constant_weights(mask, *, max_tokens, num_sequences=None):
    return [[m / ((num_sequences or len(mask)) * max_tokens) for m in row] for row in mask]


def of_ppo(ratio, A, logp, low, high):
    return clipped(ratio, A, low, high)


def of_cispo(ratio, A, logp, low, high):
    return bound(ratio.real, 1 - low, 1 + high) * A * logp


def of_sapo(ratio, A, logp, low, high):
    tau = 1.0 if A > 0 else 1.05
    return 4 / tau / (1 + exp(-tau * (ratio - 1))) * A


def loss(logp, old_logp, advantages, mask, *, weigh=sequence_mean_weights, ratios=importance_ratio,
         surrogate=of_ppo, ref_logp=None, beta=0.0, clip_low=0.2, clip_high=None, weights=None,
         max_tokens=None):
    weights = weights or weigh(mask, max_tokens=max_tokens)
    ratio, total = ratios(logp, old_logp, mask), 0.0
    for i, row in enumerate(mask):
        for t in range(sum(row)):
            p, A = logp[i][t], advantages[i]
            A = A[t] if isinstance(A, list) else A
            kl = k3(p, ref_logp[i][t]) if ref_logp else 0.0
            objective = surrogate(ratio[i][t], A, p, clip_low, clip_high) - beta * kl
            total -= weights[i][t] * objective
    return total


def log_softmax(logits, T):
    largest = max(x.real for x in logits)
    total = log(sum(exp((x - largest) / T) for x in logits))
    return [(x - largest) / T - total for x in logits]


def truncated_importance_weights(old_logp, sampled_logp, mask, *, cap, low=0.0):
    def weight(p, s, m):
        ratio = exp((p - s).real).real if m else 1.0
        return 0.0 if m and (ratio < low or low and ratio > cap) else min(ratio, cap) if m else 1.0

    return each(weight, old_logp, sampled_logp, mask)


def gae(rewards, values, mask, *, gamma=1.0, lam=0.95):
    advantages, returns = each(lambda m: 0.0, mask), each(lambda m: 0.0, mask)
    for A, R, r, V, m in zip(advantages, returns, rewards, values, mask):
        after, value_after = 0.0, 0.0
        for t in reversed(range(sum(m))):
            after = r[t] + gamma * value_after - V[t] + gamma * lam * after
            value_after = V[t]
            A[t], R[t] = after, after + V[t]
    return advantages, returns


def value_loss(values, old_values, returns, mask, *, clip=0.2):
    def square(V, old, R, m):
        bounded = old + bound(V - old, -clip, clip)
        return m * max((V - R) ** 2, (bounded - R) ** 2, key=lambda x: x.real)

    return total(each(square, values, old_values, returns, mask)) / total(mask) / 2


def whiten(x, mask):
    numbers = [y for row, m in zip(x, mask) for y in row[:sum(m)]]
    mean = sum(numbers) / len(numbers)
    variance = sum((y - mean) ** 2 for y in numbers) / len(numbers)
    return each(lambda y, m: m * (y - mean) / math.sqrt(variance + 1e-8), x, mask)


def overlong_penalty(lengths, *, max_length, cache):
    return [bound((max_length - cache - n) / cache, -1.0, 0.0) for n in lengths]


def token_logprobs(logits, tokens, *, temperature=1.0):
    return each(lambda row, token: log_softmax(row, temperature)[token], logits, tokens)


def token_entropies(logits, *, temperature=1.0):
    entropy = lambda row: -sum(exp(x) * x for x in log_softmax(row, temperature) if x.real > -1e9)
    return each(entropy, logits)


def keep_count(group_size, pruning_rate):
    return max(k for k in range(group_size + 1) if k <= group_size * (1 - pruning_rate) + 1e-9)


def highest(scores, n):
    """Places of the n largest scores, ascending. Of equal ones the first counts."""
    places = sorted(enumerate(scores), key=lambda row: (-row[1], row[0]))
    return sorted(i for i, _ in places[:n])


def prune(advantages, k):
    return [highest(map(abs, group), k) for group in advantages]


def retain(metric, k, *, largest=False):
    return [highest([x if largest else -x for x in group], k) for group in metric]


def prune_below(advantages, threshold):
    return each(lambda A: abs(A) >= threshold, advantages)


def batch_rows(kept, group_size):
    return [q * group_size + i for q, row in enumerate(kept) for i in row]


def prune_pooled(advantages, n_keep):
    return highest(map(abs, sum(advantages, [])), n_keep)


def questions_per_step(questions, group_size, k):
    return max(n for n in range(questions * group_size + 1) if n * k <= questions * group_size)


def fill(kept_counts, capacity):
    return max(n for n in range(len(kept_counts) + 1) if sum(kept_counts[:n]) <= capacity)


def micro_batches(lengths, max_tokens):
    found = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if found and lengths[found[-1][0]] * (len(found[-1]) + 1) <= max_tokens:
            found[-1].append(i)
        else:
            found.append([i])
    return found


def balance(lengths, parts):
    found = [[] for _ in range(parts)]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        min(found, key=lambda part: sum(lengths[j] for j in part)).append(i)
    return found


# --- the file ---


LOSSES = {  # in what they differ
    "grpo_loss": {"beta": 0.04},
    "dapo_loss": {"weigh": token_mean_weights, "clip_high": 0.28},
    "drgrpo_loss": {"weigh": constant_weights},
    "gspo_loss": {"ratios": sequence_ratio, "clip_low": 3e-4, "clip_high": 4e-4},
    "cispo_loss": {"weigh": token_mean_weights, "surrogate": of_cispo, "clip_low": 1.0,
                   "clip_high": 4.0},
    "sapo_loss": {"surrogate": of_sapo},
    "ppo_loss": {"weigh": token_mean_weights},
}


def loop_of(name):
    """The function of a name, or None."""
    return partial(loss, **LOSSES[name]) if name in LOSSES else globals().get(name)


def total(x):
    return sum(map(total, x)) if isinstance(x, (list, tuple)) else x


def moved(x, at):
    """x with i·h added at a place, such as (0, 2)."""
    if not at:
        return x + TINY * 1j
    return [moved(y, at[1:]) if i == at[0] else y for i, y in enumerate(x)]


def gradient(function, first, at=(), inner=None):
    """∂ Σ function(first) / ∂ first, in the form of first."""
    inner = first if inner is None else inner
    if isinstance(inner, list):
        return [gradient(function, first, (*at, i), x) for i, x in enumerate(inner)]
    return total(function(moved(first, at))).imag / TINY


def numbers(x):
    """JSON has no ∞ and no NaN: they are texts there."""
    if isinstance(x, dict):
        return {key: numbers(y) for key, y in x.items()}
    if isinstance(x, list):
        return [numbers(y) for y in x]
    return float(x) if x in ("inf", "-inf", "nan") else x


def in_json(x):
    """The other way. 12 digits, because the last ones differ between machines."""
    if isinstance(x, (list, tuple)):
        return [in_json(y) for y in x]
    if not isinstance(x, (float, complex)):
        return x
    return float(f"{x.real:.12g}") if math.isfinite(x.real) else str(x.real)


def answered(name, row):
    """A case with the answers of the loop."""
    first, *rest = numbers(row["inputs"]).values()
    function = partial(loop_of(name), **numbers(row["options"]))
    found = {"output": in_json(function(first, *rest))}
    if name in LEARN or name.endswith("_loss"):
        found["gradient"] = in_json(gradient(lambda x: function(x, *rest), first))
    return row | found


def main():
    """One case in a line."""
    blocks = []
    for name, known in json.loads(FILE.read_text(encoding="utf-8")).items():
        rows = known.pop("cases")
        if loop_of(name):
            rows = [answered(name, row) for row in rows]
        lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
        head = json.dumps(known, ensure_ascii=False)[1:-1]
        blocks.append(f'"{name}": {{{head}, "cases": [\n{lines}\n]}}')
    FILE.write_text("{\n" + ",\n".join(blocks) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
