"""What functions of the user's own return is checked: engine/run/own.py, and
engine/model/contract.py for a sampler."""

import math
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from algorithms import ALGORITHMS, resolve
from engine.base.errors import UserError
from engine.base.progress import note_once
from engine.model import networks
from engine.model.contract import Completions, Sampling, check_sampler
from engine.run.config import config_of, open_run
from engine.run.own import checked, own_rule
from examples import my_sampler
from tests.helpers.training import a_rollout

Q, G, N, T = 2, 4, 8, 3
PLAIN = torch.zeros(Q, G)


def of_algorithm(name, returned):
    """The function `name` of an algorithm's row, which returns this."""
    def mine(*_, **__):
        return returned() if callable(returned) else returned

    row = replace(resolve("grpo", group_size=G), **{name: partial(mine, beta=0.0)})
    return getattr(checked(row), name)(a_rollout(PLAIN))


def fails():
    raise RuntimeError("the size of tensor a must match")


LOSS = (torch.zeros((), requires_grad=True), {})


@pytest.mark.parametrize("name, right, wrong", [
    ("advantages", PLAIN, [
        (PLAIN[:, :1], r"tensor \(Q, G\) .* of shape \(2, 1\)"),
        (PLAIN * math.nan, "of finite numbers.*nan"), ([[0.0]], r"returned \[\[0.0\]\]")]),
    ("loss", LOSS, [
        (LOSS[0], r"of shape \(\)"), ((torch.ones(3, requires_grad=True), {}), "a scalar"),
        ((torch.ones(()), {}), "has a gradient"), ((*LOSS, 1), "and a dict"),
        ((LOSS[0], 1), "dict"), ((LOSS[0], {"x": torch.ones(N)}), "dict of numbers"),
        ((LOSS[0], {"x": "much"}), "dict of numbers"), ((LOSS[0], {"x": None}), "of numbers")]),
])  # fmt: skip
def test_what_is_right_passes_and_each_mistake_is_one_sentence(name, right, wrong):
    found = of_algorithm(name, right)
    assert found is right or found == right
    fail = [(fails, r"failed: RuntimeError.*\(test_own.py, line \d+\)"), (sys.exit, "SystemExit")]
    for returned, said in wrong + fail:
        with pytest.raises(UserError, match=rf"the {name} test_own.py:\S*mine .*{said}") as error:
            of_algorithm(name, returned)
        assert "\n" not in str(error.value)


def test_a_stat_of_a_users_loss_replaces_no_metric():
    _, found = of_algorithm("loss", (LOSS[0], {"step": torch.ones(()), "entropy": 2, "kl": 3.0}))
    assert found == {"own/step": 1, "own/entropy": 2, "kl": 3}


def test_advantages_of_ones_own_change_nothing_in_the_rollout():
    def mine(rollout):
        rollout.rewards -= rollout.rewards.mean(2, keepdim=True)
        return rollout.rewards[0]

    rollout = a_rollout([[1.0, 0.0]])
    A = checked(replace(resolve("grpo", group_size=2), advantages=mine)).advantages(rollout)
    assert A.tolist() == [[0.5, -0.5]] and rollout.rewards.tolist() == [[[1.0, 0.0]]]
    assert of_algorithm("advantages", PLAIN.long()).dtype == torch.float32


class Plain:
    """A callable object has no __code__ and no __qualname__."""

    def __call__(self, *_, **__):
        pass


def test_an_object_may_be_a_part_and_its_mistakes_name_its_class(monkeypatch):
    row = replace(ALGORITHMS["grpo"], advantages=Plain(), loss=Plain(), keep=Plain())
    monkeypatch.setitem(ALGORITHMS, "mine", row)
    _, algorithm = config_of({"algorithm": "mine"})
    rollout = a_rollout(PLAIN)
    for function, *given in [
        (algorithm.advantages, rollout), (algorithm.loss,), (algorithm.keep, rollout, PLAIN, 1)]:
        with pytest.raises(UserError, match="test_own.py:Plain must return.*It returned None"):
            function(*given)
    assert checked(replace(resolve("grpo"), loss=abs)).loss is not abs  # abs is written in C


# --- a rule, before the run and in it ---

RULES = """
def mask(rollout, A, k): return A.abs().flatten() > 1
def level(rollout, A, k): return [row["level"] for row in rollout.questions]
def each(rollout, A, k): return range(A.numel())
"""


def test_a_rule_that_returns_something_else_is_refused_before_the_run(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(RULES)
    wanted = r"--keep \S+:mask must return .* \(mask.nonzero\(\).flatten\(\) for a mask"
    with pytest.raises(UserError, match=wanted):
        open_run(["--keep", f"{tmp_path}/mine.py:mask"])
    # what fails on made-up completions may need a column of the data, and nothing is told of them
    for name in ("level", "each"):
        open_run(["--keep", f"{tmp_path}/mine.py:{name}"])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("rows, said", [
    (range(8), "has kept all of"), ([], "has kept none of"), ([3], None)])
def test_a_rule_that_keeps_all_or_none_is_told_once(rows, said, capsys):
    note_once.cache_clear()
    for _ in range(2):
        own_rule(lambda *_: rows, "--keep mine.py:rule")(a_rollout(PLAIN), PLAIN, 1)
    assert capsys.readouterr().out.count(f"note: --keep mine.py:rule {said}") == bool(said)


@pytest.mark.parametrize("error", [UserError("a sentence"), torch.OutOfMemoryError()])
def test_what_somebody_knows_how_to_take_is_passed_on(error):
    """A sentence is printed; if memory runs out, an update is repeated with smaller parts."""
    def raises():
        raise error

    with pytest.raises(type(error)) as found:
        of_algorithm("loss", raises)
    assert found.value is error


def test_nothing_of_ours_is_checked():
    for name in ALGORITHMS:
        algorithm = resolve(name)
        assert checked(algorithm) == algorithm


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
    with pytest.raises(UserError, match=f"mine.py:Mine returned {problem}.*contract.py says"):
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
    monkeypatch.setattr(networks, "known_or_own", lambda *_: my_sampler.Generate)
    networks.sampler_class("x.py:A")
    monkeypatch.delattr(my_sampler.Generate, "check")
    with pytest.raises(UserError, match="x.py:A lacks check or sample: engine/model/contract.py"):
        networks.sampler_class("x.py:A")
