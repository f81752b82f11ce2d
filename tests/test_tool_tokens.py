"""A sampler inserts what a tool answers. The policy reads these tokens, but it did not write them:
they are neither trained on nor counted. (tests/test_update.py: the update of completions with such
tokens is that of a plain loop.)"""

import math
import random
from dataclasses import replace

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from algorithms import resolve
from engine.data.questions import load_questions
from engine.model.contract import Completions, Sampling
from engine.model.logprobs import Policy
from engine.model.sampling import Sampler
from tests.examples import named
from tests.training import LONGEST, networks_around
from train import train_step
from update import Limits

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


def place_in_group(completions, **columns):
    return [float(i % 8) for i in range(len(completions))]


def test_only_the_tokens_of_the_policy_are_trained_on_and_counted(loaded):
    model, tokenizer = loaded
    networks = networks_around(Policy(model), tokenizer, lr=0.1)
    networks.sampler = WithTool(model, tokenizer)
    questions, _ = load_questions("toy", tokenizer, limit=2)
    algorithm = resolve("cppo", group_size=8, pruning_rate=0.5, mu=1, beta=0.0)
    limits = Limits(micro_batch_tokens=128)  # several micro-batches
    step = train_step(
        networks, algorithm, named(place_in_group), Sampling(LONGEST), limits, questions,
        random.Random(1))
    drawn, metrics = networks.sampler.drawn, step.metrics
    n = drawn.mask.sum(1)
    assert n.all() and not drawn.mask[5, drawn.lengths[5] - 1]
    assert drawn.lengths.sum() > n.sum() + 100

    assert torch.equal(step.rollout.lengths.flatten(), n) and len(step.rows) == 8
    assert metrics["tokens_trained"] == n[step.rows].sum()
    assert metrics["tokens_generated"] == n.sum() and metrics["length"] == n.sum() / 16
    surprise = -drawn.logp[drawn.mask].sum().item()
    assert metrics["entropy"] == pytest.approx(surprise / n.sum().item(), rel=1e-4)
    # the sampler has read the tool's answers, and so has the scorer
    assert metrics["sampler_gap_max"] < 1e-3 < metrics["grad_norm"]
