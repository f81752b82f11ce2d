"""Scores of an evaluation, from the verdicts on its completions: pass@k, maj@k, intervals, and
whether two models differ.

A record is a dict: `index`, the number of its question; `completion`, a text; `correct`, True or
False (None: its reward does not apply, and it is left out); `score`, its reward; and, if this
program has sampled it, `tokens` and `truncated`.

Python and numpy, no torch: copy what you need.
"""

import math

import numpy as np


def verdict(reward):
    """Is a completion with this reward right? None if the reward does not apply: NaN."""
    return None if math.isnan(reward) else reward > 0


def pass_at_k(n, right, k):
    """Probability that at least one of k completions is right, of n of which `right` are right.

    1 − C(n − right, k) / C(n, k), the unbiased estimator. (2107.03374, eq. 1)
    """
    return 1 - math.comb(n - right, k) / math.comb(n, k)


def majority_is_right(records, answer_of):
    """maj@k of one question: is the most frequent answer right?

    All right completions are one answer, however they write it. answer_of: a wrong completion → its
    answer, or None, which does not vote; equal answers are one. If two answers are as frequent, the
    first counts.
    """
    votes = {}  # {(is it right, a wrong answer): how many completions gave it}
    for record in records:
        wrong = None if record["correct"] else answer_of(record["completion"])
        if record["correct"] or wrong is not None:
            answer = (record["correct"], wrong)
            votes[answer] = votes.get(answer, 0) + 1
    if not votes:
        return False
    is_right, _ = max(votes, key=votes.get)
    return is_right


def interval(values, least=0.0, draws=2000):
    """95% confidence interval of the mean over questions: (low, high). Values lie in [least, 1].
    least None: nobody knows where they lie.

    A share, of values 0 and 1, gets Wilson's interval. An average over samples gets a bootstrap. If
    all n values are equal, a bootstrap would call their mean certain. Then Wilson's upper limit for
    0 successes of n, z² / (n + z²), bounds the share of all questions that may have another value,
    from `least` to 1.
    """
    values = np.asarray(values, dtype=float)
    n = len(values)
    mean = values.mean().item()
    z = 1.96
    unlike = z**2 / (n + z**2)
    if values.min() == values.max():
        if least is None:
            return math.nan, math.nan
        return mean - unlike * (mean - least), mean + unlike * (1 - mean)
    if least == 0 and np.isin(values, (0, 1)).all():
        # all p with |p − mean| ≤ z √(p (1 − p) / n)
        center = mean + unlike * (0.5 - mean)
        variance = mean * (1 - mean) / n + z**2 / (4 * n**2)
        half = z * variance**0.5 / (1 + z**2 / n)
        return center - half, center + half
    rng = np.random.default_rng(0)
    chosen = rng.integers(n, size=(draws, n))
    means = values[chosen].mean(1)
    return tuple(np.quantile(means, [0.025, 0.975]).tolist())


def paired(first, second, draws=10_000, least=-1.0):
    """Are two lists of scores of the same questions different? least: of a difference, as for
    `interval`.

    Returns (difference of the means, its 95% `interval`, p). p is two-sided, by the sign-flip
    permutation test: if the models were equal, each difference could as well be its negative.
    """
    first = np.asarray(first, dtype=float)
    second = np.asarray(second, dtype=float)
    differences = second - first
    rng = np.random.default_rng(0)
    signs = rng.choice([-1.0, 1.0], size=(draws, len(differences)))
    sums = np.abs(signs @ differences)
    found = abs(differences.sum())
    as_far = (sums >= found - 1e-9).sum().item()
    p = (1 + as_far) / (1 + draws)
    mean = differences.mean().item()
    return mean, interval(differences, least), p


def summarize(records, answer_of, key="correct"):
    """Means over records, one of each completion, with their intervals.

    accuracy (avg@k); from two completions of a question on also pass@k and maj@k. k is the
    smallest number of completions of a question. maj@k needs a completion with an answer. reward:
    the mean score, if the records have one; with the key "score" it comes in place of all these.
    answer_of: as for `majority_is_right`. It is made of this, of `group_by_question`, `mean_value`,
    `pass_at_k` and `interval`.
    """
    groups = group_by_question(records, key)
    n = min(map(len, groups))
    if key == "score":
        scores, least, sizes = {}, None, []
        scores["reward"] = [mean_value(group, key) for group in groups]
    else:
        scores, least = {}, 0.0
        scores["accuracy"] = [mean_value(group, key) for group in groups]
        sizes = {2**i for i in range(1, n.bit_length())} | {n} - {1}
    for k in sorted(sizes):
        values = []
        for group in groups:
            right = sum(record["correct"] for record in group)
            values.append(pass_at_k(len(group), right, k))
        scores[f"pass@{k}"] = values
    if sizes and any(answer_of(record["completion"]) is not None for record in records):
        scores[f"maj@{n}"] = [majority_is_right(group[:n], answer_of) for group in groups]
    summary, intervals = {}, {}
    for name, values in scores.items():
        summary[name] = sum(values) / len(values)
        intervals[name] = interval(values, least)
    summary["intervals"] = intervals
    if "score" in records[0]:
        summary["reward"] = sum(mean_value(group, "score") for group in groups) / len(groups)
    if "tokens" in records[0]:  # else another program has sampled
        summary["length"] = mean_value(records, "tokens")
        summary["truncated"] = mean_value(records, "truncated")
    summary["questions"] = len(groups)
    summary["samples"] = n
    return summary


def mean_value(records, key):
    """The mean of what the records have under a key."""
    return sum(record[key] for record in records) / len(records)


def group_by_question(records, key="correct"):
    """A list for each question: its judged records, in the order of the questions. key: what a
    judged record has."""
    groups = {}
    for record in records:
        if record[key] is not None:
            groups.setdefault(record["index"], []).append(record)
    return [groups[index] for index in sorted(groups)]
