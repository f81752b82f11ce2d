"""engine/model/sampler_interface.py: what a sampler of the user's own returns is checked."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from engine.base.errors import UserError
from engine.model import networks
from engine.model.sampler_interface import Completions, Sampling, check_sampler
from examples import my_sampler

Q, G, N, T = 2, 4, 8, 3


RIGHT = Completions(
    21 * torch.eye(N, T).long(), torch.full((N,), T), torch.zeros(N).bool(),
    torch.full((N, T), -1.0), torch.ones(N, T).bool())
SHORT = torch.arange(T) < 2


def of_sampler(returned, questions=Q):
    """What a sampler returns, of a model with 22 tokens."""
    sampler = SimpleNamespace(sample=lambda *_: returned)
    check_sampler(sampler, "--sampler mine.py:Mine", 22)
    return sampler.sample([[1]] * questions, G, Sampling(T), 0)


@pytest.mark.parametrize("parts", [
    {"tokens": torch.ones(N, T)}, {"tokens": torch.ones(Q, T).long()}, {"lengths": [1]},
    {"lengths": RIGHT.lengths[:, None]}, {"truncated": RIGHT.truncated.long()},
    {"logp": RIGHT.logp.bfloat16()}, {"mask": RIGHT.mask[:, :1]},
    {"tokens": torch.ones(N, 4).long(), "logp": torch.zeros(N, 4), "mask": torch.ones(N, 4).bool(),
     "lengths": torch.full((N,), 4)},
])  # fmt: skip
def test_completions_of_another_shape_or_kind_are_refused(parts):
    assert of_sampler(RIGHT) is RIGHT
    of_sampler(Completions.none("cpu"), questions=0)
    [name, *_] = parts
    wanted = f"Mine (must return Completions: tokens .int64|returned {name} of .* not of torch)"
    with pytest.raises(UserError, match=wanted):
        of_sampler(replace(RIGHT, **parts))


@pytest.mark.parametrize("parts, problem", [
    ({"tokens": RIGHT.tokens + 1}, "tokens .* 0 … 21"), ({"tokens": RIGHT.tokens - 1}, "tokens "),
    ({"lengths": RIGHT.lengths + 1}, "lengths .* 1 … T"),
    ({"lengths": RIGHT.lengths - T}, "lengths "),
    # lengths of 1 beside a mask of all: the reward would judge empty texts
    ({"lengths": RIGHT.lengths - 2}, "a mask that does not end"),
    ({"mask": RIGHT.mask & SHORT}, "a mask that does not end"),
    ({"logp": RIGHT.logp.exp()}, "logp above 0"),
])  # fmt: skip
def test_each_wrong_value_of_completions_is_named(parts, problem):
    with pytest.raises(UserError, match=f"mine.py:Mine returned {problem}.*_interface.py says"):
        of_sampler(replace(RIGHT, **parts))


@pytest.mark.parametrize("parts", [
    {"logp": RIGHT.logp * torch.nan}, {"logp": RIGHT.logp * 0 + 1e-3},  # unknown; rounding
    {"mask": RIGHT.mask & SHORT, "truncated": ~RIGHT.truncated},  # a tool wrote the last token
    {"mask": RIGHT.mask & ~SHORT, "logp": torch.where(SHORT, 9.0, RIGHT.logp)},  # or the first ones
    {"mask": RIGHT.mask & SHORT, "lengths": RIGHT.lengths - 1},
])  # fmt: skip
def test_what_the_contract_allows_passes(parts):
    of_sampler(replace(RIGHT, **parts))


def test_a_class_that_is_no_sampler_is_refused(monkeypatch):
    monkeypatch.setattr(networks, "builtin_or_custom", lambda *_: my_sampler.Generate)
    networks.sampler_class("x.py:A")
    monkeypatch.delattr(my_sampler.Generate, "check")
    with pytest.raises(UserError, match="x.py:A lacks check or sample: engine/model/"):
        networks.sampler_class("x.py:A")
