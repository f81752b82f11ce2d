"""A first reward of the user's own that pays more than right and wrong: the run says so, and from
then on shows its mean."""

import re

import pytest

import eval as evaluation
from engine.report import findings
from engine.scoring.score import is_graded
from tests.helpers.runs import go_on, json_of, metrics_of, run
from tests.test_train import stop_after
from tools import compare

pytestmark = pytest.mark.usefixtures("undrawn")
OWN = '''
import os

def metrics(step):
    os.environ["STEP_OF_TEST"] = str(step.rollout.step + 1)
    return {}

def sign(completions, **columns):
    return [2 * (len(text) % 2) - 1 for text in completions]

def later(completions, **columns):
    graded = int(os.environ["STEP_OF_TEST"]) > 2
    return [0.3 if graded else len(text) % 2 for text in completions]

def length(completions, **columns):
    return [1 - len(text) / 200 for text in completions]
'''
WORDS = ("--questions_per_step 1 --group_size 4 --algorithm grpo --max_new_tokens 8 --lr 1e-3 "
         "--eval_questions 4 --steps 4 --save_every 1 --eval_every 2 --rewards ")


@pytest.fixture
def made(small, tmp_path, monkeypatch):
    """made(reward, folder="run") → the folder of a run with this reward."""
    own = tmp_path / "own.py"
    own.write_text(OWN)

    def make(reward, folder="run"):
        monkeypatch.setenv("STEP_OF_TEST", "1")
        name = reward if reward.endswith("_accuracy") else f"{own}:{reward}"
        run(small, tmp_path / folder, f"{WORDS}{name} --hooks {own}")
        return tmp_path / folder

    return make


@pytest.mark.parametrize("reward, first", [("sign", 9), ("gsm8k_accuracy", 9), ("length", 1)])
def test_the_column_is_the_accuracy_until_the_reward_grades(reward, first, made, capsys):
    """first: the step from which on nothing is called right; 9: it never comes."""
    folder = made(reward)
    printed = capsys.readouterr().out
    rows = metrics_of(folder)
    for name in ("accuracy", "all_right"):
        assert [row["step"] for row in rows if row[name] is not None] == [*range(1, min(first, 5))]
    summary = json_of(folder / "summary.json")
    name = "accuracy" if first == 9 else "reward"
    assert summary["after"]["measure"] == name
    assert name in summary["best"] and f"eval_{name}" in rows[-1]
    assert f"On 4 test questions: greedy {name} " in printed and f",\n  sampled {name} " in printed
    _, *since = printed.split("nothing is called right or wrong")
    assert len(since) == (name == "reward")
    assert not re.search("right|wrong|accuracy", "".join(since))


def test_best_begins_anew_and_a_resume_and_eval_know_it(made, tmp_path, monkeypatch, capsys):
    """The accuracy of step 2 is 1 at most, a mean reward of 0.3 is less: it counts all the same."""
    whole = made("later")
    assert (whole / "best").resolve().name == "checkpoint-000004"
    summary = json_of(whole / "summary.json")
    assert summary["best"] == {"step": 4, "reward": pytest.approx(0.3)}
    with pytest.MonkeyPatch.context() as stopping:
        stop_after(3, stopping)
        killed = made("later", "killed")
    monkeypatch.setenv("STEP_OF_TEST", "4")
    capsys.readouterr()
    go_on(killed)
    assert metrics_of(killed) == metrics_of(whole)
    printed = capsys.readouterr().out
    # run.json knows what was seen
    assert "nothing is called" not in printed and "  steps  reward" in printed
    assert findings.diagnosis(killed)[1]["accuracy"].count == 0

    monkeypatch.setenv("STEP_OF_TEST", "0")  # the values of this evaluation are 0 and 1
    words = f"--questions 6 --samples 2 --model {killed}"
    judged = f"{words} --judge {tmp_path}/own.py:later"
    evaluation.main(judged.split())
    shown = capsys.readouterr().out
    assert "reward, avg@2" in shown and not re.search("right|accuracy|maj", shown)
    scores = json_of(killed / "eval-toy.json")
    assert {*scores["sampled"]["intervals"]} == {"reward"} and 0 < scores["sampled"]["reward"] < 1
    evaluation.main(judged.split())  # from its file
    assert capsys.readouterr().out == shown
    evaluation.main(f"{words} --judge toy_accuracy --output_dir {tmp_path}/other".split())
    assert "the most likely answer is right" in capsys.readouterr().out
    monkeypatch.setenv("STEP_OF_TEST", "9")
    evaluation.main(f"{judged} --output_dir {tmp_path}/late".split())
    compare.main([f"{killed}/eval-toy.jsonl", f"{tmp_path}/late/eval-toy.jsonl"])
    said = capsys.readouterr().out
    assert "greedy reward " in said and " 0.3000 " in said


def test_a_reward_that_does_not_apply_grades_nothing():
    assert not is_graded(lambda completions: [], float("nan"))
