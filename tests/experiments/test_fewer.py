"""experiments/fewer.py: what stopping draws and changes by enumeration, the places of a rollout,
and which questions are skipped."""

import itertools
import json
import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from algorithms import resolve
from experiments import fewer
from grpo import group_advantages
from records import Rollout

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
@pytest.mark.parametrize(("G", "n"), [(8, 2), (8, 4), (9, 3), (4, 4)])
def test_the_weight_of_a_question_by_enumeration(p, G, n):
    """All 2^G sequences of right and wrong; the step of a question with two kinds of gradient, ±1
    for each kind."""
    weight = completions = total = 0.0
    for right in itertools.product([0.0, 1.0], repeat=G):
        drawn = next(end for end in range(n, G + 1, n) if 0 < sum(right[:end]) < end or end == G)
        group = torch.tensor(right[:drawn], dtype=torch.float64)
        chance = math.prod(p if r else 1 - p for r in right)
        A = group_advantages(group[None])[0] if drawn > 1 else group * 0
        # Σ A ∇ log π / N with ∇ log π = u (right) or v (wrong): its part along u, and the same
        # along v with the other sign
        along_u, along_v = (A * group).mean().item(), (A * (1 - group)).mean().item()
        assert along_u == pytest.approx(-along_v)
        weight, completions, total = (
            weight + chance * along_u, completions + chance * drawn, total + chance,
        )
    assert total == pytest.approx(1)
    got = fewer.weight(p, G, n)
    assert got == (pytest.approx(weight, rel=1e-9), pytest.approx(completions))


def a_rollout(questions, G, rewards, seed):
    """A Rollout of made-up completions: token 1 + reward, `seed` + 1 tokens long."""
    r = torch.tensor(rewards, dtype=torch.float32)
    Q, T = len(questions), seed + 1
    return Rollout(
        questions, (1 + r.view(-1, 1).long()).expand(Q * G, T).clone(), torch.full((Q * G, T), -float(T)),
        [f"{question} {seed} {i}" for question in questions for i in range(G)],
        torch.full((Q, G), T), torch.zeros(Q, G, dtype=torch.bool), rewards=r[None],
        reward_names=["accuracy"], reward_weights=[1.0], seed=seed)  # fmt: skip


def test_a_question_is_drawn_until_it_has_a_signal():
    """a has a signal at once, b in the second round, c never."""
    asked, rounds = [], [
        {"a": [1, 0, 0, 0], "b": [1, 1, 1, 1], "c": [0, 0, 0, 0]},
        {"b": [1, 1, 0, 1], "c": [0, 0, 0, 0]},
        {"c": [0, 0, 0, 0]},
    ]

    def roll_out(questions, algorithm, sampling):
        asked.append(questions)
        assert algorithm.group_size == fewer.ROUND
        return a_rollout(
            questions, 4, [rounds[len(asked) - 1][q] for q in questions], seed=len(asked)
        )

    algorithm = resolve("grpo", group_size=12)
    whole = fewer.until_a_signal(
        ["a", "b", "c"], algorithm, roll_out, sampling=SimpleNamespace(max_new_tokens=5)
    )
    assert asked == [["a", "b", "c"], ["b", "c"], ["c"]]
    assert whole.trainable.sum(1).tolist() == [4, 8, 12] and whole.questions == ["a", "b", "c"]
    assert whole.total[1, :8].tolist() == [1, 1, 1, 1, 1, 1, 0, 1]
    assert (
        whole.texts[12 + 4] == "b 2 0" and whole.texts[24 + 11] == "c 3 3" and whole.texts[4] == ""
    )
    assert (
        whole.lengths[2].tolist() == [2] * 4 + [3] * 4 + [4] * 4 and whole.lengths[0, 4:].sum() == 0
    )
    assert whole.tokens[12 + 6].tolist() == [1, 1, 1, 0, 0] and whole.logp[12].tolist() == [
        -2.0, -2.0, 0, 0, 0,
    ]
    A = fewer.advantages_of_the_drawn(whole)
    torch.testing.assert_close(A[1, :8], group_advantages(whole.total[1:2, :8])[0])
    assert (A[~whole.trainable] == 0).all() and (A[2] == 0).all() and A[0, 0] > 0 > A[0, 1]


@pytest.mark.parametrize("kind", [0.0, 1.0])
def test_questions_without_a_signal_are_skipped_with_their_probability(kind):
    """Of 3,000 questions 1,000 never have a signal. Each pass is one step, so p falls to 0.49, then
    to 0.48."""
    questions, seen = [{"question": i} for i in range(3000)], []
    order, silent, counts = fewer.skipping(questions, 1, seen), set(range(0, 3000, 3)), []
    for _ in range(3):
        asked, missing = [], set(range(3000)) - silent
        while missing:  # the others come once in each pass
            asked.append(next(order))
            missing.discard(asked[-1]["question"])
        counts.append(sum(q["question"] in silent for q in asked))
        seen += [(q, kind if q["question"] in silent else 0.5) for q in asked]
    twice = counts[1]  # z = 2 for these, z = 1 for the others
    assert counts[0] == pytest.approx(1000, abs=5)
    assert twice == pytest.approx(0.49 * 1000, abs=60)
    assert counts[2] == pytest.approx(0.48**2 * twice + 0.48 * (1000 - twice), abs=60)


def test_a_question_that_has_a_signal_again_is_not_skipped():
    questions, seen = [{"question": i} for i in range(50)], []
    order = fewer.skipping(questions, 2, seen)
    for mean in (0.0, 0.5):  # until each of them has had a signal
        while {q["question"] for q, m in seen if m == mean} != set(range(50)):
            seen.append((next(order), mean))
    turns = Counter(next(order)["question"] for _ in range(500))
    assert set(turns.values()) <= {9, 10, 11}


@pytest.mark.parametrize("name", ["TOY", "REAL"])
def test_the_table_is_made(name, small, tmp_path, monkeypatch):
    task = getattr(fewer, name)._replace(at=(1.5, 3.0), eval_questions=3)
    task = task._replace(setting=task.setting | {"questions_per_step": 1})
    monkeypatch.setattr(fewer, "TOY", task)
    monkeypatch.setattr(fewer, "REAL", task)
    words = [
        "--model", small, "--seeds", "1", "--folder", str(tmp_path / "runs"), "--output",
        str(tmp_path),
    ]
    fewer.main(words)
    rows = json.loads((tmp_path / f"{task.name}.json").read_text())["rows"]
    assert list(rows) == list(task.methods)
    for method, row in rows.items():
        drawn = row["completions"] / row["questions"]
        assert drawn == 16 if "until" not in method else 4 <= drawn < 16, method
    page = (tmp_path / f"{task.name}.md").read_text()
    assert "| until a signal, P=0.875 | 1 |" in page and "| 0.03 | 13.5 |" in page
