"""engine/base/own.py: what functions of the user's own return is checked, in one place."""

import math
import sys
from functools import partial

import pytest
import torch

from algorithms import resolve
from engine.base import own, progress
from engine.base.errors import UserError
from engine.base.own import checked, own_rule
from engine.model import networks
from engine.model.contract import Completions, Sampling
from engine.run.config import algorithm_with, config_of
from engine.run.hooks import Hooks
from examples import my_sampler
from tests.training import a_rollout

Q, G, N, T = 2, 4, 8, 3
PLAIN = torch.zeros(Q, G)


def fails(*_, **__):
    raise RuntimeError("the size of tensor a must match")


def of_algorithm(name, returned):
    """The function `name` of an algorithm's row, which returns this."""
    def mine(*_, **__):
        return returned() if callable(returned) else returned

    row = resolve("grpo", group_size=G)
    algorithm = checked(own.replace(row, **{name: partial(mine, beta=0.0)}))
    return getattr(algorithm, name)(a_rollout(PLAIN))


def of_rule(returned):
    return own_rule(lambda *_: returned() if callable(returned) else returned, "mine.py:rule")(
        a_rollout(PLAIN), PLAIN, 2)


def of_hook(name, returned):
    hooks = Hooks("mine.py", **{name: lambda *_: returned() if callable(returned) else returned})
    step = type("Step", (), {"rollout": a_rollout(PLAIN)})
    arguments = {
        "schedule": ("options_at", 1, 0.5), "curriculum": ("choose", [{}] * 9, {}, 2, None),
        "metrics": ("measure", step)}
    method, *given = arguments[name]
    return getattr(hooks, method)(*given)


def of_sampler(**parts):
    """What a sampler returns: right Completions, but for these parts."""
    usual = {"tokens": torch.ones(N, T).long(), "lengths": torch.ones(N).long(),
             "truncated": torch.zeros(N).bool(), "logp": torch.zeros(N, T),
             "mask": torch.ones(N, T).bool()}
    sampler = type("Mine", (), {})()
    sampler.sample = lambda *_: Completions(**usual | parts)
    own.check_sampler(sampler, "--sampler mine.py:Mine")
    return sampler.sample([[1]] * Q, G, Sampling(T), 0)


LOSS = (torch.zeros((), requires_grad=True), {})
PARTS = [  # (what is called, what is right, what is wrong: (it, what the sentence says))
    (partial(of_algorithm, "advantages"), PLAIN, [
        (PLAIN[:, :1], r"tensor \(Q, G\) .* of shape \(2, 1\)"),
        (PLAIN.long(), "finite floats"), (PLAIN * math.nan, "nan"),
        ([[0.0]], r"returned \[\[0.0\]\]")]),
    (partial(of_algorithm, "loss"), LOSS, [
        (LOSS[0], r"of shape \(\)"), ((torch.ones(3), {}), "a scalar"),
        ((torch.ones(()), {}), "has a gradient"), ((*LOSS, 1), "and a dict"),
        ((LOSS[0], 1), "dict")]),
    (of_rule, [0, 5], [(None, "None"), ([0.5], r"returned \[0.5\]"), ([0, 8], "0 to 7"), 
        ([2, 2], "each once")]),
    (partial(of_hook, "schedule"), {"beta": 0.1}, [([1], "{option: value}")]),
    (partial(of_hook, "curriculum"), [0, 8], [
        ([0], r"\[0\]"), ([0, 9], "0 to 8"), (["a", "b"], "2 numbers")]),
    (partial(of_hook, "metrics"), {"a": 1}, [({"a": "b"}, "number"), (3, "3")]),
]


@pytest.mark.parametrize("call, right, wrong", PARTS, ids=range(6))
def test_what_is_right_passes_and_each_mistake_is_one_sentence(call, right, wrong):
    call(right)
    for returned, said in [*wrong, (fails, r"failed: RuntimeError.*\(test_own.py, line \d+\)")]:
        with pytest.raises(UserError, match=said) as error:
            call(returned)
        assert "\n" not in str(error.value)
        assert "test_own.py:" in str(error.value) or "mine.py:" in str(error.value)
    with pytest.raises(UserError, match="SystemExit"):
        call(lambda: sys.exit(3))


@pytest.mark.parametrize("parts", [
    {"tokens": torch.ones(N, T + 1).long()}, {"tokens": torch.ones(N, T)}, {"lengths": [1]},
    {"logp": torch.zeros(N)}, {"mask": torch.ones(N, T)}, {"tokens": torch.ones(Q, T).long()},
    {"truncated": None},
], ids=str)  # fmt: skip
def test_completions_of_another_shape_or_kind_are_refused(parts):
    of_sampler()
    with pytest.raises(UserError, match="mine.py:Mine must return Completions: tokens .int64.*"):
        of_sampler(**parts)


def test_a_class_that_is_no_sampler_is_refused(monkeypatch):
    monkeypatch.setattr(networks, "known_or_own", lambda *_: my_sampler.Generate)
    networks.sampler_class("x.py:A")
    monkeypatch.delattr(my_sampler.Generate, "check")
    with pytest.raises(UserError, match="x.py:A lacks check or sample: engine/model/contract.py"):
        networks.sampler_class("x.py:A")


def test_a_rule_that_keeps_fewer_than_k_is_named(capsys):
    progress.note_once.cache_clear()
    of_rule([0, 1, 4, 5])
    assert not capsys.readouterr().out
    of_rule([0])
    assert "--keep mine.py:rule keeps fewer than k = 2 completions" in capsys.readouterr().out


def test_a_run_checks_its_algorithm_and_its_schedule():
    for name in ("grpo", "gdpo", "gfpo", "gspo"):
        _, algorithm = config_of({"algorithm": name})
        with pytest.raises(UserError, match="the loss .*py:"):
            algorithm.loss(1, 2, 3)
    config, _ = config_of({})
    with pytest.raises(UserError, match="a schedule cannot set .*no number"):
        algorithm_with(config, {"pruning_rate": "0.5"})
