"""Sentences that people repeat about GRPO, measured on the toy. docs/claims.md says what they are.

    python experiments/claims.py         all of them, thirteen minutes with the training

Writes claims.json, claims.md and five pictures: the gradient of a completion beside its |A|; pairs,
and the variance for each G; groups with equal rewards; k1 and k3 by enumeration; pass@k.

"base": the toy's base model on three sets of questions. "later": three runs of GRPO, each after 100
steps (`train.py --algorithm grpo --steps 100 --seed S`, made in runs/claims-S if they are not
there), on the same sets. Every question gets 64 completions; so does every held-out question, for
pass@k. All gradients are those of the first update, where all ratios are 1, without the KL term.
"""

import sys
from pathlib import Path
from statistics import fmean

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from cppo import prune
from engine.data.questions import load_questions
from engine.model.loading import load_model
from engine.model.logprobs import Policy
from engine.run.command_line import parse, run_program
from experiments.library.bench import heading, over_seeds
from experiments.library.plot import BAND, FAILS, INK, across, curves, panels, save, swatch
from experiments.library.study import (
    Options,
    Study,
    by_name,
    one_run,
    publish,
    runs_of,
    turned,
)
from experiments.library.toy_model import answered
from grpo import group_advantages, kl_k1, kl_k2, kl_k3
from scores import pass_at_k
from tasks import toy

STAGES = ("base", "later")
NAMES = {"base": "the base", "later": "after 100 steps"}
QUESTIONS = 64  # of a set
SAMPLED = 64  # completions of a question
G = 16
KEPT = (8, 4, 2)
SCALES = (0.1, 0.3, 1, 2)  # of the noise, in random distributions
SIZES = (2, 4, 8, 16, 32, 64)
TRIES = (1, 2, 4, 8, 16, 32, 64)  # the k of pass@k
CLAIMS = ("advantage", "pairs", "kl", "pass")  # the parts of the result


# --- models and their completions ---


def model_of(stage, seed):
    """(model, tokenizer) of a stage. The runs are made if they are not there."""
    folder = toy.BASE
    if stage == "later":
        folder = Path(f"runs/claims-{seed}")
        one_run(folder, {"algorithm": "grpo", "steps": 100, "seed": seed})
    return load_model(str(folder), torch.device("cpu"))


def scores(model, batch):
    """∇ Σ_t log π(o_it) of each completion: (N, parameters), 2 GB for a set of questions."""
    parameters, rows = list(model.parameters()), []
    for i in tqdm(range(len(batch.prompts)), desc="gradients"):
        logp = Policy(model).logprobs(batch.rows([i]))
        gradients = torch.autograd.grad(logp.sum(), parameters)
        rows.append(torch.cat([g.flatten() for g in gradients]))
    return torch.stack(rows)


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


def advantages_and_norms(of_each, rewards, lengths):
    """{figure: number, and the points of the picture}, over the groups whose rewards differ.

    of_each: (N, parameters). rewards, lengths: (N,).
    """
    A = group_advantages(rewards.view(-1, G))
    some = A.any(1)
    products = torch.stack([group @ group.T for group in of_each.split(G)])[some]
    A, lengths, right = A[some], lengths.view(-1, G)[some], rewards.view(-1, G)[some] > 0
    norms = products.diagonal(dim1=1, dim2=2).sqrt()
    few = A.abs() == A.abs().max(1, keepdim=True).values  # the rarer kind of a group
    tied = A.abs().max(1).values - A.abs().min(1).values < 1e-5  # 8 right, 8 wrong

    def larger_over_smaller(x):
        """Of each group: the mean of those with the larger |A| / that of the others."""
        of_few = (x * few).sum(1) / few.sum(1)
        of_many = (x * ~few).sum(1) / (~few).sum(1)
        return (of_few / of_many)[~tied].median()

    figures = {"the larger |A| / the smaller": larger_over_smaller(A.abs())}
    for k in KEPT:
        alone = (few.sum(1)[~tied] == k).sum() / len(A)
        figures[f"k = {k}: groups in which |A| alone decides"] = alone
    divisors = {"1/|o|": lengths, "token mean": lengths.mean(1, keepdim=True)}
    for name, divisor in divisors.items():
        W = A / divisor
        larger = larger_over_smaller(W.abs() * norms)
        figures[f"{name}: norm with the larger |A| / with the smaller"] = larger
        for k in KEPT:
            share, size, cosine = kept_share(W, A, products, k)
            figures[f"{name}: k = {k}: share of the norms"] = share.mean()
            figures[f"{name}: k = {k}: norm of the sum"] = size.mean()
            figures[f"{name}: k = {k}: cosine"] = cosine.mean()
    figures["tokens of a right completion"] = lengths[right].mean()
    figures["tokens of a wrong completion"] = lengths[~right].mean()
    numbers = {name: value.item() for name, value in figures.items()}
    weighed = (A / lengths).abs() * norms
    points = {
        "1/|o|, right": points_of(A, weighed, right, right.sum(1)),
        "1/|o|, wrong": points_of(A, weighed, ~right, right.sum(1)),
    }
    return numbers | {"points": points}


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


def pairs(of_each, rewards, lengths):
    """{figure: number}. noise: variance over the squared norm of the mean."""
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


def random_distributions(seed):
    """{name: (logp, ref_logp)}, near and far, without a model."""
    rng = torch.Generator().manual_seed(seed)
    logits, noise = torch.randn(2, 1000, 22, generator=rng, dtype=torch.float64)
    ref_logp, found = logits.log_softmax(1), {}
    for scale in SCALES:
        logp = (logits + scale * noise).log_softmax(1)
        found[f"random softmax, {scale}"] = logp, ref_logp
    return found


def trained_distributions(model, batch):
    """{name: (logp, ref_logp)} of a trained policy and the base."""
    base, _ = load_model(toy.BASE, torch.device("cpu"))
    logp, ref_logp = whole_logprobs(model, batch), whole_logprobs(base, batch)
    later = batch.mask.nonzero()[:, 1] > 0
    return {
        "after 100 steps": (logp, ref_logp),
        "after 100 steps, without the first token": (logp[later], ref_logp[later]),
    }


# --- "RL only sharpens: the base catches up at a large k" ---


def passes(model, tokenizer, questions, seed):
    """{pass@k: its mean over the questions}"""
    right = []
    for i in range(0, len(questions), QUESTIONS):
        batch, _ = answered(model, tokenizer, questions[i : i + QUESTIONS], SAMPLED, seed + i)
        right += batch.advantages.view(-1, SAMPLED).sum(1).int().tolist()
    return {f"pass@{k}": fmean(pass_at_k(SAMPLED, n, k) for n in right) for k in TRIES}


# --- all of them ---


def measure(folder, stage, seed):
    """{claim: {figure: number}} of a stage with one seed."""
    model, tokenizer = model_of(stage, seed)
    questions, _ = load_questions("toy", tokenizer, limit=seed * QUESTIONS)
    batch, _ = answered(model, tokenizer, questions[-QUESTIONS:], SAMPLED, seed)
    gradients = scores(model, batch), batch.advantages, batch.mask.sum(1).float()
    if stage == "base":
        distributions = random_distributions(seed)
    else:
        distributions = trained_distributions(model, batch)
    kl = {}
    for where, both in distributions.items():
        for name, value in compare(*both).items():
            kl[f"{where}: {name}"] = value.item()
    held_out, _ = load_questions("toy", tokenizer, split="test", limit=toy.TEST_QUESTIONS)
    found = (advantages_and_norms(*gradients), pairs(*gradients), kl,
             passes(model, tokenizer, held_out, seed))
    return dict(zip(CLAIMS, found))


STUDY = Study("runs/claims", dict(zip(STAGES, STAGES)), measure)


def page(result):
    text = heading("Claims, measured", result)
    text += "\n[What the claims are](../../docs/claims.md), [what the figures are](../claims.py)."
    text += f" Mean ± standard deviation over 3 seeds.{result.get('note', '')}\n"
    for claim in CLAIMS:
        text += f"\n## {claim}\n\n{turned(result[claim], '.4f')}\n"
    return text


KINDS = {"right": INK, "wrong": FAILS}  # of completions
ESTIMATORS = {"k1": INK, "k3": FAILS}


def draw_norms(rows, folder):
    figure, axes = panels(2, sharey=True)
    for axis, stage in zip(axes, STAGES):
        points = rows[stage]["points"][0]
        for i, (kind, colour) in enumerate(KINDS.items()):
            axis.plot(*zip(*points[f"1/|o|, {kind}"]), "o", color=colour)
            swatch(axis, 0.4, 0.94 - 0.07 * i, f"{kind} completions", colour)
        axis.set(title=NAMES[stage], xlabel="|A|")
    axes[0].set_ylabel("norm of a completion's gradient, weight 1/|o|")
    save(figure, folder / "claims_advantage.png",
         "a dot: mean over the groups with the same number of right completions; seed 1",
         "At the same |A| a short wrong guess of the base moves the weights most")


def of_stages(rows, figure, values):
    """The line of each stage, for `curves`: a figure whose name holds one of these values."""
    return {NAMES[stage]: across(rows[stage][figure.format(x)] for x in values)
            for stage in STAGES}


def draw_sizes(rows, figure, output, text, **labels):
    """Of a figure for each G: a line for each stage."""
    picture, axis = panels(1, 4.8, width=9)
    curves(axis, of_stages(rows, figure, SIZES), marker="o", xticks=range(len(SIZES)),
           ylim=(0, None), **labels)
    save(picture, output, text)


def draw_pairs(rows, folder):
    draw_sizes(
        rows, "G = {}: noise of 64 completions", folder / "claims_pairs.png",
        "64 completions in each gradient; " + BAND,
        title="More pairs, but not less noise: G = 4 to 8 has the least",
        ylabel="variance / squared norm of the mean",
        xticklabels=[f"G = {size}\n{SAMPLED * (size - 1) // 2} pairs" for size in SIZES])
    draw_sizes(
        rows, "G = {}: groups with equal rewards", folder / "claims_equal.png", BAND,
        title="After training more than a third of the groups of 16 say nothing",
        ylabel="share of groups with equal rewards", xticklabels=[f"G = {size}" for size in SIZES])


def draw_kl(rows, folder):
    def place(stage, where, name):
        return [rows[stage][f"{where}: {key}"]["mean"] for key in ("KL", f"std of {name}")]

    figure, axis = panels(1, 4.8, width=9)
    lines = {}
    for name, own in ESTIMATORS.items():
        lines[name] = [[place("base", f"random softmax, {scale}", name) for scale in SCALES]]
        toy_at = place("later", "after 100 steps", name)
        axis.plot(*toy_at, "D", color=own, markersize=9)
        axis.text(*toy_at, f"   {name}, the toy", color=own, va="top", fontsize=11)
    curves(axis, lines, look=ESTIMATORS.get, marker="o", xscale="log", yscale="log",
           xlabel="KL to the reference (nats a token)",
           ylabel="standard deviation of the estimator",
           title="Near the reference k3 spreads less than k1, on the trained toy four times as far")
    save(figure, folder / "claims_kl.png",
         "circles: random distributions; diamonds: the toy after 100 steps; mean of 3 seeds")


def draw_passes(rows, folder):
    figure, axes = panels(2)
    titles = {"pass@k": (0, 1.02), "the same, from 0.97 on": (0.97, 1.001)}
    for axis, (title, limits) in zip(axes, titles.items()):
        curves(axis, of_stages(rows, "pass@{}", TRIES), marker="o", title=title, xlabel="k",
               xticks=range(len(TRIES)), xticklabels=TRIES, ylim=limits)
    save(figure, folder / "claims_pass.png", "512 held-out questions, 64 answers to each; " + BAND,
         "From k = 16 on the base is ahead, by one or two questions of 512")


def picture(result, folder):
    for claim, draw in zip(CLAIMS, (draw_norms, draw_pairs, draw_kl, draw_passes)):
        draw(by_name(result[claim]), folder)


def main(argv):
    options = parse(Options, argv)
    runs, result = runs_of(STUDY), {}
    for claim in CLAIMS:
        result[claim] = [
            {"name": stage} | over_seeds([run[claim] for run in runs[stage]]) for stage in STAGES]
    publish(options.output, "claims", result, page, picture)


if __name__ == "__main__":
    run_program(main)
