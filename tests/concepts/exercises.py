"""The checks of the notebooks' exercises. Each prints "green", or one sentence about a mistake.

If the answers are those of a known mistake, the sentence names it: `MISTAKES` holds the likeliest.

The right answers come from the project's functions, which the tests in this folder check.
"""

import inspect

import torch

from allocate import micro_batches, questions_per_step
from cppo import batch_rows, keep_count, prune
from family.dapo import has_signal, token_mean_weights
from family.drgrpo import constant_weights, drgrpo_loss
from family.pods import max_variance_subset
from family.ppo import gae
from grpo import clipped_surrogate, group_advantages, grpo_loss, sequence_mean_weights
from tests.examples import F64, mask_of, seeded


def check(function, inputs, right_answer, *, any_order=False):
    """Compare a function with the right answers. inputs: {what is tried: arguments}. any_order: a
    row of the answer is a set."""
    name, form = function.__name__, as_set if any_order else as_tensor
    for what, arguments in inputs.items():
        answer, right = function(*arguments), form(right_answer(*arguments))
        if answer is None:
            return print(f"{name}: not done yet, it returns None.")
        answer = form(answer)
        if answer.shape != right.shape:
            shapes = f"{tuple(answer.shape)}, and it should be {tuple(right.shape)}"
            return print(f"{name}: for {what} the shape of the answer is {shapes}.")
        wrong = differ(answer, right)
        if wrong.any():
            numbers = f"{answer[wrong][0]:.4g}, and it should be {right[wrong][0]:.4g}"
            why = reason(function, inputs.values(), form)
            return print(f"{name}: for {what} a number is {numbers}.{why}")
    print("green")


def as_tensor(answer):
    return torch.as_tensor(answer).double()


def as_set(answer):
    return as_tensor(answer).sort(-1).values


def differ(a, b):
    return ~torch.isclose(a, b, rtol=1e-4, atol=1e-6)


def reason(function, inputs, form):
    """A sentence about the known mistake with the same answers in all cases; "" if none has."""
    exercise = inspect.stack()[2].function  # it has called `check`
    for why, mistake in MISTAKES[exercise].items():
        pairs = [[form(f(*arguments)) for f in (function, mistake)] for arguments in inputs]
        if all(a.shape == b.shape and not differ(a, b).any() for a, b in pairs):
            return f" This is what you get if {why}."
    return ""


def normal(seed, *shape):
    return torch.randn(*shape, generator=seeded(seed), dtype=F64)


# --- 1_grpo.ipynb ---


def leave_one_out(function):
    def right(rewards):
        G = rewards.shape[1]
        return G / (G - 1) * group_advantages(rewards, divide_by_std=False)

    check(function, {f"groups of {G}": [normal(G, 3, G)] for G in (2, 5, 16)}, right)


def without_gradient(function):
    def right(ratio, advantages):
        ratio = ratio.clone().requires_grad_()
        surrogate = clipped_surrogate(ratio, advantages)
        return torch.autograd.grad(surrogate.sum(), ratio)[0] == 0

    ratio, ones = (0.3 * normal(1, 16, 6)).exp(), torch.ones(16, 6, dtype=F64)
    inputs = {"A > 0": [ratio, ones], "A < 0": [ratio, -ones]}
    check(function, inputs | {"both signs": [ratio, normal(3, 16, 6).sign()]}, right)


def loss_of_a_part(function):
    def right(logp, old_logp, advantages, mask, N):
        weights = sequence_mean_weights(mask, num_sequences=N)
        return grpo_loss(logp, old_logp, advantages, mask, beta=0, weights=weights)[0]

    inputs = {}
    for what, lengths in (("equal lengths", [4, 4, 4]), ("unequal lengths", [1, 6, 3, 2, 6])):
        mask, N = mask_of(lengths), len(lengths)
        old_logp = normal(2, *mask.shape) - 3
        batch = [old_logp + 0.3 * normal(4, *mask.shape), old_logp, normal(3, N), mask]
        inputs[f"the first two of {N}, {what},"] = [*(x[:2] for x in batch), N]
        inputs[f"the others of {N}, {what},"] = [*(x[2:] for x in batch), N]
    check(function, inputs, right)


# --- 2_cppo.ipynb ---


def keep_per_token(function):
    lengths = torch.randint(10, 200, (3, 8), generator=seeded(2))
    inputs = {f"k = {k} of 8": [normal(k, 3, 8), lengths, k] for k in (2, 4, 8)}
    right = lambda advantages, lengths, k: prune(advantages / lengths, k)
    check(function, inputs, right, any_order=True)


def rows_of_the_batch(function):
    inputs = {"one question": [torch.tensor([[1, 3]]), 4]}
    inputs["three questions"] = [prune(normal(5, 3, 16), 4), 16]
    check(function, inputs, batch_rows, any_order=True)


def right_among_the_kept(function):
    def right_answer(right, G, k):
        return (prune(group_advantages(mask_of([right], G).double()), k) < right).sum()

    inputs = {
        f"{right} right of {G} and k = {k}": [right, G, k]
        for G, k in ((16, 4), (16, 8), (10, 7)) for right in range(1, G)
        if 2 * right != G}  # at G/2 all |A| are equal
    check(function, inputs, right_answer)


# --- 3_allocation.ipynb ---


def empty_places(function):
    def right(B, G, P):
        k = keep_count(G, P)
        return B * G - k * questions_per_step(B, G, k)

    numbers = [(1, 16, 0.5), (1, 16, 0.8), (1, 15, 0.8), (3, 8, 0.4), (2, 16, 0.0)]
    check(function, {f"B = {B}, G = {G}, P = {P}": [B, G, P] for B, G, P in numbers}, right)


def padding(function):
    def right(lengths, max_tokens):
        batches = [[lengths[i] for i in batch] for batch in micro_batches(lengths, max_tokens)]
        return 1 - sum(lengths) / sum(len(batch) * max(batch) for batch in batches)

    check(function, {
        "equal lengths": [[10] * 6, 30],
        "unequal lengths": [[3, 90, 41, 7, 66, 12, 5], 128],
        "one long completion": [[900, 10, 5], 64],
    }, right)


def share_to_keep(function):
    from experiments.reproduce import amdahl  # here, because it takes seconds to import

    phases = {"generate": 40.0, "score": 2.0, "logprobs": 9.0, "update": 48.0, "other": 1.0}
    phases["total"] = sum(phases.values())
    shares = {amdahl(phases, share): share for share in (1.0, 0.5, 0.125)}
    inputs = {f"a speed-up of {speedup:.3f}": [phases, speedup] for speedup in shares}
    check(function, inputs, lambda phases, speedup: shares[speedup])


# --- 4_training.ipynb ---


def completion_tokens(function):
    from engine.model.logprobs import completion_mask  # here, because it takes seconds to import

    eos, lengths = 1, torch.tensor([3, 5, 1, 4])
    tokens = torch.tensor(  # the second is cut off: it has no EOS
        [[7, 7, 1, 1, 1], [7, 7, 7, 7, 7], [1, 1, 1, 1, 1], [7, 7, 7, 1, 1]])
    right = completion_mask(tokens, lengths)
    check(function, {
        "a batch whose padding is EOS": [tokens, eos],  # as in many tokenizers
        "a batch whose padding is 0": [tokens.masked_fill(~right, 0), eos],
    }, lambda tokens, eos: right)


def dr_grpo_loss_of_a_step(function):
    def right(logp, old_logp, rewards, mask, L):
        advantages = group_advantages(rewards, divide_by_std=False).flatten()
        return drgrpo_loss(logp, old_logp, advantages, mask, max_tokens=L)[0]

    inputs = {}
    for what, lengths, L in (
        ("equal lengths", [4] * 8, 4), ("unequal lengths", [1, 6, 3, 2] * 2, 9),
    ):
        mask = mask_of(lengths)
        old_logp = normal(7, *mask.shape) - 3
        logp = old_logp + 0.3 * normal(8, *mask.shape)
        inputs[what] = [logp, old_logp, normal(6, 2, 4), mask, L]
    check(function, inputs, right)


def reward_for_steps(function):
    inputs, rewards = {}, {}
    for what, steps, answer, reward in (
        ("right steps and a right answer", "4+7=11;11+6=17;", 17, 2),
        ("a right step with a minus", "19-2=17;", 17, 2),
        ("a wrong step and a right answer", "4+7=12;12+6=17;", 17, 1),
        ("right steps and a wrong answer", "4+7=11;11+6=17;", 18, 1),
        ("a right guess", "", 17, 1),
        ("a wrong guess", "", 9, 0),
        ("a wrong step and a wrong answer", "4+7=11;11+6=16;", 16, 0),
    ):
        text = f"<think>{steps}</think>\n" * bool(steps) + f"<answer>{answer}</answer>"
        inputs[what], rewards[text] = [[text], ["17"]], reward
    check(function, inputs, lambda texts, answers: [rewards[text] for text in texts])


# --- 5_family.ipynb ---


def weights_of_completions(function):
    def right(lengths, L):
        mask = mask_of(lengths)
        both = token_mean_weights(mask), constant_weights(mask, max_tokens=L)
        return torch.stack(both).sum(2)

    inputs = {"equal lengths": [[4, 4], 5], "unequal lengths": [[1, 6, 3], 9]}
    check(function, inputs, right)


# --- 6_choice.ipynb ---


def still_without_signal(function):
    def right(p, G, rounds):
        groups = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=F64)] * G)  # all of them
        chance = torch.where(groups == 1, p, 1 - p).prod(dim=1)
        return chance[~has_signal(groups)].sum() ** rounds

    numbers = [(0.5, 4, 1), (0.9, 4, 1), (0.9, 4, 3), (0.25, 6, 2), (0.0, 4, 5)]
    check(function, {f"p = {p}, G = {G} and {n} groups": [p, G, n] for p, G, n in numbers}, right)


def right_kept_by_pods(function):
    def right_answer(right, wrong, m):
        rewards = mask_of([right], right + wrong).double()
        return (max_variance_subset(rewards, m) < right).sum()

    check(function, {
        f"{right} right of {G} and m = {m}": [right, G - right, m]
        for G, m in ((16, 4), (16, 8), (10, 6)) for right in range(1, G)}, right_answer)


# --- 7_advantage.ipynb ---


def advantages_of_tokens(function):
    def right(rewards, values, gamma, lam):
        rows = torch.tensor([rewards]), torch.tensor([values])
        return gae(*rows, torch.ones(1, len(rewards)), gamma=gamma, lam=lam)[0][0]

    eight = normal(9, 8).tolist(), normal(10, 8).tolist()
    check(function, {
        "one token": [[1.0], [0.4], 1.0, 0.95], "λ = 0": [*eight, 0.9, 0.0],
        "λ = 1": [*eight, 0.9, 1.0], "λ = 0.95": [*eight, 0.99, 0.95],
    }, right)


# --- the likeliest mistakes: {exercise: {what somebody did: a function that does it}} ---


def parts_of(weigh):
    """The loss of a part with weights of one's own."""
    return lambda logp, old_logp, advantages, mask, N: grpo_loss(
        logp, old_logp, advantages, mask, beta=0, weights=weigh(mask.double(), N))[0]


def dr_grpo(weigh, **options):
    return lambda logp, old_logp, rewards, mask, L: grpo_loss(
        logp, old_logp, group_advantages(rewards, **options).flatten(), mask, beta=0,
        weights=weigh(mask.double(), L))[0]


def boxes(area):
    """The share of padding, if the micro-batches have this area."""
    return lambda lengths, max_tokens: 1 - sum(lengths) / area(lengths, max_tokens)


def discounted(rewards, values, gamma, lam):
    returns = [sum(gamma**n * r for n, r in enumerate(rewards[t:])) for t in range(len(rewards))]
    return [R - v for R, v in zip(returns, values)]


MISTAKES = {
    "leave_one_out": {
        "the mean is that of the whole group, r_i included":
            lambda r: r - r.mean(1, keepdim=True),
        "the sum of the others is divided by G, not by G − 1":
            lambda r: r - (r.sum(1, keepdim=True) - r) / r.shape[1],
        "the advantages are divided by the std": group_advantages,
    },
    "without_gradient": {
        "the sign of A is not looked at": lambda ratio, A: (ratio - 1).abs() > 0.2,
        "the two sides are swapped":
            lambda ratio, A: (A > 0) & (ratio < 0.8) | (A < 0) & (ratio > 1.2),
    },
    "loss_of_a_part": {
        "N is the part's": parts_of(lambda m, N: m / m.sum(1, keepdim=True) / len(m)),
        "all tokens of the part count the same": parts_of(lambda m, N: m / m.sum()),
        "the tokens are not divided by the length": parts_of(lambda m, N: m / N),
    },
    "keep_per_token": {
        "A is not divided by the length": lambda A, lengths, k: prune(A, k),
        "the sign of A counts": lambda A, lengths, k: (A / lengths).topk(k).indices,
    },
    "rows_of_the_batch": {
        "every question begins at row 0": lambda kept, G: kept.flatten(),
        "question q begins at row q·k, not q·G":
            lambda kept, G: batch_rows(kept, kept.shape[1]),
    },
    "right_among_the_kept": {
        "the right ones are taken first, even if they are not rarer":
            lambda right, G, k: min(right, k),
        "the wrong ones are taken first, even if they are not rarer":
            lambda right, G, k: max(right + k - G, 0),
    },
    "empty_places": {
        "k is computed in floats: 15 · (1 − 0.8) is below 3":
            lambda B, G, P: B * G % int(G * (1 - P)),
        "only B questions are taken": lambda B, G, P: B * G - B * keep_count(G, P),
    },
    "padding": {
        "all completions are in one rectangle":
            boxes(lambda lengths, n: len(lengths) * max(lengths)),
        "each micro-batch counts as max_tokens tokens":
            boxes(lambda lengths, n: len(micro_batches(lengths, n)) * n),
    },
    "share_to_keep": {
        "all of the time is training": lambda phases, speedup: 1 / speedup,
    },
    "completion_tokens": {
        "the EOS never counts": lambda tokens, eos: tokens != eos,
        "the first EOS does not count": lambda tokens, eos: (tokens == eos).cumsum(1) == 0,
    },
    "dr_grpo_loss_of_a_step": {
        "the lengths |o| still divide":
            dr_grpo(lambda m, L: m / m.sum(1, keepdim=True) / len(m), divide_by_std=False),
        "the std still divides": dr_grpo(lambda m, L: m / (len(m) * L)),
        "L divides, and N does not": dr_grpo(lambda m, L: m / L, divide_by_std=False),
    },
    "reward_for_steps": {
        "an answer counts anywhere in the text, and the steps are not looked at":
            lambda texts, answer: [2.0 * (gold in text) for text, gold in zip(texts, answer)],
        "the steps are not looked at": lambda texts, answer: [
            float(f"<answer>{gold}<" in text) for text, gold in zip(texts, answer)],
    },
    "weights_of_completions": {
        "the weights are those of one token": lambda lengths, L: [
            [1 / sum(lengths) for _ in lengths], [1 / (len(lengths) * L) for _ in lengths]],
        "L divides, and N does not": lambda lengths, L: [
            [n / sum(lengths) for n in lengths], [n / L for n in lengths]],
    },
    "still_without_signal": {
        "all groups must be right, or all wrong":
            lambda p, G, rounds: p ** (G * rounds) + (1 - p) ** (G * rounds),
        "only one group is drawn": lambda p, G, rounds: p**G + (1 - p) ** G,
    },
    "right_kept_by_pods": {
        "fewer than m are kept if one kind is short": lambda right, wrong, m: min(right, m // 2),
        "the rarer kind is taken first, as in CPPO":
            lambda right, wrong, m: min(right, m) if right <= wrong else max(m - wrong, 0),
    },
    "advantages_of_tokens": {
        "no token follows: δ without the next value and without λ":
            lambda rewards, values, gamma, lam: [r - v for r, v in zip(rewards, values)],
        "λ is left out": discounted,
    },
}
