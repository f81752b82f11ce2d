"""Sentences that people repeat about GRPO, measured on the toy. docs/claims.md says what they are.

    python experiments/claims.py         all of them, thirteen minutes with the training

Writes claims.json and claims.md: what the two largest |A| hold of a gradient; its variance for each
G, and groups with equal rewards; k1 and k3 by enumeration; pass@k. These are the figures that the
verdicts need. results/claims.md has more of them.

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
from experiments.library.study import Options, Study, one_run, publish, runs_of, turned
from experiments.library.toy_model import answered
from grpo import group_advantages, kl_k1, kl_k3
from scores import pass_at_k
from tasks import toy

STAGES = ("base", "later")
QUESTIONS = 64  # of a set
SAMPLED = 64  # completions of a question
G = 16
KEPT = 2  # of G
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
    """{figure: number}, means over the groups whose rewards differ.

    of_each: (N, parameters). rewards, lengths: (N,).
    """
    A = group_advantages(rewards.view(-1, G))
    some = A.any(1)
    products = torch.stack([group @ group.T for group in of_each.split(G)])[some]
    A, lengths = A[some], lengths.view(-1, G)[some]
    figures = {}
    divisors = {"1/|o|": lengths, "token mean": lengths.mean(1, keepdim=True)}
    for name, divisor in divisors.items():
        share, size, cosine = kept_share(A / divisor, A, products, KEPT)
        figures[f"{name}: k = {KEPT}: share of the norms"] = share.mean().item()
        figures[f"{name}: k = {KEPT}: norm of the sum"] = size.mean().item()
        figures[f"{name}: k = {KEPT}: cosine"] = cosine.mean().item()
    return figures


# --- "G answers give G(G−1)/2 pairs, so more is learned" ---


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
        W = (A / lengths.view(-1, size) / size).view(-1, SAMPLED)
        of_one, squared = variance(W, of_each, size)
        figures[f"G = {size}: noise of 64 completions"] = of_one / squared * size / SAMPLED
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
    return {"KL": KL, "k3 − KL": k3 - KL, "std of k1": std_k1, "std of k3": std_k3}


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
    return {"after 100 steps": (whole_logprobs(model, batch), whole_logprobs(base, batch))}


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
    text += " Mean ± standard deviation over 3 seeds.\n"
    for claim in CLAIMS:
        text += f"\n## {claim}\n\n{turned(result[claim], '.4f')}\n"
    return text


def main(argv):
    options = parse(Options, argv)
    runs, result = runs_of(STUDY), {}
    for claim in CLAIMS:
        result[claim] = [
            {"name": stage} | over_seeds([run[claim] for run in runs[stage]]) for stage in STAGES]
    publish(options.output, "claims", result, page)


if __name__ == "__main__":
    run_program(main)
