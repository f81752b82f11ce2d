"""The table of algorithms: one row each. Nothing else decides in what they differ.

    python train.py --list                  prints the table

A row says how the rewards become advantages, which completions are kept, what the ratio is (the loss), and how much each
token counts. β and the clip range are the defaults of the loss function, if the row does not name others: so each number
stands in one place. `resolve` applies the options of a run to a row; what comes out is all that a run knows of its
algorithm.

To try a rule of your own, write one function and change one row:

    advantages(rollout) → (Q, G)                    for example from rollout.rewards and rollout.lengths
    keep(rollout, advantages, k) → rows             for example cppo.batch_rows(cppo.prune(advantages, k), G);
                                                    `--keep FILE.py:FUNCTION` needs no change here
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F

import allocate
from cppo import batch_rows, keep_count, prune, prune_pooled
from engine.run import ranks
from engine.run.options import UserError
from family.dapo import dapo_loss, token_mean_weights
from family.drgrpo import constant_weights, drgrpo_loss
from family.gdpo import decoupled_advantages
from family.gfpo import adaptive_k, retain, token_efficiency
from family.gspo import gspo_loss
from family.pods import max_variance_subset
from family.ppo import gae, ppo_loss
from grpo import group_advantages, grpo_loss, sequence_mean_weights


@dataclass
class Rollout:
    """What was sampled for Q questions: G completions of each, R rewards of each completion.

    Completion i of question q is row q·G + i of `tokens`, `logp` and `texts`. All but `tokens` and `logp` is on the CPU.
    """

    questions: list[dict]  # Q rows of the data set
    tokens: torch.Tensor  # (Q·G, T) int64, as sampled, padded on the right
    logp: torch.Tensor  # (Q·G, T) float32, log π_old of each token, as the sampler computed it
    texts: list[str]  # Q·G, what the completions say
    lengths: torch.Tensor  # (Q, G) int64, tokens of each completion, EOS included
    truncated: torch.Tensor  # (Q, G) bool, cut off before an EOS
    rewards: torch.Tensor  # (R, Q, G) float32
    reward_names: list[str]  # R
    reward_weights: list[float]  # R
    trainable: torch.Tensor | None = None  # (Q, G) bool, what may be trained on; None: all
    history: list[float] = ()  # the mean reward of each earlier question of the run
    seed: int = 0  # for a rule that draws
    failures: int = 0  # calls of a reward function that failed
    rollouts: int = 1  # how often was sampled

    def __post_init__(self):
        if self.trainable is None:
            self.trainable = torch.ones_like(self.truncated)

    @property
    def total(self):
        """Σ_n w_n r_n: the weighted sum of the rewards, (Q, G)."""
        return weighted_sum(self.rewards, self.reward_weights)


def weighted_sum(rewards, reward_weights):
    """Σ_n w_n r_n. rewards: (R, …). reward_weights: R numbers. Returns (…)."""
    return sum((w * r for w, r in zip(reward_weights, rewards)), torch.zeros(rewards.shape[1:]))


def join(rollouts):
    """Several rollouts as one; the shorter completions are padded."""
    first, longest = rollouts[0], max(rollout.tokens.shape[1] for rollout in rollouts)

    def together(name, dim=0):
        return torch.cat([getattr(rollout, name) for rollout in rollouts], dim)

    def padded(name):
        return torch.cat([F.pad(x, (0, longest - x.shape[1])) for x in (getattr(r, name) for r in rollouts)])

    return replace(
        first, questions=[q for r in rollouts for q in r.questions], texts=[text for r in rollouts for text in r.texts],
        tokens=padded("tokens"), logp=padded("logp"), rewards=together("rewards", dim=1),
        **{name: together(name) for name in ("lengths", "truncated", "trainable")},
        failures=sum(r.failures for r in rollouts), rollouts=len(rollouts),
    )


# --- step 3: advantages(rollout) → (Q, G) ---


def of_the_sum(rollout, **options):
    """GRPO's: the rewards are added up, then compared within each group."""
    return group_advantages(rollout.total, **options)


def of_each_reward(rollout):
    """GDPO's: each reward is compared by itself. The last normalisation is over the groups of all devices."""
    decoupled = partial(decoupled_advantages, weights=rollout.reward_weights)
    return ranks.over_all_groups(decoupled, rollout.rewards)


def scores(rollout):
    """PPO's: no comparison here. The critic makes the advantages in step 5 (engine/model/critic.py)."""
    return rollout.total


# --- step 4: keep(rollout, advantages, k) → rows, (n,) int64 ascending ---


def every(rollout, advantages, k):
    return torch.arange(advantages.numel())


def by_advantage(rollout, advantages, k, *, rule):
    generator = torch.Generator().manual_seed(rollout.seed)
    kept = prune(advantages, k, rule=rule, generator=generator)
    return batch_rows(kept, advantages.shape[1])


def pooled(rollout, advantages, k):
    return prune_pooled(advantages, len(advantages) * k)


def smallest(metric, k):
    """The k completions of each question with the smallest metric (Q, G). k: a number, or one of each question (Q,)."""
    ks = torch.as_tensor(k).expand(len(metric)).tolist()
    kept = [q * metric.shape[1] + retain(row[None], k)[0] for q, (row, k) in enumerate(zip(metric, ks))]
    return torch.cat([torch.empty(0, dtype=torch.int64), *kept])


def shortest(rollout, advantages, k):
    return smallest(rollout.lengths, k)


def efficiency(rollout, advantages, k):
    return smallest(-token_efficiency(rollout.total, rollout.lengths), k)


def max_variance(rollout, advantages, k):
    return batch_rows(max_variance_subset(rollout.total, k), advantages.shape[1])


KEEP = {
    "all": every,
    **{rule: partial(by_advantage, rule=rule) for rule in ("largest_abs", "largest", "smallest_abs", "random")},
    "pooled": pooled,
    "shortest": shortest, "efficiency": efficiency, "max_variance": max_variance,
}
# rules after which the advantages are taken again, over the kept completions only: GFPO's and PODS's
KEPT_FIRST = ("shortest", "efficiency", "max_variance")



def own_rule(function, name):
    """A rule of the user's own, whose rows are checked."""
    def keep(rollout, advantages, k):
        rows = torch.as_tensor(function(rollout, advantages, k))
        n = advantages.numel()
        if rows.dim() != 1 or rows.dtype != torch.int64 or not ((0 <= rows) & (rows < n)).all() or len(rows.unique()) < len(rows):
            raise UserError(f"--keep {name} must return rows of the batch, whole numbers from 0 to {n - 1} and each once, "
                            "as cppo.batch_rows makes them.")
        return rows.sort().values
    return keep


# --- what each token counts: token_weights(mask, N, tokens, max_tokens) → (N, T), with N and tokens of the whole batch ---


def sequence_mean(mask, n, tokens, max_tokens):  # 1 / (N |o_i|)
    return sequence_mean_weights(mask, num_sequences=n)


def token_mean(mask, n, tokens, max_tokens):  # 1 / Σ_i |o_i|
    return token_mean_weights(mask, total_tokens=tokens)


def constant(mask, n, tokens, max_tokens):  # 1 / (N L)
    return constant_weights(mask, max_tokens=max_tokens, num_sequences=n)


# --- the table ---


def default(function, name):
    """The default of an argument: a paper's setting, from the function itself. A loss passes what it does not name to GRPO's."""
    own = inspect.signature(function).parameters
    return (own if name in own else inspect.signature(grpo_loss).parameters)[name].default


@dataclass(frozen=True)
class Algorithm:
    loss: Callable  # (logp, old_logp, advantages, mask, …) → (loss, stats): which ratio
    token_weights: Callable  # what each token counts
    advantages: Callable = of_the_sum
    keep: str | Callable = "all"  # which completions are trained on: a name of KEEP; resolved: the function
    pruning_rate: float = 0.0  # P: k = ⌊G(1−P)⌋ of them
    ks: tuple[int, ...] = ()  # instead: how many of an easy, medium, hard, very hard question
    allocation: bool = True  # use the freed places for more questions
    beta: float | None = None  # of the KL term. None, as of the next two: the default of the loss
    clip_low: float | None = None
    clip_high: float | None = None
    mu: int = 2  # how often a batch is trained on
    minibatches: int = 1  # updates that a batch is cut into, each time
    max_rollouts: int = 1  # above 1: sample again, up to so often, until groups with signal fill the step
    critic: bool = False  # a second network makes an advantage for every token
    takes: tuple[str, ...] = ("keep", "pruning_rate", "allocation")  # the options that not every algorithm takes

    # what only a run sets
    name: str = ""
    group_size: int = 16  # G
    k: int = 16
    questions_per_step: int = 1  # of a device
    kept_first: bool = False  # the advantages are those of the kept
    lam: float = default(gae, "lam")  # of PPO's advantages
    target_kl: float | None = None  # end the updates on a batch beyond it
    importance_cap: float | None = None
    overlong_cache: int = 0
    mask_truncated: bool = False

    def __post_init__(self):
        high = default(self.loss, "clip_high")
        own = {"clip_low": default(self.loss, "clip_low"), "clip_high": default(self.loss, "clip_low") if high is None else high}
        own |= {} if self.critic else {"beta": default(self.loss, "beta")}
        for name, value in own.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    def how_many(self, rollout):
        """k: a number; with GFPO's adaptive difficulty one of each question, (Q,)."""
        if not self.ks:
            return self.k
        return adaptive_k(rollout.total.mean(1), torch.tensor(rollout.history), ks=self.ks)

    @property
    def loss_options(self):
        clip = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        return clip if self.critic else clip | {"beta": self.beta}  # PPO's β is in its rewards


grpo = Algorithm(grpo_loss, sequence_mean)
gspo = Algorithm(gspo_loss, sequence_mean, minibatches=4)
gfpo = Algorithm(
    grpo_loss, token_mean, advantages=partial(of_the_sum, ddof=0), keep="shortest", pruning_rate=0.5, allocation=False,
    beta=0.001,
)
ALGORITHMS = {
    "grpo": grpo,
    "cppo": replace(grpo, keep="largest_abs", pruning_rate=0.75),
    "drgrpo": Algorithm(drgrpo_loss, constant, advantages=partial(of_the_sum, divide_by_std=False)),
    "dapo": Algorithm(dapo_loss, token_mean, max_rollouts=4, takes=(*grpo.takes, "max_rollouts")),
    "gspo": gspo,
    "gspo_token": replace(gspo, loss=partial(gspo_loss, token_level=True)),
    "gfpo": gfpo,
    "gfpo_adaptive": replace(gfpo, pruning_rate=0.0, ks=default(adaptive_k, "ks"), takes=("keep",)),
    "gdpo": replace(grpo, advantages=of_each_reward),
    "pods": replace(grpo, keep="max_variance", pruning_rate=0.75, allocation=False),
    "ppo": Algorithm(
        ppo_loss, token_mean, advantages=scores, beta=0.02, mu=4, allocation=False, critic=True, takes=("lam", "critic_lr"),
    ),
}


def resolve(name, *, keep=None, questions_per_step=1, **options):
    """The row `name` with a run's options applied. An option that is None is not given: the row's own value holds.

    keep: a name of KEEP, or a function. questions_per_step: B of a device, before allocation.
    Raises ValueError if the pruning rate keeps nothing.
    """
    given = {option: value for option, value in options.items() if value is not None}
    row, rule = ALGORITHMS[name], keep or ALGORITHMS[name].keep
    if rule != row.keep == "all":  # pruning on top of GSPO, DAPO, …
        given = {"pruning_rate": ALGORITHMS["cppo"].pruning_rate} | given
    row = replace(row, name=name, **given)
    k = max(row.ks) if row.ks else keep_count(row.group_size, row.pruning_rate)
    # ⌊B·G/k⌋ questions fill the places of B·G completions
    questions = allocate.questions_per_step(questions_per_step, row.group_size, k) if row.allocation else questions_per_step
    return replace(row, keep=KEEP.get(rule, rule), kept_first=rule in KEPT_FIRST, k=k, questions_per_step=questions)


def over_the_kept(algorithm, rollout, rows):
    """Advantages with the mean and the std of each question's kept completions only: (Q, G), 0 for the others."""
    n_questions, group_size = rollout.lengths.shape
    advantages = torch.zeros(n_questions * group_size)
    counts = torch.bincount(rows // group_size, minlength=n_questions).tolist()
    # (questions, k): all at once if every question keeps as many, else one by one
    parts = [rows.view(n_questions, -1)] if len(set(counts)) == 1 else [own[None] for own in rows.split(counts)]
    for own in parts:
        rewards, lengths = rollout.rewards.flatten(1)[:, own], rollout.lengths.flatten()[own]
        advantages[own] = algorithm.advantages(replace(rollout, rewards=rewards, lengths=lengths))
    return advantages.view(n_questions, group_size)


def table():
    """The table of algorithms as text, for `--list`."""
    names = ("keep", "pruning_rate", "beta", "clip_low", "clip_high", "mu", "minibatches", "allocation")
    lines = [("algorithm", "loss", "token_weights", *names)]
    for name, row in ALGORITHMS.items():
        loss = getattr(row.loss, "func", row.loss).__name__
        lines.append((name, loss, row.token_weights.__name__, *(str(getattr(row, column)) for column in names)))
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)
