"""Why does my reward not rise? The doctor names the fault first, and what a person can change: in
the logs of made-up runs, and at the end of real ones."""

from itertools import zip_longest

import pytest

from engine.base import files
from engine.base.errors import UserError
from engine.report import findings
from tasks import toy
from tests.helpers.runs import run
from tools.doctor import main

# --- made-up runs ---

SAME = "frac_reward_zero_std"  # the rewards of a group are all the same


def logged(
    folder, steps=10, completions=("<answer>2</answer>",), paid=(), errors=(), options=(), **metrics
):
    """What the doctor says of a run in which nothing else is wrong. Its first reward is a; the gold
    answer is 2. paid, errors: of the completions: whether a paid, and why a program failed.
    metrics: {name: its value in all steps, or a list of its values}."""
    usual = {
        "accuracy": 0.5, "reward": 0.5, "reward/a": 0.5, SAME: 0.1, f"{SAME}/a": 0.1, "kl": 0.1,
        "approx_kl": 0.001, "lr": 1e-3,
    }
    lists = {
        name: value if isinstance(value, list) else [value] * steps
        for name, value in (usual | metrics).items()}
    rows = [{name: lists[name][i] for name in lists} for i in range(steps)]
    group = [{"completion": text, "correct": right, "error": error}
             for text, right, error in zip_longest(completions, paid, errors)]
    sample = {"answer": "2", "completions": group}
    files.write(folder / "samples.jsonl", files.as_lines([sample] * steps))
    files.write(folder / "metrics.jsonl", files.as_lines(rows))
    files.write(folder / "run.json", files.as_json(dict(options)))
    return findings.diagnosis(folder)[0]


def change(before, after):
    return [before] * 5 + [after] * 5


def once(value):
    """In the last step, and 0 before."""
    return [0.0] * 9 + [value]


def around(before, after):
    """The error of a mean of four such values is √(0.01 / 3), and twice that of the difference of
    two means is 0.163."""
    return [before - 0.1, before + 0.1] * 2 + [0.5] * 2 + [after - 0.1, after + 0.1] * 2


CUT = "Raise --max_new_tokens, or ask for short thoughts", "Answers are cut off."
LARGE = "Take a tenth of --lr", "The updates are too large."
STILL = "Raise --lr", "The updates hardly move the policy."
CLIP = "Raise --clip_low and --clip_high", "The clip takes the gradient away."
BELOW = "Correct advantages or rewards that favour wrong", "The run ends below its start:"
NO_ANSWER = "Show in --system_prompt a form that a reads", "In most completions no answer is found."
OTHER_GOLD = "Correct a, which may want another form", "The reward and the gold answer disagree on"
NUMPY = "ModuleNotFoundError: No module named 'numpy'"
FAIL = "Say in --system_prompt what a program may use", "30 of 40 completions are programs"
HARD = "Take easier questions", "The questions are too hard."
ALWAYS = "Take questions in between", "A question is always right or always wrong."
EASY = "Take harder questions, or correct a", "The questions are too easy."
AWAY = "Correct a reward or advantages that pay for long", "The length runs away."
SHORT = "Correct a reward or advantages that pay for short", "The length collapses."
ONE_SIGN = "Take --keep random or --keep unbiased", "The length collapses, and little that is kept"


def pruning(rate):
    return {"options": {"pruning_rate": rate}}


@pytest.mark.parametrize("said, name, healthy, faulty, more", [
    (("Correct the reward function that fails", "It raises"), "reward_failures",
     once(0.009), once(0.011), {}),
    (("Leave out the questions", "Verdicts of math_accuracy run out of time"), "verdict_timeouts",
     once(0.09), once(0.11), {}),
    (("Correct your function of the advantages", "Rewards differ"), SAME, 0.99, 1.0,
     {f"{SAME}/a": change(0.1, 1.0)}),
    (("Lower --lr, or look for NaN", "Updates are skipped"), "skipped_updates",
     once(0.19), once(0.21), {}),
    (("Let the function of --keep", "No completion is kept"), "kept", once(1), 0, {}),
    (LARGE, "approx_kl", once(0.09), once(0.11), {}),
    (LARGE, "kl", 39.0, 41.0, {"options": {"temperature": 0.5}}),
    (LARGE, "grad_norm", [1] * 9 + [99], [1] * 9 + [101], {}),
    (("Correct a sampler", "Sampler and trainer disagree"), "sampler_logp_diff",
     once(0.29), once(0.31), {}),
    (CUT, "truncated", 0.09, 0.11, {"accuracy": 0.4}),
    (NO_ANSWER, "answer_not_found", 0.49, 0.51, {"accuracy": 0.05}),
    # half of those that the reward or the gold answer calls right; √4 may be equal to 2
    (OTHER_GOLD, "paid", [True, False, False], [True, False, True],
     {"completions": ["<answer>2</answer>", "<answer>2.0</answer>", "<answer>3</answer>"]}),
    (OTHER_GOLD, "completions", ["<answer>√4</answer>"], ["<answer>3</answer>"], {"paid": [True]}),
    (FAIL, "errors", [NUMPY] * 2, [NUMPY, "timeout", NUMPY], {"completions": ["no"] * 4}),
    (HARD, f"{SAME}/a", 0.59, 0.61, {"accuracy": 0.09}),
    (ALWAYS, f"{SAME}/a", 0.59, 0.61, {"accuracy": 0.89}),
    (EASY, f"{SAME}/a", 0.59, 0.61, {"accuracy": [1.0, 0.82] * 2 + [0.85] * 6}),
    (AWAY, "truncated", change(0.0, 0.19), change(0.0, 0.21), {}),
    (SHORT, "length", change(9.0, 4.6), change(9.0, 4.4), {}),
    (SHORT, "length", change(9.0, 4.6), change(9.0, 4.4),
     {"options": {"pruning_rate": 0.75, "keep": "random"}, "kept_negative": 0.1}),
    (ONE_SIGN, "length", change(9.0, 7.3), change(9.0, 7.1),
     pruning(0.75) | {"kept_negative": 0.1}),
    (ONE_SIGN, "kept_negative", change(0.1, 0.32), change(0.4, 0.3),
     pruning(0.75) | {"length": change(9.0, 6.2)}),
    (CLIP, "clip_fraction", change(0.0, 0.28), change(0.0, 0.32), {}),
    (STILL, "lr", once(1.1e-4), once(9e-5), {}),  # all together move a weight by 1e-4
    (BELOW, "accuracy", around(0.5, 0.34), around(0.5, 0.33), {}),
])  # fmt: skip
def test_each_finding_from_both_sides_of_its_limit(said, name, healthy, faulty, more, tmp_path):
    assert not logged(tmp_path, **more | {name: healthy})
    what_to_change, what_is_wrong = said
    finding = logged(tmp_path, **more | {name: faulty})
    assert finding.startswith(what_to_change) and f". {what_is_wrong}" in finding, finding


def test_of_several_faults_the_cause_comes_first(tmp_path):
    """Each fault is mended, and the next one appears."""
    faults = {
        "reward_failures": (0.1, "It raises"), "verdict_timeouts": (0.1, "Verdicts"),
        "paid": ([False], OTHER_GOLD[1]),
        SAME: (1.0, "Rewards differ"), "skipped_updates": (0.1, "Updates are skipped"),
        "kept": (0, "No completion is kept"),
        "grad_norm": ([1] * 9 + [999], LARGE[1]), "sampler_logp_diff": (1.0, "Sampler and trainer"),
        "truncated": (change(0.2, 1.0), CUT[1]), "answer_not_found": (0.9, NO_ANSWER[1]),
        f"{SAME}/a": (0.9, HARD[1]), "length": (change(9.0, 1.0), SHORT[1]),
        "clip_fraction": (0.5, CLIP[1]), "lr": (0.0, STILL[1]),
        "accuracy": (change(0.09, 0.01), BELOW[1]),
    }  # fmt: skip
    metrics = {name: value for name, (value, _) in faults.items()}
    for name, (_, what_is_wrong) in faults.items():
        assert f". {what_is_wrong}" in logged(tmp_path, **metrics)
        del metrics[name]
    assert not logged(tmp_path, **metrics)


def test_what_it_says_of_a_fault_of_health_and_of_no_run(tmp_path, capsys):
    with pytest.raises(UserError, match="no run with at least one step"):
        main([str(tmp_path)])
    assert logged(tmp_path, truncated=change(0.0, 0.31), length=change(9, 1234.4)) == (
        f"{AWAY[0]} answers, or lower --lr. The length runs away. Seen in 10 steps: length 9 → "
        "1234 (at most 1234); truncated 0 → 0.31 (at most 0.31); for example '<answer>2</answer>'.")
    assert not logged(tmp_path, accuracy=change(0.0, 0.15), answer_not_found=0.9)
    main([str(tmp_path)])
    assert capsys.readouterr().out.startswith(
        "Nothing was found in 10 steps. Of the samples: accuracy 0 → 0.15")


# --- real runs ---


USUAL = "--dataset toy --questions_per_step 4 --group_size 8 --lr 3e-4 --minibatches 2 "
SHIFTED = """
from answers import extract_answer

def shifted(completions, answer, **columns):  # by one question of 8 completions
    pairs = zip(completions, answer[8:] + answer[:8])
    return [float(extract_answer(text) == gold) for text, gold in pairs]
"""


def test_a_reward_that_takes_the_answer_of_another_question_is_named_first(
    tmp_path, undrawn, capsys
):
    (tmp_path / "mine.py").write_text(SHIFTED)
    run(toy.BASE, tmp_path / "run", f"{USUAL} --rewards {tmp_path}/mine.py:shifted --steps 9 "
        "--eval_questions 0")
    assert capsys.readouterr().out.splitlines()[-1].startswith(
        OTHER_GOLD[0].replace("Correct a", "Correct shifted"))
    said, _, _ = findings.diagnosis(tmp_path / "run")
    assert "of 72 completions that were read" in said  # 9 groups of 8, each once


def test_a_run_that_learns_gets_no_finding(tmp_path, undrawn, capsys):
    run(toy.BASE, tmp_path, f"{USUAL} --algorithm grpo --steps 32")
    assert capsys.readouterr().out.endswith(f"doctor    python tools/doctor.py {tmp_path}\n")
    assert findings.diagnosis(tmp_path)[1]["accuracy"].rises
