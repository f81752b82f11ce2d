"""The checks of the notebooks' exercises. Each prints "green", or one sentence about a mistake.

The right answers come from the project's functions, which the tests in this folder check.
"""

import torch

from allocate import questions_per_step
from cppo import batch_rows, keep_count, prune
from family.dapo import has_signal
from family.drgrpo import drgrpo_loss
from family.pods import max_variance_subset
from family.ppo import gae
from grpo import clipped_surrogate, group_advantages, grpo_loss
from micro_batches import micro_batches
from tests.examples import F64, mask_of, seeded


def check(function, cases):
    """Compare a function with the right answers. cases: (what is tried, arguments, answer)."""
    name = function.__name__
    for what, arguments, right in cases:
        answer, right = function(*arguments), torch.as_tensor(right).double()
        if answer is None:
            return print(f"{name}: not done yet, it returns None.")
        answer = torch.as_tensor(answer).double()
        if answer.shape != right.shape:
            shapes = f"{tuple(answer.shape)}, and it should be {tuple(right.shape)}"
            return print(f"{name}: for {what} the shape of the answer is {shapes}.")
        wrong = ~torch.isclose(answer, right, rtol=1e-4, atol=1e-6)
        if wrong.any():
            numbers = f"{answer[wrong][0]:.4g}, and it should be {right[wrong][0]:.4g}"
            return print(f"{name}: for {what} a number is {numbers}.")
    print("green")


def normal(seed, *shape):
    return torch.randn(*shape, generator=seeded(seed), dtype=F64)


# --- 1_grpo.ipynb ---


def leave_one_out(function):
    cases = []
    for G in (2, 5, 16):
        rewards = normal(G, 3, G)
        right = G / (G - 1) * group_advantages(rewards, divide_by_std=False)
        cases.append((f"groups of {G}", [rewards], right))
    check(function, cases)


def without_gradient(function):
    cases = []
    for what, signs in (("A > 0", [1.0]), ("A < 0", [-1.0]), ("both signs", [1.0, -1.0])):
        advantages = torch.tensor(signs, dtype=F64).repeat(8).unsqueeze(1).repeat(1, 6)
        ratio = (0.3 * normal(1, *advantages.shape)).exp().requires_grad_()
        surrogate = clipped_surrogate(ratio, advantages)
        (gradient,) = torch.autograd.grad(surrogate.sum(), ratio)
        cases.append((what, [ratio.detach(), advantages], gradient == 0))
    check(function, cases)


def loss_in_two_parts(function):
    cases = []
    for what, lengths in (("equal lengths", [4, 4, 4]), ("unequal lengths", [1, 6, 3, 2, 6])):
        mask = mask_of(lengths)
        old_logp, advantages = normal(2, *mask.shape) - 3, normal(3, len(lengths))
        batch = (old_logp + 0.3 * normal(4, *mask.shape), old_logp, advantages, mask)
        cases.append((what, batch, grpo_loss(*batch, beta=0)[0]))
    check(function, cases)


# --- 2_cppo.ipynb ---


def keep_per_token(function):
    cases = []
    for k in (2, 4, 8):
        advantages, lengths = normal(k, 3, 8), torch.randint(10, 200, (3, 8), generator=seeded(k))
        cases.append((f"k = {k} of 8", [advantages, lengths, k], prune(advantages / lengths, k)))
    check(function, cases)


def rows_of_the_batch(function):
    cases = []
    for what, (questions, G, k) in (("one question", (1, 4, 2)), ("three questions", (3, 16, 4))):
        kept = prune(normal(5, questions, G), k)
        cases.append((what, [kept, G], batch_rows(kept, G)))
    check(function, cases)


def right_among_the_kept(function):
    cases = []
    for G, k in ((16, 4), (16, 8), (10, 7)):
        for right in range(1, G):
            if 2 * right != G:  # at G/2 all |A| are equal
                rewards = mask_of([right], G).double()
                kept = (prune(group_advantages(rewards), k) < right).sum()
                cases.append((f"{right} right of {G} and k = {k}", [right, G, k], kept))
    check(function, cases)


# --- 3_allocation.ipynb ---


def empty_places(function):
    cases = []
    for B, G, P in ((1, 16, 0.5), (1, 16, 0.8), (1, 15, 0.8), (3, 8, 0.4), (2, 16, 0.0)):
        k = keep_count(G, P)
        empty = B * G - k * questions_per_step(B, G, k)
        cases.append((f"B = {B}, G = {G}, P = {P}", [B, G, P], empty))
    check(function, cases)


def padding(function):
    cases = []
    for what, lengths, max_tokens in (
        ("equal lengths", [10] * 6, 30),
        ("unequal lengths", [3, 90, 41, 7, 66, 12, 5], 128),
        ("one long completion", [900, 10, 5], 64),
    ):
        batches = [[lengths[i] for i in batch] for batch in micro_batches(lengths, max_tokens)]
        area = sum(len(batch) * max(batch) for batch in batches)
        cases.append((what, [lengths, max_tokens], 1 - sum(lengths) / area))
    check(function, cases)


def share_to_keep(function):
    from experiments.reproduce import amdahl  # here, because it takes seconds to import

    phases = {"generate": 40.0, "score": 2.0, "logprobs": 9.0, "update": 48.0, "other": 1.0}
    phases["total"] = sum(phases.values())
    cases = []
    for share in (1.0, 0.5, 0.125):
        speedup = amdahl(phases, share)
        cases.append((f"a speed-up of {speedup:.3f}", [phases, speedup], share))
    check(function, cases)


# --- 4_training.ipynb ---


def completion_tokens(function):
    from engine.model.logprobs import completion_mask  # here, because it takes seconds to import

    eos, lengths = 1, torch.tensor([3, 5, 1, 4])  # the second is cut off: it has no EOS
    tokens = torch.full((4, 5), eos)  # the padding is EOS too, as in many tokenizers
    for row, n in zip(tokens, lengths):
        row[: n if n == 5 else n - 1] = 7
    right = completion_mask(tokens, lengths)
    other = tokens.masked_fill(~right, 0)
    cases = [("a batch whose padding is EOS", [tokens, eos], right)]
    check(function, [*cases, ("a batch whose padding is 0", [other, eos], right)])


def dr_grpo_loss_of_a_step(function):
    cases = []
    for what, lengths, L in (
        ("equal lengths", [4] * 8, 4), ("unequal lengths", [1, 6, 3, 2] * 2, 9),
    ):
        mask, rewards = mask_of(lengths), normal(6, 2, 4)
        old_logp = normal(7, *mask.shape) - 3
        logp = old_logp + 0.3 * normal(8, *mask.shape)
        advantages = group_advantages(rewards, divide_by_std=False).flatten()
        right = drgrpo_loss(logp, old_logp, advantages, mask, max_tokens=L)[0]
        cases.append((what, [logp, old_logp, rewards, mask, L], right))
    check(function, cases)


def reward_for_steps(function):
    cases = []
    for what, steps, answer, right in (
        ("right steps and a right answer", "4+7=11;11+6=17;", 17, 2),
        ("a right step with a minus", "19-2=17;", 17, 2),
        ("a wrong step and a right answer", "4+7=12;12+6=17;", 17, 1),
        ("right steps and a wrong answer", "4+7=11;11+6=17;", 18, 1),
        ("a right guess", "", 17, 1),
        ("a wrong guess", "", 9, 0),
        ("a wrong step and a wrong answer", "4+7=11;11+6=16;", 16, 0),
    ):
        text = f"<think>{steps}</think>\n" * bool(steps) + f"<answer>{answer}</answer>"
        cases.append((what, [[text], ["17"]], [right]))
    check(function, cases)


# --- 5_family.ipynb ---


def still_without_signal(function):
    cases = []
    for p, G, rounds in ((0.5, 4, 1), (0.9, 4, 1), (0.9, 4, 3), (0.25, 6, 2), (0.0, 4, 5)):
        groups = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=F64)] * G)  # all of them
        chance = torch.where(groups == 1, p, 1 - p).prod(dim=1)
        right = chance[~has_signal(groups)].sum() ** rounds
        cases.append((f"p = {p}, G = {G} and {rounds} groups", [p, G, rounds], right))
    check(function, cases)


def right_kept_by_pods(function):
    cases = []
    for G, m in ((16, 4), (16, 8), (10, 6)):
        for right in range(1, G):
            kept = (max_variance_subset(mask_of([right], G).double(), m) < right).sum()
            cases.append((f"{right} right of {G} and m = {m}", [right, G - right, m], kept))
    check(function, cases)


def advantages_of_tokens(function):
    cases = []
    for what, n, gamma, lam in (
        ("one token", 1, 1.0, 0.95), ("λ = 0", 5, 0.9, 0.0), ("λ = 1", 5, 0.9, 1.0),
        ("λ = 0.95", 8, 0.99, 0.95),
    ):
        rewards, values = normal(9, n), normal(10, n)
        right, _ = gae(rewards[None], values[None], torch.ones(1, n), gamma=gamma, lam=lam)
        cases.append((what, [rewards.tolist(), values.tolist(), gamma, lam], right[0]))
    check(function, cases)
