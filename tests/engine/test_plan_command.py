"""engine/run/plan_command.py: what `--plan` prints, and the command that it finds when a run does
not fit."""

import itertools
import re
import shlex
import sys
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
from engine.run.plan_command import command, mildest
from grpo import grpo_loss

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
RECIPES, DOCS = ROOT / "recipes", (ROOT / "docs/gpus.md").read_text()
GSM8K, MATH = RECIPES / "gsm8k_1.5b_cppo.yaml", RECIPES / "math_7b_cppo.yaml"
SMALL, MIDDLE, LARGE = (f"Qwen/Qwen2.5-{size}-Instruct" for size in ("0.5B", "1.5B", "7B"))


@pytest.fixture
def devices(monkeypatch):
    """Plan for as many devices as one says."""
    def say(n):
        monkeypatch.setattr(ranks, "world_size", lambda: n)
    return say


def told(words, capsys):
    """What `train.py` prints, and with which exit code it ends."""
    with pytest.raises(SystemExit) as ended, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", *map(str, words)])
        command_line.run_program(train.main)
    return *capsys.readouterr(), ended.value.code


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
    out, err, code = told(["--plan", 80, "--recipe", recipe], capsys)
    assert (code, err) == (0, "") and "It fits" in out
    assert "8 questions, 8 sampled at a time" in out
    lines = {line[:14].strip(): line[14:].split() for line in out.splitlines()}
    for name, cells in table(heading).items():
        assert [cell for cell in lines[name] if cell != "0.00"] == cells


def shown(page, command, start):
    """What a page shows after a command, from a line on that begins with `start`."""
    text = page[page.index(f"    $ python train.py {command}\n") :]
    text = text[text.index(f"    {start}") :]
    lines = itertools.takewhile(lambda line: not line or line[:4] == "    ", text.splitlines())
    return "\n".join(line[4:] for line in lines).strip()


PAGES = [DOCS, (ROOT / "docs/zh/gpus.md").read_text()]


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("command, start", [
    (f"--plan 24 --model {MIDDLE} --dataset gsm8k", "It does not fit"),
    ("--plan 80 --recipe recipes/gsm8k_1.5b_cppo.yaml --rollout vllm --vllm_share 0.15", "What to"),
])
def test_the_commands_and_times_of_the_docs_are_printed(page, command, start, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    out = told(command.split(), capsys)[0]
    assert out.endswith(f"\n{shown(page, command, start)}\n")


def test_a_run_that_does_not_fit_gets_a_command(devices, capsys):
    words = ["--model", MIDDLE, "--dataset", "gsm8k"]
    out, err, code = told(["--plan", 24, *words], capsys)
    assert code == 3 and err == "" and "It fits" not in out
    # the command fits
    [found] = [line for line in out.splitlines() if line.startswith("    python ")]
    out, _, code = told([*shlex.split(found)[2:], "--plan", 24], capsys)
    assert code == 0 and "It fits" in out
    # the docs: two devices train all weights
    devices(2)
    line = f"torchrun --nproc-per-node 2 train.py --model {MIDDLE} --dataset gsm8k --shard full"
    assert f"\n    {line}\n" in told(["--plan", 24, *words], capsys)[0]


TOKENS, CHECKPOINTING = {"micro_batch_tokens": 1024}, {"gradient_checkpointing": True}
LORA, SHARDS = {"lora": 16, "lr": 1e-5}, {"shard": "full"}
CURES = [  # devices, options, share of the peak that there is room for, what is changed
    (1, {}, 0.99, TOKENS),  # the least that helps
    (1, {}, 0.76, TOKENS | CHECKPOINTING | {"beta": 0.0}),  # before LoRA: it trains other weights
    (1, {}, 0.57, LORA),
    (1, {}, 0.1, {}),  # nothing helps
    (1, {"lora": 1024}, 0.3, {}),  # a rank that was chosen stays
    (1, {"algorithm": "ppo"}, 0.57, {}),  # which takes no adapters
    (2, {}, 0.76, SHARDS),
    (2, {"lora": 64}, 0.5, TOKENS | CHECKPOINTING),  # LoRA has replicas only
    (4, SHARDS, 0.5, TOKENS | CHECKPOINTING | LORA | {"shard": "none"}),
]


def changed(p):
    """{option: value} that the mildest changes of a run change. Empty: nothing helps."""
    fitting = mildest(p)
    before = vars(p.options)
    return {x: y for x, y in vars(fitting.options).items() if y != before[x]} if fitting else {}


@pytest.mark.parametrize("processes, given, share, changes", CURES)
def test_a_cure_is_the_mildest_change_that_fits(processes, given, share, changes, devices):
    devices(processes)
    chosen = {"plan": 1000.0, "model": SMALL, "dataset": "gsm8k"} | given
    config, _ = config_of(chosen)
    peak = max(plan(config.options).peaks)
    config.preview.plan = share * peak / USABLE / GB
    assert changed(plan(config.options)) == changes
    if changes:  # the run with these options is accepted, and fits
        config, _ = config_of(chosen | changes | {"plan": config.preview.plan})
        assert plan(config.options).fits


def test_another_sampler_is_not_asked_for_adapters():
    for sampler, changes in (("own", LORA), ("vllm", {})):
        config, _ = config_of({"plan": 8.0, "model": SMALL, "dataset": "gsm8k", "rollout": sampler})
        assert changed(plan(config.options)) == changes


def test_the_command_has_the_options_of_the_user_and_the_changes():
    words = ["--recipe", "my runs/a.yaml", "--rewards", "a", "b", "--lr", "1e-6"]
    given, changes = {"shard": "none", "lr": 1e-6, "lora": None}, {"lora": 8, "lr": 1e-5}
    told = [*words, "--lr", "1e-05", "--lora", "8"]

    def line(argv, devices, changes, machines=1):
        plans = [SimpleNamespace(devices=devices, options=SimpleNamespace(**given | more))
                 for more in ({}, changes)]
        return command(argv, *plans, machines)

    for asked in (["--plan"], ["--plan", "24"], ["--plan=24"]):
        found = shlex.split(line([*asked, *words], 2, changes))
        assert found == ["torchrun", "--nproc-per-node", "2", "train.py", *told]
        assert line([*words, *asked], 1, {}) == f"python train.py {shlex.join(words)}"
    # shards need torchrun, also on one device; two machines meet at the first one
    assert line([], 1, {"shard": "full"}) == "torchrun --nproc-per-node 1 train.py --shard full"
    assert line([], 16, {}, machines=2) == (
        "torchrun --nproc-per-node 8 --nnodes 2 --rdzv-backend c10d --rdzv-endpoint NODE0:29500 "
        "--rdzv-id 1 train.py")


def test_an_update_for_each_mini_batch_and_each_pass(capsys):
    """7,473 questions, 2 in a step on 1 GPU, 16 on 8, 32 on 16; 3 · 4 updates in a step."""
    words = ["--plan", "--algorithm", "grpo", "--mu", 3, "--minibatches", 4, "--model", SMALL,
             "--questions_per_step", 2, "--dataset", "gsm8k"]
    out = told(words, capsys)[0]
    for devices, steps in (("1 GPU", 3737), ("8 GPUs", 468), ("16 GPUs of 2 machines", 234)):
        [line] = [line for line in out.splitlines() if line.startswith(devices)]
        assert f": {steps:,} steps of " in line
        assert line.endswith(f", at most {12 * steps:,} updates")


def test_a_plan_counts_one_step_as_one_and_names_a_time_once(capsys):
    words = ["--plan", "--model", SMALL, "--dataset", "gsm8k", "--steps", 1]
    out = told(words, capsys)[0]
    assert "\n1 GPU: 1 step of 4 questions, at most 2 updates\n" in out
    assert not re.search(r"(\d+ s) to \1", out) and re.search(r" \(\d+ s\)\n", out)
    assert ("80 GB if --plan names no size" in out) != torch.cuda.is_available()


def test_a_plan_that_nothing_helps(capsys):
    words = ["--plan", 12, "--model", LARGE, "--dataset", "gsm8k_zh", "--algorithm", "ppo"]
    out, err, code = told(words, capsys)
    assert code == 2 and err.count("\n") == 1 and "--nproc-per-node 4" in err
    assert "\npeak " in out and "It does not fit: " in out and "train.py" not in out
    assert out.count("no command was found that fits") == 3


@pytest.mark.parametrize("recipe", [GSM8K, MATH])
def test_the_recipes_of_the_paper_are_its_first_code(recipe):
    """Token mean, the largest |A| of a device's whole batch, μ = 2, β = 0.04; its GRPO is the same
    row with P = 0."""
    chosen = command_line.given(Config, ["--plan", "--recipe", str(recipe)])
    _, row = config_of(chosen)
    assert row.loss.func is grpo_loss and row.token_weights is token_mean
    assert row.keep is KEEP["pooled"]
    assert (row.group_size, row.k, row.questions_per_step, row.mu, row.beta) == (16, 2, 8, 2, 0.04)
    _, grpo = config_of(chosen | {"pruning_rate": 0.0})
    assert (grpo.token_weights, grpo.k, grpo.questions_per_step) == (token_mean, 16, 1)


@pytest.mark.parametrize("share, fits", [(1.001, True), (0.999, False)])
def test_a_device_gives_95_percent(share, fits):
    config, _ = config_of({"plan": 80.0, "model": SMALL, "dataset": "gsm8k"})
    peak = max(plan(config.options).peaks)
    room = {"plan": share * peak / USABLE / GB}
    assert plan(SimpleNamespace(**vars(config.options) | room)).fits == fits
