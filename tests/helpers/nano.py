"""A step of nano.py, or of a diff of it, and train.py's step on the same completions."""

import random
from copy import deepcopy

import torch

import rewards
from engine.model.logprobs import Policy, completion_mask
from engine.model.sampler_interface import Completions, Sampling
from loop.records import Parts
from loop.update import Limits
from tasks import toy
from tests.helpers.examples import named
from tests.helpers.training import networks_around, weights_of
from train import train_step


@torch.no_grad()
def another(model):
    """A reference that is not the model, so that the KL has a gradient."""
    reference = deepcopy(model).requires_grad_(False)
    for p in reference.parameters():
        p.mul_(1.05)
    return reference


def nano_step(nano, model, tokenizer, questions):
    """(how far a step of SGD moves the weights, accuracy, mean length, the first completion). nano:
    the module.

    AdamW would make a whole step of a rounding error.
    """
    own = deepcopy(model)
    sgd = torch.optim.SGD(own.parameters(), lr=0.1)
    metrics = nano.step(own, another(model), sgd, tokenizer, nano.TOY, questions)
    return weights_of(own) - weights_of(model), *metrics


def train_py_step(algorithm, model, tokenizer, questions, drawn, max_grad_norm):
    """(how far a step of SGD moves the weights, its Step). drawn: what nano.sample returned."""
    tokens, _, mask = drawn
    tokens, lengths = tokens[:, -mask.shape[1] :], mask.sum(1)
    truncated = tokens[torch.arange(len(tokens)), lengths - 1] != tokenizer.eos_token_id
    # the sampler reports no log-probabilities, and nano's does not either
    given = Completions(
        tokens, lengths, truncated, torch.full(tokens.shape, torch.nan),
        completion_mask(tokens, lengths))
    own = deepcopy(model)
    reference = Policy(another(model)) if algorithm.beta else None
    networks = networks_around(
        Policy(own), tokenizer, lr=0.1, beta=algorithm.beta, reference=reference)
    networks.optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    networks.sampler.sample = lambda *_: given
    limits = Limits(max_grad_norm=max_grad_norm)
    sampling = Sampling(toy.MAX_NEW_TOKENS)
    parts = Parts(networks, algorithm, named(rewards.toy_accuracy), sampling, limits)
    step = train_step(parts, questions, random.Random(0))
    return weights_of(own) - weights_of(model), step
