"""A sampler inserts what a tool answers. The policy reads these tokens, but it did not write them:
they are neither trained on nor counted."""

import math
import random
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from algorithms import resolve
from engine.data.questions import load_questions
from engine.model.contract import Completions, Sampling
from engine.model.logprobs import Policy
from engine.model.networks import Networks
from engine.model.sampling import Sampler
from tests.examples import named
from tests.training import LONGEST, weights_of
from train import train_step
from update import Limits

G, K, LR = 8, 4, 0.1  # P = 0.5
FIRST = 3  # tokens before the tool is called


class WithTool:
    """A sampler (the contract is in engine/model/contract.py). It calls a tool after the first
    tokens of most completions. What each wrote is in `drawn`."""

    dtype = torch.float32

    def __init__(self, model, tokenizer):
        self.own, self.drawn = Sampler(model, tokenizer), None

    def sample(self, prompts, group_size, sampling, seed, places=None):
        prompts = [prompt for prompt in prompts for _ in range(group_size)]
        first = self.own.sample(prompts, 1, replace(sampling, max_new_tokens=FIRST), seed)
        # the tool's answers have 0 to 21 tokens
        tools = [[9, 7, 8] * (i % group_size) for i in range(len(prompts))]
        read = [p + f + tool for p, f, tool in zip(prompts, first.tokens.tolist(), tools)]
        rest = self.own.sample(read, 1, sampling, seed + 1)
        columns = []
        for i, tool in enumerate(map(torch.tensor, tools)):
            n = 0 if i % group_size == 5 else int(rest.lengths[i])  # this one ends with the tool's
            columns.append((
                torch.cat([first.tokens[i], tool.long(), rest.tokens[i, :n]]),
                # nobody knows the log-probability of a tool's token
                torch.cat([first.logp[i], torch.full((len(tool),), math.nan), rest.logp[i, :n]]),
                torch.tensor([True] * FIRST + [False] * len(tool) + [True] * n),
            ))
        tokens, logp, mask = (pad_sequence(column, batch_first=True) for column in zip(*columns))
        lengths = torch.tensor([len(row) for row, *_ in columns])
        self.drawn = Completions(tokens, lengths, rest.truncated, logp, mask)
        return self.drawn

    def refresh(self, weights):
        pass

    def free_memory(self):
        pass


def numbers(completions, **columns):
    """Rewards of which no two are equally far from their mean."""
    return [float((3 * i % G) ** 2) for i in range(len(completions))]


@pytest.fixture
def world(loaded):
    """(model, a reference that differs, a sampler with a tool, the networks, two questions)"""
    model, tokenizer = loaded
    reference = deepcopy(model)
    with torch.no_grad():
        reference.lm_head.weight *= 0.9
    sampler = WithTool(model, tokenizer)
    networks = Networks(
        Policy(model), tokenizer, sampler, torch.optim.SGD(model.parameters(), lr=LR),
        Policy(reference))
    return model, reference, sampler, networks, load_questions("toy", tokenizer, limit=2)[0]


def step(networks, algorithm, questions):
    """The metrics of a step in several micro-batches."""
    limits = Limits(micro_batch_tokens=128, max_grad_norm=1e9)
    return train_step(
        networks, algorithm, named(numbers), Sampling(LONGEST), limits, questions,
        random.Random(1)).metrics


def largest(r, n):
    """CPPO: the k with the largest |A|."""
    A = (r - r.mean()) / (r.std() + 1e-4)
    return A, sorted(range(G), key=lambda i: -abs(A[i]))[:K]


def shortest(r, n):
    """GFPO: the k shortest, and their advantages among themselves."""
    kept = sorted(range(G), key=lambda i: n[i])[:K]
    own = r[kept]
    return (r - own.mean()) / (own.std(correction=0) + 1e-4), kept


# rule, weight of a token (of n in its completion, M tokens in N completions), β
PLAIN = {
    "cppo": (largest, lambda n, N, M: 1 / (N * n), 0.04),
    "cppo, token mean": (largest, lambda n, N, M: 1 / M, 0.0),
    "gfpo": (shortest, lambda n, N, M: 1 / M, 0.001),
}
ROWS = {
    "cppo": resolve("cppo", group_size=G, mu=1, pruning_rate=0.5),
    "cppo, token mean": resolve("dapo", group_size=G, mu=1, pruning_rate=0.5, max_rollouts=1,
                                keep="largest_abs"),
    "gfpo": resolve("gfpo", group_size=G, mu=1),
}


@pytest.mark.parametrize("name", PLAIN)
def test_loss_gradient_and_counts_are_those_of_the_policys_own_tokens(name, world):
    """Beside a plain loop over completions, in one update, where each ratio is 1."""
    model, reference, sampler, networks, questions = world
    rule, weight, beta = PLAIN[name]
    plain, before = deepcopy(model), weights_of(model)
    metrics = step(networks, ROWS[name], questions)
    tokens, mask, lengths = sampler.drawn.tokens, sampler.drawn.mask, sampler.drawn.lengths
    n = mask.sum(1).tolist()
    assert all(n) and not mask[5, lengths[5] - 1] and lengths.sum() > sum(n) + 100
    if rule == shortest:  # by all tokens others would be
        assert {*shortest(torch.ones(G), n[:G])[1]} != {*shortest(torch.ones(G), lengths)[1]}

    r, A, kept = torch.tensor(numbers(range(2 * G))), [], []
    for q in (0, 1):
        own, rows = rule(r[q * G : q * G + G], n[q * G : q * G + G])
        A += own.tolist()
        kept += [q * G + i for i in rows]
    N, M, loss, of_all = len(kept), sum(n[i] for i in kept), 0.0, 0.0
    for i in range(2 * G):
        prompt = questions[i // G]["prompt"]
        sequence = torch.tensor([prompt + tokens[i, : lengths[i]].tolist()])
        logp, ref_logp = (
            m(sequence).logits[0].log_softmax(-1)[:-1].gather(1, sequence[0, 1:, None])[:, 0]
            for m in (plain, reference))
        own = torch.tensor([False] * (len(prompt) - 1) + mask[i, : lengths[i]].tolist())
        logp, ref_logp = logp[own], ref_logp.detach()[own]
        of_all -= logp.detach().sum().item()
        if i in kept:
            gains = A[i] * (logp - logp.detach()).exp()
            k3 = (ref_logp - logp).exp() - (ref_logp - logp) - 1
            loss = loss - weight(n[i], N, M) * (gains - beta * k3).sum()
    gradient = torch.autograd.grad(loss, list(plain.parameters()))
    gradient = torch.cat([g.flatten() for g in gradient])
    moved = (before - weights_of(model)) / LR
    assert (moved - gradient).norm() < 1e-3 * gradient.norm()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-3, abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(gradient.norm().item(), rel=1e-3)

    assert (metrics["kept"], metrics["tokens_trained"]) == (N, M)
    assert metrics["tokens_generated"] == sum(n) and metrics["length"] == sum(n) / (2 * G)
    assert metrics["entropy"] == pytest.approx(of_all / sum(n), rel=1e-4)
    # the sampler has read the tool's answers, and so has the scorer
    assert metrics["sampler_gap_max"] < 1e-3
