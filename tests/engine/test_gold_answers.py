"""engine/scoring/gold_answers.py: gold answers that nobody can win are named before the run."""

import pytest

from engine.scoring.gold_answers import reachable
from engine.scoring.score import REWARDS, Reward
from tests.helpers.runs import go_on, run, sums, written

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.mark.parametrize("name, answers, expected", [
    ("gsm8k_accuracy", "18 | Ann has 9. #### 18 | 1,234 | B | -3/4 | $5", True),
    ("gsm8k_accuracy", r"proof | so it is eight, which is 8 | \sqrt{2} | x + 1", False),
    ("number_accuracy", "7", True), ("number_accuracy", "seven", False),
    ("math_accuracy", r"\sqrt{2} | 18 | \frac{1}{2} | so \boxed 2 | x+1 | B", True),
    ("math_accuracy", "proof | Proof | notfound", False),
    # the number alone must win; but words that change it are no unit
    ("math_accuracy", r"6 \mathrm{~cm} | 6\text{ m}^2 | 5 \text{ or more} | 10\text{th}", True),
    ("math_accuracy", r"6 \mathrm{~xq} | 18\text{ noon}", False),
    ("toy_accuracy", "7 | x", True), ("code_accuracy", "7", True),
])  # fmt: skip
def test_which_gold_answers_can_be_won(name, answers, expected):
    rows = rows_of(answers.split(" | "))
    assert reachable(Reward(name, REWARDS[name]), rows) == [expected] * len(rows)


FORMS = ("<answer>{}</answer>", "#### {}", "is {}", "<ans>{}</ans>", "\nFINAL {}", "[[{}]]")


@pytest.mark.parametrize("low, high", [(0, 1), (-1, -0.5)])
@pytest.mark.parametrize("form", FORMS)
def test_no_good_gold_answer_is_accused_because_its_reward_wants_another_form(form, low, high):
    def mine(completions, answer, **columns):
        return [high if form.format(a) in c else low for c, a in zip(completions, answer)]

    # and a reward of one's own may have the name of another one
    for name in ("mine", "number_accuracy"):
        assert reachable(Reward(name, mine), rows_of([*range(8), "seven"])) == [True] * 9


def boxed_2(completions, answer, **columns):
    """None: it does not apply."""
    pairs = zip(completions, answer)
    return [None if gold == "x" else float("boxed{2}" in text) for text, gold in pairs]


@pytest.mark.parametrize("mine, golds, expected", [
    (boxed_2, ["2", "3", "x"], [True, False, True]),
    (lambda completions, **_: 1 / 0, ["2", "3"], [True, True]), (boxed_2, [], []),
])
def test_a_reward_of_ones_own_judges_both_forms_and_its_mistakes_are_told_elsewhere(
    mine, golds, expected
):
    assert reachable(Reward("mine", mine), rows_of(golds)) == expected


def rows_of(golds):
    return [{"question": "?", "answer": str(gold)} for gold in golds]


def test_a_run_says_so(small, tmp_path, capsys):
    rows = [*sums(4), *({"question": f"{i}+2=?", "answer": "none of 1, 2"} for i in range(4))]
    data = written(tmp_path / "x.jsonl", rows)
    run(small, tmp_path / "run", f"--dataset {data} --max_new_tokens 4 --steps 1 --group_size 4 "
        "--questions_per_step 4 --allocation false")
    said = "".join(capsys.readouterr())
    assert "1 of the 4 gold answers that were judged cannot be won" in said
    go_on(tmp_path / "run", "--steps 2")  # the second step asks the other questions
    assert "3 of the 4 gold answers that were judged" in "".join(capsys.readouterr())
