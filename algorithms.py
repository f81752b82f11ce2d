"""The table of algorithms: one row each, which says all in which they differ.

    python train.py --list                  prints the table

A row says how rewards become advantages, which completions are kept, what the ratio is (the loss),
how much each token counts, and the numbers: β, the clip range, μ, … The one thing that a row only
switches on is PPO's critic, a second network. `resolve` makes a run's Algorithm of a row.

To try an idea of your own, write one function and change one row:

    advantages(rollout) → (Q, G)            records.py says what a rollout holds
    keep(rollout, advantages, k) → rows     or name your function: --keep FILE.py:FUNCTION

A rule may also return (rows, advantages of these rows), if the kept completions shall count more or
less than before, for example the inverse of the probability with which they were drawn.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

import allocate
from cppo import batch_rows, keep_count, prune, prune_pooled
from family.cispo import cispo_loss
from family.dapo import dapo_loss, token_mean_weights
from family.drgrpo import constant_weights, drgrpo_loss
from family.gdpo import decoupled_advantages
from family.gfpo import adaptive_k, retain, token_efficiency
from family.gspo import gspo_loss
from family.lite_ppo import batch_std_advantages
from family.maxrl import mean_normalized_advantages
from family.pods import max_variance_subset
from family.ppo import ppo_loss
from family.rloo import leave_one_out_advantages
from family.sapo import sapo_loss
from family.unbiased import chances, draw, weighed
from grpo import group_advantages, grpo_loss, sequence_mean_weights

# --- step 3: advantages(rollout) → (Q, G) ---


def of_the_sum(rollout, function=group_advantages, **options):
    """GRPO: add the rewards up, then compare the sums within each group."""
    return function(rollout.total, **options)


def of_each_reward(rollout):
    """GDPO: compare each reward by itself. The last normalisation is over all devices."""
    decoupled = partial(decoupled_advantages, weights=rollout.reward_weights)
    return rollout.over_all_devices(decoupled)


def over_the_batch(rollout):
    """Lite PPO: add the rewards up, then compare with the group. The std is over all devices."""
    return rollout.over_all_devices(
        lambda rewards: batch_std_advantages(replace(rollout, rewards=rewards).total))


def scores(rollout):
    """PPO has no advantages yet, only scores. The critic makes the advantages in step 5."""
    return rollout.total


# --- step 4: keep(rollout, advantages, k) → rows of the batch, (n,) int64, ascending ---
# Completions that may not be trained on (`rollout.trainable`) come last in every rule.


def every(rollout, advantages, k):
    return torch.arange(advantages.numel())


def by_advantage(rollout, advantages, k, *, rule):
    """CPPO (largest_abs), and the rules of its ablation."""
    generator = torch.Generator().manual_seed(rollout.seed)
    options = {"rule": rule, "generator": generator, "allowed": rollout.trainable}
    return batch_rows(prune(advantages, k, **options), advantages.shape[1])


def pooled(rollout, advantages, k):
    """CPPO's published code: the largest |A| of all questions of the device together."""
    return prune_pooled(advantages, len(advantages) * k, allowed=rollout.trainable)


def unbiased(rollout, advantages, k):
    """Drawn with chances in proportion to |A|, and weighed by their inverse."""
    generator = torch.Generator().manual_seed(rollout.seed)
    p = chances(advantages.abs().double(), k, allowed=rollout.trainable)
    kept = draw(p, torch.rand((len(p), 1), dtype=p.dtype, generator=generator))
    rows = kept.flatten().nonzero()[:, 0]
    return rows, weighed(advantages, p).flatten()[rows]


def smallest(rollout, advantages, k, *, metric):
    """GFPO: the k completions of each question with the smallest metric. k: a number, or (Q,).

    metric: rollout → (Q, G).
    """
    ks = torch.as_tensor(k).expand(len(advantages)).tolist()
    metric = metric(rollout).float().masked_fill(~rollout.trainable, torch.inf)
    G, kept = metric.shape[1], [torch.empty(0, dtype=torch.int64)]
    kept += [q * G + retain(metric[q : q + 1], k)[0] for q, k in enumerate(ks)]
    return torch.cat(kept)


def max_variance(rollout, advantages, k):
    """PODS: the rewards that vary the most."""
    G, kept = advantages.shape[1], [torch.empty(0, dtype=torch.int64)]
    for q, (rewards, trainable) in enumerate(zip(rollout.total, rollout.trainable)):
        first, last = trainable.nonzero()[:, 0], (~trainable).nonzero()[:, 0]
        if len(first) > k:
            first, last = first[max_variance_subset(rewards[None, first], k)[0]], last[:0]
        kept.append(q * G + torch.cat([first, last[: k - len(first)]]).sort().values)
    return torch.cat(kept)


KEEP = {
    "all": every,
    "largest_abs": partial(by_advantage, rule="largest_abs"),
    "largest": partial(by_advantage, rule="largest"),
    "smallest_abs": partial(by_advantage, rule="smallest_abs"),
    "random": partial(by_advantage, rule="random"),
    "pooled": pooled, "unbiased": unbiased, "max_variance": max_variance,
    "shortest": partial(smallest, metric=lambda rollout: rollout.lengths),
    "efficiency": partial(  # the most reward per token
        smallest, metric=lambda rollout: -token_efficiency(rollout.total, rollout.lengths)),
}
# GFPO's and PODS's rules: the mean and the std of the advantages are those of the kept completions
OVER_KEPT = ("shortest", "efficiency", "max_variance")


def advantages_over_kept(algorithm, rollout, rows):
    """Advantages (Q, G) over the kept completions of each question only, and 0 for the others."""
    Q, G = rollout.lengths.shape
    if algorithm.ks:  # each question keeps its own number: (1, k) rows for each
        groups = [rows[rows // G == q][None] for q in range(Q)]
    else:  # all questions at once, also if there are none: GDPO compares over all devices
        groups = [rows.view(Q, algorithm.k)]
    advantages = torch.zeros(Q * G)
    for group in groups:
        rewards, lengths = rollout.rewards.flatten(1)[:, group], rollout.lengths.flatten()[group]
        of_kept = replace(rollout, rewards=rewards, lengths=lengths)
        advantages[group] = algorithm.advantages(of_kept)
    return advantages.view(Q, G)


# --- token_weights(mask, N, tokens, max_tokens) → (N, T); N and tokens are of the whole batch ---


def sequence_mean(mask, n, tokens, max_tokens):  # 1 / (N |o_i|)
    return sequence_mean_weights(mask, num_sequences=n)


def token_mean(mask, n, tokens, max_tokens):  # 1 / Σ_i |o_i|
    return token_mean_weights(mask, total_tokens=tokens)


def constant(mask, n, tokens, max_tokens):  # 1 / (N L)
    return constant_weights(mask, max_tokens=max_tokens, num_sequences=n)


# --- the table ---


@dataclass(frozen=True)
class Algorithm:
    """A row of the table. `resolve` applies the options of a run to it, and gives its loss the
    numbers.
    """

    loss: Callable  # (logp, old_logp, advantages, mask, …) → (loss, stats); resolved: with numbers
    token_weights: Callable
    beta: float  # weight of the KL term
    clip_low: float | None  # None: the loss has no clip
    clip_high: float | None
    advantages: Callable = of_the_sum
    keep: str | Callable = "all"  # a name of KEEP; resolved: the function
    pruning_rate: float = 0.0  # P: k = ⌊G(1−P)⌋ are kept of each question
    ks: tuple[int, ...] = ()  # or: how many of an easy, medium, hard, very hard question
    allocation: bool = True  # use the freed places for more questions
    mu: int = 2  # how often a batch is trained on
    minibatches: int = 1  # updates that a batch is cut into, each time
    max_rollouts: int = 1  # above 1: dynamic sampling, at most so often
    critic: bool = False  # a second network makes an advantage for every token
    takes: tuple[str, ...] = ("keep", "pruning_rate", "allocation")  # options that not all take

    # set by `resolve` for a run, not by a row
    name: str = ""
    group_size: int = 16  # G
    k: int = 16
    questions_per_step: int = 1  # of a device
    over_kept: bool = False  # the advantages are compared only with the kept completions
    wants_entropy: bool = False  # the loss takes the entropy of each token, as one of your own may
    lam: float = 0.95  # PPO's λ
    target_kl: float | None = None  # the updates on a batch end if the KL exceeds it
    importance_cap: float | None = None
    importance_low: float | None = None
    overlong_cache: int = 0
    mask_truncated: bool = False

    def choose(self, rollout, advantages):
        """Step 4. Returns (rows of the kept completions, advantages (Q, G) of the step)."""
        k = self.k
        if self.ks:  # GFPO's adaptive k: one of each question, (Q,)
            k = adaptive_k(rollout.total.mean(1), torch.tensor(rollout.history), ks=self.ks)
        rows = self.keep(rollout, advantages, k)
        if isinstance(rows, tuple):  # a rule that says how much each kept completion counts
            rows, own = rows
            advantages = advantages.flatten().index_copy(0, rows, own).view_as(advantages)
        elif self.over_kept:  # GFPO and PODS
            advantages = advantages_over_kept(self, rollout, rows)
        return rows[rollout.trainable.flatten()[rows]], advantages


grpo = Algorithm(grpo_loss, sequence_mean, beta=0.04, clip_low=0.2, clip_high=0.2)
gspo = Algorithm(
    gspo_loss, sequence_mean, beta=0.0, clip_low=3e-4, clip_high=4e-4, minibatches=4)
gfpo = Algorithm(
    grpo_loss, token_mean, beta=0.001, clip_low=0.2, clip_high=0.2,
    advantages=partial(of_the_sum, ddof=0), keep="shortest", pruning_rate=0.5, allocation=False,
)
ALGORITHMS = {
    "grpo": grpo,
    "cppo": replace(grpo, keep="largest_abs", pruning_rate=0.75),
    # the code that made the tables of CPPO's paper
    "cppo_published": replace(grpo, token_weights=token_mean, keep="pooled", pruning_rate=0.75),
    "drgrpo": Algorithm(
        drgrpo_loss, constant, beta=0.0, clip_low=0.2, clip_high=0.2,
        advantages=partial(of_the_sum, divide_by_std=False),
    ),
    "dapo": Algorithm(
        dapo_loss, token_mean, beta=0.0, clip_low=0.2, clip_high=0.28, max_rollouts=4,
        takes=(*grpo.takes, "max_rollouts"),
    ),
    "cispo": Algorithm(
        cispo_loss, token_mean, beta=0.0, clip_low=1.0, clip_high=4.0,
        takes=(*grpo.takes, "max_rollouts"),
    ),
    "sapo": Algorithm(sapo_loss, sequence_mean, beta=0.0, clip_low=None, clip_high=None),
    # with one update every ratio is 1, so the clip never acts: REINFORCE
    "rloo": Algorithm(
        grpo_loss, constant, beta=0.0, clip_low=0.2, clip_high=0.2, mu=1,
        advantages=partial(of_the_sum, function=leave_one_out_advantages),
    ),
    "lite_ppo": Algorithm(
        grpo_loss, token_mean, beta=0.0, clip_low=0.2, clip_high=0.2, mu=1,
        advantages=over_the_batch,
    ),
    "maxrl": Algorithm(
        grpo_loss, token_mean, beta=0.0, clip_low=0.2, clip_high=0.2, mu=1,
        advantages=partial(of_the_sum, function=mean_normalized_advantages),
    ),
    "gspo": gspo,
    "gspo_token": replace(gspo, loss=partial(gspo_loss, token_level=True)),
    "gfpo": gfpo,
    "gfpo_adaptive": replace(gfpo, pruning_rate=0.0, ks=(4, 6, 8, 8), takes=("keep",)),
    "gdpo": replace(grpo, advantages=of_each_reward),
    "pods": replace(grpo, keep="max_variance", pruning_rate=0.75, allocation=False),
    "ppo": Algorithm(
        ppo_loss, token_mean, beta=0.02, clip_low=0.2, clip_high=0.2, advantages=scores, mu=4,
        critic=True, allocation=False, takes=("lam", "critic_lr"),
    ),
}


def rule_name(rule):
    """The name of a rule of KEEP, or module:function of a row's own function."""
    function = getattr(rule, "func", rule)  # of a partial
    return rule if isinstance(rule, str) else f"{function.__module__}:{function.__qualname__}"


def resolve(name, *, keep=None, questions_per_step=1, **options):
    """The row `name` with the options of a run applied: all that a run knows of its algorithm.

    keep: a name of KEEP, or a function. questions_per_step: B of a device, before allocation.
    An option that is None is not given: then the row's own value holds.
    Raises ValueError if the pruning rate keeps nothing.
    """
    row, given = ALGORITHMS[name], {k: v for k, v in options.items() if v is not None}
    rule = keep or row.keep
    if row.keep == "all" and rule != "all":  # CPPO's pruning on top of GSPO, DAPO, …
        given = {"pruning_rate": ALGORITHMS["cppo"].pruning_rate} | given
    row = replace(row, name=name, **given)
    k, B = max(row.ks, default=0), questions_per_step
    k = k or keep_count(row.group_size, row.pruning_rate)
    if row.allocation:
        B = allocate.questions_per_step(B, row.group_size, k)  # ⌊B·G/k⌋
    numbers = {"clip_low": row.clip_low, "clip_high": row.clip_high}
    if not row.critic:  # PPO's β is in its rewards
        numbers["beta"] = row.beta
    return replace(
        row, k=k, questions_per_step=B, keep=KEEP.get(rule, rule), over_kept=rule in OVER_KEPT,
        loss=partial(row.loss, **numbers),
        wants_entropy="entropy" in inspect.signature(row.loss).parameters)


def table():
    """The table as text."""
    names = ("keep", "pruning_rate", "beta", "clip_low", "clip_high", "mu", "minibatches")
    lines = [("algorithm", "loss", "token_weights", *names)]
    for name in ALGORITHMS:
        row, rule = resolve(name), rule_name(ALGORITHMS[name].keep)
        functions = row.loss.func.__name__, row.token_weights.__name__
        lines.append((name, *functions, rule, *(str(getattr(row, column)) for column in names[1:])))
    widths = [max(map(len, column)) for column in zip(*lines)]
    lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    more = "minibatches is the least number: a data set may ask for more (the toy asks for 2)."
    return "\n".join([*lines, "", more])
