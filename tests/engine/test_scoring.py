"""engine/scoring/score.py: rewards by name and weight, a user's own, and what happens when one
misbehaves."""

import math
import re
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from algorithms import resolve
from engine.base import files
from engine.base.errors import UserError
from engine.report.metrics import step_metrics
from engine.scoring.score import (
    Hung,
    choose_accuracy_reward,
    limited,
    load_rewards,
    read_answer,
    score,
)
from judges.mathematics import math_accuracy
from judges.programs import code_accuracy
from rewards import gsm8k_accuracy
from tests.helpers.examples import named
from tests.helpers.training import a_rollout
from train import main

pytestmark = pytest.mark.usefixtures("undrawn")
MINE = """
from __future__ import annotations
from dataclasses import dataclass
from neighbour import two

@dataclass
class Length:
    of: str

def short(completions, **columns):
    return [-float(len(Length(text).of)) for text in completions]

def picky(completions, **columns):
    return [1.0 if text.isdigit() else 1 / 0 for text in completions]

def nan(completions, **columns):
    return [two] * len(completions)

inf = nan
"""


@pytest.fixture
def mine(tmp_path):
    """A user's file, which imports the file beside it."""
    (tmp_path / "neighbour.py").write_text("two = 2.0")
    (tmp_path / "mine.py").write_text(MINE)
    files.custom_module.cache_clear()  # another test may have had a mine.py in its folder
    return str(tmp_path / "mine.py")


# --- rewards by name ---


def test_rewards_are_named_with_or_without_a_weight(mine):
    chosen = load_rewards(
        ["gsm8k_accuracy", "format_reward:0.5", f"{mine}:short", f"{mine}:picky:-2e-1"])
    assert [(r.name, r.weight) for r in chosen] == [
        ("gsm8k_accuracy", 1.0), ("format_reward", 0.5), ("short", 1.0), ("picky", -0.2),
    ]
    assert chosen[0].function is gsm8k_accuracy and chosen[2].function(["abc"]) == [-3.0]
    for word, weight in (("nan", 1.0), ("inf", 1.0), ("nan:0.5", 0.5)):  # names, and no weights
        [reward] = load_rewards([f"{mine}:{word}"])
        assert reward.weight == weight and reward.function(["a"]) == [2.0]


@pytest.mark.parametrize("words, named", [
    ("gsm9k", "gsm9k"), ("format_reward:nan", "format_reward:nan"),
    ("mine.py:long", "no function .long.: write mine.py:FUNCTION, .*.Length, short, picky"),
    ("format_reward format_reward:2", "format_reward:2"),
])
def test_a_reward_that_there_is_not_is_one_sentence(mine, words, named, monkeypatch):
    monkeypatch.chdir(Path(mine).parent)
    with pytest.raises(UserError, match=f"^--rewards[^\n]*{named}[^\n]*$"):
        load_rewards(words.split())


def test_a_completion_is_judged_by_the_first_reward_unless_the_test_questions_need_another(
    tmp_path,
):
    chosen = load_rewards(["code_accuracy", "format_reward"])
    (tmp_path / "x.jsonl").write_text("")
    for eval_dataset in ("gsm8k_zh", "gsm8k", str(tmp_path / "x.jsonl")):
        assert choose_accuracy_reward(chosen, "gsm8k_zh", eval_dataset) is code_accuracy
    assert choose_accuracy_reward(chosen, "gsm8k", "math500") is math_accuracy
    assert choose_accuracy_reward(chosen, "math", str(tmp_path / "x.jsonl")) is code_accuracy


# --- the values that they give ---


def judged(function, *texts, **columns):
    """(the values that this reward gives, on how many of the texts it fails)"""
    parts, failures = score(named(function), list(texts), columns)
    [values] = parts.values()
    assert values.dtype == torch.float32
    return values.tolist(), failures


@pytest.mark.parametrize("returned, words", [
    ([1.0] * 3, "returned 3 values for 2"), (1.0, "failed on 2 of 2.*'float' "),
    ([1.0, math.nan], "returned nan for the completion 'bcd'"),
])
def test_a_reward_that_does_not_return_one_number_for_each_is_named(returned, words):
    def odd(completions, **columns):
        return returned

    with pytest.raises(UserError, match=f"the reward odd {words}"):
        judged(odd, "a", "bcd")


async def waits(completions, **columns):
    return [0.0] * len(completions)


@pytest.mark.parametrize("function", [
    lambda data_source, solution_str, ground_truth: 0.0,  # as of verl
    max, lambda completions: [0.0], lambda texts, **columns: [0.0],
    lambda completions, /, **columns: [0.0], waits,
])
def test_a_reward_that_cannot_be_called_is_told_how_it_is_called(function):
    with pytest.raises(UserError, match="on 2 of 2 .* TypeError.* columns question, by name"):
        judged(function, "a", "bcd", question=["1", "2"])


@pytest.mark.parametrize("function, expected", [
    (lambda completions, **columns: np.array([0, 2]), [0.0, 2.0]),
    (lambda completions, **columns: torch.tensor([0, 2]), [0.0, 2.0]),
    # None: the reward does not apply
    (lambda completions, **columns: [None, 2.0], [math.nan, 2.0]),
    # it fails on all at once, and does not apply to one alone
    (lambda completions, **columns: [1 / (len(completions) == 1) and None], [math.nan] * 2),
])
def test_the_values_may_be_of_numpy_or_torch_or_none(function, expected):
    assert judged(function, "a", "bcd") == (pytest.approx(expected, nan_ok=True), 0)


def test_a_reward_sees_all_columns_by_name_and_cannot_change_what_another_one_sees():
    """As TRL's trainers call it: the questions are the prompts, too."""
    def blanks(completions, level, cases, **columns):
        completions.clear()
        level.clear()
        cases[0].clear()
        return [0.0, 0.0]

    def full(prompts, completions, level, cases, **columns):
        return [float(f"{p}{len(c)}{n}{case['in']}") for p, c, n, case in zip(
            prompts, completions, level, cases)]

    texts = ["a", "bcd"]
    columns = {"question": ["1", "2"], "level": [3, 4], "cases": [{"in": 5}, {"in": 6}]}
    parts, _ = score(named(blanks, full), texts, columns)
    assert [*parts] == ["blanks", "full"] and parts["full"].tolist() == [1135, 2346]
    assert texts == ["a", "bcd"] and columns["level"] == [3, 4]  # those of the data set


@pytest.mark.parametrize("written", [
    "prompts, completions, **kwargs", "*args, completions, **kwargs",
    "answer, completions, prompts=None, **kwargs",
])
def test_a_users_reward_takes_its_arguments_in_any_order(written, tmp_path):
    """The first form is the first one of TRL's documentation."""
    (tmp_path / "mine.py").write_text(f"""
def lens({written}):
    known = locals() | kwargs
    assert known["answer"] == ["3", "4"] and known["prompts"] == ["1", "2"]
    return [len(text) for text in known["completions"]]
""")
    [reward] = load_rewards([f"{tmp_path}/mine.py:lens"])
    values, failures = score([reward], ["a", "bcd"], {"question": ["1", "2"], "answer": ["3", "4"]})
    assert values["lens"].tolist() == [1, 3] and failures == 0


# --- a reward that fails ---


@pytest.mark.parametrize("crash", [lambda: 1 / 0, lambda: sys.exit(0), lambda: "x"])
@pytest.mark.parametrize("values, lowest", [
    ([1.0, -0.5, -2.0], -2.0), ([1.0, 0.5, 2.0], 0.0),
])
def test_to_crash_the_reward_pays_no_more_than_a_wrong_answer(values, lowest, crash, capsys):
    """And it is never a right one: that is a value above 0."""
    def crashes(completions, **columns):
        return [crash() if text == "crash" else values[int(text)] for text in completions]

    found = judged(crashes, "0", "crash", "1", "2", answer=list("abcd"))
    assert found == ([values[0], lowest, *values[1:]], 1)
    assert "the reward crashes failed: " in capsys.readouterr().out
    # one completion that fails alone does not end the run
    assert judged(crashes, "crash") == ([0.0], 1)


def test_without_a_completion_no_reward_is_called(capsys):
    """A device without a question has no columns, either, and nothing failed there."""
    assert judged(lambda completions, *, answer: pytest.fail("it was called")) == ([], 0)
    assert capsys.readouterr().out == ""


# --- a reward that hangs ---


@pytest.fixture(autouse=True)
def no_second_for_each_completion(monkeypatch):
    monkeypatch.setattr("engine.scoring.score.EACH", 0)


def test_the_limit_grows_with_the_completions_and_with_what_was_slow_once(monkeypatch, capsys):
    calls = []

    def slow(completions, **columns):
        calls.append(len(completions))
        time.sleep(0.1 * len(completions))
        return [1.0] * len(completions)

    limit = limited(slow, 0.25)
    assert judged(limit, *"abcd") == ([1.0] * 4, 0) and calls == [4, 1, 1, 1, 1]
    assert judged(limit, *"abcd") == ([1.0] * 4, 0) and calls[5:] == [4]
    monkeypatch.setattr("engine.scoring.score.EACH", 0.2)
    assert limited(slow, 0.1)(list("abcd")) == [1.0] * 4


def tries(text):
    while True:
        try:
            time.sleep(30)
        except Exception:
            pass


def stuck(completions, **columns):
    return [tries(text) or 0.0 if text[0] == "x" else 1.0 for text in completions]


def test_completions_on_which_a_reward_hangs_get_the_lowest_value_and_it_says_so(capsys):
    start = time.monotonic()
    handler = signal.getsignal(signal.SIGALRM)
    assert judged(limited(stuck, 0.2), "a", "xx", "abc", "x") == ([1.0, 0.0, 1.0, 0.0], 2)
    assert time.monotonic() - start < 20
    assert "failed: Hung: " in capsys.readouterr().out
    assert signal.getsignal(signal.SIGALRM) == handler
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_only_a_users_own_function_is_limited(mine, monkeypatch):
    monkeypatch.setattr("engine.scoring.score.TIMEOUT", 0.1)
    Path(mine).write_text("import time\ndef nap(completions, **columns):\n    time.sleep(5)\n")
    *known, own = load_rewards(["math_accuracy", "code_accuracy", f"{mine}:nap"])
    assert [reward.function for reward in known] == [math_accuracy, code_accuracy]
    with pytest.raises(Hung):
        own.function(["a"])


def test_an_interrupted_judge_of_mathematics_does_not_answer_the_next_question():
    assert math_accuracy(["\\boxed{2}"], ["4/2"]) == [1.0]  # it has started
    with pytest.raises(Hung):
        slow = "\\prod_{n=1}^{10^9} n"  # the gold answer computes, too: else it is refused at once
        limited(math_accuracy, 0.5)([f"\\boxed{{{slow}}}"], answer=[f"{slow}+1"])
    assert math_accuracy(["\\boxed{3}", "\\boxed{4}"], ["6/2", "5"]) == [1.0, 0.0]


# --- in a run ---


def go(small, folder, *words):
    usual = (
        f"--model {small} --output_dir {folder} --questions_per_step 2 --group_size 4 --steps 2 "
        "--eval_questions 4")
    return main([*usual.split(), *words])


def test_a_run_logs_each_reward_and_their_weighted_sum(small, tmp_path, mine, capsys):
    """And --check_rewards shows what the first step of the run sees, and begins no run."""
    weights = {"toy_accuracy": 2, "format_reward": 0.5, "short": 0.01, "nan": 0}
    rewards = f"toy_accuracy:2 format_reward:0.5 {mine}:short:0.01 {mine}:nan:0"
    words = f"--algorithm gdpo --rewards {rewards}".split()
    go(small, tmp_path / "run", *words)
    row, _ = files.read_lines(tmp_path / "run/metrics.jsonl")
    total = sum(weight * row[f"reward/{name}"] for name, weight in weights.items())
    assert row["reward"] == pytest.approx(total, rel=1e-5)
    assert row["accuracy"] == row["reward/toy_accuracy"] and row["reward_failures"] == 0
    # nan's is always 2
    assert row["frac_reward_zero_std/nan"] == 1.0 and row["frac_reward_zero_std/short"] < 1
    capsys.readouterr()
    go(small, tmp_path / "other", *words, "--check_rewards")
    said = capsys.readouterr().out
    assert f"toy_accuracy, weight 2: mean {row['reward/toy_accuracy']:.3f}, " in said
    assert re.search(r"it:\n\d[\d+-]+=\?\n\(here the model goes on; right: '-?\d", said)
    of_completions = r"^toy_accuracy [01]  format_reward [01]  short -\d+  nan 2  read: .*'$"
    assert len(re.findall(of_completions, said, re.MULTILINE)) == 4
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("reward, text, answer", [
    ("number_accuracy", "<think>7", None), ("number_accuracy", "<think>7</think>it is 18.", "18"),
    ("code_accuracy", "```python\nprint(18)\n```", "print(18)\n"),
    ("code_runs", "<answer>18</answer>", None),
    ("of_ones_own", "\\boxed{18}", "18"), ("of_ones_own", "18", None),
])  # fmt: skip
def test_an_answer_is_found_as_the_accuracy_reads_it(reward, text, answer):
    assert read_answer(reward, text) == answer


def test_the_metrics_of_five_questions_by_hand():
    """Two tasks in one batch: each reward says None for questions of the other one, and its metrics
    leave them out. The accuracy alone says which groups are all right (with different rewards) or
    all wrong. Tokens of which the sampler does not say how likely they were do not count in the
    entropy."""
    no = math.nan
    first = [[1, no], [no, no], [3, 0], [0, -1], [0, -2]]
    second = [[0, 1], [2, 3], [no, no], [1, 1], [0, 1]]
    logp = torch.tensor([-1.0, no, -3.0, -5.0, no, -3.0, -3.0, -3.0, -3.0, -3.0])[:, None]
    rollout = a_rollout(
        torch.tensor([first, second]), logp=logp, texts=["\\boxed{1}", *"?" * 9])
    assert rollout.total.tolist() == [[1, 1], [2, 3], [3, 0], [1, 0], [0, -1]]
    metrics = step_metrics(rollout, rollout.total, torch.arange(10))
    expected = {
        "accuracy": 2 / 7, "answer_not_found": 6 / 7, "all_right": 1 / 4, "all_wrong": 2 / 4,
        "reward": 10 / 10, "reward/reward_0": 1 / 7, "reward/reward_1": 9 / 8,
        "frac_reward_zero_std": 1 / 5, "frac_reward_zero_std/reward_0": 0.0,
        "frac_reward_zero_std/reward_1": 1 / 4,
        "tokens_without_logp": 2, "entropy": 3.0, "kept_negative": 1 / 10,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    nobody = step_metrics(a_rollout(torch.tensor([[no, no]])), torch.zeros(1, 2), torch.arange(2))
    assert math.isnan(nobody["accuracy"]) and nobody["reward"] == 0
    separately = resolve("gdpo", group_size=2).advantages(rollout)
    assert separately.isfinite().all() and separately.any()
