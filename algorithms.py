"""The table of algorithms. Each has one row, which holds what the algorithm changes in GRPO.

    python algorithms.py                    prints the table

A row says how rewards become advantages, which completions are kept (loop/keep.py), what the ratio
is (the loss), how much each token counts, and the numbers: β, the clip range, μ, … `resolve` turns
a row into the Algorithm of a run.

To try an idea of your own, write one function and change one row:

    advantages(rollout) → (Q, G)            loop/records.py says what a rollout holds
    keep(rollout, advantages, k) → rows     or name your function: --keep FILE.py:FUNCTION

Rows are numbers q·G + i, or a mask (Q, G). A rule may also return (rows, advantages of these rows).
Then a kept completion may count more or less than before. For example, a completion that was drawn
may count the inverse of its chance.
"""

import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

import allocate
from cppo import keep_count
from family.cispo import cispo_loss
from family.dapo import dapo_loss, token_mean_weights
from family.deepseek_v32 import deepseek_v32_loss
from family.drgrpo import constant_weights, drgrpo_loss
from family.gdpo import decoupled_advantages
from family.gfpo import adaptive_k
from family.gspo import gspo_loss
from family.lite_ppo import batch_std_advantages
from family.maxrl import mean_normalized_advantages
from family.ppo import ppo_loss
from family.rloo import leave_one_out_advantages
from family.sapo import sapo_loss
from family.tis import CORRECTIONS
from grpo import group_advantages, grpo_loss, sequence_mean_weights
from loop.keep import KEEP, Rule, finite, kept_rows, on_copies, smallest

# --- step 3: advantages(rollout) → (Q, G) ---


def grpo_advantages(rollout, *, divide_by_std=True, ddof=1):
    """Add the rewards up, then compare the sums within each group."""
    return group_advantages(rollout.total, divide_by_std=divide_by_std, ddof=ddof)


def rloo_advantages(rollout):
    return leave_one_out_advantages(rollout.total)


def maxrl_advantages(rollout):
    return mean_normalized_advantages(rollout.total)


def gdpo_advantages(rollout):
    """Compare each reward by itself. The last normalisation is over the whole batch."""
    return decoupled_advantages(rollout.rewards.nan_to_num(), weights=rollout.reward_weights)


def lite_ppo_advantages(rollout):
    """Add the rewards up, then compare with the group. The std is that of the whole batch."""
    return batch_std_advantages(rollout.total)


# --scale_rewards: by what GRPO's r − mean(r) is divided
SCALE_REWARDS = {
    "group": grpo_advantages,
    "batch": lite_ppo_advantages,
    "none": partial(grpo_advantages, divide_by_std=False),
}


def ppo_scores(rollout):
    """PPO has no advantages yet, only scores. The critic makes the advantages in step 5."""
    return rollout.total


# --- token_weights(mask, N, tokens, max_tokens) → (N, T); N and tokens are of the whole batch ---


def sequence_mean(mask, n, tokens, max_tokens):  # 1 / (N |o_i|)
    return sequence_mean_weights(mask, num_sequences=n)


def token_mean(mask, n, tokens, max_tokens):  # 1 / Σ_i |o_i|
    return token_mean_weights(mask, total_tokens=tokens)


def constant(mask, n, tokens, max_tokens):  # 1 / (N L)
    return constant_weights(mask, max_tokens=max_tokens, num_sequences=n)


TOKEN_WEIGHTS = {"sequence_mean": sequence_mean, "token_mean": token_mean, "constant": constant}


# --- the table ---


ALL_OPTIONS = (
    "keep", "pruning_rate", "allocation", "min_prefix", "token_weights", "scale_rewards")
OWN_SCALE = ALL_OPTIONS[:-1]  # of rows whose advantages are not GRPO's


@dataclass(frozen=True)
class Row:
    """A row of the table: what an algorithm changes."""

    loss: Callable  # (logp, old_logp, advantages, mask, …) → (loss, stats)
    token_weights: Callable
    clip_low: float | None  # ε_low: the ratio is clipped below 1 − ε_low; None: no clip
    clip_high: float | None  # ε_high: the ratio is clipped above 1 + ε_high
    beta: float = 0.0  # β, weight of the KL to the reference; 0: no reference
    group_size: int = 16  # G, completions sampled per question
    advantages: Callable = grpo_advantages
    over_all_devices: bool = False  # whether `advantages` compares the groups of all devices
    keep: str | Callable = "all"  # a rule of KEEP, or a function
    custom_keep_is_metric: bool = False  # GFPO: the smallest values of --keep FILE.py:F are kept
    pruning_rate: float = 0.0  # P, the share that is pruned: k = ⌊G(1−P)⌋
    k_by_difficulty: tuple[int, ...] = ()  # GFPO: k of an easy, medium, hard, very hard question
    allocation: bool = True  # more questions in place of the pruned: ⌊B·G/k⌋ instead of B
    mu: int = 2  # μ, passes over each batch of completions
    minibatches: int = 1  # of a batch; each pass makes one update per mini-batch
    one_update: bool = False  # a step makes one update, whatever the data set's mini-batches
    max_rollouts: int = 1  # above 1: dynamic sampling; a step samples at most so often
    critic: bool = False  # a second network makes an advantage for every token
    lam: float = 0.95  # PPO's λ
    words: str = ""  # what it changes in GRPO, for the printed table
    # what the loss takes besides, (N, T) each: "entropy", "sampled_logp". Only these are handed in
    wants: tuple[str, ...] = ()
    # of the options that only some rows allow
    allowed_options: tuple[str, ...] = ALL_OPTIONS


grpo = Row(
    grpo_loss, sequence_mean, beta=0.04, clip_low=0.2, clip_high=0.2,
    words="(·: as in this row)")
gspo = Row(
    gspo_loss, sequence_mean, clip_low=3e-4, clip_high=4e-4, minibatches=4,
    # its loss looks at the whole completion: no --min_prefix, and one weight for all its tokens
    allowed_options=("keep", "pruning_rate", "allocation", "scale_rewards"),
    words="a ratio per completion, no KL")
gfpo = Row(
    grpo_loss, token_mean, beta=0.001, clip_low=0.2, clip_high=0.2,
    advantages=partial(grpo_advantages, ddof=0), keep="shortest", custom_keep_is_metric=True,
    pruning_rate=0.5, allocation=False, allowed_options=OWN_SCALE,
    words="trains on the shortest only")
ALGORITHMS = {
    "grpo": grpo,
    "2grpo": replace(grpo, group_size=2, words="two completions per question"),
    "cppo": replace(
        grpo, keep="largest_abs", pruning_rate=0.75, words="trains on the largest |A| only"),
    "cppo_published": replace(  # the code that made the tables of CPPO's paper
        grpo, token_weights=token_mean, keep="pooled", pruning_rate=0.75,
        words="CPPO's code: |A| of the whole step"),
    "drgrpo": Row(
        drgrpo_loss, constant, clip_low=0.2, clip_high=0.2,
        advantages=partial(grpo_advantages, divide_by_std=False),
        words="no std, no length, no KL"),
    "dapo": Row(
        dapo_loss, token_mean, clip_low=0.2, clip_high=0.28, max_rollouts=4,
        words="clips higher, samples again, no KL"),
    "cispo": Row(
        cispo_loss, token_mean, clip_low=1.0, clip_high=4.0,
        words="the ratio is only a weight, no KL"),
    "sapo": Row(
        sapo_loss, sequence_mean, clip_low=None, clip_high=None,
        words="a soft gate for the clip, no KL"),
    "rloo": Row(  # with one update every ratio is 1, so the clip never acts: REINFORCE
        grpo_loss, constant, clip_low=0.2, clip_high=0.2, mu=1, one_update=True,
        advantages=rloo_advantages, allowed_options=OWN_SCALE,
        words="A from the other completions, no KL"),
    "lite_ppo": Row(
        grpo_loss, token_mean, clip_low=0.2, clip_high=0.2, mu=1, one_update=True,
        advantages=lite_ppo_advantages, over_all_devices=True, allowed_options=OWN_SCALE,
        words="the std of the whole batch, no KL"),
    "maxrl": Row(
        grpo_loss, token_mean, clip_low=0.2, clip_high=0.2, mu=1, one_update=True,
        advantages=maxrl_advantages, allowed_options=OWN_SCALE,
        words="A divided by the mean, no KL"),
    "gspo": gspo,
    "gspo_token": replace(
        gspo, loss=partial(gspo_loss, token_level=True), words="GSPO, A may differ by token"),
    "gfpo": gfpo,
    "gfpo_adaptive": replace(
        gfpo, pruning_rate=0.0, k_by_difficulty=(4, 6, 8, 8),
        allowed_options=("keep", "min_prefix", "token_weights"), words="GFPO, k by difficulty"),
    "gdpo": replace(
        grpo, advantages=gdpo_advantages, over_all_devices=True, allowed_options=OWN_SCALE,
        words="normalises each reward alone"),
    "deepseek_v32": replace(
        grpo, loss=deepseek_v32_loss, wants=("sampled_logp",),
        advantages=partial(grpo_advantages, divide_by_std=False),
        # its mask looks at the whole completion: no --min_prefix
        allowed_options=("keep", "pruning_rate", "allocation", "token_weights", "scale_rewards"),
        words="no std, another KL, masks stale A < 0"),
    "pods": replace(
        grpo, keep="max_variance", pruning_rate=0.75, allocation=False, allowed_options=OWN_SCALE,
        words="trains on the most varied rewards"),
    "ppo": Row(
        ppo_loss, token_mean, beta=0.02, clip_low=0.2, clip_high=0.2, advantages=ppo_scores, mu=4,
        critic=True, allocation=False, allowed_options=(),
        words="a critic in place of the group"),
}


def rule_name(rule):
    """The name of a rule of KEEP, or module:function of a row's own function."""
    function = getattr(rule, "func", rule)  # of a partial
    if isinstance(rule, str):
        return rule
    name = getattr(function, "__qualname__", type(function).__name__)  # or of an object's class
    return f"{function.__module__}:{name}"


# --- the algorithm of a run ---


@dataclass(frozen=True, kw_only=True)
class Algorithm(Row):
    """A row with the options of a run. `resolve` makes it.

    Its `keep` is a Rule, and its `loss` has the numbers β and ε.
    """

    # what follows from the row and the options
    name: str  # of the row
    k: int  # completions that are kept per question; if the row has `k_by_difficulty`, the most
    questions_per_step: int  # of a device, after allocation

    # what a run adds to its row; None: off
    target_kl: float | None  # end the updates on a batch when KL(π_old ‖ π_θ) exceeds this
    sampler_correction: Callable | None  # of family/tis.py
    min_prefix: float | None  # NAT: train on a prefix of at least this share
    overlong_buffer: int | None  # DAPO: the penalty grows over this many last tokens
    mask_truncated: bool  # do not train on completions that are cut off

    def keep_completions(self, rollout, advantages):
        """Step 4. Returns (rows of the kept completions, advantages (Q, G) of the step)."""
        advantages = finite(advantages, rollout.lengths.shape, "advantages")
        k = self.k
        if self.k_by_difficulty:  # GFPO's adaptive k: one of each question, (Q,)
            history = torch.tensor(rollout.history)
            k = adaptive_k(rollout.total.mean(1), history, ks=self.k_by_difficulty)
        kept, changed = kept_rows(self.keep, rollout, advantages, k)
        if changed is not None:
            advantages = advantages.flatten().index_copy(0, kept, changed).view_as(advantages)
        if self.keep.normalize_kept_only:  # GFPO and PODS
            advantages = advantages_over_kept(self, rollout, kept)
        return kept[rollout.trainable.flatten()[kept]], advantages


def advantages_over_kept(algorithm, rollout, kept):
    """Advantages (Q, G) over the kept completions of each question only, and 0 for the others."""
    Q, G = rollout.lengths.shape
    if algorithm.k_by_difficulty:  # each question keeps its own number: (1, k) rows for each
        groups = [kept[kept // G == q][None] for q in range(Q)]
    else:  # all questions at once. A device with none takes part, as GDPO compares over all devices
        groups = [kept.view(Q, algorithm.k)]
    rewards, lengths = rollout.rewards.flatten(1), rollout.lengths.flatten()
    advantages = torch.zeros(Q * G)
    for group in groups:
        of_kept = replace(rollout, rewards=rewards[:, group], lengths=lengths[group])
        advantages[group] = finite(algorithm.advantages(of_kept), group.shape, "advantages")
    return advantages.view(Q, G)


def resolve(
    name, *, keep=None, token_weights=None, scale_rewards=None, questions_per_step=1,
    target_kl=None, sampler_correction=None, min_prefix=None, overlong_buffer=None,
    mask_truncated=False, **changed,
):
    """The Algorithm of a run: the row `name` with the options of the run.

    keep: a name of KEEP, or a function. token_weights: a name of TOKEN_WEIGHTS, or a function.
    scale_rewards: a name of SCALE_REWARDS. questions_per_step: B of a device, before allocation.
    sampler_correction: a name of CORRECTIONS. changed: fields of the row. None: the row's own.
    Raises AssertionError if the pruning rate keeps nothing.
    """
    row = ALGORITHMS[name]
    rule = keep or row.keep
    given = {option: value for option, value in changed.items() if value is not None}
    given.setdefault("pruning_rate", usual_pruning_rate(row, rule))
    if isinstance(token_weights, str):
        token_weights = TOKEN_WEIGHTS.get(token_weights)  # None: a function of the row's own
    if token_weights:
        given["token_weights"] = token_weights
    if scale_rewards:
        given["advantages"] = SCALE_REWARDS[scale_rewards]
        given["over_all_devices"] = scale_rewards == "batch"
    row = replace(row, **given)
    if row.k_by_difficulty:
        k = max(row.k_by_difficulty)
    else:
        k = keep_count(row.group_size, row.pruning_rate)
    B = questions_per_step
    if row.allocation:
        B = allocate.questions_per_step(B, row.group_size, k)  # ⌊B·G/k⌋
    numbers = {"clip_low": row.clip_low, "clip_high": row.clip_high}
    if not row.critic:  # PPO's β is in its rewards
        numbers["beta"] = row.beta
    rule = KEEP[rule] if isinstance(rule, str) else rule
    if not isinstance(rule, Rule):  # a function of one's own
        rule = on_copies(rule)
        rule = smallest(rule) if row.custom_keep_is_metric else Rule(rule)
    row = replace(row, keep=rule, loss=partial(row.loss, **numbers))
    return Algorithm(
        **vars(row), name=name, k=k, questions_per_step=B,
        target_kl=target_kl, sampler_correction=CORRECTIONS.get(sampler_correction),
        min_prefix=min_prefix, overlong_buffer=overlong_buffer,
        mask_truncated=mask_truncated)


def usual_pruning_rate(row, rule):
    """The pruning rate if none is given: the row's own. If `rule` makes a row prune that keeps all
    completions (GSPO, DAPO, …), it is CPPO's rate."""
    added = row.keep == "all" and rule not in (None, "all")
    return ALGORITHMS["cppo"].pruning_rate if added else row.pruning_rate


def table(*names):
    """The table as text; with names, only these rows beside GRPO's."""
    fields = "token_weights keep group_size pruning_rate beta clip_low clip_high mu minibatches"
    fields = fields.split()
    titles = "algorithm|what it changes|token weights|keep|G|P|β|ε low|ε high|μ|mini-batches"
    lines = [titles.split("|")]
    usual = [cell(getattr(grpo, name)) for name in fields]
    for name, row in ALGORITHMS.items():
        if names and name not in ("grpo", *names):
            continue
        cells = [cell(getattr(row, field)) for field in fields]
        if row is not grpo:
            cells = ["·" if x == y else x for x, y in zip(cells, usual)]
        lines.append([name, row.words, *cells])
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def cell(value):
    """A number as text; the name of a rule or of a function."""
    value = getattr(value, "func", value)  # of a partial
    return getattr(value, "__name__", str(value))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # python algorithms.py | head
    # python algorithms.py cppo: its row
    print(table(*(word for word in sys.argv[1:] if word in ALGORITHMS)))
