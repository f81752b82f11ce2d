"""engine/run/plan_command.py: what `--plan` prints, and how it ends."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import train
from algorithms import KEEP, token_mean
from engine.base import ranks
from engine.run import command_line
from engine.run.config import Config, config_of
from engine.run.plan import GB, USABLE, plan
from grpo import grpo_loss

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
RECIPES, DOCS = ROOT / "recipes", (ROOT / "docs/gpus.md").read_text()
GSM8K, MATH = RECIPES / "gsm8k_1.5b_cppo.yaml", RECIPES / "math_7b_cppo.yaml"
GENERATE = ROOT / "examples/my_sampler.py:Generate"
SMALL, MIDDLE, LARGE = (f"Qwen/Qwen2.5-{size}-Instruct" for size in ("0.5B", "1.5B", "7B"))


@pytest.fixture
def devices(monkeypatch):
    """Plan for as many devices as one says."""
    def say(n):
        monkeypatch.setattr(ranks, "world_size", lambda: n)
    return say


def told(words, capsys):
    """(what `train.py` prints, its exit code)"""
    code = train.main([*map(str, words)])
    return capsys.readouterr().out, code


def table(heading):
    """{first cell: the other cells} of a table in docs/gpus.md."""
    text = DOCS[DOCS.index(f"| {heading}") :].split("\n\n")[0].replace("*", "")
    rows = {}
    for line in text.splitlines()[2:]:
        name, *cells = [cell.strip() for cell in line.strip("| ").split("|")]
        rows[name] = [cell for cell in cells if cell]
    return rows


@pytest.mark.parametrize("recipe, heading, processes", [(GSM8K, "GSM8K", 1), (MATH, "MATH", 3)])
def test_the_memory_in_the_docs_is_that_of_the_plan(recipe, heading, processes, devices, capsys):
    devices(processes)
    out, code = told(["--plan", 80, "--recipe", recipe], capsys)
    assert code == 0 and "It fits" in out
    assert "8 questions, 8 sampled at a time" in out
    lines = {line[:14].strip(): line[14:].split() for line in out.splitlines()}
    for name, cells in table(heading).items():
        assert [cell for cell in lines[name] if cell != "0.00"] == cells


def shown(page, command):
    """What a page shows after a command, from the verdict on."""
    text = page[page.index(f"    $ python train.py {command}\n") :]
    text = text[text.index("    It ") :]
    lines = itertools.takewhile(lambda line: not line or line[:4] == "    ", text.splitlines())
    return "\n".join(line[4:] for line in lines).strip()


def test_what_the_docs_show_is_printed(capsys):
    command = f"--plan 24 --model {MIDDLE} --dataset gsm8k"
    out, code = told(command.split(), capsys)
    assert code == 3 and out.endswith(f"\n{shown(DOCS, command)}\n")


SAFE = ["--micro_batch_tokens 1024", "--gradient_checkpointing"]
SHARDS = "--shard full on 2 devices"
LEVERS = [  # processes, options, what may be changed
    (1, "", [*SAFE, "--beta 0", "--lora 16", SHARDS]),
    (2, "", [*SAFE, "--beta 0", "--lora 16", "--shard full"]),
    (2, "--shard full", ["--micro_batch_tokens 512", SAFE[1], "--beta 0"]),
    (1, "--lora 8", SAFE),
    (1, "--algorithm ppo", [*SAFE, "--beta 0", SHARDS]),
    (1, f"--sampler {GENERATE}", [*SAFE, "--beta 0", SHARDS]),
    (1, "--beta 0 --gradient_checkpointing --micro_batch_tokens 1024",
     ["--micro_batch_tokens 512", "--lora 16", SHARDS]),
    (1, "--beta 0 --gradient_checkpointing --micro_batch_tokens 1", ["--lora 16", SHARDS]),
]


@pytest.mark.parametrize("processes, given, expected", LEVERS)
def test_each_lever_is_the_plan_of_the_run_with_it(processes, given, expected, devices, capsys):
    words = f"--plan 24 --model {MIDDLE} --dataset gsm8k {given}".split()
    devices(processes)
    out, _ = told(words, capsys)
    _, lines = out.split("with one change\n")
    assert [line[41:] for line in lines.splitlines()] == expected
    for line, lever in zip(lines.splitlines(), expected):
        changes, on, _ = lever.partition(" on 2 devices")
        devices(2 if on else processes)
        out, code = told([*words, *changes.split()], capsys)
        assert f"\npeak          {line[14:38]}\n" in out
        assert {"fits": 0, "does not fit": 3}[line[:14].strip()] == code


def test_a_run_that_nothing_helps_ends_with_code_3(capsys):
    words = f"--plan 12 --model {LARGE} --dataset gsm8k_zh --algorithm ppo".split()
    out, code = told(words, capsys)
    assert code == 3 and "\nIt does not fit: a device has 11.4 GB for the peak." in out
    assert out.count("\ndoes not fit ") == 4 and "\nfits " not in out


def test_a_machine_without_a_gpu_is_told_what_is_planned(capsys):
    out, _ = told(["--plan"], capsys)
    assert ("80 GB if --plan names no size" in out) != torch.cuda.is_available()


def test_the_plan_says_that_it_does_not_know_a_sampler_of_ones_own(capsys):
    out, _ = told(["--plan", "--sampler", GENERATE], capsys)
    assert f"note: --sampler {GENERATE} is counted as if it were the project's own." in out


@pytest.mark.parametrize("recipe", [GSM8K, MATH])
def test_the_recipes_of_the_paper_are_its_first_code(recipe):
    """Token mean, the largest |A| of a device's whole batch, μ = 2, β = 0.04; its GRPO is the same
    row with P = 0."""
    chosen = command_line.given(Config, ["--plan", "--recipe", str(recipe)])
    _, row = config_of(chosen)
    assert row.loss.args[0] is grpo_loss and row.token_weights is token_mean
    assert row.keep is KEEP["pooled"]
    assert (row.group_size, row.k, row.questions_per_step, row.mu, row.beta) == (16, 2, 8, 2, 0.04)
    _, grpo = config_of(chosen | {"pruning_rate": 0.0})
    assert (grpo.token_weights, grpo.k, grpo.questions_per_step) == (token_mean, 16, 1)


@pytest.mark.parametrize("share, fits", [(1.001, True), (0.999, False)])
def test_a_device_gives_95_percent(share, fits):
    config, _ = config_of({"plan": 80.0, "model": SMALL, "micro_batch_tokens": 2048})
    peak = max(plan(config.options).peaks)
    room = {"plan": share * peak / USABLE / GB}
    assert plan(SimpleNamespace(**vars(config.options) | room)).fits == fits
