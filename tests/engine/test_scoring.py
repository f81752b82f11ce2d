"""engine/scoring/score.py: rewards by name and weight, a user's own, and what happens when one
misbehaves."""

import json
import re
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.base import progress
from engine.base.errors import UserError
from engine.model.loading import load_model
from engine.run import state
from engine.run.config import Config, check
from engine.run.options import parse
from engine.scoring import preview
from engine.scoring.mathematics import math_accuracy
from engine.scoring.programs import code_accuracy
from engine.scoring.score import REWARDS, Hung, choose, judge, limited, overshadowing, score
from engine.tasks.questions import load_questions
from engine.tasks.table import task_of
from records import weighted_sum
from rewards import gsm8k_accuracy
from tests.engine.test_reward_model import make as make_reward_model
from tests.examples import named
from train import main

ROOT = Path(__file__).parents[2]
MINE = """
from math import prod

def short(completions, **columns):
    return [-float(len(text)) for text in completions]

def picky(completions, **columns):
    return [1.0 if text.isdigit() else 1 / 0 for text in completions]
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    return str(tmp_path / "mine.py")


def test_rewards_are_named_with_or_without_a_weight(mine):
    chosen = choose(["gsm8k_accuracy", "format_reward:0.5", f"{mine}:short", f"{mine}:picky:-2e-1"])
    assert [(r.name, r.weight) for r in chosen] == [
        ("gsm8k_accuracy", 1.0), ("format_reward", 0.5), ("short", 1.0), ("picky", -0.2),
    ]
    assert chosen[0].function is gsm8k_accuracy and chosen[2].function(["abc"]) == [-3.0]


@pytest.mark.parametrize("word, message", [
    ("gsm9k", "unknown reward 'gsm9k': there are gsm8k_accuracy, "),
    ("re", "unknown reward 're'"),  # a name inside rewards.py that is no reward
    ("format_reward:nan", "the form is NAME or NAME:WEIGHT"),
    (":2", "the form is NAME or NAME:WEIGHT"),
    ("none.py:f", "the file none.py does not exist"),
    ("MINE:long", r"has no function 'long'. It has short, picky\.$"),
    ("MINE", r"^--rewards: name a function of the file, as MINE:FUNCTION. It has short, picky\.$"),
    ("MINE:0.5", r"^--rewards: name a function of the file, as MINE:FUNCTION. It has short, "
                 r"picky\.$"),
    ("RewardModel:", "unknown reward 'RewardModel:'"),
])
def test_a_reward_that_there_is_not_is_one_sentence(mine, word, message):
    with pytest.raises(UserError, match=message.replace("MINE", mine)):
        choose([word.replace("MINE", mine)])


@pytest.mark.parametrize("code, message", [
    ("import nothing_of_that_name", "ModuleNotFoundError: No module named 'nothing_of_that_name'"),
    ("def f(:", "SyntaxError"),
    ("raise SystemExit(3)", "SystemExit: 3"),
    ("import sys\nsys.exit(0)", "SystemExit: 0"),
])
def test_a_users_file_that_cannot_be_imported_shows_its_own_mistake_in_one_line(
    tmp_path, code, message
):
    (tmp_path / "own.py").write_text(code)
    with pytest.raises(UserError, match=f"own.py cannot be imported: {message}") as error:
        choose([f"{tmp_path / 'own.py'}:f"])
    assert "\n" not in str(error.value)


def test_a_users_file_may_import_its_neighbours_and_hold_dataclasses(tmp_path):
    (tmp_path / "neighbour.py").write_text("weight = 3.0\n")
    (tmp_path / "own.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom neighbour "
        "import weight\n@dataclass\nclass A:\n    a: int\ndef f(completions, **columns):\n    "
        "return [weight] * len(completions)\n"
    )
    assert choose([f"{tmp_path / 'own.py'}:f"])[0].function(["a", "b"]) == [3.0, 3.0]


def test_one_completion_that_fails_alone_does_not_end_the_run(mine):
    parts, failures = score(choose([f"{mine}:picky"]), ["x"], {})
    assert parts["picky"].tolist() == [0.0] and failures == 1


def test_a_reward_is_named_once():
    with pytest.raises(UserError, match="names format_reward twice"):
        choose(["format_reward", "format_reward:2"])


def test_the_rewards_of_a_data_set():
    assert (
        task_of("toy").rewards == ("toy_accuracy",)
        and task_of("math500").rewards[0] == "math_accuracy"
    )
    assert (
        task_of("gsm8k").rewards
        == task_of("my.jsonl").rewards
        == ("gsm8k_accuracy", "format_reward")
    )
    for given, chosen in [(None, ["toy_accuracy"]), (["toy_accuracy:2"], ["toy_accuracy:2"])]:
        c = Config(rewards=given)
        check(c)
        assert c.rewards == chosen


def test_a_completion_is_judged_by_the_first_reward_unless_the_test_questions_need_another(
    tmp_path,
):
    chosen = choose(["code_accuracy", "format_reward"])
    assert (
        judge(chosen, "gsm8k_zh", "gsm8k_zh") is judge(chosen, "gsm8k_zh", "gsm8k") is code_accuracy
    )
    assert judge(choose(["gsm8k_accuracy"]), "gsm8k", "math500") is math_accuracy
    (tmp_path / "x.jsonl").write_text("")
    assert judge(choose(["math_accuracy"]), "math", str(tmp_path / "x.jsonl")) is math_accuracy


def test_a_reward_model_by_name(tmp_path):
    folder = make_reward_model(tmp_path / "judge")
    (chosen,) = choose([f"RewardModel:{folder}:0.5"], torch.device("cpu"))
    assert (chosen.name, chosen.weight) == ("judge", 0.5)
    parts, _ = score([chosen], ["3", "4"], {"question": ["1+2=?", "1+2=?"]})
    assert len(set(parts["judge"].tolist())) == 2
    assert choose([f"RewardModel:{folder}"])[0].function is None  # before any work it is only named
    for name, message in [
        ("./nowhere", "nowhere does not exist"),
        (make_reward_model(tmp_path / "two", labels=2), "has 2 labels"),
    ]:
        with pytest.raises(UserError, match=message) as error:
            choose([f"RewardModel:{name}"], torch.device("cpu"))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_can_be_run(recipe):
    c = parse(Config, ["--recipe", str(recipe), "--plan"])  # a run asks the hub for its model
    assert check(c).k >= 1


def length(completions, **columns):
    return [len(completion) for completion in completions]


def bonus(completions, level, **columns):
    return [0.5 * n for n in level]


def test_every_reward_judges_every_completion_from_its_columns():
    parts, failures = score(
        named(length, bonus), ["a", "bcd"], {"level": [1, 3], "answer": ["x", "y"]}
    )
    assert list(parts) == ["length", "bonus"] and failures == 0
    assert all(values.dtype == torch.float32 for values in parts.values())
    assert parts["length"].tolist() == [1.0, 3.0] and parts["bonus"].tolist() == [0.5, 1.5]
    assert {
        name: len(values) for name, values in score(named(length, bonus), [], {})[0].items()
    } == {"length": 0, "bonus": 0}


@pytest.mark.parametrize("level", [[], [1], [1, 2, 3]])
def test_a_reward_that_returns_another_number_of_values_is_named(level):
    with pytest.raises(UserError, match=f"bonus returned {len(level)} values for 2 completions"):
        score(named(length, bonus), ["a", "bcd"], {"level": level})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_reward_that_is_not_finite_is_named_with_its_completion(value):
    with pytest.raises(
        UserError, match=rf"bonus returned {value} \(float\) for the completion 'bcd'"
    ):
        score(named(length, bonus), ["a", "bcd"], {"level": [1, value]})


async def asks(completions, **columns):
    return [1.0, 2.0]


@pytest.mark.parametrize("returned, message", [
    (None, "odd returned NoneType: it must return a list of numbers, and it has no `return`."),
    (asks([]), "odd returned coroutine: it must return a list of numbers, so write `def` in place "
               "of `async def`."),
    ((x for x in [1.0, 2.0]), "odd returned generator: it must return a list of numbers, so write "
                              "`return` in place of `yield`."),
    ({"a": 1.0}, "odd returned dict: it must return a list of numbers."),
    (1.0, "odd returned float: it must return a list of numbers."),
    ([1.0, None], "odd returned None (NoneType) for the completion 'bcd': it must be a finite "
                  "number."),
    ([1.0, "1.0"], "odd returned '1.0' (str) for the completion 'bcd': it must be a finite number."),
    (torch.ones(2, 1), "odd returned [1.0] (list) for the completion 'a': it must be a finite "
                       "number."),
], ids=lambda x: type(x).__name__)  # fmt: skip
@pytest.mark.filterwarnings("ignore:coroutine")
def test_a_reward_that_returns_something_else_is_named_with_the_type_and_the_cure(
    returned, message
):
    with pytest.raises(UserError) as error:
        score(named(odd(returned)), ["a", "bcd"], {})
    assert str(error.value) == f"the reward {message}"


def odd(returned):
    def odd(completions, **columns):
        return returned

    return odd


@pytest.mark.parametrize("returned", [
    [np.float32(1), np.int64(2)], [np.bool_(True), torch.tensor(2)], [torch.tensor(1.0), 2], np.array([1, 2]), torch.tensor([1.0, 2.0]),
], ids=str)  # fmt: skip
def test_the_values_may_be_numpys_or_torchs(returned):
    assert score(named(odd(returned)), ["a", "bcd"], {})[0]["odd"].tolist() == [1.0, 2.0]


def test_a_completion_on_which_a_reward_fails_gets_its_lowest_value_and_it_says_so(mine, capsys):
    parts, failures = score(
        choose([f"{mine}:picky"]), ["1", "x", "22", "y"], {"answer": list("abcd")}
    )
    assert parts["picky"].tolist() == [1.0, 0.0, 1.0, 0.0] and failures == 2
    said = capsys.readouterr().out
    assert (
        "picky failed on 2 of 4 completions, which get the lowest value, 0: ZeroDivisionError: "
        "division by zero"
        in said
    )


@pytest.mark.parametrize("values, lowest", [([1.0, -0.5, -2.0], -2.0), ([1.0, 0.5, 2.0], 0.0), ([-1.0, -3.0, -2.0], -3.0)])
def test_to_crash_the_judge_pays_no_more_than_a_wrong_answer(values, lowest):
    """And it is never a right one: that is a value above 0."""
    def judge(completions, **columns):
        return [values[int(text)] for text in completions]

    assert score(named(judge), ["0", "crash", "1", "2"], {})[0]["judge"].tolist() == [
        values[0], lowest,
        *values[1:],
    ]


def test_sys_exit_in_a_reward_is_an_error_of_the_reward(capsys):
    def leaves(completions, **columns):
        return [len(text) if text != "x" else sys.exit(0) for text in completions]

    parts, failures = score(named(leaves), ["x", "ab"], {})
    assert parts["leaves"].tolist() == [0.0, 2.0] and failures == 1
    assert (
        "leaves failed on 1 of 2 completions, which get the lowest value, 0: SystemExit: 0"
        in capsys.readouterr().out
    )
    with pytest.raises(
        UserError, match="the reward leaves failed on all 2 completions: SystemExit: 0"
    ):
        score(named(leaves), ["x", "x"], {})


def test_a_reward_cannot_change_what_another_one_sees():
    def blanks(completions, level, cases, **columns):
        completions[:], level[:] = [""] * len(completions), [0] * len(level)
        cases[0]["in"] = cases[1]["in"] = None
        return [0.0] * len(level)

    def full(completions, level, cases, **columns):
        return [len(text) + n + case["in"] for text, n, case in zip(completions, level, cases)]

    texts, columns = ["a", "bcd"], {"level": [10, 20], "cases": [{"in": 100}, {"in": 200}]}
    assert score(named(blanks, full), texts, columns)[0]["full"].tolist() == [111.0, 223.0]
    # those of the data set
    assert texts == ["a", "bcd"] and columns == {
        "level": [10, 20], "cases": [{"in": 100}, {"in": 200}],
    }


def test_a_reward_that_raises_on_all_of_them_ends_the_run(mine):
    with pytest.raises(UserError, match="picky failed on all 2 completions: ZeroDivisionError"):
        score(choose([f"{mine}:picky"]), ["x", "y"], {})


@pytest.mark.parametrize("function, error", [
    (lambda completions, level, **columns: [0.0], "TypeError: .* missing 1 required positional "
                                                  "argument: 'level'"),
    (lambda completions, **columns: [columns["level"][0]], "KeyError: 'level'"),
    (lambda completions, answer: [0.0], "TypeError: .* got an unexpected keyword argument "
                                        "'question'"),
])  # fmt: skip
def test_a_reward_that_misses_a_column_is_told_which_there_are(function, error):
    function.__name__ = "mine"
    cure = r"\. It is called with completions and the columns question, answer, by name\.$"
    with pytest.raises(
        UserError, match=f"the reward mine failed on all 2 completions: {error}{cure}"
    ):
        score(named(function), ["x", "y"], {"question": ["a", "b"], "answer": ["1", "2"]})


def loops(text):
    while True:
        pass


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


def backtracks(text):
    return re.fullmatch("(a+)+b", "a" * 40)


def stuck(hang, on="x"):
    """A reward that hangs in its own way on texts that begin with `on`."""
    def slow(completions, **columns):
        return [
            float(len(text)) if not text.startswith(on) else hang(text) or 0.0
            for text in completions
        ]

    return limited(slow, 0.2)


@pytest.mark.parametrize("hang", [loops, tries, backtracks, lambda text: time.sleep(30)])
def test_completions_on_which_a_reward_hangs_get_the_lowest_value_and_it_says_so(hang, capsys):
    start = time.monotonic()
    parts, failures = score(named(stuck(hang)), ["a", "xx", "abc", "x"], {})
    assert (
        parts["slow"].tolist() == [1.0, 0.0, 3.0, 0.0]
        and failures == 2
        and time.monotonic() - start < 3
    )
    said = capsys.readouterr().out
    assert "slow took longer than 0.2 s for 4 completions and is called for each by itself" in said
    assert (
        "slow failed on 2 of 4 completions, which get the lowest value, 0: Hung: it took longer "
        "than 0.2 s"
        in said
    )


def test_what_swallows_the_alarm_is_interrupted_again():
    start = time.monotonic()
    assert stuck(ignores)(["x"]) == [0.0] and time.monotonic() - start < 5


def test_a_reward_that_is_too_slow_for_all_at_once_judges_them_one_by_one(capsys):
    def slow(completions, **columns):
        time.sleep(0.1 * len(completions))
        return [1.0] * len(completions)

    parts, failures = score(named(limited(slow, 0.25)), list("abcd"), {})
    assert (
        parts["slow"].tolist() == [1.0] * 4
        and failures == 0
        and "raise --reward_timeout" in capsys.readouterr().out
    )


@pytest.mark.parametrize("patience, calls", [(0, 3), (1, 5)])
def test_a_reward_that_always_hangs_ends_the_run_soon(monkeypatch, patience, calls):
    monkeypatch.setattr("engine.scoring.score.PATIENCE", patience)
    with pytest.raises(
        UserError, match=f"slow took longer than 0.2 s on {calls} of {calls + 1} completions"
    ) as error:
        score(named(stuck(lambda text: time.sleep(30))), ["a", *["x"] * 255], {})
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="slow failed on all 2 completions: Hung"):
        score(named(stuck(loops)), ["x", "x"], {})


def test_an_earlier_alarm_and_its_handler_are_put_back():
    rung = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(time.monotonic()))
    start = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.6, 50)
        assert stuck(loops)(["a"]) == [1.0]
        with pytest.raises(Hung):
            stuck(loops)(["x"])
        left, interval = signal.getitimer(signal.ITIMER_REAL)
        assert 0.2 < left < 0.45 and interval == 50
        time.sleep(0.5)
        assert len(rung) == 1 and 0.55 < rung[0] - start < 0.75
        # falls due while the reward runs: late, and not lost
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(Hung):
            stuck(loops)(["x"])
        time.sleep(0.01)
        assert len(rung) == 2
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    stuck(loops)(["a"])
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_outside_the_main_thread_and_with_0_there_is_no_limit():
    def nap(completions, **columns):
        time.sleep(0.2)
        return [1.0]

    values = []
    thread = threading.Thread(target=lambda: values.extend(limited(nap, 0.05)(["a"])))
    thread.start()
    thread.join()
    assert values == limited(nap, 0)(["a"]) == [1.0]


def test_only_a_users_own_function_is_limited(mine):
    for reward in choose(["math_accuracy", "code_accuracy"], timeout=0.001):
        assert reward.function is REWARDS[reward.name]
    Path(mine).write_text("import time\ndef nap(completions, **columns):\n    time.sleep(5)\n")
    with pytest.raises(Hung, match="longer than 0.1 s"):
        choose([f"{mine}:nap"], timeout=0.1)[0].function(["a"])
    with pytest.raises(UserError, match="--reward_timeout must be at least 0"):
        check(Config(reward_timeout=-1))


def test_an_interrupted_judge_of_mathematics_does_not_answer_the_next_question():
    assert math_accuracy(["\\boxed{2}"], ["4/2"]) == [1.0]  # it has started
    with pytest.raises(Hung):
        limited(math_accuracy, 0.5)(["\\boxed{\\prod_{n=1}^{10^9} n}"], answer=["2\\sqrt{2}"])
    assert math_accuracy(["\\boxed{3}", "\\boxed{4}", "\\boxed{5}"], ["6/2", "5", "10/2"]) == [
        1.0, 0.0, 1.0,
    ]


def test_an_interrupted_sandbox_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    answers = [f"```python\n{code}\n```" for code in ("while True: pass", "print(7)")]
    with pytest.raises(Hung):
        limited(code_accuracy, 0.7)(answers, answer=["7", "7"])
    assert list(tmp_path.iterdir()) == []
    assert code_accuracy(answers[1:], answer=["7"]) == [1.0]


def test_weights_count_in_the_sum():
    parts = torch.tensor([[[1.0, 0.0]], [[2.0, 3.0]]])
    assert weighted_sum(parts, [1.0, 0.5]).tolist() == [[2.0, 1.5]] and weighted_sum(
        parts, [1.0, 1.0]
    ).tolist() == [[3.0, 3.0]]


def go(small, folder, *words):
    return main(
        [
            "--model", small, "--output_dir", str(folder), "--questions_per_step", "2",
            "--group_size", "4", "--steps", "2", "--eval_questions", "4",
            *words,
        ]
    )


def test_a_run_logs_each_reward_by_itself_and_their_weighted_sum_and_resumes_with_them(
    small, tmp_path, mine
):
    go(
        small, tmp_path / "run", "--rewards", "toy_accuracy:2", "format_reward:0.5",
        f"{mine}:short:0.01", "--algorithm", "gdpo",
    )
    assert json.loads((tmp_path / "run/run.json").read_text())["rewards"][1] == "format_reward:0.5"
    go(small, tmp_path / "run", "--resume", "--steps", "3")
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    for row in rows:
        parts = [row[f"reward/{name}"] for name in ("toy_accuracy", "format_reward", "short")]
        assert row["reward"] == pytest.approx(
            2 * parts[0] + 0.5 * parts[1] + 0.01 * parts[2], rel=1e-5
        )
        assert row["accuracy"] == parts[0] and row["reward_failures"] == 0


def test_a_recipe_may_name_several_rewards(tmp_path):
    (tmp_path / "recipe.yaml").write_text("rewards: [toy_accuracy, 'format_reward:0.5']\n")
    assert parse(Config, ["--recipe", str(tmp_path / "recipe.yaml")]).rewards == [
        "toy_accuracy", "format_reward:0.5",
    ]


def test_check_rewards_shows_a_prompt_and_each_reward_and_trains_nothing(
    small, tmp_path, mine, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    words = [
        "--model", small, "--group_size", "4", "--check_rewards", "--rewards", "toy_accuracy:2",
        f"{mine}:short",
    ]
    assert main(words) is None
    said = capsys.readouterr().out
    assert (
        "4 questions × 4 completions, at most 48 tokens each:\n16 completions of 4 questions"
        in said
    )
    assert "toy_accuracy, weight 2: mean 0." in said and "short, weight 1: mean -" in said
    assert (
        said.count("  best, ") == said.count("  worst, ") >= 1
        and said.count("  all, ") <= 1
        and "gold answer" in said
    )
    conclusion = r"\n\nConclusion: the completions of a question differ by toy_accuracy in \d of 4, short in \d of 4 questions\. "
    assert re.search(conclusion, said)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]  # no run was begun
    main([*words, "--questions_per_step", "2", "--max_new_tokens", "5"])
    assert (
        "2 questions × 4 completions, at most 5 tokens each:\n8 completions of 2 questions"
        in capsys.readouterr().out
    )


def test_check_rewards_shows_one_whole_prompt_as_the_model_sees_it(small, capsys):
    main(
        [
            "--model", small, "--group_size", "4", "--check_rewards", "--questions_per_step", "1",
            "--max_new_tokens", "2",
        ]
    )
    tokenizer = load_model(small, torch.device("cpu"))[1]
    (question, *_), _ = load_questions("toy", tokenizer, limit=1)
    whole = tokenizer.decode(question["prompt"])
    assert question["question"] in whole
    assert (
        f"The first prompt, as the model sees it:\n{whole}\n(here the model goes on)"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("rewards, golds, warned", [
    (["number_accuracy"], ["12", "twelve", "#### 7", "x > 3"], "2 of 4 gold answers are no "
                                                               "numbers, for example 'twelve', and "
                                                               "number_"),
    (["format_reward", "gsm8k_accuracy"], ["18", "$1,800", "a"], "1 of 3 gold answers are no "
                                                                 "numbers, for example 'a', and "
                                                                 "gsm8k_"),
    (["number_accuracy"], ["12", "1/2", "so 3\n#### -3"], None), (["toy_accuracy"], ["twelve"], None),
])  # fmt: skip
def test_check_rewards_warns_of_gold_answers_that_are_no_numbers(rewards, golds, warned, capsys):
    preview.warn_of_gold(choose(rewards), [{"answer": gold} for gold in golds])
    said = capsys.readouterr().out
    assert f"warning: {warned}accuracy wants numbers: " in said if warned else said == ""


def test_check_rewards_says_now_and_then_what_it_does(small, capsys, monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 1e-9)
    main(["--model", small, "--group_size", "4", "--check_rewards", "--questions_per_step", "1", "--max_new_tokens", "2"])
    assert "sampling 1 of 2 tokens" in capsys.readouterr().out


def test_check_rewards_shows_no_example_twice(small, capsys, monkeypatch):
    """Of three completions of a question, with two rewards that agree and one that is equal for
    all."""
    monkeypatch.setattr(
        preview, "choose",
        lambda *_: named(
            renamed("one", lambda i, text: i == 0), renamed("two", lambda i, text: i == 0),
            renamed("same", lambda i, text: 0),
        ),
    )
    monkeypatch.setattr(
        preview, "load_questions",
        lambda *_, **__: ([{"question": "1+1=?", "answer": "2", "prompt": [3]}], []),
    )
    main(["--model", small, "--algorithm", "grpo", "--group_size", "3", "--check_rewards"])
    said = capsys.readouterr().out.splitlines()
    shown = [
        line[:12].split(":")[0].strip() + " above" * line.endswith("shown above")
        for line in said
        if line.startswith("  ")
    ]
    labels = [label for label in shown if ", " in label]
    assert labels[:3] + labels[4:] == ["best, 1", "worst, 0", "best, 1 above", "all, 0 above"]
    examples = [line for line in said if line.startswith("    ")]
    assert len(examples) == len(set(examples)) >= 2


def renamed(name, value):
    def reward(completions, **columns):
        return [float(value(i, text)) for i, text in enumerate(completions)]

    reward.__name__ = name
    return reward


CUT_HERE = "of the completions were cut off at 48 tokens, the limit of this look on a CPU: add --max_new_tokens 1024 to see"


@pytest.mark.parametrize("groups, cut, longest, words", [
    ([[0, 1], [1, 1]], [0, 0, 0, 0], 1024, "differ by right in 1 of 2 questions. Training learns "
                                           "from such differences."),
    ([[0, 1], [1, 1]], [1, 0, 0, 0], 1024, "such differences. 25% of the completions were cut off: "
                                           "raise --max_new_tokens (now 1024)."),
    ([[0, 1], [1, 1]], [1, 0, 0, 0], 48, f"such differences. 25% {CUT_HERE}"),
    ([[0, 0], [0, 0]], [0, 0, 0, 0], 1024, "would make no update (only PPO would). No completion "
                                           "is right: read the examples"),
    ([[0, 0], [0, 0]], [1, 1, 1, 0], 1024, "make no update (only PPO would). 75% of the "
                                           "completions were cut off: raise --max_new_tokens"),
    ([[0, 0], [0, 0]], [1, 1, 1, 0], 48, f"make no update (only PPO would). 75% {CUT_HERE}"),
    ([[1, 1], [1, 1]], [0, 0, 0, 0], 1024, "make no update (only PPO would). Every completion is "
                                           "right: take harder questions."),
])  # fmt: skip
def test_check_rewards_draws_the_conclusion(groups, cut, longest, words):
    groups = torch.tensor(groups).float()
    assert words in preview.conclusion(
        {"right": groups}, groups, torch.tensor(cut).bool(), longest, 1024
    )


def test_check_rewards_speaks_for_each_reward():
    """1 of 128 answers is right, and their lengths differ: every sum differs, and yet training
    would learn brevity."""
    right, brevity = torch.zeros(8, 16), torch.rand(8, 16)
    right[3, 5] = 1.0

    def said(right):
        return preview.conclusion(
            {"right": right, "brevity": brevity}, right + 0.1 * brevity, torch.zeros(128), 9, 9
        )

    assert (
        "differ by right in 1 of 8, brevity in 8 of 8 questions. Training would learn brevity and "
        "hardly right: "
        in said(right)
    )
    right[:2, 0] = 1.0
    assert said(right).endswith(
        "differ by right in 3 of 8, brevity in 8 of 8 questions. Training learns from such "
        "differences."
    )


@pytest.mark.parametrize("differ, other", [
    ({"right": 0, "form": 1, "brevity": 3}, "brevity"), ({"right": 1, "brevity": 4}, None), ({"right": 1, "brevity": 5}, "brevity"),
    ({"right": 0}, None), ({"right": 0, "brevity": 0}, None), ({"right": 0.1, "brevity": 1.0}, "brevity"),
])  # fmt: skip
def test_another_reward_overshadows_the_first_if_it_differs_in_over_four_times_as_many_groups(
    differ, other
):
    assert overshadowing(differ) == other


def test_a_run_that_learns_another_reward_than_its_first_says_so_once(
    small, tmp_path, mine, monkeypatch, capsys
):
    monkeypatch.setattr(state, "SIGNAL_STEPS", 2)
    Path(mine).write_text(
        "def never(completions, **columns):\n    return [0.0] * len(completions)\n" + MINE
    )
    warning = r"warning: in the last 2 steps never differed in 0% of the groups, and short in \d+%: the run learns short, even"
    go(small, tmp_path / "a", "--rewards", f"{mine}:never", f"{mine}:short:0.1", "--steps", "4")
    assert len(re.findall(warning, capsys.readouterr().out)) == 1
    rows = [json.loads(line) for line in (tmp_path / "a/metrics.jsonl").read_text().splitlines()]
    assert [row["no_signal/never"] for row in rows] == [1.0] * 4 and all(
        row["no_signal/short"] < 0.5 for row in rows
    )
    for name, rewards in [("b", [f"{mine}:short", f"{mine}:never"]), ("c", [f"{mine}:never"])]:
        go(small, tmp_path / name, "--rewards", *rewards, "--steps", "2")
        assert "warning" not in capsys.readouterr().out
