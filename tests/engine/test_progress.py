"""engine/base/progress.py, engine/run/logs.py and interrupt.py: what a run says while it works."""

import io
import json
import re
import signal
import sys
import time

import pytest

import train
from algorithms import resolve
from engine.base import files, progress
from engine.run import interrupt, logs


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


WORDS = ["--group_size", "8", "--questions_per_step", "1", "--max_new_tokens", "24",
         "--eval_questions", "4", "--seed", "3"]


def table(shown):
    """The lines of the table: its head, the evaluation before, and the steps."""
    lines = shown.splitlines()
    [head] = [i for i, line in enumerate(lines) if line.split()[:2] == ["steps", "accuracy"]]
    [end] = [i for i, line in enumerate(lines) if line.startswith("On ")]
    return lines[head:end]


def test_a_run_leaves_a_table_and_what_to_do_next(small, tmp_path, monkeypatch, capsys):
    """The lines of steps 1, 2, 4 and 5 are means since the line above, also of a run that goes
    on; the answer is to the first example that was answered wrong."""
    said = []
    monkeypatch.setattr(progress, "say", lambda *words: said.append(words))
    words = ["--model", small, *WORDS, "--output_dir", str(tmp_path / "run")]
    assert train.main([*words, "--steps", "5"]) == 0
    shown = capsys.readouterr()
    first, second, *_ = shown.out.splitlines()
    assert first.startswith("CPPO on toy: qwen2, ") and first.endswith(f"Folder: {tmp_path}/run")
    assert second.startswith("Each step: 4 questions × 8 completions") and shown.err == ""
    head, before, *lines = table(shown.out)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    example = next(row for row in summary["before"]["examples"] if not row["correct"])
    assert head.endswith(f"tokens  {example['question']}  (right: {example['answer']})")
    assert before.split()[:2] == ["before", f"{summary['before']['sampled']['accuracy']:.2f}"]
    assert "wrong" in before and example["completion"].split()[0] in before
    assert [line.split()[0] for line in lines] == ["1", "2", "3–4", "5"]
    rows = files.read(tmp_path / "run/metrics.jsonl")
    length = (rows[2]["length"] + rows[3]["length"]) / 2
    assert f"{length:.1f}  " in lines[2] and max(map(len, lines)) <= 100
    phrases = ("On 4 test questions: greedy accuracy ", f"look      {tmp_path}/run/curves.png",
               "compare   the same command with --algorithm grpo",
               f"evaluate  python eval.py --model {tmp_path}/run")
    assert all(phrase in shown.out for phrase in phrases)
    assert {("sampling", 1, 24, "tokens"), ("scoring",), ("log-probabilities",),
            ("update", 1, 1, "micro-batches"), ("saving",)} <= set(said)

    halves = ["--model", small, *WORDS, "--output_dir", str(tmp_path / "halves")]
    ends = iter([False, False, False, True])
    with monkeypatch.context() as patch:
        patch.setattr(interrupt.Interrupt, "agree",
                      lambda self, device: setattr(self, "asked", next(ends)))
        train.main([*halves, "--steps", "5"])
    capsys.readouterr()
    train.main(["--output_dir", str(tmp_path / "halves"), "--resume"])
    assert table(capsys.readouterr().out) == [head, before, lines[-1]]


def test_a_long_answer_has_no_column_and_a_run_without_an_evaluation_no_first_line(
    small, tmp_path, capsys
):
    words = ["--model", small, *WORDS, "--steps", "1"]
    train.main([*words, "--max_new_tokens", "101", "--output_dir", str(tmp_path / "long")])
    head, before, line = table(capsys.readouterr().out)
    assert head.endswith("tokens") and "wrong" not in before + line and "right" not in before + line
    questions = files.as_lines([{"question": f"{i}+1=?", "answer": str(i + 1)} for i in range(9)])
    (tmp_path / "own.jsonl").write_text(questions)
    train.main([*words, "--dataset", str(tmp_path / "own.jsonl"), "--rewards", "toy_accuracy",
                "--output_dir", str(tmp_path / "own")])
    shown = capsys.readouterr().out
    assert "before" not in shown and "      1  0." in shown and "On " not in shown


def test_a_line_has_as_much_of_an_answer_as_the_terminal_has_room_for(monkeypatch, capsys):
    record = {"correct": True, "completion": "a thought\nof two lines\n<answer>8</answer>"}
    for columns, text in ((99, "a thought of two lines <answer>8</answer>"),
                          (58, "<answer>8</answer>")):
        monkeypatch.setenv("COLUMNS", str(columns))
        logs.show_line("17–32", {"accuracy": 0.88, "length": 34.8}, record)
        line = f"  17–32  0.88 █████████    34.8  right  {text}\n"
        assert capsys.readouterr().out == line


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_a_run_if_it_is_not_the_first_one_passed_on(
    monkeypatch, capsys, number
):
    asked, clock = interrupt.Interrupt(), [100.0]
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
