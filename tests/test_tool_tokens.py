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

G, K, LR, BETA = 8, 4, 0.1, 0.04  # P = 0.5
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


def test_loss_gradient_and_counts_are_those_of_the_policys_own_tokens(world):
    """Beside a plain loop over CPPO's completions, in one update, where each ratio is 1."""
    model, reference, sampler, networks, questions = world
    plain, before = deepcopy(model), weights_of(model)
    algorithm = resolve("cppo", group_size=G, mu=1, pruning_rate=0.5, beta=BETA)
    limits = Limits(micro_batch_tokens=128, max_grad_norm=1e9)  # several micro-batches
    metrics = train_step(
        networks, algorithm, named(numbers), Sampling(LONGEST), limits, questions,
        random.Random(1)).metrics
    tokens, mask, lengths = sampler.drawn.tokens, sampler.drawn.mask, sampler.drawn.lengths
    n = mask.sum(1).tolist()
    assert all(n) and not mask[5, lengths[5] - 1] and lengths.sum() > sum(n) + 100

    A, kept = [], []
    for q in (0, 1):
        r = torch.tensor(numbers(range(G)))
        A += ((r - r.mean()) / (r.std() + 1e-4)).tolist()
        kept += sorted(range(q * G, q * G + G), key=lambda i: -abs(A[i]))[:K]
    loss, of_all = 0.0, 0.0
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
            loss = loss - (gains - BETA * k3).mean() / len(kept)
    gradient = torch.autograd.grad(loss, list(plain.parameters()))
    gradient = torch.cat([g.flatten() for g in gradient])
    moved = (before - weights_of(model)) / LR
    assert (moved - gradient).norm() < 1e-3 * gradient.norm()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-3, abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(gradient.norm().item(), rel=1e-3)

    assert metrics["kept"] == len(kept) and metrics["tokens_trained"] == sum(n[i] for i in kept)
    assert metrics["tokens_generated"] == sum(n) and metrics["length"] == sum(n) / (2 * G)
    assert metrics["entropy"] == pytest.approx(of_all / sum(n), rel=1e-4)
    # the sampler has read the tool's answers, and so has the scorer
    assert metrics["sampler_gap_max"] < 1e-3
