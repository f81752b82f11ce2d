"""tasks/table.py: every data set has a whole row, and a run on it gets what the row says."""

from dataclasses import replace
from itertools import islice
from pathlib import Path
from unittest.mock import MagicMock

import datasets
import pytest

import eval as evaluation
import train as training
from engine.base.errors import UserError
from engine.data.questions import load_questions
from engine.run.begin import open_run
from engine.scoring.score import REWARDS
from experiments.library.toy_model import make_tokenizer
from tasks.table import TASKS, Hub, Task, task_of

# the forms that rewards read
ANSWERS = ["<answer>{}</answer>", "{}", "\\boxed{{{}}}", "```python\nprint({})\n```"]


@pytest.mark.parametrize("name", TASKS)
def test_a_row_is_whole(name):
    task = TASKS[name]
    assert set(task.rewards) <= set(REWARDS) and task.system_prompt
    if not isinstance(task.source, Hub):  # an endless supply must have a count
        for split, count in [("train", task.train_questions), ("test", task.test_questions)]:
            rows = list(islice(task.source(split), count))
            assert len(rows) == count and all(row["question"] and row["answer"] for row in rows)


@pytest.mark.parametrize("name", TASKS)
def test_the_first_reward_is_the_accuracy(name):
    """It pays for the right answer in the one form that it reads, and never for a wrong answer."""
    first, *others = TASKS[name].rewards
    for given, pays in ((7, True), (8, False)):
        completions = [form.format(given) for form in ANSWERS]
        assert any(REWARDS[first](completions, answer=["7"] * len(ANSWERS))) == pays
    assert first.endswith("_accuracy") and "_accuracy" not in " ".join(others)


@pytest.mark.parametrize("name", TASKS)
def test_a_run_gets_what_the_row_says_and_the_user_has_the_last_word(name, small):
    task = TASKS[name]
    words = f"--dataset {name} --model {small} --algorithm ppo".split()
    options = open_run(words)[0].options
    for option in ("system_prompt", "max_new_tokens", "lr", "questions_per_step"):
        assert getattr(options, option) == getattr(task, option), option
    assert options.rewards == list(task.rewards)
    data = open_run(words)[0].data
    assert data.tested == (name if task.has_test_split else None) and data.eval_dataset is None
    assert task.has_test_split == (name not in ("math500", "amc23", "aime24"))
    assert data.eval_questions == (512 if name.startswith("toy") else 256)
    assert open_run([*words, "--eval_questions", "0"])[0].data.tested is None
    assert open_run([*words, "--lr", "0.5"])[0].options.lr == 0.5


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("name", [name for name in TASKS if isinstance(TASKS[name].source, Hub)])
def test_the_hub_is_asked_for_the_rows_split_and_columns(name, split, monkeypatch):
    hub = TASKS[name].source
    row = {"question": "1+1", "answer": "2", "level": 3}
    columns = {hub.question: "1+1", hub.answer: "2", "level": 3}
    ask = MagicMock(return_value=datasets.Dataset.from_list([columns]))
    monkeypatch.setattr(datasets, "load_dataset", ask)
    ([found], notes) = load_questions(name, make_tokenizer(), split=split)
    assert found == found | row and not notes
    ask.assert_called_once_with(hub.path, hub.configuration, split=getattr(hub, split))


def test_a_file_has_the_settings_of_gsm8k():
    task = replace(TASKS["gsm8k"], source=None, train_questions=None)
    assert task_of("mine.jsonl") == Task() == task


@pytest.mark.parametrize("name", [name for name in TASKS if not TASKS[name].base])
def test_the_toy_is_not_asked_in_words(name):
    """Its model knows no letters; `--model` is `toy` unless another is named. (Of train.py:
    tests/engine/test_checks.py)"""
    with pytest.raises(UserError, match=f"{name} .*--model"):
        evaluation.main(["--benchmark", name])


def test_a_wrong_file_is_refused_before_the_model_is_loaded(tmp_path, monkeypatch):
    """And nothing is left behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training, "begin_run", None)
    monkeypatch.setattr(evaluation, "resolve_model", None)
    Path("mine.jsonl").write_text('{"question": "1+1=?", "answer": 2}\nno')
    for main, words in [
        (training.main, "--dataset"), (training.main, "--eval_dataset"),
        (evaluation.main, "--benchmark"),
    ]:
        with pytest.raises(UserError, match="mine.jsonl .*line 2"):
            main([*words.split(), "mine.jsonl"])
    assert [path.name for path in tmp_path.iterdir()] == ["mine.jsonl"]
