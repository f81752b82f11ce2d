"""The gradient of the kept completions beside that of all: its direction, its length and its noise.

    python experiments/gradients.py                            writes gradients.json and gradients.md in experiments/results

The policy is the toy's base model. It answers 192 questions with 16 completions each. The target is GRPO's gradient of
one half of the questions, all completions. A step of a method takes random questions of the other half and trains on 16
completions, as in Table 1: GRPO on one question, CPPO with P = 0.875 on two completions of each of eight. Over many
steps, the page shows

- the cosine with the target: 1 would be a step without noise and without bias;
- the cosine of the mean of all steps with the target: the noise is gone from one side, so what is missing is the target's
  own noise (the same for all methods) and the bias;
- the length of the mean step, GRPO's = 1, and the noise: the length of what a step adds to its mean, in units of it.

All of it twice: with GRPO's mean over the tokens of a completion, 1/|o_i|, and with the sum over its tokens, as in
Dr. GRPO. The sum is the gradient of log π(o_i), whose mean over all completions of a question is 0. With 1/|o_i| it is
not 0, so a rule that keeps completions of one sign turns the gradient.
"""

import random
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


@dataclass
class Options:
    questions: int = option(192, "questions; half of them make the target")
    steps: int = option(1000, "steps of each method")
    seed: int = option(0, "seed of the completions and of the steps")
    output: str = option("experiments/results", "folder of gradients.json and gradients.md")


def sampled(model, tokenizer, count, seed):
    """The toy's questions, answered: (Batch of count·G completions, advantages (count, G))."""
    questions, _ = load_questions("toy", tokenizer, limit=count)
    drawn = Sampler(model, tokenizer).sample([q["prompt"] for q in questions], G, Sampling(toy.MAX_NEW_TOKENS), seed)
    texts = drawn.texts(tokenizer, questions)
    rewards = toy_accuracy(texts, answer=[q["answer"] for q in questions for _ in range(G)])
    advantages = group_advantages(torch.tensor(rewards).view(count, G))
    prompts = [q["prompt"] for q in questions for _ in range(G)]
    return Batch(prompts, drawn.tokens, drawn.lengths, advantages.flatten()), advantages


def scores(model, batch):
    """∇ 1/|o_i| Σ_t log π(o_it) of each completion: (N, parameters)."""
    rows = []
    for i in tqdm(range(len(batch.prompts)), desc="gradients"):
        one = batch.rows([i])
        logp = one.logprobs(model, 1.0).sum() / int(one.lengths)
        gradient = torch.autograd.grad(logp, list(model.parameters()))
        rows.append(torch.cat([g.flatten() for g in gradient]))
    return torch.stack(rows)


def importance(advantages, k, rng):
    """k draws with replacement, with probability |A| / Σ|A|: (indices, weights), unbiased (notebook 2, section 11)."""
    size = advantages.abs().sum(1, keepdim=True)
    chance = torch.where(size > 0, advantages.abs(), torch.ones_like(advantages))
    index = torch.multinomial(chance, k, replacement=True, generator=rng)
    return index, advantages.gather(1, index).sign() * size / G


def one_of_each_kind(advantages, k, rng):
    """With rewards 0 and 1: a right and a wrong completion."""
    index = torch.stack([advantages.argmax(1), advantages.argmin(1)], dim=1)
    return index, advantages.gather(1, index)


def kept(rule):
    def choose(advantages, k, rng):
        index = prune(advantages, k, rule=rule, generator=rng)
        return index, advantages.gather(1, index)
    return choose


def without_the_mean_score(advantages, k, rng):
    """The largest |A|, minus the mean score of the group as often as the kept advantages ask for it.

    1/k Σ_{i ∈ I} A_i s_i − Ā_I · 1/G Σ_i s_i. It needs all G completions, so it saves nothing: it shows the bias.
    """
    index, weight = kept("largest_abs")(advantages, k, rng)
    weights = torch.zeros_like(advantages).scatter(1, index, weight * G / k) - weight.mean(1, keepdim=True)
    return torch.arange(G).expand_as(advantages), weights * k / G


METHODS = {  # name: (questions of a step, k, how they are chosen)
    "GRPO, 1 question": (1, 16, kept("largest_abs")),
    "GRPO, 8 questions": (8, 16, kept("largest_abs")),
    "largest |A|, P=0.875": (8, 2, kept("largest_abs")),
    "random, P=0.875": (8, 2, kept("random")),
    "smallest |A|, P=0.875": (8, 2, kept("smallest_abs")),
    "one of each kind, P=0.875": (8, 2, one_of_each_kind),
    "importance, P=0.875": (8, 2, importance),
    "largest |A|, without the mean score": (8, 2, without_the_mean_score),
}


def cosine(a, b):
    return torch.nn.functional.cosine_similarity(a, b, dim=-1)


def measure(options):
    """({kind: one row of figures for each method}, facts of the completions)."""
    model, tokenizer = load_model(toy_model.base(), torch.device("cpu"))
    torch.set_num_threads(1)
    batch, advantages = sampled(model, tokenizer, options.questions, options.seed)
    of_each = scores(model, batch).view(options.questions, G, -1)
    lengths = batch.lengths.view(options.questions, G).float()
    rows = {"mean over tokens": compared(of_each, advantages, torch.ones_like(lengths), options),
            "sum over tokens": compared(of_each, advantages, lengths, options)}
    facts = {"accuracy": (advantages > 0).float().mean().item(), "no_signal": (advantages == 0).all(1).float().mean().item()}
    return rows, facts


def compared(of_each, advantages, counts, options):
    """A row of figures for each method. counts: (Q, G), how often each score counts."""
    half, rows = len(of_each) // 2, []
    target = torch.einsum("qg,qgp->p", (counts * advantages)[half:], of_each[half:])
    for name, (count, k, choose) in METHODS.items():
        rng, picks = torch.Generator().manual_seed(options.seed), random.Random(options.seed)
        cosines, total, square = [], 0, 0.0
        for _ in tqdm(range(options.steps), desc=name):
            chosen = torch.tensor(picks.sample(range(half), count))
            index, weight = choose(advantages[chosen], k, rng)
            weight = weight * counts[chosen].gather(1, index) / (count * k)
            step = torch.einsum("qk,qkp->p", weight, of_each[chosen[:, None], index])
            cosines.append(cosine(step, target).item())
            total, square = total + step, square + step.square().sum().item()
        mean, cosines = total / options.steps, torch.tensor(cosines)
        length = mean.norm().item()
        rows.append({
            "name": name, "sampled": count * G, "trained": count * k, "cosine": cosines.mean().item(),
            "standard_error": (cosines.std() / options.steps**0.5).item(), "cosine_of_mean": cosine(mean, target).item(),
            "length": length / (rows[0]["norm"] if rows else length), "norm": length,
            "noise": max(square / options.steps - length**2, 0) ** 0.5 / length,
        })
    return rows


def page(about, kinds):
    head = ["", "sampled", "trained on", "cosine with the target", "cosine of the mean step", "length", "noise"]
    text = (f"{heading('The gradient of the kept completions', about)}\n"
            f"The toy's base model, {about['questions']} questions × {G} completions, {about['steps']} steps of each method. "
            f"{about['accuracy']:.0%} of the completions are right, {about['no_signal']:.0%} of the groups have no signal. "
            "Cosine: mean over the steps ± standard error. Length: of the mean step, GRPO's = 1. Noise: the root mean square of what a "
            "step adds to the mean step, in lengths of the mean step.\n")
    for kind, rows in kinds.items():
        lines = [[r["name"].replace("|", "\\|"), r["sampled"], r["trained"], f"{r['cosine']:.3f} ± {r['standard_error']:.3f}",
                  f"{r['cosine_of_mean']:.3f}", f"{r['length']:.2f}", f"{r['noise']:.1f}"] for r in rows]
        text += f"\n{kind.capitalize()}:\n\n{markdown_table([head, *lines])}\n"
    return text


def main(argv):
    options = parse(Options, argv)
    rows, facts = measure(options)
    about = setting(["torch", "transformers"]) | {"questions": options.questions, "steps": options.steps} | facts
    write(options.output, "gradients", about | {"rows": rows}, page(about, rows))
    print(page(about, rows))


if __name__ == "__main__":
    run_program(main)
