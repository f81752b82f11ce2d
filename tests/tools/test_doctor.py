"""Why does my reward not rise? The doctor names the fault first: in the logs of made-up runs, one
limit after the other, and in real runs."""

import contextlib
from dataclasses import replace
from functools import partial

import pytest
import torch

from algorithms import ALGORITHMS, grpo_advantages
from engine.base import files
from engine.base.errors import UserError
from engine.model import networks
from engine.report.metrics import group_gap
from tasks import toy
from tasks.table import TASKS
from tests.helpers.runs import run, written
from tests.helpers.training import a_rollout
from tools import doctor
from tools.doctor import main

OWN = '''
from rewards import extract_answer

def even(completions, **columns):
    """What a small model can learn: half of the answers are even."""
    return [float((extract_answer(text) or "1")[-1] in "02468") for text in completions]

def odd(completions, **columns):
    return [1 - value for value in even(completions)]

def zero(completions, **columns):
    return [0.0] * len(completions)

def one(completions, **columns):
    return [1.0] * len(completions)

def longer(completions, **columns):
    return [len(text) / 100 for text in completions]

def shorter(completions, **columns):
    return [1 - len(text) / 500 for text in completions]

def fails_on_thoughts(completions, **columns):
    if any("<think>" in text for text in completions):
        raise ValueError("a thought")
    return even(completions)

def none(rollout, advantages, k):
    return []
'''


def named_first(findings, what):
    """what: None, if there is nothing to find."""
    assert findings and findings[0].startswith(what) if what else not findings, findings


# --- the limits, in logs ---


def logged(folder, steps=10, completions=("<answer>2</answer>",), options=(), prompt="", **metrics):
    """What the doctor finds in a run in which nothing else is wrong. Its first reward is a.
    metrics: {name: its value in all steps, or a list of its values}."""
    usual = {
        "accuracy": 0.5, "reward": 0.5, "reward/a": 0.5, "no_signal": 0.1, "no_signal/a": 0.1,
        "length": 9.0, "truncated": 0.0, "entropy": 0.3, "kl": 0.1, "kl_old": 0.001,
        "clip_fraction": 0.01, "grad_norm": 1.0, "lr": 1e-3,
    }
    columns = {"step": [*range(1, steps + 1)]}
    for name, value in (usual | metrics).items():
        columns[name] = value if isinstance(value, list) else [value] * steps
    rows = [dict(zip(columns, row)) for row in zip(*columns.values())]
    sample = {"question": "1+1=?", "prompt": prompt, "answer": "2"}
    sample["completions"] = [{"completion": text} for text in completions]
    files.write(folder / "samples.jsonl", files.as_lines([sample] * steps))
    files.write(folder / "metrics.jsonl", files.as_lines(rows))
    files.write(folder / "run.json", files.as_json(dict(options)))
    return doctor.diagnosis(folder)[0]


def change(before, after):
    return [before] * 5 + [after] * 5


FALLS = change(0.3, 0.1)
RISES = change(0.1, 0.8)
CUT = "Answers are cut off"
LARGE = "The updates are too large"
BELOW = "The run ends below its"
STILL = "The updates hardly move"
AWAY = "The clip takes the gradient away"
NOISE = "The samples are noise"
ALIKE = "The samples are all alike"
SAME = "Rewards differ within groups, but the advantages do not"
NO_TOOL = "The model calls a tool, and nobody answers"
NO_ANSWER = "In most completions no answer is found"
HARD = "The questions are too hard"
WRONG = "The reward pays answers that are not the gold"
GAMED = "Another reward rises, and the accuracy does not"


@pytest.mark.parametrize("name, healthy, faulty, what, more", [
    ("tokens_without_logp", 0, 1, "The sampler does not say how likely", {}),
    ("sampler_gap", 0.02, 0.04, "Sampler and trainer disagree", {"group_gap": 0.02}),
    ("sampler_gap", 0.02, 0.6, "A group is not one question", {"group_gap": 0.006}),
    ("grad_norm", 0.1, 0.0, "The gradient is 0", {}),
    ("entropy", 2.4, 2.6, NOISE, {}),
    ("no_signal", 0.2, 0.4, ALIKE, {"options": {"temperature": 0.6}, "completions": "22"}),
    ("kl_old", 0.09, 0.11, LARGE, {}),
    ("truncated", 0.09, 0.11, CUT, {"accuracy": 0.4}),
    ("truncated", 0.19, 0.21, CUT, {"accuracy": RISES}),  # it may begin so, and rise
    ("no_signal/a", 0.59, 0.61, "A question is always right or always", {}),
    ("no_signal", 0.1, RISES, "The entropy collapses", {"entropy": FALLS}),
    ("clip_fraction", 0.14, 0.16, AWAY, {}),
    ("steps", 7, 8, AWAY, {"clip_fraction": 0.16}),
    # all learning rates together move a weight by 1e-4
    ("lr", 1.1e-5, 9e-6, STILL, {}),
])
def test_each_limit_from_both_sides(name, healthy, faulty, what, more, tmp_path):
    for value, expected in ((healthy, None), (faulty, what)):
        named_first(logged(tmp_path, **more | {name: value}), expected)


@pytest.mark.parametrize("algorithm, keep, rate, told", [
    ("cppo", "largest_abs", 0.75, True), ("grpo", "largest_abs", 0.75, True),
    ("cppo_published", "largest_abs", 0.75, False), ("cppo", "random", 0.75, False),
    ("cppo", "largest_abs", 0.0, False), ("grpo", "all", 0.0, False),
])
def test_cppo_whose_completions_become_short_is_told_of_the_token_mean(
    algorithm, keep, rate, told, tmp_path
):
    options = {"algorithm": algorithm, "keep": keep, "pruning_rate": rate}
    for length, collapses in ((4.0, True), (6.2, told), (6.5, False)):
        found = logged(tmp_path, length=change(9.0, length), options=options)
        named_first(found, "The length collapses" if collapses else None)
        if collapses:
            assert ("cppo_published --keep largest_abs" in found[0]) == told


def paid(*answers, **more):
    """A run whose reward pays nearly all completions."""
    texts = [f"<answer>{answer}</answer>" for answer in answers]
    return {"accuracy": 0.95, "no_signal/a": 0.61, "completions": texts} | more


NEVER = {"accuracy": 0.0, "no_signal/a": 1.0}
NOT_READ = NEVER | {"unreadable": 0.6, "completions": ["12"]}
LONG = {"truncated": 0.5, "accuracy": 0.1}


@pytest.mark.parametrize("metrics, what", [
    (NOT_READ, NO_ANSWER), (NOT_READ | {"unreadable": 0.4}, HARD),
    ({"accuracy": change(0.0, 0.15), "unreadable": 0.9}, None),  # it learns to answer
    (paid(2, 2, 2, 2, 3), "The questions are too easy"), (paid(2, 2, 2, 3), WRONG),
    (paid(2, **NEVER), "The reward never fires, not even for right"), (paid(3, **NEVER), HARD),
    (paid(2, accuracy=0.0, **{"reward/a": -0.9}),
     "The accuracy says nothing, because the first reward is never above 0"),
    (LONG | {"prompt": ".\n\nUser: 1+1=?\nAssistant:"},
     "The chat template is not applied: the model has none"),
    (LONG | {"completions": ["<answer>2</answer>4+5-6+7-8+9-2+3-4+5"]},
     "Answers do not end: the model writes on after"),
    # wrong advantages also make it fall
    ({"accuracy": change(0.5, 0.09)}, BELOW),
    ({"accuracy": RISES, "reward/my_format": 0.0}, None),  # a form that is not known
])
def test_of_several_faults_the_cause_comes_first(metrics, what, tmp_path):
    named_first(logged(tmp_path, **metrics), what)


@pytest.mark.parametrize("reward, completion, what", [
    ("format_reward", "<think>so</think>\n\n\n<answer>2</answer>",
     "has text before '<think>', a mark twice, or something else than a newline between '</think>' "
     "and '<answer>'"),
    ("format_reward", "<think>so</think>\n<answer>2</answer>.", "has '.' after '</answer>'"),
    ("soft_format_reward", "<answer>2</answer>", "has no '<think>'"),
    ("code_format", "<think>so</think>\n```python\n2", "has no '\\n```' after '```python\\n'"),
])  # fmt: skip
def test_a_form_that_is_never_met_is_shown_by_the_nearest_completion(
    reward, completion, what, tmp_path
):
    """Also if the accuracy rises."""
    texts = ["2", completion]
    [finding] = logged(tmp_path, completions=texts, accuracy=RISES, **{f"reward/{reward}": 0.0})
    assert finding.startswith(f"The format is never met. The nearest completion {what}. Seen in 10")
    assert f"as {completion!r}" in finding


def test_the_gap_within_a_group():
    """Two completions of one question begin with 2 and with 3 tokens of the first one, a third one
    with none."""
    tokens = torch.tensor([[5, 6, 7, 0], [5, 6, 8, 9], [5, 6, 7, 0], [4, 6, 7, 8]])
    logp = torch.tensor([
        [-1, -2, -3, 0], [-1.5, -2.5, -9, -9], [-1, -2, -3.6, 0], [-5, -9, -9, -9]])
    rollout = a_rollout(torch.zeros(1, 4), tokens=tokens, logp=logp, mask=tokens > 0)
    assert group_gap(rollout).item() == pytest.approx(0.5 + 0.2, abs=1e-6)


def test_what_it_says_of_a_fault_of_few_steps_of_health_and_of_no_run(tmp_path, capsys):
    with pytest.raises(UserError, match="no run with at least one step"):
        main([str(tmp_path)])
    [finding] = logged(tmp_path, entropy=FALLS, no_signal=RISES)
    assert "Seen in 10 steps: entropy 0.3 → 0.1 (at most 0.3); no_signal 0.1 → 0.8" in finding
    assert "; as '<answer>2</answer>'. Try: lower --lr" in finding
    for more, said in (
        ({"steps": 3}, "3 steps are too few to judge the accuracy: that takes 8."),
        ({"accuracy": [i / 10 for i in range(10)]},
         "Nothing was found in 10 steps. Of the samples: accuracy 0.15 → 0.75"),
    ):
        assert not logged(tmp_path, **more)
        main([str(tmp_path)])
        assert capsys.readouterr().out.startswith(said)
    assert doctor.first_sentence(tmp_path) == f"doctor    python tools/doctor.py {tmp_path}"
    assert doctor.first_sentence(tmp_path, steps_before=10) is None  # it has made none
    assert [*map(doctor.short, (512.4, 99.6, 0.0312, -1234))] == ["512", "100", "0.031", "-1234"]


# --- real runs ---


TIMES = {"zero": 0.0, "against": -1.0}  # wrong advantages: GRPO's times these
TOOL = "--model toy --dataset toy_tool --eval_questions 8 --max_new_tokens 64 "
WITH_TOOL = f"{TOOL}--sampler examples/my_tool.py:WithCalculator "


def times_grpo(rollout, times):
    return times * grpo_advantages(rollout)


@pytest.fixture
def found(tmp_path, small, undrawn, capsys, monkeypatch):
    """found(words of the command line) → what the doctor finds in this run. At its end, also if it
    stops, train.py says it."""
    for name, times in TIMES.items():
        own = partial(times_grpo, times=times)
        monkeypatch.setitem(ALGORITHMS, name, replace(ALGORITHMS["grpo"], advantages=own))
    (tmp_path / "own.py").write_text(OWN)
    data = written(tmp_path / "questions.jsonl", map(toy.question, range(400)))
    usual = ("--algorithm grpo --questions_per_step 2 --group_size 8 --steps 10 --lr 3e-4 "
             f"--minibatches 2 --max_new_tokens 40 --dataset {data} --rewards toy_accuracy ")

    def found(words, model=small):
        own = words.replace("own:", f"{tmp_path}/own.py:")
        with contextlib.suppress(UserError):  # if the run stops, because it failed too often
            run(model, tmp_path / "run", usual + own)
        findings = doctor.diagnosis(tmp_path / "run")[0]
        said = capsys.readouterr().out
        assert not findings or said.endswith(
            f"\n{findings[0]} More: python tools/doctor.py {tmp_path}/run\n")
        return findings

    return found


# those that are slow need eight steps and more
@pytest.mark.parametrize("words, what", [
    ("--steps 1 --rewards own:one", WRONG), ("--steps 1 --max_new_tokens 2", CUT),
    ("--steps 1 --rewards own:fails_on_thoughts", "A reward function fails"),
    ("--steps 1 --algorithm cppo --keep own:none", "No completion is kept"),
    ("--steps 2 --rewards own:zero", "The reward never fires"),
    ("--steps 1 --algorithm zero", SAME),
    ("--lr 1e9 --rewards own:even", "Updates are skipped"),
    ("--lr 10 --steps 3", LARGE), (f"{TOOL}--steps 2", NO_TOOL),
    ("--temperature 3 --steps 2", NOISE), ("--stop <answer> --steps 2", NO_ANSWER),
    # healthy
    ("--steps 2 --algorithm cppo", None), ("--steps 3 --beta 0", None),
    ("--steps 2 --lora 4", None), (f"{WITH_TOOL}--steps 2", None),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("--temperature 0.05 --rewards own:even", ALIKE),
        ("--lr 1e-5 --rewards own:even", STILL),
        ("--steps 16 --algorithm against", BELOW),
        ("--steps 24 --rewards own:even own:odd:3", GAMED),
        ("--rewards code_accuracy code_format", NO_ANSWER),
        ("--lr 5e-5 --clip_low 1e-6 --clip_high 1e-6 --rewards own:even", AWAY),
        ("--steps 16 --max_new_tokens 24 --rewards own:longer", "The length runs away"),
        ("--steps 40 --lr 2e-4 --rewards own:shorter", "The length collapses"),
    )),
])
def test_a_fault_is_named_first(words, what, found):
    named_first(found(words), what)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [
    "grpo", "cppo", "drgrpo", "dapo", "gspo", "gdpo", "pods", "cppo_published", "ppo",
    "gfpo --pruning_rate 0.25",  # at its 0.5 GFPO needs more steps than a test has
    "cppo --beta 0 --mask_truncated", "grpo --lora 4 --lr 3e-3",
])
def test_a_run_that_learns_gets_no_finding(algorithm, found, tmp_path, monkeypatch):
    # PPO's critic learns at the toy's rate: the questions come from a file, whose rate is GSM8K's
    monkeypatch.setattr(networks, "task_of", lambda name: TASKS["toy"])
    assert not found(
        f"--algorithm {algorithm} --questions_per_step 4 --steps 32", model=toy.BASE)
    metrics = doctor.metrics_of(files.read(tmp_path / "run/metrics.jsonl"))
    assert metrics["accuracy"].rises
