"""Step 4: which completions are kept. One function for each rule, and their table.

    keep(rollout, advantages, k) → rows of the rollout, q·G + i, (n,) int64, ascending

A rule that chooses takes completions that may not be trained on (`rollout.trainable`) last;
`Algorithm.keep_completions` drops those. A rule may also return a mask (Q, G), or (rows, advantages
of these rows): then a kept completion may count more or less than before. For example, one that was
drawn may count the inverse of its chance.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from cppo import batch_rows, prune, prune_pooled
from family.gfpo import retain, token_efficiency
from family.pods import max_variance_subset
from family.unbiased import draw, keep_probabilities, reweighted


@dataclass(frozen=True)
class Rule:
    """A rule of step 4."""

    function: Callable  # (rollout, advantages, k) → rows, or (rows, their advantages)
    # GFPO, PODS: the advantages take the mean and the std over the kept completions only
    normalize_kept_only: bool = False


# --- the rules ---


def keep_all(rollout, advantages, k):
    return torch.arange(advantages.numel())


def keep_largest_abs(rollout, advantages, k):
    """CPPO: the k completions of each question with the largest |A|."""
    return batch_rows(prune(advantages, k, allowed=rollout.trainable), advantages.shape[1])


# the three other rules of CPPO's ablation (2503.22342)


def keep_smallest_abs(rollout, advantages, k):
    """The smallest |A|."""
    return keep_by_score(rollout, -advantages.abs(), k)


def keep_largest(rollout, advantages, k):
    """The largest A: the sign counts."""
    return keep_by_score(rollout, advantages, k)


def keep_random(rollout, advantages, k):
    """Any k of each question, each with the same chance."""
    generator = torch.Generator().manual_seed(rollout.seed)
    return keep_by_score(rollout, torch.rand(advantages.shape, generator=generator), k)


def keep_by_score(rollout, score, k):
    """The k completions of each question with the largest score (Q, G). If scores are equal, the
    lower index is kept."""
    score = score.masked_fill(~rollout.trainable, -torch.inf)
    return batch_rows(retain(score, k, largest=True), score.shape[1])


def keep_pooled(rollout, advantages, k):
    """CPPO's published code: the largest |A| of all questions of the device together."""
    return prune_pooled(advantages, len(advantages) * k, allowed=rollout.trainable)


def keep_unbiased(rollout, advantages, k):
    """Draw completions with chances in proportion to |A|. Each counts the inverse of its chance."""
    generator = torch.Generator().manual_seed(rollout.seed)
    sizes = advantages.abs().double()
    p = keep_probabilities(sizes, k, allowed=rollout.trainable)
    u = torch.rand((len(p), 1), dtype=p.dtype, generator=generator)
    rows = rows_where(draw(p, u))
    return rows, reweighted(advantages, p).flatten()[rows]


def keep_smallest(rollout, advantages, k, *, metric):
    """GFPO: the k completions of each question with the smallest metric. k: a number, or (Q,).

    metric: rollout → (Q, G).
    """
    ks = torch.as_tensor(k).expand(len(advantages)).tolist()
    values = finite(metric(rollout), advantages.shape, "a metric")
    values = values.masked_fill(~rollout.trainable, torch.inf)
    kept = torch.zeros_like(rollout.trainable)
    for row, own, own_k in zip(kept, values, ks):
        row[retain(own[None], own_k)] = True
    return rows_where(kept)


def keep_max_variance(rollout, advantages, k):
    """PODS: the rewards that vary the most."""
    kept = torch.zeros_like(rollout.trainable)
    for row, rewards, trainable in zip(kept, rollout.total, rollout.trainable):
        # the completions that may be trained on; if they are fewer than k, also some others
        order = trainable.argsort(descending=True, stable=True)
        candidates = order[: max(k, trainable.sum())]
        chosen = max_variance_subset(rewards[None, candidates], k)
        row[candidates[chosen]] = True
    return rows_where(kept)


def rows_where(kept):
    """The rows of the batch that a mask (Q, G) marks."""
    return kept.flatten().nonzero()[:, 0]


def smallest(metric):
    """GFPO's rule with this metric: rollout → (Q, G)."""
    return Rule(partial(keep_smallest, metric=metric), normalize_kept_only=True)


KEEP = {
    "all": Rule(keep_all),
    "largest_abs": Rule(keep_largest_abs),
    "largest": Rule(keep_largest),
    "smallest_abs": Rule(keep_smallest_abs),
    "random": Rule(keep_random),
    "pooled": Rule(keep_pooled),
    "unbiased": Rule(keep_unbiased),
    "max_variance": Rule(keep_max_variance, normalize_kept_only=True),
    "shortest": smallest(lambda rollout: rollout.lengths),
    "efficiency": smallest(  # the most reward per token
        lambda rollout: -token_efficiency(rollout.total, rollout.lengths)),
}


# --- what a rule returns ---


def kept_rows(rule, rollout, advantages, k):
    """(rows that a rule keeps, ascending; its advantages of these rows, or None)."""
    rows = rule.function(rollout, advantages, k)
    changed = None
    if isinstance(rows, tuple):  # the rule also says what these rows count
        rows, changed = rows
    rows = torch.as_tensor(rows, device="cpu")
    every = torch.arange(advantages.numel())
    if rows.dtype == torch.bool:
        assert rows.shape in (advantages.shape, every.shape), "a mask must be (Q, G) or (Q·G,)"
        rows = every[rows.flatten()]
    assert rows.numel() == 0 or not rows.is_floating_point(), "rows must be whole numbers"
    rows, order = rows.long().sort()
    assert torch.equal(rows, every[torch.isin(every, rows)]), (
        f"keep must return rows of the batch, each once, from 0 to {len(every) - 1}, or a mask")
    if changed is not None:
        changed = finite(changed, rows.shape, "advantages of kept rows", "one for each row")[order]
    return rows, changed


def on_copies(function):
    """A rule or a metric of one's own: what it changes in its arguments changes nothing in the
    step."""
    return lambda *arguments: function(*copy.deepcopy(arguments))


def finite(values, shape, what, of_shape="(Q, G)"):
    """float32 numbers of this shape; of another shape, or not finite, they are refused."""
    values = torch.as_tensor(values, dtype=torch.float32, device="cpu")
    assert values.shape == shape and values.isfinite().all(), (
        f"{what} must be finite numbers, {of_shape}")
    return values
