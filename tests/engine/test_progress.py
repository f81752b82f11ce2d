"""progress.py, logs.py and interrupt.py of engine: what a run says while it works."""

import io
import json
import math
import re
import signal
import sys

import pytest
from matplotlib.figure import Figure

from engine.base import progress
from engine.report import logs
from engine.report.curves import curves
from engine.run import interrupt
from tests.helpers.runs import go_on, metrics_of, run, written
from tests.test_train import stop_after

pytestmark = pytest.mark.usefixtures("undrawn")


class Screen(io.StringIO):
    def isatty(self):
        return True


def test_80_columns_show_the_bar_the_time_left_and_how_much_is_sampled(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Screen())
    with progress.bar("cppo, accuracy 0.53, length 33", 32, "steps") as bar:
        bar.ncols, bar.start_t = 80, bar._time() - 96
        bar.update(24)
        progress.say("sampling", 37, 48, "tokens")
        assert str(bar) == (
            "cppo, accuracy 0.53, length 33 24/32 steps |######  | 00:32 left, sampling 37/48")


WORDS = ("--group_size 8 --questions_per_step 1 --max_new_tokens 24 --eval_questions 4 --seed 3 "
         "--allocation false")


def table(shown):
    """The lines of the table: its head, the evaluation before, and the steps."""
    return re.search("^ *steps +accuracy.*?(?=\nOn )", shown, re.M | re.S)[0].splitlines()


def test_a_run_leaves_a_table_and_what_to_do_next(small, tmp_path, monkeypatch, capsys):
    """The lines of steps 1, 2, 4 and 5 are means since the line above, also of a run that goes
    on; the answer is to the first example that was answered wrong."""
    folder = tmp_path / "run"
    assert run(small, folder, f"{WORDS} --steps 5") == 0
    out, err = capsys.readouterr()
    assert out.startswith("CPPO on toy: qwen2, ") and "Each step: 1 question × 8 completions" in out
    assert err == ""
    head, before, *lines = table(out)
    summary = json.loads((folder / "summary.json").read_text())
    scores = summary["before"]
    example = next(row for row in scores["examples"] if not row["correct"])
    assert head.endswith(f"tokens  {example['question']}  (right: {example['answer']}), greedy:")
    assert before.split()[:2] == ["before", f"{scores['sampled']['accuracy']:.2f}"]
    assert "wrong" in before and example["completion"].split()[0] in before
    assert [line.split()[0] for line in lines] == ["1", "2", "3–4", "5"]
    third, fourth = (row["length"] for row in metrics_of(folder)[2:4])
    assert f"{(third + fourth) / 2:.1f}  " in lines[2] and max(map(len, lines)) <= 100
    assert ("\nBefore and after the run 4 test questions get a greedy and a sampled answer, as "
            "many completions as 2.0 steps. --eval_questions changes this; 0: none.\n") in out
    for part in ("greedy", "sampled"):
        first, last = (each[part]["accuracy"] for each in (scores, summary["after"]))
        assert f"{part} accuracy {first:.3f} → {last:.3f},\n" in out
    for line in (f"model     {folder}/checkpoint-000005", f"look      {folder}/curves.png",
                 "compare   python train.py --algorithm=grpo ",
                 f"evaluate  python eval.py --model {folder}"):
        assert line in out

    stop_after(4, monkeypatch)
    assert run(small, tmp_path / "halves", f"{WORDS} --steps 5") == 130
    capsys.readouterr()
    go_on(tmp_path / "halves")
    assert table(capsys.readouterr().out) == [head, before, lines[-1]]


@pytest.mark.parametrize("measure, tested, title", [
    ("accuracy", [], "accuracy of the samples: 0.2 → 0.4"),
    ("reward", [], "reward of the samples: 3 → 5"),
    ("accuracy", ["a 1 → 2", "b"], "a 1 → 2\nb"),
])
def test_the_picture_is_called_as_the_last_lines_are(measure, tested, title, tmp_path, monkeypatch):
    rows = [{"questions": 2, "accuracy": a, "reward": r, "length": 9, "entropy": 1}
            for a, r in ((0.2, 3), (0.4, 5))]
    written(tmp_path / "metrics.jsonl", rows)
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **more: drawn.append(figure))
    curves(tmp_path, "cppo", measure, tested)
    axes = drawn[0].axes
    assert axes[0].get_title() == title and len(axes) == 3


def test_a_step_in_which_nothing_was_judged_has_a_line(capsys):
    logs.show_line("4", {"accuracy": math.nan, "length": 34.8}, "accuracy")
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
