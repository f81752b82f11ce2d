"""engine/base/progress.py and logs.py: what a run says while it works."""

import io
import json
import re
import signal
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

import train
from algorithms import resolve
from engine.base import progress
from engine.run import logs
from engine.run.config import Config
from engine.run.state import Run


class Screen(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_on_a_terminal_moves_and_shows_what_is_done_while_its_loop_stands_still(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Screen())
    bar = progress.Bar("cppo", 24, "steps", done=2)
    bar.update(facts="accuracy 0.42")
    progress.say("sampling", 37, 96, "tokens")
    time.sleep(1.3)
    progress.say("scoring")
    time.sleep(0.7)
    bar.close()
    shown = sys.stderr.getvalue()
    assert (
        "cppo 3/24 steps" in shown
        and ", sampling 37 of 96 tokens, accuracy 0.42" in shown
        and ", scoring, acc" in shown
    )
    # at most ten a second; and its clock goes
    assert 4 <= shown.count("\r") <= 20 and len(set(re.findall(r"00:0\d", shown))) >= 2


def test_a_file_gets_a_line_a_minute_and_no_bar(monkeypatch, capsys):
    bar = progress.Bar("cppo", 24, "steps")
    bar.update(facts="accuracy 0.10")
    bar.written -= 61
    bar.update(facts="accuracy 0.42")
    bar.update(facts="accuracy 0.43")
    bar.close()
    assert list(progress.over([7], "evaluation", "batches")) == [7]
    assert capsys.readouterr() == ("cppo: 2 of 24 steps, accuracy 0.42\n", "")


CONFIG = Config(questions_per_step=2, max_new_tokens=96, lr=1e-6)


@pytest.mark.parametrize("name, options, words", [
    ("grpo", {}, "2 questions × 16 completions = 32 sampled, at most 96 tokens each; trained on: "
                 "all of them. "),
    ("cppo", {}, "8 questions × 16 completions = 128 sampled, at most 96 tokens each; trained on: "
                 "32, k = 4 of each 16 (allocation: 8 questions per device in place of 2)."),
    ("cppo", {"allocation": False}, "2 questions × 16 completions = 32 sampled, at most 96 tokens "
                                    "each; trained on: 8, k = 4 of each 16. "),
    ("dapo", {}, "32 sampled, up to 4 times, at most 96"),
    ("gfpo_adaptive", {}, "trained on: at most 16, 4 to 8 of each 16. "),
])  # fmt: skip
def test_one_line_says_what_a_step_is(name, options, words):
    algorithm = resolve(name, questions_per_step=2, **options)
    line = logs.a_step(CONFIG, algorithm, algorithm.questions_per_step, 0)
    assert line.startswith("each step: ") and words in line and "\n" not in line
    assert "Evaluated: 512 questions, before and after training." in logs.a_step(
        CONFIG, algorithm, 2, 512
    )
    assert "Learning rate: 1e-06 at its peak, cosine to 0." in line
    assert "0.001 at its peak." in logs.a_step(
        replace(CONFIG, lr=1e-3, lr_schedule="constant"), algorithm, 2, 0
    )


@pytest.mark.parametrize("steps, asked, lr, notes", [(4, None, 1e-6, 1), (4, 4, 1e-6, 0), (934, None, 1e-6, 0), (4, None, 3e-5, 0)])
def test_a_run_that_can_hardly_change_the_model_says_so(steps, asked, lr, notes):
    run = SimpleNamespace(steps=steps, algorithm=resolve("cppo"), config=Config(steps=asked, lr=lr))
    assert len(Run.too_little(run)) == notes  # 8 updates of 1e-6


@pytest.mark.parametrize("seconds, words", [(3.2, "3 s"), (99, "99 s"), (900, "15 min"), (9000, "2 "
                                                                                                "h "
                                                                                                "30 min")])
def test_a_duration_in_words(seconds, words):
    assert logs.duration(seconds) == words


def test_a_run_says_what_it_will_do_and_after_its_first_step_how_long_it_will_take(
    small, tmp_path, monkeypatch, capsys
):
    clock, said, train_step, say = iter([7.0, 70.0, 700.0]), set(), train.train_step, progress.say

    def step(*arguments):
        of_step = train_step(*arguments)
        return of_step._replace(metrics=of_step.metrics | {"seconds/total": next(clock)})

    monkeypatch.setattr(train, "train_step", step)
    monkeypatch.setattr(
        progress, "say", lambda *words: said.add(say(*words) or progress.now["words"])
    )
    words = [
        "--model", small, "--group_size", "8", "--questions_per_step", "1", "--max_new_tokens",
        "24", "--eval_questions", "2",
    ]
    assert train.main([*words, "--steps", "3", "--output_dir", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert (
        "4 questions × 8 completions = 32 sampled, at most 24 tokens each; trained on: 8, k = 2 of "
        "each 8"
        in lines[0]
    )
    assert lines[0].endswith("Evaluated: 2 questions, before and after training.")
    assert lines[1] == "step 1 took 7 s: the others take about 14 s." and "took" not in "".join(
        lines[2:]
    )
    assert shown.err == ""
    assert {
        "sampling 1 of 24 tokens", "scoring", "log-probabilities", "update 1 of 1 micro-batches",
        "saving", "",
    } <= said


def test_the_bar_of_dynamic_sampling_counts_questions(small, tmp_path, monkeypatch, capsys):
    """DAPO takes more questions than its steps would, so the run is over before its steps are."""
    (tmp_path / "x.jsonl").write_text(json.dumps({"question": "1+2=?", "answer": "3"}) + "\n")
    bars, bar = [], progress.Bar
    monkeypatch.setattr(
        progress, "Bar", lambda *words, **options: bars.append(bar(*words, **options)) or bars[-1]
    )
    words = [
        "--model", small, "--dataset", str(tmp_path / "x.jsonl"), "--group_size", "4",
        "--max_new_tokens", "8", "--algorithm", "dapo",
    ]
    for steps in ([], ["--steps", "1"]):
        assert (
            train.main(
                [
                    *words, "--epochs", "6",
                    *steps, "--output_dir", str(tmp_path / f"run{len(steps)}"),
                ]
            )
            == 0
        )
    assert [(bar.total, bar.unit) for bar in bars] == [(6, "questions"), (1, "steps")]
    assert bars[0].done == 6


def test_the_second_signal_ends_a_run_if_it_is_not_the_first_one_passed_on(monkeypatch, capsys):
    interrupt, clock = logs.Interrupt(), [100.0]
    monkeypatch.setattr(logs.time, "monotonic", lambda: clock[0])
    with interrupt:
        signal.raise_signal(signal.SIGTERM)
        clock[0] += 0.9
        signal.raise_signal(signal.SIGTERM)
        clock[0] += 0.2
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert capsys.readouterr().out == "finishing this step; once more to stop now\n"
    interrupt.share(None)
    assert interrupt.exit_code == 0  # the first one counts
