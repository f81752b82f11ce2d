"""The policy of the notebooks. All its completions can be listed, so an expectation is a sum.

It has three words (tokens): "." ends a completion, then "a" and "b". A completion has at most three
words, so there are 15. Its parameters theta, (5, 3), are rows of logits: one row for the first
word, then one for each place and the word before it. Import plots first: it finds the project's
files.
"""

from itertools import product

import torch

from grpo import token_logprobs

WORDS = ".ab"
COMPLETIONS = [
    o for n in (1, 2, 3) for o in product(range(3), repeat=n)
    if 0 not in o[:-1] and (o[-1] == 0 or n == 3)
]  # fmt: skip
NAMES = ["".join(WORDS[v] for v in o) for o in COMPLETIONS]
LENGTHS = torch.tensor([len(o) for o in COMPLETIONS])  # |o|, (15,)
MASK = torch.arange(3) < LENGTHS[:, None]  # (15, 3)
TOKENS = torch.tensor([o + (0,) * (3 - len(o)) for o in COMPLETIONS])  # (15, 3)
BEFORE = TOKENS.roll(1, dims=1)
ROWS = torch.stack([0 * BEFORE[:, 0], BEFORE[:, 1], 2 + BEFORE[:, 2]], dim=1) * MASK

RNG = torch.Generator().manual_seed(16)
THETA = 0.7 * torch.randn(5, 3, generator=RNG, dtype=torch.float64)
OTHER = THETA + 0.5 * torch.randn(5, 3, generator=RNG, dtype=torch.float64)  # another policy
REWARDS = torch.tensor([1.0, 0, 3, 0, 2, 1, 0, 3, 2, 0, 1, 3, 0, 2, 3], dtype=torch.float64)
RIGHT = (REWARDS >= 2).double()  # the same with rewards 0 and 1


def logp(theta, temperature=1.0):
    """log π of each token of each completion, (15, 3)."""
    return token_logprobs(theta[ROWS], TOKENS, temperature=temperature)


def log_pi(theta):
    """log π of each completion, (15,)."""
    return (logp(theta) * MASK).sum(1).double()


def scores(theta):
    """∇ log π of each completion, (15, 15)."""
    return torch.autograd.functional.jacobian(log_pi, theta).flatten(1)


def sample(theta, *shape, seed=0):
    """Completions by their numbers, drawn from π."""
    drawn = log_pi(theta).exp().multinomial(
        torch.Size(shape).numel(), replacement=True, generator=torch.Generator().manual_seed(seed))
    return drawn.view(shape)
