"""logs.py and interrupt.py of engine: what a run says while it works."""

import json
import re
import signal

import pytest

from engine.run import interrupt
from tests.helpers.runs import metrics_of, run

pytestmark = pytest.mark.usefixtures("undrawn")


WORDS = ("--group_size 8 --questions_per_step 1 --max_new_tokens 24 --eval_questions 4 --seed 3 "
         "--allocation false")


def table(shown):
    """The lines of the table: its head, the evaluation before, and the steps."""
    return re.search("^ *steps +accuracy.*?(?=\nOn )", shown, re.M | re.S)[0].splitlines()


def test_a_run_leaves_a_table_and_what_to_do_next(small, tmp_path, capsys):
    """The lines of steps 1, 2, 4 and 5 are means since the line above; the answer is to the first
    example that was answered wrong."""
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
    for part in ("greedy", "sampled"):
        first, last = (each[part]["accuracy"] for each in (scores, summary["after"]))
        assert f"{part} accuracy {first:.3f} → {last:.3f},\n" in out
    for line in (f"model     {folder}/checkpoint-000005", f"look      {folder}/curves.png",
                 "compare   python train.py --algorithm=grpo ",
                 f"evaluate  python eval.py --model {folder}"):
        assert line in out


def test_the_second_signal_ends_a_run_if_it_is_not_the_first_one_passed_on(monkeypatch, capsys):
    asked = interrupt.Interrupt()
    clock = [100.0]
    monkeypatch.setattr(interrupt.time, "monotonic", lambda: clock[0])
    before = signal.getsignal(signal.SIGTERM)
    with asked:
        signal.raise_signal(signal.SIGTERM)
        clock[0] += 0.9
        signal.raise_signal(signal.SIGTERM)
        clock[0] += 0.2
        for _ in range(2):  # the third one ends also the saving that the second one has begun
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            clock[0] += 0.9
            signal.raise_signal(signal.SIGINT)
            clock[0] += 0.2
        assert not asked.asked  # nobody obeys before all ranks know
        asked.agree(None)
    assert asked.asked == signal.SIGTERM  # the first one counts
    assert "once more to stop now" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) == before
