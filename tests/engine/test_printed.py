"""The commands that a run prints work as they are, and measure what the run has measured."""

import json
import os
import re
import shlex
from pathlib import Path
from statistics import fmean

import pytest

import eval as evaluation
import train
from engine.base import files
from engine.base.errors import UserError
from engine.run.command_line import given
from engine.run.config import Config, compared, config_of
from engine.run.folder import earlier_run, keep_options, options_for_eval
from tests.helpers.runs import ROOT, run, sums, written
from tests.test_train import stop_after
from tools import compare

pytestmark = pytest.mark.usefixtures("undrawn")
BRIEF = ("--questions_per_step 1 --group_size 4 --max_new_tokens 16 --steps 2 --temperature 0.9 "
         "--eval_questions 4 --lr 1e-3")


def test_the_commands_at_the_end_of_a_run_work_and_measure_the_same(
    small, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    data = written(tmp_path / "my data.jsonl", [
        {"q": row["question"], "answer": row["answer"]} for row in sums(8)])
    folder = tmp_path / "runs/my run"
    (tmp_path / "mine.py").write_text(
        "def mine(completions, **columns):\n    return [float(len(c)) for c in completions]\n")
    words = [*BRIEF.split(), "--dataset", str(data), "--eval_dataset", str(data), "--columns",
             "question=q", "--pruning_rate", "0.5", "--stop", "9", "--system_prompt", "Add it.",
             "--rewards", "mine.py:mine:2", "number_accuracy"]
    run_words = ["--model", str(small), "--output_dir", str(folder), *words]
    assert train.main(run_words) == 0
    out = capsys.readouterr().out
    lines = dict(re.findall(r"^(compare|evaluate) +python (.+)$", out, re.MULTILINE))
    program, *again = shlex.split(lines["evaluate"])
    evaluation.main(again)
    scores = json.loads((folder / "eval-my data.json").read_text())
    assert program == "eval.py" and scores["questions"] == 8
    assert scores["of_the_run"] == " (the run was trained on 4 of 8)"
    assert "\nOn 4 training questions: greedy reward " in out
    wanted = {"judge": "mine.py:mine:2", "max_new_tokens": 16, "temperature": 0.9, "stop": ["9"],
              "system_prompt": "Add it."}
    assert wanted.items() <= scores.items()
    summary = json.loads((folder / "summary.json").read_text())
    greedy = [row["score"] for row in files.read(folder / "eval-my data.jsonl")[1:5]]
    assert fmean(greedy) == summary["after"]["greedy"]["reward"] > 0

    program, *other = shlex.split(lines["compare"])
    chosen = given(Config, other)
    assert program == "train.py" and chosen["algorithm"] == "grpo"
    assert not {"pruning_rate", "output_dir"} & chosen.keys()
    assert (chosen["stop"], chosen["columns"]) == (["9"], ["question=q"])
    assert train.main(other) == 0  # into a folder of its own, beside the first run
    out = capsys.readouterr().out
    [line] = re.findall("^compare +python (.+)$", out, re.MULTILINE)
    program, *folders = shlex.split(line)
    assert (program, folders) == ("tools/compare.py", ["runs/my run", "runs/my data-grpo-1"])
    compare.main(folders)
    shown = capsys.readouterr().out
    for run_dir in folders:
        after = json.loads(Path(run_dir, "summary.json").read_text())["after"]
        values = re.findall(rf"{run_dir} +(\S+)", shown)[:2]
        assert [float(value) for value in values] == pytest.approx(
            [after[part]["reward"] for part in ("greedy", "sampled")], abs=1e-4)
    assert Path("runs/compared.png").is_file()


def test_the_earlier_run_is_the_newest_finished_one_with_the_same_questions(tmp_path):
    contents = {  # (its training data, its test data), from the oldest run to the newest
        "first": ("a", "b"), "second": ("a", "b"), "training": ("x", "b"), "test": ("a", "x"),
        "untested": ("a", None), "broken": (1, "b"), "own": ("a", "b")}
    for age, (name, (data, test)) in enumerate(contents.items()):
        written(tmp_path / name / "run.json", [{}])
        written(tmp_path / name / "summary.json", [{} if data == 1 else {"data": data}])
        if test:
            written(tmp_path / name / "answers.jsonl", [{"setting": {"data": test}}])
        os.utime(tmp_path / name / "summary.json", (age, age))
    assert earlier_run(tmp_path / "own") == tmp_path / "second"
    assert earlier_run(tmp_path / "test") is None


COUNTERPARTS = {  # of a run with these words: the words of the other one
    "--algorithm=cppo": "--algorithm=grpo",
    "--algorithm=cppo --pruning_rate=0": "--algorithm=cppo",
    "--algorithm=grpo": "--algorithm=cppo",
    "--algorithm=grpo --dataset=toy_code": "--algorithm=cppo --dataset=toy_code",
    "--algorithm=grpo --keep=random": "--algorithm=grpo --pruning_rate=0.0",
    "--algorithm=cppo --keep=random --mu=3 --allocation=false": "--algorithm=grpo --mu=3",
    # another loss than GRPO's
    "--algorithm=cppo_published": "--algorithm=cppo_published --pruning_rate=0.0",
    "--algorithm=cppo_published --pruning_rate=0": "--algorithm=cppo_published",
    "--algorithm=gfpo": "--algorithm=gfpo --pruning_rate=0.0",
    "--algorithm=gfpo_adaptive": "--algorithm=gfpo --pruning_rate=0.0",
    "--algorithm=dapo --keep=largest_abs": "--algorithm=dapo --pruning_rate=0.0",
    "--algorithm=dapo": "--algorithm=grpo",
}


@pytest.mark.parametrize("words", COUNTERPARTS)
def test_a_run_that_prunes_is_compared_with_its_own_loss(words, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py"])
    config, _ = config_of(given(Config, words.split()))
    line, *pace = compared(config)
    other, _ = config_of(given(Config, shlex.split(line)[2:]))  # it is accepted
    assert line.replace(" --dataset=toy", "") == f"python train.py {COUNTERPARTS[words]}"
    known = words in ("--algorithm=cppo", "--algorithm=grpo")
    assert pace == ["GRPO takes about 3 times as long as CPPO."] * known


@pytest.mark.parametrize("words, count, of_the_run", [
    ("", 12, " (the run was trained on 4 of 12)"),
    ("--eval_every 1", 3, ", held out of the training"),
    ("--hooks FIRST", 12, " (the run was trained on 2 of 12)"),
    ("--eval_every 2 --eval_dataset DATA", 12, " (the run was trained on 4 of 12)"),
    ("--eval_dataset OTHER", 5, ""),
])
def test_an_evaluation_says_what_the_run_has_done_with_its_questions(
    small, tmp_path, words, count, of_the_run, capsys
):
    """Of 12 questions of a file."""
    data = written(tmp_path / "mine.jsonl", sums(12))
    other = written(tmp_path / "other.jsonl", sums(17)[12:])
    (tmp_path / "first.py").write_text(
        "def curriculum(questions, past, count, rng):\n    return [0, 5] * (count // 2)\n")
    for name, path in [("DATA", data), ("OTHER", other), ("FIRST", tmp_path / "first.py")]:
        words = words.replace(name, str(path))
    folder = tmp_path / "run"
    run(small, folder, f"{BRIEF} --pruning_rate 0.5 --dataset {data} {words}")
    trained = files.read(folder / "samples.jsonl")
    evaluation.main(["--model", str(folder)])
    assert f" {count} questions{of_the_run}, judged by" in capsys.readouterr().out
    [answers] = folder.glob("eval-*.jsonl")
    asked = {row["question"] for row in files.read(answers)[1:]}
    assert len(asked) == count
    if of_the_run.startswith(", held out"):
        assert not asked & {row["question"] for row in trained}
    elif "trained" in of_the_run:  # samples.jsonl has the first question of each step
        assert {row["question"] for row in trained} <= asked
    evaluation.main(["--model", str(folder), "--questions", "2", "--output_dir", f"{tmp_path}/few"])
    said = capsys.readouterr().out
    if words.startswith("--hooks"):
        assert " 2 questions (the run was trained on 2 of 12), judged" in said


def test_the_command_after_ctrl_c_is_whole(small, tmp_path, monkeypatch, capsys):
    stop_after(1, monkeypatch)
    run(small, tmp_path / "run", BRIEF)
    said = capsys.readouterr().out
    [line] = re.findall("To go on from .*: python train.py (.+)$", said, re.MULTILINE)
    assert train.main(shlex.split(line)) == 0


def test_another_model_or_benchmark_takes_nothing_of_a_run(tmp_path):
    assert options_for_eval("toy") == options_for_eval(str(tmp_path)) == {}
    files = {"dataset": "gsm8k", "eval_dataset": "math500", "rewards": ["gsm8k_accuracy"],
             "sampler": "vllm", "max_new_tokens": 7, "columns": ["question=q"]}
    (tmp_path / "run.json").write_text(json.dumps(files))
    for model in (tmp_path, tmp_path / "checkpoint-000001"):
        found = options_for_eval(str(model))
        # another data set has another judge
        assert found["benchmark"] == ["math500"] and found["max_new_tokens"] == 7
        # nor has it columns, which eval.py would refuse
        assert not {"judge", "sampler", "columns"} & found.keys()
    config = evaluation.check({"model": str(tmp_path), "benchmark": ["toy"]})
    assert config.max_new_tokens is None


def test_a_run_that_sampled_with_another_sampler_is_evaluated_with_ours(tmp_path):
    generate = f"{ROOT}/examples/my_sampler.py:Generate"
    config, _ = config_of({"sampler": generate, "output_dir": str(tmp_path)})
    keep_options(tmp_path, config)
    assert options_for_eval(str(tmp_path))["sampler"] == generate
    assert evaluation.check({"model": str(tmp_path)}).sampler == "ours"
    with pytest.raises(UserError, match="leave it out"):
        evaluation.check({"model": str(tmp_path), "sampler": generate})
