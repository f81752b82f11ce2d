"""The checks of the notebooks' exercises. Each prints "green", or says in one sentence what is wrong.

The right answers come from the project's functions, which the other files of this folder test.
"""

import torch

from allocate import micro_batches, questions_per_step
from cppo import batch_rows, keep_count, prune
from family.dapo import has_signal
from family.drgrpo import drgrpo_loss
from family.gspo import sequence_ratio
from family.pods import max_variance_subset
from family.ppo import gae
from grpo import clipped_surrogate, group_advantages, grpo_loss

F64 = torch.float64


def check(function, cases):
    """Compare a function with the right answers. cases: (what is tried, arguments, the right answer)."""
    for what, arguments, right in cases:
        answer, right = function(*arguments), torch.as_tensor(right).double()
        if answer is None:
            return print(f"{function.__name__}: not done yet, it returns None.")
        answer = torch.as_tensor(answer).double()
        if answer.shape != right.shape:
            shapes = f"{tuple(answer.shape)}, and it should be {tuple(right.shape)}"
            return print(f"{function.__name__}: the shape of the answer for {what} is {shapes}.")
        if not torch.allclose(answer, right, rtol=1e-4, atol=1e-6, equal_nan=True):
            n = (~torch.isclose(answer, right, rtol=1e-4, atol=1e-6)).flatten().nonzero()[0].item()
            first, expected = answer.flatten()[n].item(), right.flatten()[n].item()
            return print(f"{function.__name__}: for {what} a number is {first:.4g}, and it should be {expected:.4g}.")
    print("green")


def draws(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def rows_of(lengths, width=None):
    return torch.arange(width or max(lengths)) < torch.tensor(lengths).unsqueeze(1)


# --- notebook 1 ---


def leave_one_out(function):
    cases = []
    for what, group_size in (("groups of 2", 2), ("groups of 5", 5), ("groups of 16", 16)):
        rewards = draws(group_size, 3, group_size)
        factor = group_size / (group_size - 1)
        cases.append((what, [rewards], factor * group_advantages(rewards, divide_by_std=False)))
    check(function, cases)


def without_gradient(function):
    cases = []
    for what, sign in (("A > 0", [1.0]), ("A < 0", [-1.0]), ("both signs", [1.0, -1.0])):
        advantages = torch.tensor(sign, dtype=F64).repeat(8).unsqueeze(1).expand(-1, 6).contiguous()
        ratio = (0.3 * draws(1, *advantages.shape)).exp().requires_grad_()
        (gradient,) = torch.autograd.grad(clipped_surrogate(ratio, advantages).sum(), ratio)
        cases.append((what, [ratio.detach(), advantages], gradient == 0))
    check(function, cases)


def loss_in_two_parts(function):
    cases = []
    for what, lengths in (("equal lengths", [4, 4, 4]), ("unequal lengths", [1, 6, 3, 2, 6])):
        mask, n = rows_of(lengths), len(lengths)
        old_logp, advantages = draws(2, *mask.shape) - 3, draws(3, n)
        batch = (old_logp + 0.3 * draws(4, *mask.shape), old_logp, advantages, mask)
        cases.append((what, batch, grpo_loss(*batch, beta=0)[0]))
    check(function, cases)


# --- notebook 2 ---


def keep_per_token(function):
    cases = []
    for what, seed, k in (("k = 2 of 8", 5, 2), ("k = 4 of 8", 6, 4), ("k = 8 of 8", 7, 8)):
        advantages = draws(seed, 3, 8)
        lengths = torch.randint(10, 200, (3, 8), generator=torch.Generator().manual_seed(seed))
        cases.append((what, [advantages, lengths, k], prune(advantages / lengths, k)))
    check(function, cases)


def rows_of_the_batch(function):
    cases = []
    for what, (questions, group_size, k) in (("one question", (1, 4, 2)), ("three questions", (3, 16, 4))):
        kept = prune(draws(8, questions, group_size), k)
        cases.append((what, [kept, group_size], batch_rows(kept, group_size)))
    check(function, cases)


def right_among_the_kept(function):
    cases = []
    for group_size, k in ((16, 4), (16, 8), (10, 7)):
        for right in range(1, group_size):
            if 2 * right != group_size:  # there all |A| are equal
                advantages = group_advantages((torch.arange(group_size) < right).double().unsqueeze(0))
                kept = (prune(advantages, k) < right).sum()
                cases.append((f"{right} right of {group_size} and k = {k}", [right, group_size, k], kept))
    check(function, cases)


# --- notebook 3 ---


def empty_places(function):
    cases = []
    for questions, group_size, rate in ((1, 16, 0.5), (1, 16, 0.8), (4, 10, 0.9), (3, 8, 0.4), (2, 16, 0.0)):
        k = keep_count(group_size, rate)
        empty = questions * group_size - k * questions_per_step(questions, group_size, k)
        cases.append((f"B = {questions}, G = {group_size}, P = {rate}", [questions, group_size, rate], empty))
    check(function, cases)


def padding(function):
    cases = []
    for what, lengths, max_tokens in (
        ("equal lengths", [10] * 6, 30), ("unequal lengths", [3, 90, 41, 7, 66, 12, 5], 128), ("one long completion", [900, 10, 5], 64),
    ):
        area = sum(len(batch) * max(lengths[i] for i in batch) for batch in micro_batches(lengths, max_tokens))
        cases.append((what, [lengths, max_tokens], 1 - sum(lengths) / area))
    check(function, cases)


def share_to_keep(function):
    from experiments.reproduce import amdahl

    phases = {"generate": 40.0, "score": 2.0, "logprobs": 9.0, "update": 48.0, "other": 1.0, "total": 100.0}
    cases = [(f"a speed-up of {amdahl(phases, share):.3f}", [phases, amdahl(phases, share)], share) for share in (1, 0.5, 0.125)]
    check(function, cases)


# --- notebook 4 ---


def completion_tokens(function):
    from engine.model.logprobs import completion_mask  # here, because transformers takes seconds to import

    eos, lengths = 1, [3, 5, 1, 4]  # the second completion is cut off: it has no EOS
    tokens = torch.full((4, 5), eos)  # padding is EOS too, as in many tokenizers
    for row, n in enumerate(lengths):
        tokens[row, : n - (n < 5)] = 7
    cases = [("a batch whose padding is EOS", [tokens, eos], completion_mask(tokens, torch.tensor(lengths)))]
    tokens = torch.tensor([[7, 7, 1, 0, 0], [1, 0, 0, 0, 0]])
    cases.append(("a batch whose padding is 0", [tokens, eos], rows_of([3, 1], 5)))
    check(function, cases)


def dr_grpo_loss_of_a_step(function):
    cases = []
    for what, lengths, longest in (("equal lengths", [4] * 8, 4), ("unequal lengths", [1, 6, 3, 2, 6, 5, 2, 4], 10)):
        mask, rewards = rows_of(lengths), draws(9, 2, 4).round()
        old_logp = draws(10, *mask.shape) - 3
        logp = old_logp + 0.3 * draws(11, *mask.shape)
        advantages = group_advantages(rewards, divide_by_std=False).flatten()
        right = drgrpo_loss(logp, old_logp, advantages, mask, max_tokens=longest)[0]
        cases.append((what, [logp, old_logp, rewards, mask, longest], right))
    check(function, cases)


def reward_for_steps(function):
    think = "<think>{}</think>\n<answer>{}</answer>".format
    cases = [
        ("right steps and a right answer", think("4+7=11;11+6=17;", 17), 2.0),
        ("a wrong step and a right answer", think("4+7=12;12+6=17;", 17), 1.0),
        ("right steps and a wrong answer", think("4+7=11;11+6=17;", 18), 1.0),
        ("a right guess", "<answer>17</answer>", 1.0),
        ("a wrong guess", "<answer>9</answer>", 0.0),
        ("a wrong step and a wrong answer", think("4+7=11;11+6=16;", 16), 0.0),
        ("a minus", think("9-2=7;", 17), 2.0),
    ]
    cases = [(what, [[text], ["17"]], [right]) for what, text, right in cases]
    texts = [arguments[0][0] for _, arguments, _ in cases]
    check(function, [*cases, ("all of them at once", [texts, ["17"] * len(texts)], [right[0] for *_, right in cases])])


# --- notebook 5 ---


def ratio_of_completions(function):
    cases = []
    for what, lengths in (("equal lengths", [5, 5]), ("unequal lengths", [2, 7, 1, 4])):
        mask = rows_of(lengths)
        old_logp = draws(12, *mask.shape) - 3
        logp = old_logp + 0.3 * draws(13, *mask.shape)  # not 0 on padding
        cases.append((what, [logp, old_logp, mask], sequence_ratio(logp, old_logp, mask)))
    check(function, cases)


def still_without_signal(function):
    cases = []
    for rate, group_size, rounds in ((0.5, 4, 1), (0.9, 4, 1), (0.9, 4, 3), (0.25, 6, 2), (0.0, 4, 5)):
        groups = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=F64)] * group_size)
        chance = torch.where(groups == 1, rate, 1 - rate).prod(dim=1)
        wasted = chance[~has_signal(groups)].sum() ** rounds
        cases.append((f"p = {rate}, G = {group_size}, {rounds} rounds", [rate, group_size, rounds], wasted))
    check(function, cases)


def advantages_of_tokens(function):
    cases = []
    for what, n, gamma, lam in (("one token", 1, 1.0, 0.95), ("λ = 0", 5, 0.9, 0.0), ("λ = 1", 5, 0.9, 1.0), ("λ = 0.95", 8, 0.99, 0.95)):
        rewards, values = draws(14, n), draws(15, n)
        right, _ = gae(rewards[None], values[None], torch.ones(1, n), gamma=gamma, lam=lam)
        cases.append((what, [rewards.tolist(), values.tolist(), gamma, lam], right[0]))
    check(function, cases)


def right_kept_by_pods(function):
    cases = []
    for group_size, m in ((16, 4), (16, 8), (10, 6)):
        for right in range(1, group_size):
            rewards = (torch.arange(group_size) < right).double().unsqueeze(0)
            kept = (max_variance_subset(rewards, m) < right).sum()
            cases.append((f"{right} right of {group_size} and m = {m}", [right, group_size - right, m], kept))
    check(function, cases)
