"""The gradient of the kept completions beside GRPO's: which rule, and which divisor in the loss,
points the right way?

    python experiments/gradients.py                writes gradients.json and gradients.md in
                                                   results/

The toy's base model answers several sets of questions with 16 completions each. A step takes random
questions of one half of a set and trains on 16 completions: GRPO on all of 1 question, a rule on k
of each of 16/k questions. The loss gives each token the weight A_i / divisor:

- 1/|o|: the length of the completion (GRPO, and the formula of CPPO's paper);
- token mean: the mean length of the completions that the step keeps (CPPO's published code);
- constant: the same number for all (Dr. GRPO);
- group's mean: the mean length of all 16 completions of the question, kept or not.

The target of a divisor is the mean of GRPO's steps of one question over the other half, with this
divisor. ("token mean" and "group's mean" have the same target: a step of one whole question is the
same for both.)

Under 1/|o| the length gets in: E[∇ log π(o) / |o|] = ∇ E[1/|o|] (notebook 2, section 11). So the
page also compares the mean step with ∇ E[1/|o|], the direction of shorter completions, for hard
questions (fewer than 8 right) and easy ones. A step is a weighted sum of gradients of completions:
its length and its cosines need only their inner products.
"""

import sys
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import mean, stdev

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from cppo import prune
from engine.data.questions import load_questions
from engine.model.loading import load_model
from engine.model.logprobs import Policy
from engine.run.command_line import option, parse, run_program
from experiments.library.bench import heading, markdown_table, report
from experiments.library.toy_model import answered
from grpo import group_advantages
from records import Batch
from tasks import toy

G = 16
KEPT = (2, 4)  # k: P = 0.875 and 0.75


@dataclass
class Options:
    sets: int = option(5, "sets of questions, each with a seed of its own")
    questions: int = option(192, "questions of a set; half of them make the target")
    steps: int = option(1000, "steps of each method")
    output: str = option("experiments/results", "folder of gradients.json and gradients.md")


# --- the rules: advantages A (steps, Q, G) → how often each completion is kept, and the advantage
# that it then has ---


def kept(rule):
    def choose(A, k, rng):
        index = prune(A.flatten(0, 1), k, rule=rule, generator=rng).view(*A.shape[:2], k)
        return torch.zeros_like(A).scatter(2, index, 1), A
    return choose


def pooled(A, k, rng):
    """The largest |A| of all questions of the step."""
    times, _ = kept("largest_abs")(A.flatten(1)[:, None], A.shape[1] * k, rng)
    return times.view(A.shape), A


def importance(A, k, rng):
    """k draws with replacement, with probability |A| / Σ|A|, weighed by its inverse (notebook 2,
    section 11)."""
    size = A.abs().sum(2, keepdim=True)
    chance = torch.where(size > 0, A.abs(), torch.ones_like(A))
    index = torch.multinomial(chance.flatten(0, 1), k, replacement=True, generator=rng)
    index = index.view(*A.shape[:2], k)
    times = torch.zeros_like(A).scatter_add(2, index, torch.ones(index.shape))
    return times, A.sign() * size / G


GRPO, ALL, CPPO = "all of 1 question (GRPO)", "all of the same questions", "largest |A| (CPPO)"
METHODS = {
    GRPO: kept("largest_abs"), ALL: kept("largest_abs"), CPPO: kept("largest_abs"),
    "largest |A|, pooled": pooled, "importance, weighted": importance, "random": kept("random"),
    "smallest |A|": kept("smallest_abs"),
}
DIVISORS = {  # of the tokens of each completion. times, lengths: (steps, Q, G)
    "1/|o|": lambda times, lengths: lengths,
    "token mean": lambda times, lengths: (
        (times * lengths).sum((1, 2), keepdim=True) / times.sum((1, 2), keepdim=True)
    ),
    "constant": lambda times, lengths: toy.MAX_NEW_TOKENS,
    "group's mean": lambda times, lengths: lengths.mean(2, keepdim=True),
}


# --- one set of questions ---


def sampled(model, tokenizer, number, count):
    """Set `number` of the toy's questions, answered: (Batch of count·G completions, advantages,
    lengths (count, G))."""
    questions = load_questions("toy", tokenizer, limit=(number + 1) * count)[0][-count:]
    drawn, _, rewards = answered(model, tokenizer, questions, G, number)
    advantages = group_advantages(rewards.view(count, G))
    each = [question["prompt"] for question in questions for _ in range(G)]
    batch = Batch(each, drawn.tokens, drawn.mask, advantages.flatten())
    return batch, advantages, drawn.lengths.view(count, G).float()


def scores(model, batch):
    """∇ Σ_t log π(o_it) of each completion: (N, parameters)."""
    rows = []
    for i in tqdm(range(len(batch.prompts)), desc="gradients"):
        logp = Policy(model).logprobs(batch.rows([i])).sum()
        gradients = torch.autograd.grad(logp, list(model.parameters()))
        rows.append(torch.cat([g.flatten() for g in gradients]))
    return torch.stack(rows)


def step_weights(name, k, divisor, A, lengths, rng=None):
    """How much each completion counts in steps of a method. A, lengths and the result: (steps, Q,
    G)."""
    times, advantages = METHODS[name](A, k, rng)
    weights = times * advantages / DIVISORS[divisor](times, lengths)
    return weights / times.sum((1, 2), keepdim=True)


def cosine_and_length(W, products, along):
    """Of steps: with the direction whose inner products with all completions are `along`. W:
    (steps, Q·G)."""
    length = (W.to_sparse() @ products * W).sum(1).clamp(min=1e-24).sqrt()
    return W @ along / length, length


def measure(of_each, A, lengths, steps, seed):
    """{(table, row, column): figure} of one set. of_each: (Q·G, parameters). A, lengths: (Q, G)."""
    half = len(A) // 2
    figures = {}
    grpo = None
    own, other = of_each.split(half * G)
    products = own @ own.T
    along = lambda direction: own @ direction / direction.norm()
    A, A_other = A.split(half)
    lengths, lengths_other = lengths.split(half)
    one = A_other[:, None], lengths_other[:, None]  # steps of one question
    targets = {d: step_weights(GRPO, G, d, *one).flatten() @ other for d in DIVISORS}
    for d, k, name in product(DIVISORS, KEPT, METHODS):
        rng = torch.Generator().manual_seed(seed)  # the same questions and draws for all divisors
        count, k_of_each = {GRPO: (1, G), ALL: (G // k, G)}.get(name, (G // k, k))
        picks = torch.rand(steps, half, generator=rng).argsort(dim=1)[:, :count]
        rows = (picks[:, :, None] * G + torch.arange(G)).flatten(1)
        W = step_weights(name, k_of_each, d, A[picks], lengths[picks], rng).flatten(1)
        W = torch.zeros(steps, half * G).scatter(1, rows, W)
        of_steps, _ = cosine_and_length(W, products, along(targets[d]))
        of_mean, norm = cosine_and_length(W.mean(0, keepdim=True), products, along(targets[d]))
        grpo = norm if name == GRPO else grpo  # GRPO comes first
        P = f"P = {1 - k / G}"
        figures[f"{P}: cosine of a step", name, d] = of_steps.mean()
        figures[f"{P}: cosine of the mean step", name, d] = of_mean
        figures[f"{P}: length of the mean step, GRPO's = 1", name, d] = norm / grpo
    # ∇ E[1/|o|]; the mean adds E[∇ log π] = 0
    shorter = (1 / lengths_other - (1 / lengths_other).mean()).flatten() @ other
    right = (A > 0).sum(1)
    kinds = {"hard": (right > 0) & (right < G / 2), "easy": (right > G / 2) & (right < G)}
    title = "Cosine of the mean step with ∇ E[1/|o|], shorter completions"
    for d, kind, (name, k) in product(DIVISORS, kinds, ((ALL, G), (CPPO, KEPT[0]))):
        those = kinds[kind]
        W = torch.zeros(half, G)
        W[those] = step_weights(name, k, d, A[None, those], lengths[None, those])[0]
        push, _ = cosine_and_length(W.view(1, -1), products, along(shorter))
        figures[title, f"{kind} questions, {name}", d] = push
    for d, target in targets.items():
        cosine = torch.cosine_similarity(target, targets["1/|o|"], dim=0)
        figures["Cosine of the target with that of 1/|o|", "", d] = cosine
    return {key: round(figure.item(), 4) for key, figure in figures.items()}


# --- the page ---


def page(result):
    text = (
        f"{heading('The gradient of the kept completions', result)}\n"
        f"{result['sets']} sets of {result['questions']} questions × {G} completions, "
        f"{result['steps']} steps of each method; mean ± standard deviation over the sets. "
        f"{result['accuracy']:.0%} of the completions are right; right ones have "
        f"{result['right']:.1f} tokens, wrong ones {result['wrong']:.1f}. [What rows and columns "
        "are](../gradients.py).\n\nUnder 1/|o| the length gets in: Σ_o π ∇ log π / |o| = Σ_o ∇π / "
        "|o| = ∇ E[1/|o|]. With a constant this is ∇ 1 = 0. So kept advantages that are mostly "
        "positive (hard questions) push towards shorter completions, and mostly negative ones "
        "(easy questions) towards longer ones. How far a step turns depends on the lengths: the "
        "order under 1/|o| is that of this toy.\n"
    )
    for title, rows in result["tables"].items():
        lines = [["", *DIVISORS]] + [
            [row, *(f"{mean(v):.3f} ± {stdev(v):.3f}" for v in own.values())]
            for row, own in rows.items()
        ]
        text += f"\n{title}:\n\n{markdown_table(lines)}\n"
    return text


def main(argv):
    options = parse(Options, argv)
    model, tokenizer = load_model(toy.BASE, torch.device("cpu"))
    torch.set_num_threads(1)
    sets, facts, tables = [], [], {}
    for number in range(options.sets):
        batch, A, lengths = sampled(model, tokenizer, number, options.questions)
        sets.append(measure(scores(model, batch), A, lengths, options.steps, number))
        facts.append([(A > 0).float().mean(), lengths[A > 0].mean(), lengths[A < 0].mean()])
    for table, row, column in sets[0]:
        own = [figures[table, row, column] for figures in sets]
        tables.setdefault(table, {}).setdefault(row, {})[column] = own
    about = dict(zip(("accuracy", "right", "wrong"), torch.tensor(facts).mean(0).tolist()))
    report(options, "gradients", asdict(options) | about | {"tables": tables}, page)


if __name__ == "__main__":
    run_program(main)
