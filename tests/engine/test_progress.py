"""engine/base/progress.py, engine/run/logs.py and interrupt.py: what a run says while it works."""

import io
import json
import math
import re
import signal
import sys
import time

import pytest

from algorithms import resolve
from engine.base import progress
from engine.run import interrupt, logs
from tests.engine.runs import go_on, metrics_of, run, sums, written
from tests.test_train import stop_after

pytestmark = pytest.mark.usefixtures("undrawn")


class Screen(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_on_a_terminal_shows_what_is_done_while_its_loop_stands_still(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Screen())
    with progress.bar("cppo", 24, "steps", done=2) as bar:
        bar.update()
        for token in range(150):
            progress.say("sampling", token, 150, "tokens")
            time.sleep(0.01)
        progress.say("scoring")
    shown = sys.stderr.getvalue()
    assert "cppo 3/24 steps" in shown and re.search(r", sampling \d+/150 tokens", shown)
    assert 3 <= shown.count("\r") <= 8  # at most two a second


def test_80_columns_show_the_bar_the_time_left_and_how_much_is_sampled(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Screen())
    with progress.bar("cppo, accuracy 0.53, length 33", 32, "steps") as bar:
        bar.ncols, bar.start_t = 80, bar._time() - 96
        bar.update(24)
        progress.say("sampling", 37, 48, "tokens")
        assert str(bar) == (
            "cppo, accuracy 0.53, length 33 24/32 steps |######  | 00:32 left, sampling 37/48")


def test_a_file_gets_a_line_a_minute_and_no_bar(capsys):
    clock = [0.0]
    with progress.bar("cppo", 24, "steps") as bar:
        bar._time, bar.start_t, bar.last_print_t = lambda: clock[0], 0.0, 0.0
        for _ in range(4):
            progress.say("scoring")
            clock[0] += 31
            bar.update()
    assert list(progress.over([7], "evaluation", "batches")) == [7]
    lines = "cppo: 2 of 24 steps, 11:22 left, scoring\ncppo: 4 of 24 steps, 10:20 left, scoring\n"
    assert capsys.readouterr() == (lines, "")


@pytest.mark.parametrize("name, rule, words", [
    ("grpo", "all", "Each step: 2 questions × 16 completions; all are trained on."),
    ("cppo", "largest_abs", "Each step: 8 questions × 16 completions; the 4 of each 16 with the "
     "largest |A| are trained on."),
    ("dapo", "all", "16 completions, up to 4 times; all are"),
    ("gfpo_adaptive", "shortest", "at most 8 of each 16 that the rule shortest chooses are"),
])  # fmt: skip
def test_one_line_says_what_a_step_is(name, rule, words):
    algorithm = resolve(name, questions_per_step=2)
    assert words in logs.describe_step(algorithm, rule, algorithm.questions_per_step)


WORDS = ("--group_size 8 --questions_per_step 1 --max_new_tokens 24 --eval_questions 4 --seed 3 "
         "--allocation false")


def table(shown):
    """The lines of the table: its head, the evaluation before, and the steps."""
    return re.search("^ *steps +accuracy.*?(?=\nOn )", shown, re.M | re.S)[0].splitlines()


def test_a_run_leaves_a_table_and_what_to_do_next(small, tmp_path, monkeypatch, capsys):
    """The lines of steps 1, 2, 4 and 5 are means since the line above, also of a run that goes
    on; the answer is to the first example that was answered wrong."""
    said = []
    folder = tmp_path / "run"
    monkeypatch.setattr(progress, "say", lambda *words: said.append(words))
    assert run(small, folder, f"{WORDS} --steps 5") == 0
    out, err = capsys.readouterr()
    of_a_gpu = "(note: a micro-batch .*\n)?"
    assert re.match(f"CPPO on toy: qwen2, .*Folder: {folder}\n{of_a_gpu}Each step: 1 quest", out)
    head, before, *lines = table(out)
    scores = json.loads((folder / "summary.json").read_text())["before"]
    example = next(row for row in scores["examples"] if not row["correct"])
    assert head.endswith(f"tokens  {example['question']}  (right: {example['answer']}), greedy:")
    assert before.split()[:2] == ["before", f"{scores['sampled']['accuracy']:.2f}"]
    assert "wrong" in before and example["completion"].split()[0] in before
    assert [line.split()[0] for line in lines] == ["1", "2", "3–4", "5"]
    third, fourth = (row["length"] for row in metrics_of(folder)[2:4])
    assert f"{(third + fourth) / 2:.1f}  " in lines[2] and max(map(len, lines)) <= 100
    for phrase in ("On 4 test questions: greedy accuracy ",
                   f"model     {folder}/checkpoint-000005", f"look      {folder}/curves.png",
                   "compare   python train.py --algorithm=grpo ",
                   f"evaluate  python eval.py --model {folder}"):
        assert phrase in out
    assert err == "" and {("sampling", 1, 24, "tokens"), ("scoring",), ("log-probabilities",),
                          ("update", 1, 1, "micro-batches"), ("saving",)} <= {*said}

    stop_after(4, monkeypatch)
    assert run(small, tmp_path / "halves", f"{WORDS} --steps 5") == 130
    capsys.readouterr()
    go_on(tmp_path / "halves")
    assert table(capsys.readouterr().out) == [head, before, lines[-1]]


def test_a_long_answer_has_no_column_and_a_run_without_an_evaluation_no_first_line(
    small, tmp_path, capsys
):
    run(small, tmp_path / "long", f"{WORDS} --steps 1 --max_new_tokens 101 --eval_questions 1")
    head, before, line = table(capsys.readouterr().out)
    assert head.endswith("tokens") and "wrong" not in before + line and "right" not in before + line
    data = written(tmp_path / "own.jsonl", sums(9))
    run(small, tmp_path / "own", f"{WORDS} --steps 1 --dataset {data} --rewards toy_accuracy")
    shown = capsys.readouterr().out
    assert "before" not in shown and "      1  0." in shown and "On " not in shown


@pytest.mark.parametrize("columns, text", [
    ("99", "a thought of two lines <answer>8</answer>"), ("58", "<answer>8</answer>"),
    ("70", "a thought o…<answer>8</answer>")])
def test_a_line_has_as_much_of_an_answer_as_the_terminal_has_room_for(
    monkeypatch, capsys, columns, text
):
    monkeypatch.setenv("COLUMNS", columns)
    record = {"correct": True, "completion": "a thought\nof two lines\n<answer>8</answer>"}
    logs.show_line("17–32", {"accuracy": 0.88, "length": 34.8}, record)
    assert capsys.readouterr().out == f"  17–32  0.88 █████████    34.8  right  {text}\n"
    logs.show_line("4", {"accuracy": math.nan, "length": 34.8}, None)  # nothing was judged
    assert capsys.readouterr().out == f"      4  nan {'':10}   34.8\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_a_run_if_it_is_not_the_first_one_passed_on(
    monkeypatch, capsys, number
):
    asked = interrupt.Interrupt()
    clock = [100.0]
    monkeypatch.setattr(interrupt.time, "monotonic", lambda: clock[0])
    before = signal.getsignal(number)
    with asked:
        signal.raise_signal(number)
        clock[0] += 0.9
        signal.raise_signal(number)
        clock[0] += 0.2
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert not asked.asked  # nobody obeys before all ranks know
        asked.agree(None)
    assert asked.asked == number  # the first one counts
    assert "once more to stop now" in capsys.readouterr().out
    assert signal.getsignal(number) == before
