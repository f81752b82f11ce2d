"""examples/: a reward, a rule, an algorithm and a data set of one's own, each run as its first lines say."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.run.options import own_function
from engine.tasks.questions import load_questions
from examples.my_algorithm import leave_one_out
from rewards import number_accuracy
from tests.training import one_step

ROOT = Path(__file__).parents[1]


def test_a_rule_of_ones_own_keeps_by_advantage_per_token():
    per_token = own_function(f"{ROOT}/examples/my_rule.py:per_token", "--keep")
    advantages, lengths = torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.3, -0.4]]), torch.tensor([[2, 8, 2], [1, 3, 2]])
    # |A| / length: 0.5, 0.25, 0.25; 0, 0.1, 0.2
    assert per_token(SimpleNamespace(lengths=lengths), advantages, 1).tolist() == [0, 5]
    assert per_token(SimpleNamespace(lengths=lengths), advantages, 2).tolist() == [0, 1, 4, 5]


def test_a_rule_of_ones_own_divides_by_the_mean_length_of_the_group():
    group_length = own_function(f"{ROOT}/examples/my_rule.py:group_length", "--keep")
    rows, own = group_length(SimpleNamespace(lengths=torch.tensor([[2, 8, 2]])), torch.tensor([[1.0, -2.0, 0.5]]), 2)
    assert rows.tolist() == [0, 1] and own.tolist() == [0.5, -4.0]  # A |o| / 4


def test_a_reward_of_ones_own_pays_for_brevity():
    brevity = own_function(f"{ROOT}/examples/my_reward.py:brevity", "--rewards")
    assert brevity(["", "x" * 20, "x" * 200], answer=["", "", ""]) == [1.0, 0.8, 0.0]


def test_an_advantage_of_ones_own_compares_with_the_others():
    rewards = torch.tensor([[1.0, 0, 0, 0], [2, 1, 1, 0]])
    A = leave_one_out(SimpleNamespace(total=rewards))
    others = [[torch.cat([row[:i], row[i + 1 :]]).mean() for i in range(4)] for row in rewards]
    torch.testing.assert_close(A, rewards - torch.tensor(others))


def test_a_run_takes_a_rule_and_a_reward_of_ones_own(small, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    mine = ["--keep", "examples/my_rule.py:per_token", "--rewards", "toy_accuracy", "examples/my_reward.py:brevity:0.1"]
    metrics = one_step(small, tmp_path, "--eval_questions", "1", *mine)
    assert metrics["kept"] == metrics["completions"] // 4 and 0 < metrics["reward/brevity"] < 1


@pytest.mark.slow
def test_a_run_takes_an_algorithm_of_ones_own(small, tmp_path):
    metrics = one_step(small, tmp_path, "--algorithm", "mine", "--eval_questions", "1", program="examples/my_algorithm.py")
    assert metrics["kept"] == 16 and json.loads((tmp_path / "config.json").read_text())["algorithm"] == "mine"


def test_a_run_takes_a_data_set_of_ones_own(small, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = ["--dataset", "examples/my_dataset.jsonl", "--rewards", "number_accuracy", "--max_new_tokens", "8"]
    metrics = one_step(small, tmp_path, *words)
    assert metrics["questions"] == 4 and "reward/number_accuracy" in metrics


def test_the_answers_of_the_data_set_are_numbers(loaded):
    questions, _ = load_questions(str(ROOT / "examples/my_dataset.jsonl"), loaded[1])
    assert len(questions) == 12 and all(set(q) >= {"question", "answer", "unit"} for q in questions)
    answers = [q["answer"] for q in questions]
    assert number_accuracy([f"It is {a}." for a in answers], answer=answers) == [1.0] * 12
