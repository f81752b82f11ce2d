"""engine/scoring/gold_answers.py: gold answers that nobody can win are named before the run."""

import pytest

import engine.scoring.gold_answers as module
from answers import last_number
from engine.data.questions import Questions
from engine.scoring.gold_answers import notes_on_gold_answers, winnable
from engine.scoring.score import REWARDS, Reward
from experiments.library.toy_model import make_tokenizer
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
    assert winnable(Reward(name, REWARDS[name]), rows) == [expected] * len(rows)


def test_a_reward_of_ones_own_may_be_slow_so_it_judges_few_gold_answers(monkeypatch):
    monkeypatch.setattr(module, "BY_OWN", 2)
    asked = []

    def mine(completions, answer, **columns):
        asked.extend(answer)
        return [1.0] * len(completions)

    module.notes_on_lost(Reward("mine", mine), rows_of(range(9)))
    assert {*asked} == {"0", "1"}
    ours = Reward("toy_accuracy", REWARDS["toy_accuracy"])  # it judges all
    [note] = module.notes_on_lost(ours, rows_of([*range(9), "proof"]))
    assert "1 of the 10 gold answers" in note


FORMS = ("<answer>{}</answer>", "#### {}", "is {}", "<ans>{}</ans>", "\nFINAL {}", "[[{}]]")


@pytest.mark.parametrize("low, high", [(0, 1), (-1, -0.5)])
@pytest.mark.parametrize("form", FORMS)
def test_no_good_gold_answer_is_accused_because_its_reward_wants_another_form(form, low, high):
    def mine(completions, answer, **columns):
        return [high if form.format(a) in c else low for c, a in zip(completions, answer)]

    # and a reward of one's own may have the name of another one
    for name in ("mine", "number_accuracy"):
        assert winnable(Reward(name, mine), rows_of([*range(8), "seven"])) == [True] * 9


def boxed_2(completions, answer, **columns):
    """None: it does not apply."""
    pairs = zip(completions, answer)
    return [None if gold == "x" else float("boxed{2}" in text) for text, gold in pairs]


def minus_error(completions, answer, **columns):
    pairs = zip(completions, answer)
    return [-abs(float(last_number(text) or 100) - float(gold)) for text, gold in pairs]


@pytest.mark.parametrize("mine, golds, expected", [
    (boxed_2, ["2", "3", "x"], [True, False, True]),
    (lambda completions, **_: 1 / 0, ["2", "3"], [True, True]), (boxed_2, [], []),
    # no form of 1e9 is paid more than no answer
    (minus_error, ["2", "3", "1e9"], [True, True, False]),
])
def test_a_reward_of_ones_own_judges_both_forms_and_its_mistakes_are_told_elsewhere(
    mine, golds, expected
):
    assert winnable(Reward("mine", mine), rows_of(golds)) == expected


def rows_of(golds):
    return [{"question": "?", "answer": str(gold)} for gold in golds]


def test_the_first_three_are_named_with_their_questions_and_the_others_are_counted(monkeypatch):
    answers = "1,a b,2,c d,e f,g h,i j,3".split(",")
    rows = [{"question": f"{i}", "answer": answer} for i, answer in enumerate(answers)]

    def notes(*numbers):
        reward = Reward("gsm8k_accuracy", REWARDS["gsm8k_accuracy"])
        return notes_on_gold_answers([reward], Questions(rows, "toy", make_tokenizer()), numbers)

    [note] = notes(5, 0, 1, 2, 3, 4)
    assert note.startswith("4 of the 6 gold answers that were judged cannot be won with gsm8k_acc")
    assert "'5': 'g h', '1': 'a b', '3': 'c d')" in note and "'e f'" not in note
    monkeypatch.setattr(module, "LOOKED_AT", 3)
    [note] = notes(1, 0, 2, 3, 4)
    assert note.startswith("1 of the 3 ")
    assert notes(0, 2, 7) == []


@pytest.mark.parametrize("option", ["", "--check_rewards"])
def test_a_run_and_its_preview_say_so(small, tmp_path, capsys, option):
    rows = [*sums(4), *({"question": f"{i}+2=?", "answer": "none of 1, 2"} for i in range(4))]
    data = written(tmp_path / "x.jsonl", rows)
    run(small, tmp_path / "run", f"--dataset {data} --max_new_tokens 4 --steps 1 --group_size 4 "
        f"--questions_per_step 4 --allocation false {option}")
    printed = "".join(capsys.readouterr())
    assert "1 of the 4 gold answers that were judged cannot be won" in printed
    assert ("read: " in printed) == bool(option)
    if not option:  # the second step asks the other questions
        go_on(tmp_path / "run", "--steps 2")
        assert "3 of the 4 gold answers that were judged" in "".join(capsys.readouterr())
