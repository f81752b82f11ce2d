"""Sentences that people repeat about GRPO, measured on the toy. docs/claims.md says what they are.

    python experiments/claims.py                       all of them, ten minutes with the training
    python experiments/claims.py --claim advantage     the gradient of a completion beside its |A|
    python experiments/claims.py --claim pairs         pairs, and the variance for each G
    python experiments/claims.py --claim kl            k1 and k3 by enumeration
    python experiments/claims.py --claim tokens        what a token counts

Writes claims.json, claims.md and two pictures. Figures of other claims that are there stay.

"base": the toy's base model on three sets of questions. "later": three runs of GRPO, each after 100
steps (`train.py --algorithm grpo --steps 100 --seed S`, made in runs/claims-S if they are not
there), on the same sets. Every question gets 64 completions. All gradients are those of the first
update, where all ratios are 1, without the KL term.
"""

import json
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from cppo import prune
from engine.base.errors import UserError
from engine.data.questions import load_questions
from engine.model.loading import load_model
from engine.run.command_line import option, parse, run_program
from engine.run.curves import CPPO, GRPO
from experiments.gradients import scores
from experiments.library.bench import heading, over_seeds, setting
from experiments.library.plot import across, curves, panels, save
from experiments.library.study import (
    RESULTS,
    Study,
    by_name,
    draw,
    one_run,
    runs_of,
    turned,
)
from experiments.library.toy_model import answered
from family.dapo import token_mean_weights
from family.drgrpo import constant_weights
from grpo import group_advantages, kl_k1, kl_k2, kl_k3, sequence_mean_weights
from records import Batch
from tasks import toy

SEEDS = (1, 2, 3)
STAGES = ("base", "later")
NAMES = {"base": "the base", "later": "after 100 steps"}
QUESTIONS = 64  # of a set
SAMPLED = 64  # completions of a question
G = 16
KEPT = (8, 4, 2)
SIZES = (2, 4, 8, 16, 32, 64)
SHORT, LONG = 6, 35  # tokens of a guess and of a thought


@dataclass
class Options:
    claim: str | None = option(None, "advantage, pairs, kl or tokens; none: all")
    output: str = option(RESULTS, "folder of the page, of its figures and of its pictures")


# --- models and their completions ---


def model_of(stage, seed):
    """(model, tokenizer) of a stage. The runs are made if they are not there."""
    folder = toy.BASE
    if stage == "later":
        folder = Path(f"runs/claims-{seed}")
        one_run(folder, {"algorithm": "grpo", "steps": 100, "seed": seed})
    return load_model(str(folder), torch.device("cpu"))


def sampled(model, tokenizer, seed, count):
    """(Batch of count·SAMPLED completions, their rewards, their lengths) on set `seed`."""
    questions = load_questions("toy", tokenizer, limit=seed * count)[0][-count:]
    drawn, _, rewards = answered(model, tokenizer, questions, SAMPLED, seed)
    each = [question["prompt"] for question in questions for _ in range(SAMPLED)]
    return Batch(each, drawn.tokens, drawn.mask, rewards), rewards, drawn.lengths.float()


@lru_cache(maxsize=1)  # one alone takes 2 GB
def gradients_of(stage, seed):
    """(∇ log π(o) of all completions (N, parameters), rewards (N,), lengths (N,))"""
    model, tokenizer = model_of(stage, seed)
    batch, rewards, lengths = sampled(model, tokenizer, seed, QUESTIONS)
    return scores(model, batch), rewards, lengths


# --- "completions with a small |A| contribute little" ---


def length_of(W, products):
    """The norms of Σ_i W_i ∇ log π(o_i). W: (groups, G). products: (groups, G, G). (groups,)"""
    return torch.einsum("gi,gij,gj->g", W, products, W).clamp(min=0).sqrt()


def kept_share(W, A, products, k):
    """What the k largest |A| of each group hold of its gradient Σ_i W_i ∇ log π(o_i): (share of the
    sum of norms, norm of their sum over the norm of the whole sum, cosine of both), each (groups,).
    """
    kept = torch.zeros_like(W).scatter(1, prune(A, k), 1) * W
    norms = products.diagonal(dim1=1, dim2=2).sqrt()
    share = (kept.abs() * norms).sum(1) / (W.abs() * norms).sum(1)
    of_kept, of_all = length_of(kept, products), length_of(W, products)
    cosine = torch.einsum("gi,gij,gj->g", kept, products, W) / (of_kept * of_all)
    return share, of_kept / of_all, cosine


def advantages_and_norms(stage, seed):
    """{figure: number, and the points of the picture}"""
    of_each, rewards, lengths = gradients_of(stage, seed)
    products = torch.stack([group @ group.T for group in of_each.split(G)])
    figures, points = of_groups(products, rewards.view(-1, G), lengths.view(-1, G))
    return figures | {"points": points}


def of_groups(products, rewards, lengths):
    """({figure: number}, points of the picture), over the groups whose rewards differ, from the
    inner products of the ∇ log π(o) of each group, (groups, G, G).

    rewards, lengths: (groups, G).
    """
    A = group_advantages(rewards)
    some = A.any(1)
    products, A, lengths, right = products[some], A[some], lengths[some], rewards[some] > 0
    norms = products.diagonal(dim1=1, dim2=2).sqrt()
    few = A.abs() == A.abs().max(1, keepdim=True).values  # the rarer kind of a group
    tied = A.abs().max(1).values - A.abs().min(1).values < 1e-5  # 8 right, 8 wrong

    def larger_over_smaller(x):
        """Of each group: the mean of those with the larger |A| / that of the others."""
        of_few, of_many = ((x * those).sum(1) / those.sum(1) for those in (few, ~few))
        return (of_few / of_many)[~tied].median()

    figures, points = {"the larger |A| / the smaller": larger_over_smaller(A.abs())}, {}
    for k in KEPT:
        alone = (few.sum(1)[~tied] == k).sum() / len(A)
        figures[f"k = {k}: groups in which |A| alone decides"] = alone
    divisors = {"1/|o|": lengths, "token mean": lengths.mean(1, keepdim=True).expand_as(A)}
    for name, divisor in divisors.items():
        W = A / divisor
        weighed = W.abs() * norms
        larger = larger_over_smaller(weighed)
        figures[f"{name}: norm with the larger |A| / with the smaller"] = larger
        for k in KEPT:
            shares = zip(("share of the norms", "norm of the sum", "cosine"),
                         kept_share(W, A, products, k))
            for label, value in shares:
                figures[f"{name}: k = {k}: {label}"] = value.mean()
        points[f"{name}, right"] = points_of(A, weighed, right, right.sum(1))
        points[f"{name}, wrong"] = points_of(A, weighed, ~right, right.sum(1))
    figures["tokens of a right completion"] = lengths[right].mean()
    figures["tokens of a wrong completion"] = lengths[~right].mean()
    return {name: value.item() for name, value in figures.items()}, points


def points_of(A, norms, those, count_right):
    """[|A|, mean norm of those completions], for groups with 1, 2, … G−1 right completions."""
    points = []
    for n in range(1, G):
        chosen = those & (count_right == n)[:, None]
        if chosen.any():
            points.append([A[chosen].abs().mean().item(), norms[chosen].mean().item()])
    return points


# --- "G answers give G(G−1)/2 pairs, so more is learned" ---


def from_pairs(rewards, eps=1e-4):
    """The factor of each ∇ log π(o_i) in 1/G Σ_{i<j} (r_i − r_j) (∇ log π(o_i) − ∇ log π(o_j)) /
    std: a sum over pairs. rewards: (Q, G). Returns (Q, G)."""
    differences = rewards[:, :, None] - rewards[:, None, :]  # r_i − r_j
    return differences.sum(2) / rewards.shape[1] / (rewards.std(1, keepdim=True) + eps)


def variance(W, of_each, size):
    """Of a gradient that is a mean over groups of `size` completions, each of another question:
    (variance of one group's gradient, squared norm of the mean). Both are unbiased.

    W: (Q, M), the factors of M completions of each question, M / size groups.
    of_each: (QM, parameters).
    """
    Q, M = W.shape
    means, second = [], 0.0
    for factors, own in zip(W, of_each.split(M)):
        groups = torch.bmm(factors.view(-1, 1, size), own.view(-1, size, own.shape[1]))[:, 0]
        second += groups.square().sum() / len(groups) / Q
        means.append(groups.mean(0))
    # two different questions are independent, so |E g|² = E g·g'
    means = torch.stack(means)
    squared = (means.sum(0).square().sum() - means.square().sum()) / (Q * (Q - 1))
    return second - squared, squared


def pairs(stage, seed):
    """{figure: number}. noise: variance over the squared norm of the mean."""
    of_each, rewards, lengths = gradients_of(stage, seed)
    figures = {}
    for size in SIZES:
        groups = rewards.view(-1, size)
        A = group_advantages(groups)
        off = (A - from_pairs(groups)).abs().max()
        figures["largest difference of the sum over pairs"] = off
        W = (A / lengths.view(-1, size) / size).view(-1, SAMPLED)
        of_one, squared = variance(W, of_each, size)
        right = groups.sum(1)
        differ = (right * (size - right)).sum() / (len(groups) * size * (size - 1) / 2)
        figures[f"G = {size}: noise of 64 completions"] = of_one / squared * size / SAMPLED
        figures[f"G = {size}: pairs whose rewards differ"] = differ
        figures[f"G = {size}: groups with equal rewards"] = (A == 0).all(1).float().mean()
    return {name: value.item() for name, value in figures.items()}


# --- "k3 estimates the KL better than k1" ---


def mean_and_std(estimator, logp, ref_logp):
    """(mean, standard deviation) of an estimator over all words of each row, exactly, each row
    counting the same. logp, ref_logp: (rows, V), the whole distributions."""
    p, k = logp.exp(), estimator(logp, ref_logp)
    mean = (p * k).sum(1).mean()
    return mean, ((p * k**2).sum(1).mean() - mean**2).sqrt()


def compare(logp, ref_logp):
    """{figure: number} of the two estimators. logp, ref_logp: (rows, V), whole distributions."""
    KL, std_k1 = mean_and_std(kl_k1, logp, ref_logp)
    k3, std_k3 = mean_and_std(kl_k3, logp, ref_logp)
    k2, _ = mean_and_std(kl_k2, logp, ref_logp)
    return {"KL": KL, "k3 − KL": k3 - KL, "k2 − KL": k2 - KL, "std of k1": std_k1,
            "std of k3": std_k3}


@torch.no_grad()
def whole_logprobs(model, batch):
    """(tokens, V) float64: log π of every word, at each token of the completions."""
    prompts = torch.tensor(batch.prompts)  # the toy's prompts have one length
    logits = model(torch.cat([prompts, batch.tokens], 1)).logits[:, prompts.shape[1] - 1 : -1]
    return logits[batch.mask].double().log_softmax(-1)


def kl(stage, seed):
    """{figure: number}. base: random distributions. later: the trained policy."""
    found = {}  # (logp, ref_logp) of each comparison
    if stage == "base":  # far and near, without a model
        rng = torch.Generator().manual_seed(seed)
        logits, noise = torch.randn(2, 1000, 22, generator=rng, dtype=torch.float64)
        for scale in (0.1, 0.3, 1, 2):
            logp = (logits + scale * noise).log_softmax(1)
            found[f"random softmax, {scale}"] = logp, logits.log_softmax(1)
    else:
        model, tokenizer = model_of(stage, seed)
        batch, _, _ = sampled(model, tokenizer, seed, QUESTIONS)
        base, _ = model_of("base", seed)
        logp, ref = whole_logprobs(model, batch), whole_logprobs(base, batch)
        later = batch.mask.nonzero()[:, 1] > 0
        found["after 100 steps"] = logp, ref
        found["after 100 steps, without the first token"] = logp[later], ref[later]
    return {f"{where}: {name}": value.item()
            for where, both in found.items() for name, value in compare(*both).items()}


# --- "a token mean treats long answers fairly" ---


def tokens(stage, seed):
    """Arithmetic: a batch of one short and one long answer. No model is needed."""
    if stage == "later":
        return {}
    mask = torch.arange(LONG) < torch.tensor([[SHORT], [LONG]])
    ways = {"1/|o|": sequence_mean_weights(mask), "token mean": token_mean_weights(mask),
            "constant": constant_weights(mask, max_tokens=toy.MAX_NEW_TOKENS)}
    figures = {}
    for name, weights in ways.items():
        figures[f"{name}: a token of the short answer"] = weights[0, 0].item()
        figures[f"{name}: a token of the long answer"] = weights[1, 0].item()
        figures[f"{name}: share of the long answer"] = (weights[1].sum() / weights.sum()).item()
    return figures


# --- the page and the pictures ---

CLAIMS = {"advantage": advantages_and_norms, "pairs": pairs, "kl": kl, "tokens": tokens}


def measure(names):
    """{claim: its rows, one of each stage}"""
    study = Study("runs/claims", dict(zip(STAGES, STAGES)), lambda folder, stage, seed: {
        name: CLAIMS[name](stage, seed) for name in names})
    runs = runs_of(study)
    return {name: [{"name": stage} | over_seeds([run[name] for run in runs[stage]])
                   for stage in STAGES] for name in names}


def page(result):
    text = "# Claims, measured\n\n[What the claims are](../../docs/claims.md), [what the figures "
    text += "are](../claims.py). Mean ± standard deviation over 3 seeds.\n"
    for name, own in result.items():
        text += f"\n#{heading(name, own)}\n{turned(own['rows'], '.4f')}\n"
    return text


def draw_norms(rows, folder):
    figure, axes = panels(2, sharey=True)
    for axis, stage in zip(axes, STAGES):
        points = rows[stage]["points"][0]
        lines = {f"{kind} completions": ([points[f"1/|o|, {kind}"]], colour, "o")
                 for kind, colour in (("right", CPPO), ("wrong", GRPO))}
        curves(axis, lines, title=NAMES[stage], xlabel="|A|")
    axes[0].set_ylabel("norm of a completion's gradient, weight 1/|o|")
    save(figure, folder / "claims_advantage.png",
         "a dot: mean over the groups with the same number of right completions; seed 1",
         "At the same |A| a short wrong guess of the base moves the weights most")


def draw_pairs(rows, folder):
    figure, axis = panels(1, 4.8, width=9)
    lines = {}
    for stage, colour in zip(STAGES, (GRPO, CPPO)):
        noise = [rows[stage][f"G = {size}: noise of 64 completions"] for size in SIZES]
        lines[NAMES[stage]] = across(noise), colour, "o-"
    ticks = [f"G = {size}\n{SAMPLED * (size - 1) // 2} pairs" for size in SIZES]
    curves(axis, lines, title="More pairs, but not less noise: G = 4 to 8 has the least",
           ylabel="variance / squared norm of the mean", xticks=range(len(SIZES)),
           xticklabels=ticks, ylim=(0, None))
    save(figure, folder / "claims_pairs.png",
         "64 completions in each gradient; line and band: mean and range of 3 seeds")


def picture(result, folder):
    """The pictures of the claims that have one."""
    for name, own in (("advantage", draw_norms), ("pairs", draw_pairs)):
        if name in result:
            own(by_name(result[name]["rows"]), folder)


def main(argv):
    options = parse(Options, argv)
    if options.claim not in (None, *CLAIMS):
        raise UserError(f"--claim must be one of {', '.join(CLAIMS)}, not {options.claim}.")
    stored = Path(options.output, "claims.json")
    result = json.loads(stored.read_text()) if stored.exists() else {}
    for name, rows in measure([options.claim] if options.claim else CLAIMS).items():
        result[name] = setting() | {"rows": rows}
    draw(options.output, "claims", result, page, picture)


if __name__ == "__main__":
    run_program(main)
