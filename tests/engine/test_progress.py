"""engine/base/progress.py, engine/run/logs.py and interrupt.py: what a run says while it works."""

import io
import re
import signal
import sys
import time

import pytest

import train
from algorithms import resolve
from engine.base import progress
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
    lines = "cppo: 2 of 24 steps, scoring\ncppo: 4 of 24 steps, scoring\n"
    assert capsys.readouterr() == (lines, "")


def test_the_last_line_of_a_run_stands_once_in_a_file(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "IN_A_FILE", progress.IN_A_FILE | {"mininterval": 0, "delay": 0})
    words = ["--model", small, "--group_size", "4", "--questions_per_step", "1", "--steps", "2",
             "--max_new_tokens", "9", "--eval_questions", "1", "--output_dir", str(tmp_path / "a")]
    train.main(words)
    bar = [line for line in capsys.readouterr().out.splitlines() if line.startswith("cppo")]
    assert bar[-1].endswith(": 2 of 2 steps") and bar.count(bar[-1]) == 1 < len(bar)


@pytest.mark.parametrize("seconds, words", [
    (0.3, "0 s"), (59.4, "59 s"), (60, "1 min"), (719, "12 min"), (3599, "1 h 0 min"),
    (4810, "1 h 20 min"), (86400, "24 h 0 min"),
])
def test_a_duration_has_its_unit(seconds, words):
    assert progress.duration(seconds) == words


@pytest.mark.parametrize("name, words", [
    ("grpo", "2 questions × 16 completions = 32 sampled, at most 96 tokens each; trained on: all "
             "of them."),
    ("cppo", "8 questions × 16 completions = 128 sampled, at most 96 tokens each; trained on: 32, "
             "k = 4 of each 16."),
    ("dapo", "32 sampled, at most 96 tokens each, up to 4 times"),
    ("gfpo_adaptive", "trained on: at most 16, k = 8 of each 16."),
])  # fmt: skip
def test_one_line_says_what_a_step_is(name, words):
    algorithm = resolve(name, questions_per_step=2)
    assert words in logs.describe_step(algorithm, algorithm.questions_per_step, 96)


def test_a_run_says_what_it_will_do_and_after_its_first_step_how_long_it_will_take(
    small, tmp_path, monkeypatch, capsys
):
    clock, said, train_step = iter([3000.0, 70.0, 700.0]), [], train.train_step

    def step(*arguments):
        of_step = train_step(*arguments)
        return of_step._replace(metrics=of_step.metrics | {"seconds/total": next(clock)})

    monkeypatch.setattr(train, "train_step", step)
    monkeypatch.setattr(progress, "say", lambda *words: said.append(words))
    words = [
        "--model", small, "--group_size", "8", "--questions_per_step", "1", "--max_new_tokens",
        "24", "--eval_questions", "2", "--steps", "3", "--output_dir", str(tmp_path / "run"),
    ]
    assert train.main(words) == 0
    shown = capsys.readouterr()
    assert "4 questions × 8 completions = 32" in shown.out and shown.err == ""
    assert "step 1 took 3000.0 s: the others take about 1 h 40 min." in shown.out
    assert {("sampling", 1, 24, "tokens"), ("scoring",), ("log-probabilities",),
            ("update", 1, 1, "micro-batches"), ("saving",)} <= set(said)


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
