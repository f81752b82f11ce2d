"""Evaluation: verdicts on completions, resuming, and ranks."""

from functools import partial

import pytest

import eval as evaluation
from engine.base import files
from engine.base.errors import UserError
from engine.data.questions import load_questions
from engine.model.sampler import Sampler
from engine.model.sampler_interface import Sampling
from engine.options.command_line import flat
from engine.options.config import config_of
from tasks.table import SYSTEM_PROMPT
from tests.engine.test_ranks import torchrun
from tests.helpers.runs import ROOT, json_of


def always(answer):
    return lambda completions, **columns: [float(gold == answer) for gold in columns["answer"]]


def test_accuracy_is_the_share_of_right_completions(loaded, tmp_path):
    model, tokenizer = loaded
    [row], _ = load_questions("toy", tokenizer, split="test", limit=1)
    questions = [row | {"answer": str(i % 2)} for i in range(7)]  # 0 1 0 1 0 1 0
    summary = evaluation.evaluate(
        Sampler(model, tokenizer), tokenizer, questions, always("1"), Sampling(8), samples=3,
        batch_size=6, path=tmp_path / "answers")  # two questions in a batch
    records = files.read_lines(tmp_path / "answers")
    greedy, sampled = ([r for r in records if r["part"] == p] for p in ("greedy", "sampled"))
    assert summary["greedy"]["accuracy"] == summary["sampled"]["accuracy"] == pytest.approx(3 / 7)
    assert [r["index"] for r in sampled] == [i for i in range(7) for _ in range(3)]
    assert all(r["correct"] == (r["index"] % 2 == 1) for r in records)
    assert summary["greedy"]["length"] == pytest.approx(sum(r["tokens"] for r in greedy) / 7)
    for drawn in (sampled[:3], sampled[::6]):  # of one question, and the first of each batch
        assert len({r["completion"] for r in drawn}) > 1


@pytest.mark.parametrize("completion, answer, number", [
    ("<answer>5.0</answer>", 5, 5), ("the answer is $5", 5, 5), ("<answer>0</answer>", 0, 0),
    ("<answer>x = y</answer>", "x = y", None), ("no answer", None, None), ("So 4.", None, 4),
])  # fmt: skip
def test_an_answer_is_read_as_the_judge_reads_it_and_equal_numbers_are_one(
    completion, answer, number
):
    assert evaluation.answer_of("gsm8k_accuracy", completion) == answer
    assert evaluation.answer_of("number_accuracy", completion) == number


WORDS = ["--questions", "10", "--samples", "2", "--batch_size", "6", "--max_new_tokens", "20"]


def go(small, folder, *words):
    evaluation.main(["--model", small, *WORDS, "--output_dir", str(folder), *words])
    return (folder / "eval-toy.jsonl").read_text().splitlines()


def test_a_run_without_a_best_checkpoint_is_told_so(tmp_path):
    files.write(tmp_path / "run.json", files.as_json(flat(config_of({})[0])))
    with pytest.raises(UserError, match=f"{tmp_path} has no best checkpoint.*--eval_every"):
        evaluation.main(["--model", str(tmp_path), "--best"])


def test_a_question_to_which_the_judge_does_not_apply_is_left_out(loaded):
    """Of two questions of a mixture, it is the reward of the first one alone."""
    def first_task(completions, answer, **columns):
        return [1.0 if a == "1" else None for a in answer]

    model, tokenizer = loaded
    rows = [{"question": "1=?", "prompt": [4], "answer": answer} for answer in ("1", "2")]
    examined = partial(evaluation.evaluate, Sampler(model, tokenizer), tokenizer)
    found = examined(rows, first_task, Sampling(4), samples=2)
    assert [record["index"] for record in found["examples"]] == [0]
    assert found["sampled"]["accuracy"] == found["sampled"]["questions"] == 1
    with pytest.raises(UserError, match="applies to none of its questions"):
        examined(rows[1:], first_task, Sampling(4))


def test_an_interrupted_evaluation_goes_on_where_it_was(small, tmp_path):
    def score():
        return json_of(tmp_path / "a/eval-toy.json") | {"seconds": None}

    whole, first = go(small, tmp_path / "a"), score()
    assert len(whole) == 1 + 10 + 20
    # it has ended; a line is lost; a line is doubled; it was stopped in the middle of a line
    files_of = [whole, whole[:14] + whole[15:], whole[:14] + whole[13:]]
    texts = ["\n".join(lines) for lines in files_of]
    texts += ["\n".join(whole[:count])[:-30] for count in (6, 17)]
    for text in texts:
        (tmp_path / "a/eval-toy.jsonl").write_text(text)
        assert go(small, tmp_path / "a") == whole and score() == first


def test_each_setting_has_files_of_its_own(small, tmp_path):
    first = go(small, tmp_path)
    for words, count in ((["--temperature", "0.5"], 2), (["--samples", "0"], 3)):
        for _ in range(2):  # the second time it goes on where it was: at its end
            assert go(small, tmp_path, *words) == first
            assert len([*tmp_path.glob("*.json")]) == count
    names = ["eval-toy", "eval-toy-2", "eval-toy-3"]
    settings = [json_of(tmp_path / f"{name}.json") for name in names]
    assert [setting["temperature"] for setting in settings] == [1.0, 0.5, 1.0]
    assert [setting["samples"] for setting in settings] == [2, 2, 0]
    (tmp_path / "eval-toy.jsonl").write_text("a\n")  # of another program
    with pytest.raises(UserError, match="no file of answers"):
        go(small, tmp_path)


@pytest.mark.slow
def test_the_number_of_ranks_changes_nothing(small, tmp_path):
    alone = go(small, tmp_path / "a")
    words = [*WORDS, "--output_dir", tmp_path / "b"]
    done = torchrun(ROOT / "eval.py", "--model", small, *words, ranks=3)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "b/eval-toy.jsonl").read_text().splitlines() == alone


def test_several_benchmarks_each_with_its_setting(tmp_path, capsys):
    rows = [{"question": "1+1=?", "answer": "One and one.\n#### 2"},
            {"question": "2+2=?", "answer": "4", "level": 1}]
    (tmp_path / "mine.jsonl").write_text(files.as_lines(rows))
    evaluation.main([
        "--questions", "3", "--samples", "0", "--max_new_tokens", "9",
        "--output_dir", f"{tmp_path}/out", "--benchmark", f"{tmp_path}/mine.jsonl", "toy"])
    assert capsys.readouterr().out.count("greedy  ") == 2
    summary, toy = (json_of(tmp_path / f"out/eval-{x}.json")
                    for x in ("mine", "toy"))
    assert (summary["questions"], summary["max_new_tokens"]) == (2, 9)
    assert (summary["judge"], toy["judge"]) == ("gsm8k_accuracy", "toy_accuracy")
    assert summary["system_prompt"] == SYSTEM_PROMPT and "sampled" not in summary
    answers = files.read_lines(tmp_path / "out/eval-mine.jsonl")[1:]
    assert [row["question"] for row in answers] == ["1+1=?", "2+2=?"]


@pytest.mark.parametrize("words", ["--benchmark gsm9k", "--model ./nowhere", "--samples -1"])
def test_bad_input_of_eval(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=words.split()[-1]):
        evaluation.main(words.split())
