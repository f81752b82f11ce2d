"""engine/scoring/golds.py: gold answers that nobody can win are named before the run."""

import pytest

import engine.scoring.golds as golds_module
from engine.base import files
from engine.scoring.golds import Golds, winnable
from engine.scoring.score import REWARDS, Reward
from train import main


def won(name, *golds):
    return winnable(Reward(name, REWARDS[name]), [{"question": "?", "answer": g} for g in golds])


@pytest.mark.parametrize("name, golds, expected", [
    ("gsm8k_accuracy", ["18", "Ann has 9. #### 18", "1,234", "B", "-3/4", "$5"], True),
    ("gsm8k_accuracy", ["proof", "so it is eight, which is 8", "\\sqrt{2}", "x + 1"], False),
    ("number_accuracy", ["7"], True), ("number_accuracy", ["seven"], False),
    ("math_accuracy", ["\\sqrt{2}", "18", "\\frac{1}{2}", "so \\boxed 2", "x+1", "B"], True),
    ("math_accuracy", ["proof", "Proof", "notfound"], False),
    ("toy_accuracy", ["7", "x"], True), ("code_accuracy", ["7"], True),
])  # fmt: skip
def test_which_gold_answers_can_be_won(name, golds, expected):
    assert won(name, *golds) == [expected] * len(golds)


def test_a_reward_of_ones_own_judges_both_forms_and_its_mistakes_are_told_elsewhere():
    rows = [{"question": "?", "answer": gold} for gold in ("2", "3")]
    boxed = Reward("mine", lambda completions, **_: [float("boxed{2}" in c) for c in completions])
    assert winnable(boxed, rows) == [True, False]
    for fault in (lambda completions, **_: 1 / 0, lambda completions, **_: [float("nan")] * 2):
        broken = Reward("mine", fault)
        assert winnable(broken, rows) == [True, True]
        assert winnable(broken, []) == []


def test_the_first_three_are_named_with_their_rows_and_each_is_judged_once(capsys):
    answers = ("1", "a b", "2", "c d", "e f", "g h")
    rows = {number: {"question": "?", "answer": answers[number]} for number in (5, 0, 1, 2, 3, 4)}
    golds = Golds(Reward("gsm8k_accuracy", REWARDS["gsm8k_accuracy"]))
    [note] = golds.note(rows, "the first 6 gold answers")
    assert note.startswith("4 of the first 6 gold answers cannot be won with gsm8k_accuracy")
    assert "row 6: 'g h', row 2: 'a b', row 4: 'c d')" in note and "'e f'" not in note
    assert golds.note(rows, "the same") == []
    # in a step: those that were told before are only counted
    more = {number: {"question": "?", "answer": "i j"} for number in (6, 7)}
    assert golds.lost({0: rows[0], 1: rows[1], 2: rows[2]}) == 1 and not capsys.readouterr().out
    assert golds.lost({6: more[6], 1: rows[1]}) == 2
    assert "1 of the 2 gold answers of this step cannot be won" in capsys.readouterr().out
    assert golds.lost(more) == 2 and not capsys.readouterr().out  # one note is enough


@pytest.mark.parametrize("option", [[], ["--check_rewards"]])
def test_a_run_and_its_preview_say_so(small, tmp_path, capsys, option):
    rows = [{"question": f"{i}+1=?", "answer": "none of 1, 2" if i % 2 else str(i + 1)}
            for i in range(8)]
    (tmp_path / "x.jsonl").write_text(files.as_lines(rows))
    main(["--model", small, "--dataset", str(tmp_path / "x.jsonl"), "--max_new_tokens", "4",
          "--steps", "1", "--group_size", "4", "--questions_per_step", "8", "--allocation", "false",
          "--output_dir", str(tmp_path / "run"), *option])
    printed = "".join(capsys.readouterr())
    assert "4 of the first 8 gold answers cannot be won" in printed
    assert ("read: " in printed) == bool(option)


def test_gold_answers_that_come_later_are_counted_when_they_are_taken(
    small, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(golds_module, "LOOKED_AT", 2)
    rows = [{"question": f"{i}+1=?", "answer": "none of 1, 2" if i % 2 else str(i + 1)}
            for i in range(8)]
    (tmp_path / "x.jsonl").write_text(files.as_lines(rows))
    words = ["--model", small, "--dataset", str(tmp_path / "x.jsonl"), "--max_new_tokens", "4",
             "--group_size", "4", "--questions_per_step", "2", "--algorithm", "grpo",
             "--epochs", "2", "--output_dir", str(tmp_path / "run")]
    for more in (["--steps", "3"], ["--resume", "--steps", "8"]):
        main([*words, *more])
    summary = files.read(tmp_path / "run/metrics.jsonl"), (tmp_path / "run/summary.json")
    assert len(summary[0]) == 8 and '"lost_questions": 8' in summary[1].read_text()
    assert capsys.readouterr().out.count("summary.json counts them") <= 2
