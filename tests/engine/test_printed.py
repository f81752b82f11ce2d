"""The commands that a run prints work as they are, and measure what the run has measured."""

import json
import re
import shlex
from pathlib import Path
from statistics import fmean

import pytest

import eval as evaluation
import train
from engine.base import files
from engine.base.errors import UserError
from engine.options.command_line import parse_given
from engine.options.config import Config, config_of
from engine.report.logs import baseline_command, evaluation_command
from engine.run.folder import as_in_the_run, keep_options
from tests.helpers.runs import ROOT, run, sums, written
from tests.test_train import stop_after

pytestmark = pytest.mark.usefixtures("undrawn")
BRIEF = ("--questions_per_step 1 --group_size 4 --max_new_tokens 16 --steps 2 --temperature 0.9 "
         "--eval_questions 4 --lr 1e-3")


def test_the_commands_at_the_end_of_a_run_work_and_measure_the_same(
    small, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    rows = [{"q": row["question"], "answer": row["answer"]} for row in sums(8)]
    written(Path("my data.jsonl"), rows)
    folder = Path("runs/my run")
    Path("mine.py").write_text(
        "def mine(completions, **columns):\n    return [float(len(c)) for c in completions]\n")
    words = (
        f"{BRIEF} --model {small} --output_dir '{folder}' --dataset 'my data.jsonl' --eval_dataset "
        "'my data.jsonl' --columns question=q --pruning_rate 0.5 --stop 9 --system_prompt 'Add it.'"
        " --rewards mine.py:mine:2 number_accuracy")
    assert train.main(shlex.split(words)) == 0
    said = capsys.readouterr().out
    assert "\nOn 4 training questions: greedy reward " in said
    program, *again = command("evaluate", said)
    evaluation.main(again)
    scores = json.loads((folder / "eval-my data.json").read_text())
    wanted = {"judge": "mine.py:mine:2", "max_new_tokens": 16, "temperature": 0.9, "stop": ["9"],
              "system_prompt": "Add it.", "questions": 8,
              "of_the_run": " (the run was trained on 4 of 8)"}
    assert program == "eval.py" and wanted.items() <= scores.items()
    greedy = [row["score"] for row in files.read_lines(folder / "eval-my data.jsonl")[1:5]]
    assert fmean(greedy) == after(folder)["greedy"]["reward"] > 0

    program, *other = command("compare", said)
    chosen = parse_given(Config, other)
    assert program == "train.py" and chosen["algorithm"] == "grpo"
    assert not {"pruning_rate", "output_dir"} & chosen.keys()
    assert (chosen["stop"], chosen["columns"]) == (["9"], ["question=q"])


def command(what, said):
    """The words of the command that a run has printed at its end."""
    [line] = re.findall(f"^{what} +python (.+)$", said, re.MULTILINE)
    return shlex.split(line)


def after(folder):
    return json.loads(Path(folder, "summary.json").read_text())["after"]


@pytest.mark.parametrize("words, other", [
    ("--algorithm=cppo --keep=random --mu=3 --allocation=false",
     "python train.py --algorithm=grpo --dataset=toy --mu=3"),
    ("--algorithm=grpo --lora=4", "python train.py --algorithm=cppo --dataset=toy --lora=4"),
    ("--algorithm=grpo --group_size=2", None),  # CPPO would keep none of 2
])
def test_cppo_is_compared_with_grpo_and_grpo_with_cppo(words, other, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py"])
    line = baseline_command(config_of(parse_given(Config, words.split()))[0])
    assert line == other
    config_of(parse_given(Config, shlex.split(line or "")[2:]))  # it is accepted


def test_an_evaluation_asks_what_was_held_out_of_the_training(small, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    written(Path("mine.jsonl"), sums(12))
    words = "--dataset mine.jsonl --eval_every 9 --steps 9 --pruning_rate 0.5 --allocation false"
    run(small, "run", f"{BRIEF} {words}")
    evaluation.main(["--model", "run"])
    assert " 3 questions, held out of the training, judged by" in capsys.readouterr().out
    asked = {row["question"] for row in files.read_lines("run/eval-mine.jsonl")[1:]}
    trained = {row["question"] for row in files.read_lines("run/samples.jsonl")}  # one in each step
    assert len(asked) == 3 and trained == {row["question"] for row in sums(12)} - asked


def test_the_command_after_ctrl_c_is_whole(small, tmp_path, monkeypatch, capsys):
    stop_after(1, monkeypatch)
    run(small, tmp_path / "run", BRIEF)
    said = capsys.readouterr().out
    [line] = re.findall("To go on from .*: python train.py (.+)$", said, re.MULTILINE)
    assert train.main(shlex.split(line)) == 0


def test_another_benchmark_takes_neither_the_judge_nor_the_columns_of_a_run(tmp_path):
    options = {"dataset": "gsm8k", "eval_dataset": "math500", "rewards": ["gsm8k_accuracy"],
               "sampler": "builtin", "max_new_tokens": 7, "columns": ["question=q"]}
    written(tmp_path / "run.json", [options])
    found = as_in_the_run({"model": str(tmp_path / "checkpoint-000001")})
    assert found["benchmark"] == ["math500"] and found["max_new_tokens"] == 7
    assert not {"judge", "columns"} & found.keys()
    config = evaluation.check({"model": str(tmp_path), "benchmark": ["toy"]})
    assert config.max_new_tokens is None


@pytest.mark.parametrize("own, sampler", [
    ("my_tool.py:WithCalculator", f"{ROOT}/examples/my_tool.py:WithCalculator"),
    ("my_sampler.py:Generate", "builtin"),
])
def test_a_run_with_a_sampler_of_ones_own_is_evaluated_with_it_if_it_is_built_on_ours(
    own, sampler, tmp_path
):
    config, _ = config_of({"sampler": f"{ROOT}/examples/{own}", "output_dir": str(tmp_path)})
    keep_options(tmp_path, config)
    words = shlex.split(evaluation_command(config))[2:]
    assert evaluation.check(parse_given(evaluation.EvaluationOptions, words)).sampler == sampler


def test_a_sampler_that_is_not_built_on_ours_is_refused():
    with pytest.raises(UserError, match="Generate is not built on .* write --sampler builtin"):
        evaluation.check({"sampler": f"{ROOT}/examples/my_sampler.py:Generate"})
