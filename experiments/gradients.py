"""The gradient of the kept completions beside GRPO's: which rule, and which divisor in the loss,
points the right way?

    python experiments/gradients.py                writes gradients.json and gradients.md in
                                                   runs/results/

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
its cosines need only their inner products.
"""

import sys
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from cppo import prune
from engine.data.questions import load_questions
from engine.model.loading import load_model
from engine.model.logprobs import Policy
from engine.run.command_line import option, parse, run_program
from experiments.library.bench import heading, markdown_table, pm, report, spread
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
    output: str = option("runs/results", "folder of gradients.json and gradients.md")


# --- the rules: advantages A (steps, Q, G) → how often each completion is kept, and the advantage
# that it then has ---


def kept(rule):
    def choose(A, k, rng):
        index = prune(A.flatten(0, 1), k, rule=rule, generator=rng)
        index = index.view(*A.shape[:2], k)
        return torch.zeros_like(A).scatter(2, index, 1), A
    return choose


def pooled(A, k, rng):
    """The largest |A| of all questions of the step."""
    one_group = A.flatten(1)[:, None]
    times, _ = kept("largest_abs")(one_group, A.shape[1] * k, rng)
    return times.view(A.shape), A


def importance(A, k, rng):
    """k draws with replacement, with probability |A| / Σ|A|, weighed by its inverse (notebook 2,
    section 11)."""
    size = A.abs().sum(2, keepdim=True)
    chance = A.abs().where(size > 0, 1.0).flatten(0, 1)
    index = torch.multinomial(chance, k, replacement=True, generator=rng)
    index = index.view(*A.shape[:2], k)
    once = torch.ones(index.shape)
    times = torch.zeros_like(A).scatter_add(2, index, once)
    return times, A.sign() * size / G


GRPO, ALL, CPPO = "all of 1 question (GRPO)", "all of the same questions", "largest |A| (CPPO)"
METHODS = {
    GRPO: kept("largest_abs"), ALL: kept("largest_abs"), CPPO: kept("largest_abs"),
    "largest |A|, pooled": pooled, "importance, weighted": importance, "random": kept("random"),
    "smallest |A|": kept("smallest_abs"),
}
DIVISORS = ("1/|o|", "token mean", "constant", "group's mean")


def divisor_of(name, times, lengths):
    """By what the advantage of each token is divided. times, lengths: (steps, Q, G)."""
    if name == "1/|o|":
        return lengths
    if name == "token mean":
        tokens = (times * lengths).sum((1, 2), keepdim=True)
        return tokens / times.sum((1, 2), keepdim=True)
    if name == "group's mean":
        return lengths.mean(2, keepdim=True)
    return toy.MAX_NEW_TOKENS


# --- one set of questions ---


def sampled(model, tokenizer, number, count):
    """Set `number` of the toy's questions, answered: (Batch of count·G completions, advantages,
    lengths (count, G))."""
    questions, _ = load_questions("toy", tokenizer, limit=(number + 1) * count)
    questions = questions[-count:]
    drawn, _, rewards = answered(model, tokenizer, questions, G, number)
    advantages = group_advantages(rewards.view(count, G))
    lengths = drawn.lengths.view(count, G).float()
    prompts = [question["prompt"] for question in questions for _ in range(G)]
    batch = Batch(prompts, drawn.tokens, drawn.mask, advantages.flatten())
    return batch, advantages, lengths


def scores(model, batch):
    """∇ Σ_t log π(o_it) of each completion: (N, parameters)."""
    parameters, rows = list(model.parameters()), []
    for i in tqdm(range(len(batch.prompts)), desc="gradients"):
        logp = Policy(model).logprobs(batch.rows([i]))
        gradients = torch.autograd.grad(logp.sum(), parameters)
        rows.append(torch.cat([g.flatten() for g in gradients]))
    return torch.stack(rows)


def step_weights(name, k, divisor, A, lengths, rng=None):
    """How much each completion counts in steps of a method. A, lengths and the result: (steps, Q,
    G)."""
    times, advantages = METHODS[name](A, k, rng)
    weights = times * advantages / divisor_of(divisor, times, lengths)
    return weights / times.sum((1, 2), keepdim=True)


def random_steps(name, k, divisor, A, lengths, steps, seed):
    """The same of steps on random questions among Q. A, lengths: (Q, G). (steps, Q·G)"""
    rng = torch.Generator().manual_seed(seed)  # the same questions and draws for all divisors
    count = 1 if name == GRPO else G // k
    k = G if name in (GRPO, ALL) else k
    order = torch.rand(steps, len(A), generator=rng).argsort(dim=1)
    picks = order[:, :count]
    weights = torch.zeros(steps, *A.shape)
    own = step_weights(name, k, divisor, A[picks], lengths[picks], rng)
    weights[torch.arange(steps)[:, None], picks] = own
    return weights.flatten(1)


def cosines(weights, products, along):
    """Of steps, with the direction whose inner products with all completions are `along`. weights:
    (steps, Q·G)."""
    squares = (weights.to_sparse() @ products * weights).sum(1)
    length = squares.clamp(min=1e-24).sqrt()
    return weights @ along / length


def measure(of_each, A, lengths, steps, seed):
    """{(table, row, column): figure} of one set. of_each: (Q·G, parameters). A, lengths: (Q, G)."""
    half = len(A) // 2
    own, other = of_each.split(half * G)
    A, A_other = A.split(half)
    lengths, lengths_other = lengths.split(half)
    products = own @ own.T
    figures = {}
    for divisor in DIVISORS:
        # the mean of GRPO's steps, one question each
        weights = step_weights(GRPO, G, divisor, A_other[:, None], lengths_other[:, None])
        target = weights.flatten() @ other
        along = own @ target / target.norm()
        for k, name in product(KEPT, METHODS):
            weights = random_steps(name, k, divisor, A, lengths, steps, seed)
            mean = weights.mean(0, keepdim=True)
            title = f"P = {1 - k / G}: cosine of"
            figures[f"{title} a step", name, divisor] = cosines(weights, products, along).mean()
            figures[f"{title} the mean step", name, divisor] = cosines(mean, products, along)
    # ∇ E[1/|o|]; the mean adds E[∇ log π] = 0
    shorter = 1 / lengths_other
    shorter = (shorter - shorter.mean()).flatten() @ other
    along = own @ shorter / shorter.norm()
    right = (A > 0).sum(1)
    hard = (0 < right) & (right < G / 2)
    easy = (G / 2 < right) & (right < G)
    title = "Cosine of the mean step with ∇ E[1/|o|], shorter completions"
    for kind, those in (("hard", hard), ("easy", easy)):
        own_A, own_lengths = A[None, those], lengths[None, those]
        for divisor, (name, k) in product(DIVISORS, ((ALL, G), (CPPO, KEPT[0]))):
            weights = torch.zeros(1, half, G)
            weights[:, those] = step_weights(name, k, divisor, own_A, own_lengths)
            push = cosines(weights.flatten(1), products, along)
            figures[title, f"{kind} questions, {name}", divisor] = push
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
        lines = [["", *DIVISORS]]
        for name, of_divisors in rows.items():
            cells = [pm(spread(values)) for values in of_divisors.values()]
            lines.append([name, *cells])
        text += f"\n{title}:\n\n{markdown_table(lines)}\n"
    return text


def main(argv):
    options = parse(Options, argv)
    model, tokenizer = load_model(toy.BASE, torch.device("cpu"))
    torch.set_num_threads(1)
    of_sets, facts = [], []
    for number in range(options.sets):
        batch, A, lengths = sampled(model, tokenizer, number, options.questions)
        of_each = scores(model, batch)
        of_sets.append(measure(of_each, A, lengths, options.steps, number))
        right = A > 0
        share = right.float().mean()
        facts.append([share, lengths[right].mean(), lengths[A < 0].mean()])
    tables = {}
    for key in of_sets[0]:
        table, row, column = key
        rows = tables.setdefault(table, {})
        columns = rows.setdefault(row, {})
        columns[column] = [figures[key] for figures in of_sets]
    facts = torch.tensor(facts).mean(0).tolist()
    about = asdict(options) | dict(zip(("accuracy", "right", "wrong"), facts))
    report(options, "gradients", about | {"tables": tables}, page)


if __name__ == "__main__":
    run_program(main)
