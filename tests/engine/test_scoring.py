"""engine/scoring/score.py: rewards by name and weight, a user's own, and what happens when one
misbehaves."""

import math
import re
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from algorithms import resolve
from engine.base import files
from engine.base.errors import UserError
from engine.run.command_line import given
from engine.run.config import Config, config_of
from engine.run.interrupt import Interrupt
from engine.run.metrics import summarize
from engine.scoring.score import (
    Hung,
    accuracy_reward,
    limited,
    load_rewards,
    read,
    score,
)
from judges.mathematics import math_accuracy
from judges.programs import code_accuracy
from rewards import gsm8k_accuracy
from tests.engine.runs import ROOT
from tests.examples import named
from tests.training import a_rollout
from train import main

pytestmark = pytest.mark.usefixtures("undrawn")
MINE = """
from math import prod

def short(completions, **columns):
    return [-float(len(text)) for text in completions]

def picky(completions, **columns):
    return [1.0 if text.isdigit() else 1 / 0 for text in completions]

def nan(completions, **columns):
    return [2.0] * len(completions)

inf = nan
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
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
    ("gsm9k", "gsm9k"), ("format_reward:nan", "format_reward:nan"), (":2", "unknown reward ''"),
    ("none.py:f", "none.py"), ("mine.py", "mine.py:FUNCTION"),
    ("mine.py:long", "no function .long.: write mine.py:FUNCTION"),
    ("format_reward format_reward:2", "format_reward:2"), ("own.py:overlong", "overlong"),
    # files that cannot be imported
    ("missing.py:f", "missing.py.*nothing_of_that_name"),
    ("exits.py:f", "exits.py.*SystemExit: 3"),
    ("verl.py:f", r"must take \*\*columns"),
])
def test_a_reward_that_there_is_not_is_one_sentence(mine, words, named, monkeypatch):
    monkeypatch.chdir(Path(mine).parent)
    for name, code in {
        "own": "def overlong(completions, **columns): pass",
        "missing": "import nothing_of_that_name", "exits": "raise SystemExit(3)",
        "verl": "def f(data_source, solution_str, ground_truth): return 0.0",
    }.items():
        Path(f"{name}.py").write_text(code)
    with pytest.raises(UserError, match=f"^--rewards[^\n]*{named}[^\n]*$"):
        load_rewards(words.split())


def test_a_users_file_may_import_its_neighbours_and_hold_dataclasses(mine):
    Path(mine).with_name("neighbour.py").write_text("weight = 3.0\n")
    Path(mine).write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom neighbour "
        "import weight\n@dataclass\nclass A:\n    a: int\ndef f(completions, **columns):\n    "
        "return [weight] * len(completions)\n"
    )
    assert load_rewards([f"{mine}:f"])[0].function(["a", "b"]) == [3.0, 3.0]


def test_a_completion_is_judged_by_the_first_reward_unless_the_test_questions_need_another(
    tmp_path,
):
    chosen = load_rewards(["code_accuracy", "format_reward"])
    (tmp_path / "x.jsonl").write_text("")
    for eval_dataset in ("gsm8k_zh", "gsm8k", str(tmp_path / "x.jsonl")):
        assert accuracy_reward(chosen, "gsm8k_zh", eval_dataset) is code_accuracy
    assert accuracy_reward(chosen, "gsm8k", "math500") is math_accuracy
    assert accuracy_reward(chosen, "math", str(tmp_path / "x.jsonl")) is code_accuracy


@pytest.mark.parametrize(
    "recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_can_be_run(recipe):
    words = ["--recipe", str(recipe), "--plan"]  # a run asks the hub for its model
    assert config_of(given(Config, words))[1].k >= 1


# --- the values that they give ---


def judged(function, *texts, **columns):
    """(the values that this reward gives, on how many of the texts it fails)"""
    parts, failures = score(named(function), list(texts), columns)
    [values] = parts.values()
    assert values.dtype == torch.float32
    return values.tolist(), failures


@pytest.mark.parametrize("returned, words", [
    ([], "returned 0 values for 2"), ([1.0] * 3, "returned 3 values for 2"),
    (1.0, "failed on 2 of 2.*'float' .*completions, a list .* columns question, answer,.* return"),
    ([1.0, math.nan], "returned nan for the completion 'bcd'"),
    ([-math.inf, 1.0], "returned -inf for the completion 'a'"),
], ids=str)
def test_a_reward_that_does_not_return_one_number_for_each_is_named(returned, words):
    def odd(completions, **columns):
        return returned

    with pytest.raises(UserError, match=f"the reward odd {words}"):
        judged(odd, "a", "bcd", question=["1", "2"], answer=["3", "4"])


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_the_values_may_be_numpys_or_torchs(kind):
    assert judged(lambda completions, **columns: kind([0, 2]), "a", "bcd") == ([0.0, 2.0], 0)


def test_none_says_that_a_reward_does_not_apply():
    values, failures = judged(lambda completions, **columns: [None, 2.0], "a", "bcd")
    assert math.isnan(values[0]) and values[1] == 2 and failures == 0
    # it failed on all at once, and the second one alone does not apply
    values, failures = judged(
        lambda completions, **columns: [1 / (len(completions) == 1) and None], "a", "bcd")
    assert all(map(math.isnan, values)) and failures == 0


def test_a_reward_sees_all_columns_by_name_and_cannot_change_what_another_one_sees():
    """As TRL's trainers call it: the questions are the prompts, too."""
    def blanks(completions, level, cases, **columns):
        completions[:], level[:] = [""] * len(completions), [0] * len(level)
        cases[0]["in"] = cases[1]["in"] = 0
        return [0.0] * len(completions)

    def full(prompts, completions, level, cases, **columns):
        return [float(f"{p}{len(c)}{n}{case['in']}") for p, c, n, case in zip(
            prompts, completions, level, cases)]

    texts = ["a", "bcd"]
    columns = {"question": ["1", "2"], "level": [3, 4], "cases": [{"in": 5}, {"in": 6}]}
    parts, _ = score(named(blanks, full), texts, columns)
    assert [*parts] == ["blanks", "full"] and parts["full"].tolist() == [1135, 2346]
    # those of the data set
    assert texts == ["a", "bcd"] and columns["level"] == [3, 4]


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
    assert "the reward crashes failed" in capsys.readouterr().out
    # one completion that fails alone does not end the run
    assert judged(crashes, "crash") == ([0.0], 1)


def test_without_a_completion_no_reward_is_called(capsys):
    """A device without a question has no columns, either, and nothing failed there."""
    assert judged(lambda completions, *, answer: pytest.fail("it was called")) == ([], 0)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("option", [[], ["--check_rewards"]])
def test_it_is_told_before_anything_is_sampled(small, mine, option, tmp_path, monkeypatch):
    for place in ("train.examine", "train.sample_and_score"):
        monkeypatch.setattr(place, lambda *_, **__: pytest.fail("it came this far"))
    Path(mine).write_text("def f(completions, **columns): return [c[0]['content']]\n")
    with pytest.raises(UserError, match="the reward f failed on 5 of 5 "):
        go(small, tmp_path / "run", "--rewards", "toy_accuracy", f"{mine}:f", *option)


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


def sleeps(text):
    time.sleep(30)


def tries(text):
    while True:
        try:
            time.sleep(30)
        except Exception:
            pass


def ignores(text):
    for _ in range(2):
        try:
            time.sleep(30)
        except:  # noqa: E722
            pass


def stuck(hang):
    """A reward that hangs in its own way on texts that begin with x."""
    def slow(completions, **columns):
        return [hang(text) or 0.0 if text[0] == "x" else 1.0 for text in completions]

    return limited(slow, 0.2)


@pytest.mark.parametrize("hang", [sleeps, tries])
def test_completions_on_which_a_reward_hangs_get_the_lowest_value_and_it_says_so(hang, capsys):
    start = time.monotonic()
    handler = signal.getsignal(signal.SIGALRM)
    assert judged(stuck(hang), "a", "xx", "abc", "x") == ([1.0, 0.0, 1.0, 0.0], 2)
    assert time.monotonic() - start < 20 and "longer than 0.2 s" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGALRM) == handler
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_what_swallows_the_alarm_is_interrupted_again():
    start = time.monotonic()
    assert stuck(ignores)("x") == [0.0] and time.monotonic() - start < 20


def test_a_reward_that_hangs_on_three_completions_ends_the_run():
    with pytest.raises(UserError, match="slow failed on 3 of 4 .*longer than 0.2"):
        judged(stuck(sleeps), "a", *"x" * 255)


def test_a_signal_ends_a_reward_that_hangs_and_lets_another_one_finish(monkeypatch):
    monkeypatch.setattr("engine.run.interrupt.PATIENCE", 0.2)
    left = []

    def asked(completions, **columns):
        signal.raise_signal(signal.SIGTERM)
        left.append(signal.getitimer(signal.ITIMER_REAL)[0])
        return [tries(text) if text == "x" else 1.0 for text in completions]

    with Interrupt():
        assert judged(limited(asked, 3), "a") == ([1.0], 0)
        time.sleep(0.3)
    with Interrupt(), pytest.raises(KeyboardInterrupt):
        judged(limited(asked, 3), "x")
    assert max(left) <= 0.2
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
        limited(math_accuracy, 0.5)(["\\boxed{\\prod_{n=1}^{10^9} n}"], answer=["2\\sqrt{2}"])
    answers = ["\\boxed{3}", "\\boxed{4}", "\\boxed{5}"]
    assert math_accuracy(answers, ["6/2", "5", "10/2"]) == [1.0, 0.0, 1.0]


def test_an_interrupted_sandbox_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    answers = [f"```python\n{code}\n```" for code in ("while True: pass", "print(7)")]
    with pytest.raises(Hung):
        limited(code_accuracy, 0.7)(answers, answer=["7", "7"])
    assert list(tmp_path.iterdir()) == []
    assert code_accuracy(answers[1:], answer=["7"]) == [1.0]


# --- in a run ---


def go(small, folder, *words):
    usual = (
        f"--model {small} --output_dir {folder} --questions_per_step 2 --group_size 4 --steps 2 "
        "--eval_questions 4")
    return main([*usual.split(), *words])


def test_a_run_logs_each_reward_and_their_weighted_sum(small, tmp_path, mine, capsys):
    """And --check_rewards shows what the first step of the run sees."""
    weights = {"toy_accuracy": 2, "format_reward": 0.5, "short": 0.01, "nan": 0}
    rewards = f"toy_accuracy:2 format_reward:0.5 {mine}:short:0.01 {mine}:nan:0"
    words = f"--algorithm gdpo --rewards {rewards}".split()
    go(small, tmp_path / "run", *words)
    row, _ = files.read(tmp_path / "run/metrics.jsonl")
    total = sum(weight * row[f"reward/{name}"] for name, weight in weights.items())
    assert row["reward"] == pytest.approx(total, rel=1e-5)
    assert row["accuracy"] == row["reward/toy_accuracy"] and row["reward_failures"] == 0
    assert row["no_signal/nan"] == 1.0 and row["no_signal/short"] < 1  # it is always 2
    capsys.readouterr()
    go(small, tmp_path / "other", *words, "--check_rewards")
    expected = f"toy_accuracy, weight 2: mean {row['reward/toy_accuracy']:.3f}, "
    assert expected in capsys.readouterr().out


# --- --check_rewards ---


def test_check_rewards_shows_a_prompt_and_each_reward_and_trains_nothing(
    small, tmp_path, mine, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    words = f"--model {small} --group_size 4 --check_rewards --rewards toy_accuracy:2 {mine}:short "
    for more, shown in (
        ("", [
            "32 questions × 4 completions", "at most 48 tokens", "Nothing is trained",
            r"The first prompt", r"it:\n\d[\d+-]+=\?\n\(here the model goes on; right: '-?\d",
            "\n32 questions × 4 completions: ",  # those of a step
            "toy_accuracy, weight 2: mean 0.", "short, weight 1: mean -",
        ]),
        ("--questions_per_step 2 --algorithm grpo --max_new_tokens 1", [
            "2 questions × 4 completions: 1 tokens long, 100% cut off, 100% without an",
            "\nAnswers are cut off. Seen in 1 step: truncated 1; ",
        ]),
    ):
        main((words + more).split())
        said = capsys.readouterr().out
        assert all(re.search(pattern, said) for pattern in shown), said
        assert ("Seen in 1 step" in said) == bool(more)
        of_completions = r"^toy_accuracy [01]  short -\d+  read: (?:None|'[^']*')  '"
        assert len(re.findall(of_completions, said, re.MULTILINE)) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]  # no run was begun


@pytest.mark.parametrize("reward, text, answer", [
    ("number_accuracy", "<think>7</think>it is 18.", "18"), ("number_accuracy", "<think>7", None),
    ("code_accuracy", "```python\nprint(18)\n```", "print(18)\n"),
    ("code_runs", "<answer>18</answer>", None),
    ("of_ones_own", "\\boxed{18}", "18"), ("of_ones_own", "18", None),
])  # fmt: skip
def test_an_answer_is_found_as_the_accuracy_reads_it(reward, text, answer):
    assert read(reward, text) == answer
    rollout = replace(a_rollout([[0.0, 0.0]]), texts=[text, "well"], reward_names=[reward])
    metrics = summarize(rollout, torch.zeros(1, 2), torch.arange(2))
    assert metrics["unreadable"] == (0.5 if answer else 1.0)


def test_the_metrics_of_four_questions_by_hand():
    """The accuracy alone says which groups are all right (with different rewards) or all wrong.
    Tokens of which the sampler does not say how likely they were do not count in the entropy."""
    accuracy = [[1, 2], [0, -1], [1, 0], [0, 0]]
    other = [[0, 1], [0, 0], [0, 1], [0, 1]]
    logp = torch.tensor([-1.0, math.nan, -3.0, -5.0, math.nan, -3.0, -3.0, -3.0])[:, None]
    rollout = a_rollout(torch.tensor([accuracy, other]).float(), logp=logp)
    metrics = summarize(rollout, rollout.total, torch.arange(8))
    assert (metrics["all_right"], metrics["all_wrong"]) == (1 / 4, 2 / 4)
    assert metrics["tokens_without_logp"] == 2 and metrics["entropy"] == 3.0


def test_where_a_reward_does_not_apply_its_metrics_leave_it_out():
    """Two tasks in one batch: each reward says None for the other one's questions."""
    no = math.nan
    first = [[1, 0], [no, no], [1, no], [no, no]]
    second = [[no, no], [2, 3], [no, no], [1, 1]]
    rollout = a_rollout(torch.tensor([first, second]), texts=["\\boxed{1}", *"?" * 7])
    assert rollout.total.tolist() == [[1, 0], [2, 3], [1, 0], [1, 1]]
    metrics = summarize(rollout, rollout.total, torch.arange(8))
    assert metrics["accuracy"] == metrics["unreadable"] == metrics["reward/reward_0"] == 2 / 3
    assert (metrics["all_right"], metrics["all_wrong"]) == (1 / 2, 0)
    assert metrics["reward"] == 9 / 8 and metrics["reward/reward_1"] == 7 / 4
    assert metrics["no_signal"] == 1 / 4 and metrics["no_signal/reward_1"] == 1 / 2
    nobody = summarize(a_rollout(torch.tensor([[no, no]])), torch.zeros(1, 2), torch.arange(2))
    assert math.isnan(nobody["accuracy"]) and nobody["reward"] == 0
    separately = resolve("gdpo", group_size=2).advantages(rollout)
    assert separately.isfinite().all() and separately.any()
