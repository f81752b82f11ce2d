"""What experiments/judge.py trains, and what it reads from a run."""


import pytest

from engine.base.files import known_or_own
from experiments import judge
from experiments.library.rules import off_by_one
from tasks import toy


@pytest.fixture(scope="module")
def answers():
    return judge.labelled(range(64), "train", seed=1)


@pytest.mark.slow
def test_a_judge_learns_from_the_true_labels_and_separates_new_answers(answers, tmp_path):
    each = [toy.question(i // judge.ANSWERS) for i in range(len(answers.texts))]
    assert answers.questions == [row["question"] for row in each]
    expected = [float(f"<answer>{row['answer']}</answer>" in text)
                for row, text in zip(each, answers.texts)]
    assert answers.right.tolist() == expected and 0 < sum(expected) < len(expected)
    judge.train_judge(answers, tmp_path, seed=1, steps=40)
    judge.use(tmp_path)
    found = judge.quality(judge.labelled(range(64), "test", seed=1))
    assert found["AUC"] > 0.65 and found["AUC among guesses"] < 0.65
    assert found["accuracy on wrong answers"] > 0.5


@pytest.mark.slow
def test_each_run_asks_the_judge_of_its_seed(answers, tmp_path):
    """A process keeps the functions that it has loaded, and their judge."""
    word, scores = "examples/my_reward_model.py:judged", []
    for seed in (1, 2):
        judge.train_judge(answers, tmp_path / str(seed), seed, steps=2)
        judge.use(tmp_path / str(seed))
        judged = known_or_own(word, {}, "reward", "--rewards")
        scores.append(judged(answers.texts[:4], question=answers.questions[:4]))
    assert scores[0] != scores[1]


def test_off_by_one_pays_only_the_gold_answer_plus_one():
    texts = ["<answer>8</answer>", "<answer>7</answer>", "<answer>6</answer>", "8 + 1", ""]
    assert off_by_one(texts, answer=["7"] * 5) == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_the_figures_of_a_run_are_means_of_four_steps():
    """The accuracy rises to 0.8 and falls. Step 5 makes no update, so it has no KL."""
    accuracies = [0.2, 0.4, 0.6, 0.8, 0.8, 0.8, 0.8, 0.0]
    kls = [0.0, 0.1, 0.2, 0.3, None, 0.4, 1.1, 2.2]
    rows = [{"accuracy": a, "kl": kl, "kl_old": None if kl is None else kl / 100,
             "reward/judged": 10 * i}
            for i, (a, kl) in enumerate(zip(accuracies, kls))]
    found = judge.figures(rows, "judged")
    assert found["curve of kl"] == pytest.approx([0, 0, 0, 0.15, 0.15, 0.25, 0.5, 1.0])
    assert found["best"] == pytest.approx(0.8) and found["step of the best"] == 7
    assert found["KL at the best"] == pytest.approx(0.5)
    assert found["reward, last"] == 55 and found["largest kl_old"] == pytest.approx(0.022)
    row = {name: [found[name]] for name in found}  # of one seed
    for X, step, accuracy in ((0.2, 6, 0.75), (1.5, 8, 0.6)):  # 1.5: never, so the last step
        stopped = judge.stops_in_the_logs(row, X)
        assert stopped["steps"]["values"] == [step]
        assert stopped["held-out"]["mean"] == pytest.approx(accuracy)
    assert not any(found["curve of median"])  # of fewer than 16 steps with a KL
