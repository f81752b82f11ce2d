"""The gradient of the kept completions beside GRPO's: which rule, with which divisor of the loss, points the right way?

    python experiments/gradients.py                            writes gradients.json and gradients.md in experiments/results

The policy is the toy's base model. It answers several sets of 192 questions with 16 completions each. A step takes random
questions of one half of a set and trains on 16 completions: GRPO on all of 1 question, the rules on k of each of 16/k. A
loss gives each token of a completion the weight A_i / divisor:

- 1/|o|: the completion's own length (GRPO, and the paper's CPPO);
- token mean: the tokens of all kept completions of the step (CPPO's published code);
- constant: one number for all (Dr. GRPO);
- group's mean: the mean length of all G completions of the question, kept or not.

The target of a column is GRPO's mean step with the column's divisor, over all questions of the other half, one question a
step. (So token mean and group's mean have the same target.) 1/|o| lets the length in, because E[∇ log π(o) / |o|] =
∇ E[1/|o|]: notebook 2, section 11. A step is a sum of the gradients of completions, so its cosine needs only their inner
products, which are computed once for each set.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from cppo import prune
from engine.model.loading import load_model
from engine.model.sampling import Sampler, Sampling
from engine.run.options import option, parse, run_program
from engine.tasks import toy, toy_model
from engine.tasks.questions import load_questions
from experiments.setting import heading, markdown_table, setting, write
from grpo import group_advantages
from records import Batch
from rewards import toy_accuracy

G = 16
KEPT = (2, 4)  # k: P = 0.875 and 0.75


@dataclass
class Options:
    sets: int = option(5, "sets of questions, each with a seed of its own")
    questions: int = option(192, "questions of a set; half of them make the target")
    steps: int = option(1000, "steps of each method")
    output: str = option("experiments/results", "folder of gradients.json and gradients.md")


# --- the rules: advantages A (steps, Q, G) → how often each completion is kept, and the advantage it then has, times that ---


def kept(rule):
    def choose(A, k, rng):
        index = prune(A.flatten(0, 1), k, rule=rule, generator=rng).view(*A.shape[:2], k)
        times = torch.zeros_like(A).scatter(2, index, 1)
        return times, times * A
    return choose


def pooled(A, k, rng):
    """The largest |A| of all questions of the step."""
    times, advantages = kept("largest_abs")(A.flatten(1)[:, None], A.shape[1] * k, rng)
    return times.view(A.shape), advantages.view(A.shape)


def minus_their_mean(A, k, rng):
    """The largest |A|, and from each advantage the mean of the kept ones is taken."""
    times, advantages = kept("largest_abs")(A, k, rng)
    return times, advantages - times * advantages.sum(2, keepdim=True) / k


def importance(A, k, rng):
    """k draws with replacement, with probability |A| / Σ|A|, weighed by its inverse (notebook 2, section 11)."""
    size = A.abs().sum(2, keepdim=True)
    chance = torch.where(size > 0, A.abs(), torch.ones_like(A))
    index = torch.multinomial(chance.flatten(0, 1), k, replacement=True, generator=rng).view(*A.shape[:2], k)
    times = torch.zeros_like(A).scatter_add(2, index, torch.ones(index.shape))
    return times, times * A.sign() * size / G


def half_of_each_sign(A, k, rng, weighted=False):
    """k/2 with A > 0 and k/2 of the others, at random. If a kind has fewer, the other kind has more.

    weighted: by G/k times the chance to be kept, inverted (Horvitz and Thompson): then the mean step is that of all.
    """
    up = A > 0
    m = up.sum(2, keepdim=True)
    n = m.clamp(max=k // 2).maximum(k - (G - m))  # kept ones with A > 0
    place = (torch.rand(A.shape, generator=rng) + up).argsort(dim=2, descending=True).argsort(dim=2)  # A > 0 first
    times = torch.where(up, place < n, place - m < k - n).float()
    inverse = torch.where(up, m / n, (G - m) / (k - n)) * k / G
    return times, times * A * (inverse if weighted else 1)


GRPO, ALL = "all of 1 question (GRPO)", "all of the same questions"
METHODS = {
    GRPO: kept("largest_abs"), ALL: kept("largest_abs"),
    "largest |A| (CPPO)": kept("largest_abs"), "largest |A|, pooled": pooled, "half of each sign": half_of_each_sign,
    "half of each sign, weighted": lambda *given: half_of_each_sign(*given, weighted=True),
    "importance, weighted": importance, "random": kept("random"), "smallest |A|": kept("smallest_abs"),
    "largest |A|, minus their mean": minus_their_mean,
}
DIVISORS = {  # (times, lengths), both (steps, Q, G) → what divides a token of each completion
    "1/|o|": lambda times, lengths: lengths * times.sum((1, 2), keepdim=True),
    "token mean": lambda times, lengths: (times * lengths).sum((1, 2), keepdim=True),
    "constant": lambda times, lengths: toy.MAX_NEW_TOKENS * times.sum((1, 2), keepdim=True),
    "group's mean": lambda times, lengths: lengths.mean(2, keepdim=True) * times.sum((1, 2), keepdim=True),
}


# --- one set of questions ---


def sampled(model, tokenizer, number, count):
    """Set `number` of the toy's questions, answered: (Batch of count·G completions, advantages, lengths (count, G))."""
    questions = load_questions("toy", tokenizer, limit=(number + 1) * count)[0][-count:]
    drawn = Sampler(model, tokenizer).sample([q["prompt"] for q in questions], G, Sampling(toy.MAX_NEW_TOKENS), number)
    rewards = toy_accuracy(drawn.texts(tokenizer, questions), answer=[q["answer"] for q in questions for _ in range(G)])
    advantages = group_advantages(torch.tensor(rewards).view(count, G))
    prompts = [q["prompt"] for q in questions for _ in range(G)]
    batch = Batch(prompts, drawn.tokens, drawn.lengths, advantages.flatten())
    return batch, advantages, batch.lengths.view(count, G).float()


def scores(model, batch):
    """∇ Σ_t log π(o_it) of each completion: (N, parameters)."""
    rows = []
    for i in tqdm(range(len(batch.prompts)), desc="gradients"):
        logp = batch.rows([i]).logprobs(model, 1.0).sum()
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(logp, list(model.parameters()))]))
    return torch.stack(rows)


def steps_of(name, k, A, lengths, divisor, steps, rng):
    """How much each completion counts in random steps of a method: (steps, Q·G), mostly 0."""
    questions, k = {GRPO: (1, G), ALL: (G // k, G)}.get(name, (G // k, k))
    picks = torch.rand(steps, len(A), generator=rng).argsort(dim=1)[:, :questions]
    times, advantages = METHODS[name](A[picks], k, rng)
    weights = advantages / DIVISORS[divisor](times, lengths[picks])
    rows = picks[:, :, None] * G + torch.arange(G)
    return torch.zeros(steps, A.numel()).scatter(1, rows.flatten(1), weights.flatten(1))


def measure(of_each, A, lengths, steps, seed):
    """{k: {divisor: {method: figures}}} of one set. of_each: (Q·G, parameters)."""
    half, figures = len(A) // 2, {}
    own, other = of_each[: half * G], of_each[half * G :]
    products = own @ own.T
    for divisor, of in DIVISORS.items():
        target = (A[half:, None] / of(torch.ones(half, 1, G), lengths[half:, None])).flatten() @ other
        along = own @ target / target.norm()
        for k in KEPT:
            rows = figures.setdefault(k, {})[divisor] = {}
            for name in METHODS:
                rng = torch.Generator().manual_seed(seed)  # the same questions and draws for all divisors
                W = steps_of(name, k, A[:half], lengths[:half], divisor, steps, rng)
                square, mean = (W.to_sparse() @ products * W).sum(1), W.mean(0)
                length = (mean @ products @ mean).sqrt().item()
                rows[name] = {
                    "cosine": (W @ along / square.sqrt().clamp(min=1e-12)).mean().item(),
                    "cosine_of_mean": (mean @ along).item() / length, "norm": length,
                    "length": length / rows[GRPO]["norm"] if name != GRPO else 1.0,
                    "noise": max(square.mean().item() - length**2, 0) ** 0.5 / length,
                }
    return figures
