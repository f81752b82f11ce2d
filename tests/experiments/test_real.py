"""real.py and fewer.py: runs of the same seconds, what stopping draws, the places of a rollout, and
which questions are skipped."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from algorithms import resolve
from engine.base.errors import UserError
from experiments import fewer, real
from grpo import group_advantages
from records import Rollout

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("plan", "other"), [([], "CPPO, P=0.875"),
                                             (["--second"], "published, P=0.5")])
def test_a_run_on_a_real_model_has_the_same_seconds_whatever_the_method(
    plan, other, small, tmp_path, monkeypatch
):
    name = "real_second" if plan else "real"
    task = getattr(real, name.upper())._replace(at=(0.5, 1.0), eval_questions=3)
    monkeypatch.setattr(real, name.upper(), task)
    runs = tmp_path / "runs"
    words = ["--model", small, "--seeds", "1", "--methods", "GRPO", other, *plan]
    words += ["--folder", str(runs), "--output", str(tmp_path)]
    real.main(words)
    files = sorted(runs.iterdir())
    assert {path.name for path in files} == {
        other.replace(", ", "-") + "-seed-1.json", "GRPO-seed-1.json",
    }
    for path in files:
        done = json.loads(path.read_text())
        assert list(done) == ["method", "seed", "lr", "options", "steps", "evaluations"]
        assert [e["at"] for e in done["evaluations"]] == [0.5, 1.0]
        seconds = [step["seconds"] for step in done["steps"]]
        # the step that goes beyond ends it
        assert seconds == sorted(seconds) and seconds[-1] > 1.0 >= ([0] + seconds)[-2]
    before = [path.stat().st_mtime_ns for path in files]
    real.main([*words, "--page"])
    real.main(words)  # finished runs are kept
    assert [path.stat().st_mtime_ns for path in files] == before
    page = (tmp_path / f"{name}.md").read_text()
    assert "lan, written " in page and f"| {other} | 1 |" in page
    assert (tmp_path / f"{name}.png").exists()


def test_a_difference_is_each_seed_above_each_seed():
    seeds = {
        "GRPO": (0.4, 0.6), "CPPO, P=0.875": (0.6, 0.7), "random, P=0.875": (0.61, 0.9),
        "CPPO, P=0.5": (0.1, 0.39),
    }
    rows = {
        name: {f"greedy {when}": {"min": low, "max": high} for when in real.AT}
        for name, (low, high) in seeds.items()
    }
    table = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in real.differences(rows, "greedy").splitlines()[2:]
    ]
    beside = [["–", "–"], ["–", "–"], ["above", "–"], ["below", "below"]]  # GRPO, CPPO
    assert [line[2:4] for line in table] == [line[5:7] for line in table] == beside


@pytest.mark.parametrize("words", [["--methods", "GPRO"], ["--page"]])
def test_a_mistake_is_one_sentence(words, tmp_path):
    with pytest.raises(UserError):
        real.main([*words, "--folder", str(tmp_path)])


# --- fewer completions ---


def a_rollout(questions, G, rewards, seed):
    """A Rollout of made-up completions: token 1 + reward, `seed` + 1 tokens long."""
    r = torch.tensor(rewards, dtype=torch.float32)
    Q, T = len(questions), seed + 1
    return Rollout(
        questions, (1 + r.view(-1, 1).long()).expand(Q * G, T).clone(),
        torch.full((Q * G, T), -float(T)),
        [f"{question} {seed} {i}" for question in questions for i in range(G)],
        torch.full((Q, G), T), torch.zeros(Q, G, dtype=torch.bool), rewards=r[None],
        reward_names=["accuracy"], reward_weights=[1.0], seed=seed,
    )


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
        rewards = [rounds[len(asked) - 1][q] for q in questions]
        return a_rollout(questions, 4, rewards, seed=len(asked))

    whole = fewer.until_a_signal(
        ["a", "b", "c"], resolve("grpo", group_size=12), roll_out,
        sampling=SimpleNamespace(max_new_tokens=5),
    )
    assert asked == [["a", "b", "c"], ["b", "c"], ["c"]]
    assert whole.trainable.sum(1).tolist() == [4, 8, 12] and whole.questions == ["a", "b", "c"]
    assert whole.total[1, :8].tolist() == [1, 1, 1, 1, 1, 1, 0, 1]
    assert [whole.texts[i] for i in (12 + 4, 24 + 11, 4)] == ["b 2 0", "c 3 3", ""]
    assert whole.lengths[2].tolist() == [2] * 4 + [3] * 4 + [4] * 4
    assert whole.lengths[0, 4:].sum() == 0
    assert whole.tokens[12 + 6].tolist() == [1, 1, 1, 0, 0]
    assert whole.logp[12].tolist() == [-2.0, -2.0, 0, 0, 0]
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
            missing -= {asked[-1]["question"]}
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


def test_the_table_is_made(small, tmp_path, monkeypatch):
    task = fewer.TOY._replace(at=(1.5, 3.0), eval_questions=3)
    task = task._replace(setting=task.setting | {"questions_per_step": 1})
    monkeypatch.setattr(fewer, "REAL", task)
    words = ["--model", small, "--seeds", "1"]
    fewer.main([*words, "--folder", str(tmp_path / "runs"), "--output", str(tmp_path)])
    rows = json.loads((tmp_path / f"{task.name}.json").read_text())["rows"]
    assert list(rows) == list(task.methods)
    for method, row in rows.items():
        drawn = row["completions"] / row["questions"]
        assert drawn == 16 if "until" not in method else 4 <= drawn < 16, method
    assert "| until a signal, P=0.875 | 1 |" in (tmp_path / f"{task.name}.md").read_text()
