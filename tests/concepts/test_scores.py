"""scores.py: scores of known verdicts, estimators against enumeration, intervals against tables."""

import itertools
import math
import random

import pytest

from scores import (
    group_by_question,
    interval,
    majority_is_right,
    paired,
    pass_at_k,
    summarize,
    verdict,
)


@pytest.mark.parametrize("n, right", [(4, 0), (4, 1), (5, 3), (6, 6)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n, right):
    flags = [i < right for i in range(n)]
    for k in range(1, n + 1):
        subsets = list(itertools.combinations(flags, k))
        assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def answer_of(text):
    """A number, a text, or None for none."""
    if "no" in text:
        return None
    return float(text) if text.isdigit() else text


@pytest.mark.parametrize("answers, right", [
    ("5 5 7", True), ("7 7 5", False), ("5 7", True), ("7 5", False),  # of a tie the first
    ("(5,2) (0,0) (0,0) (5,/2) (5.0,2)", True),  # right ones are one answer, however written
    ("(5,2) (0,0) (0,0)", False), ("(5,2) (0,0) (0.0,0)", True),  # wrong ones are not
    ("none none 5", True), ("none", False),  # none has no vote
    ("none5 7 7", False), ("none5 7 none5", True),  # right, in a form that is not read
    ("0 0 5", False),  # the number 0 is an answer
])
def test_the_majority(answers, right):
    records = [{"completion": a, "correct": "5" in a} for a in answers.split()]
    assert majority_is_right(records, answer_of) is right


def test_of_a_reward_that_grades_there_is_the_mean_alone():
    scores = [0.5, 0.1, 3.0, None, 0.0, 0.0]
    records = [{"index": i // 2, "completion": "", "correct": None, "score": score, "tokens": 4,
                "truncated": False} for i, score in enumerate(scores)]
    summary = summarize(records, None, "score")
    assert summary["reward"] == pytest.approx((0.3 + 3 + 0) / 3) and summary["length"] == 4
    low, high = summary["intervals"].pop("reward")
    assert 0 <= low < summary["reward"] < high <= 3 and not summary["intervals"]
    assert not {"accuracy", "pass@2"} & {*summary} and summary["samples"] == 1
    assert all(map(math.isnan, interval([3.0, 3.0], least=None)))  # nobody knows the others


def records_of(*rows):
    """One row of 0 and 1 for each question: which of its completions are right."""
    return [
        {"index": i, "completion": "no answer", "correct": c == "1"}
        for i, row in enumerate(rows) for c in row]


def test_a_summary_of_known_verdicts():
    summary = summarize(records_of("1000", "1111", "0000", "1100"), answer_of)
    assert summary["accuracy"] == 7 / 16 and summary["pass@4"] == 3 / 4
    assert summary["pass@2"] == pytest.approx((1 / 2 + 1 + 0 + 5 / 6) / 4)
    assert (summary["questions"], summary["samples"]) == (4, 4)


def test_the_questions_come_in_order_whatever_the_order_of_the_records():
    records = records_of("10", "00", "11")
    assert group_by_question(records[::-1]) == [records[i : i + 2][::-1] for i in (0, 2, 4)]


def test_completions_that_nobody_can_judge_are_left_out():
    records = records_of("10", "00", "1x")
    records[-1]["correct"] = verdict(math.nan)
    assert verdict(0.5) is True and verdict(-0.5) is verdict(0.0) is False
    summary = summarize(records, answer_of)
    assert summary["accuracy"] == pytest.approx((1 / 2 + 0 + 1) / 3) and summary["samples"] == 1


def test_questions_may_have_different_numbers_of_completions():
    summary = summarize(records_of("100", "1111"), answer_of)  # none holds an answer
    assert (summary["samples"], summary["accuracy"]) == (3, pytest.approx((1 / 3 + 1) / 2))
    assert summary["pass@2"] == pytest.approx((2 / 3 + 1) / 2) and "maj@3" not in summary
    more = zip((0, 0, 1, 1, 1), "55577")  # maj@2 asks only the first 2 of the second question
    records = [{"index": i, "completion": a, "correct": a == "5"} for i, a in more]
    assert summarize(records, answer_of)["maj@2"] == 1
    zeros = [{"index": 0, "completion": "0", "correct": True}] * 2
    assert summarize(zeros, answer_of)["maj@2"] == 1  # the number 0 is an answer


def test_the_interval_of_an_average_is_that_of_the_normal_distribution_for_many_questions():
    values = [0.5 * (random.Random(i).random() < 0.3) for i in range(2000)]
    mean = sum(values) / 2000
    half = 1.96 * math.sqrt(mean * (0.5 - mean) / 2000)
    assert interval(values) == pytest.approx((mean - half, mean + half), abs=2e-3)


# method 3 in Newcombe, Statistics in Medicine 17 (1998), table I
@pytest.mark.parametrize("right, n, low, high", [
    (81, 263, 0.2553, 0.3662), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718),
])  # fmt: skip
def test_the_interval_of_a_share_is_wilsons(right, n, low, high):
    assert interval([i < right for i in range(n)]) == pytest.approx((low, high), abs=5e-5)


def test_no_interval_says_that_a_mean_is_known_for_certain():
    """Of 30 questions with the same score, a few in a hundred of all questions may still have
    another one."""
    few = 1.96**2 / (30 + 1.96**2)
    assert interval([0.5] * 30) == pytest.approx((0.5 - few / 2, 0.5 + few / 2))
    intervals = summarize(records_of(*["00"] * 30), answer_of)["intervals"]
    assert intervals["accuracy"] == intervals["pass@2"] == pytest.approx((0, few))
    for first, second, bounds in [
        (0, 0, (-few, few)), (0, 1, (1 - 2 * few, 1)), (1, 0, (-1, -1 + 2 * few)),
    ]:
        assert paired([first] * 30, [second] * 30)[1] == pytest.approx(bounds)
    # no share of questions: a difference may be -1, too
    third = [1] * 10 + [0] * 20
    assert paired([0] * 30, third)[1] != pytest.approx(interval(third))


def test_the_paired_test_is_the_exact_one():
    """5 questions got better and 1 worse: two-sided sign test 2·(1 + 6)/2⁶. And no difference has p
    = 1."""
    first, second = [0] * 5 + [1] * 5, [1] * 5 + [0] + [1] * 4
    difference, (low, high), p = paired(first, second)
    assert difference == pytest.approx(0.4) and low < 0.4 < high
    assert p == pytest.approx(2 * 7 / 64, abs=0.02)
    assert paired(first, first)[2] == 1.0
