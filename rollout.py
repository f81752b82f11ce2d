"""Steps 1 and 2 of the algorithm box: sample completions and score them. One record, `Rollout`, holds what comes out.

The functions of an algorithm take this record: `advantages(rollout)`, `keep(rollout, advantages, k)`. So a rule may look at
lengths, at log-probabilities or at several rewards.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from tqdm import tqdm

from engine.run import ranks
from engine.scoring.score import score
from engine.tasks.questions import reward_columns
from family.dapo import has_signal, overlong_penalty


@dataclass
class Rollout:
    """What was sampled for Q questions: G completions of each, R rewards of each completion.

    Completion i of question q is row q·G + i of `tokens`, `logp` and `texts`.
    `tokens` and `logp` are on the device, all else is on the CPU.
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
    rollouts: int = 1  # how often the step has sampled

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


def sample_and_score(next_questions, networks, algorithm, rewards, sampling, rng, clock, history=()):
    """Steps 1 and 2 for this device's share of the next questions. Returns a Rollout.

    next_questions(n): this device's share of the next n questions of all devices; None: a step's.
    """
    one_time = partial(
        roll_out, networks=networks, algorithm=algorithm, rewards=rewards, sampling=sampling,
        rng=rng, clock=clock, history=history,
    )
    if algorithm.max_rollouts > 1:
        rollout = dynamic_sampling(one_time, next_questions, algorithm.max_rollouts)
    else:
        rollout = one_time(next_questions(None))
    return shaped(rollout, algorithm, sampling.max_new_tokens)


def roll_out(questions, networks, algorithm, rewards, sampling, rng, clock, history):
    """Sample G completions of each question, and score them."""
    G, shape = algorithm.group_size, (len(questions), algorithm.group_size)
    with clock.phase("generate"):  # 1 sample
        prompts = [question["prompt"] for question in questions]
        sampled = networks.sampler.sample(prompts, G, sampling, rng.getrandbits(62))
    with clock.phase("score"):  # 2 score
        texts = sampled.texts(networks.tokenizer, questions)
        values, failures = score(rewards, texts, reward_columns(questions, G))
    return Rollout(
        questions, sampled.tokens, sampled.logp, texts,
        sampled.lengths.cpu().view(shape), sampled.truncated.cpu().view(shape),
        rewards=torch.stack(list(values.values())).view(len(values), *shape),
        reward_names=list(values), reward_weights=[reward.weight for reward in rewards],
        history=history, seed=rng.getrandbits(62), failures=failures,
    )


# --- DAPO's changes of a rollout (family/dapo.py) ---


def dynamic_sampling(one_time, next_questions, max_rollouts):
    """Sample again, for further questions, until groups with signal fill the step.

    one_time: questions → Rollout. At most `max_rollouts` times. Returns all as one Rollout.
    """
    rollouts, missing = [], None
    while missing != 0 and (questions := next_questions(missing)) is not None:
        rollout = one_time(questions)
        signal = has_signal(rollout.total)
        rollouts.append(replace(rollout, trainable=rollout.trainable & signal.unsqueeze(1)))
        counts = {"without": (~signal).sum().item()}
        without = int(ranks.all_sum(counts, rollout.tokens.device)["without"])
        missing = without if len(rollouts) < max_rollouts else 0
    if without and ranks.rank() == 0:
        tqdm.write(f"{without} groups are without signal after sampling {len(rollouts)} times: "
                   "this step trains on the others.")
    return join(rollouts)


def join(rollouts):
    """Several rollouts as one. Shorter completions are padded."""
    longest = max(rollout.tokens.shape[1] for rollout in rollouts)

    def together(name, dim=0):
        return torch.cat([getattr(rollout, name) for rollout in rollouts], dim)

    def padded(name):
        rows = [getattr(rollout, name) for rollout in rollouts]
        return torch.cat([F.pad(x, (0, longest - x.shape[1])) for x in rows])

    return replace(
        rollouts[0], rollouts=len(rollouts), failures=sum(r.failures for r in rollouts),
        questions=[q for r in rollouts for q in r.questions],
        texts=[text for r in rollouts for text in r.texts],
        tokens=padded("tokens"), logp=padded("logp"), rewards=together("rewards", dim=1),
        **{name: together(name) for name in ("lengths", "truncated", "trainable")},
    )


def shaped(rollout, algorithm, max_new_tokens):
    """With a penalty for long completions, and without training on truncated ones, if the run asks for these.

    The penalty comes after `has_signal`: with it a group of right answers would look informative.
    """
    if algorithm.mask_truncated:
        rollout = replace(rollout, trainable=rollout.trainable & ~rollout.truncated)
    if algorithm.overlong_cache:
        options = {"max_length": max_new_tokens, "cache": algorithm.overlong_cache}
        penalty = overlong_penalty(rollout.lengths, **options)
        rollout = replace(
            rollout, rewards=torch.cat([rollout.rewards, penalty.unsqueeze(0)]),
            reward_names=[*rollout.reward_names, "overlong"],
            reward_weights=[*rollout.reward_weights, 1.0],
        )
    return rollout
