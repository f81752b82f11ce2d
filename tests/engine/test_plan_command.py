"""engine/run/plan_command.py: what `--plan` prints, and the command that it finds when a run does
not fit."""

import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import train
from algorithms import KEEP, token_mean
from engine.base import ranks
from engine.run import options
from engine.run.config import Config, check
from engine.run.options import compose
from engine.run.plan import GB, USABLE, plan
from engine.run.plan_command import command, cure, eval_batch_size
from grpo import grpo_loss

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
RECIPES, DOCS = ROOT / "recipes", (ROOT / "docs/gpus.md").read_text()
GSM8K, MATH = RECIPES / "gsm8k_1.5b_cppo.yaml", RECIPES / "math_7b_cppo.yaml"
SMALL, MIDDLE, LARGE = (f"Qwen/Qwen2.5-{size}-Instruct" for size in ("0.5B", "1.5B", "7B"))


def config(model=SMALL, **given):
    """Options as they are after the command line was checked."""
    options = {"model": model, "dataset": "gsm8k", "devices": 1, "device_gb": 80} | given
    c, _ = check(Config.of(plan=True, **options))
    return c.options


def with_memory(c, share):
    """The options for devices that have room for this share of a run's peak."""
    return SimpleNamespace(**vars(c) | {"device_gb": share * max(plan(c).peaks) / USABLE / GB})


def told(words, capsys):
    """What `train.py --plan` prints, and with which exit code it ends."""
    with pytest.raises(SystemExit) as ended, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", "--plan", *map(str, words)])
        options.run_program(train.main)
    return *capsys.readouterr(), ended.value.code


def table(heading):
    """{first cell: the other cells} of a table in docs/gpus.md."""
    lines = DOCS[DOCS.index(f"| {heading}") :].split("\n\n")[0].replace("*", "").splitlines()
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines[2:]]
    return {name: [cell for cell in cells if cell] for name, *cells in rows}


@pytest.mark.parametrize("recipe, heading, kept, evaluated, said", [
    (GSM8K, "GSM8K, 1.5B", 16, 256, "It fits: it needs 60.5 GB in the update, and a device of 80"),
    (MATH, "MATH, 7B", 48, 342, "while it is written: 274.2 GB"),  # three training devices
])
def test_the_memory_in_the_docs_is_that_of_the_plan(
    recipe, heading, kept, evaluated, said, capsys
):
    out, err, code = told(["--recipe", recipe, "--device_gb", 80], capsys)
    assert (code, err) == (0, "") and said in out and "It fits" in out
    lines = {line[:18].strip(): line[18:].split() for line in out.splitlines()}
    for name, cells in table(heading).items():
        assert [cell for cell in lines[name] if cell != "-"] == cells
    assert lines["questions"] == ["8", str(kept // 2)] and lines["kept"] == ["16", str(kept)]
    assert lines["evaluated at once"][1] == str(evaluated)


def test_a_run_that_does_not_fit_gets_the_command_of_the_docs(capsys):
    words = ["--model", MIDDLE, "--dataset", "gsm8k", "--device_gb", 24]
    out, err, code = told(words, capsys)
    assert code == 3 and err == "" and "It fits" not in out
    shown = DOCS[DOCS.index("    It does not fit: ") : DOCS.index("The changes are tried")]
    assert "\n".join(line[4:] for line in shown.splitlines()).strip() in out
    line = next(line.strip() for line in out.splitlines() if line.startswith("    python"))
    out, _, code = told([*shlex.split(line)[2:], "--device_gb", "24"], capsys)
    assert code == 0 and "It fits" in out
    # the docs: two devices train all weights
    command = f"torchrun --nproc-per-node 2 train.py --model {MIDDLE} --dataset gsm8k --shard full"
    assert f"\n    {command}\n" in told([*words, "--devices", 2], capsys)[0]


LORA, CHECKPOINTING, SHARDS = (
    {"lora": 16, "lr": 1e-5}, {"gradient_checkpointing": True}, {"shard": "full"},
)
CURES = [  # options, share of the peak that there is room for, what is changed
    ({}, 0.99, {"micro_batch_tokens": 1024}),  # the least that helps
    ({"questions_per_step": 4, "lora": 16}, 0.8, {"sample_batch_size": 128}),  # of 256 completions
    ({}, 0.76, {**CHECKPOINTING, "beta": 0.0}),  # before LoRA, which trains other weights
    ({}, 0.57, LORA),  # alone: what was tried before it is taken back
    ({"stop_kl": 1.0}, 0.76, LORA),  # --beta 0 is refused with --stop_kl
    ({"refresh_reference": 5}, 0.57, None),  # so are adapters with this
    ({"algorithm": "ppo"}, 0.57, None),  # which takes no adapters
    ({"devices": 2}, 0.76, SHARDS),
    ({"devices": 2, "lora": 64}, 0.5, {"sample_batch_size": 32, **CHECKPOINTING}),
    # LoRA has replicas only
    ({"devices": 4, **SHARDS}, 0.5, {**CHECKPOINTING, **LORA, "shard": "none"}),
    ({}, 0.105, {"micro_batch_tokens": 1024, "sample_batch_size": 16, **CHECKPOINTING, **LORA,
                 "max_new_tokens": 512}),
    ({"algorithm": "dapo", "overlong_cache": 900}, 0.105, None),  # of at least 900 tokens
]


@pytest.mark.parametrize("given, share, changes", CURES)
def test_a_cure_changes_the_least(given, share, changes):
    c = with_memory(config(**given, device_gb=1000), share)
    assert cure(plan(c)) == changes
    if changes:  # the run with these options is accepted, and fits
        changed = vars(c) | changes
        check(compose(Config, changed))
        assert plan(SimpleNamespace(**changed)).fits


def test_vllm_takes_no_adapters():
    assert cure(plan(config(MIDDLE, rollout="vllm", device_gb=40, devices=2))) == SHARDS


def test_the_command_has_the_options_of_the_user_and_the_changes():
    words = [
        "--plan", "--recipe", "my runs/a.yaml", "--devices=2", "--rewards", "a", "b", "--lr",
        "1e-6", "--device_gb", "24", "--seed", "1",
    ]
    changes = {"micro_batch_tokens": 1024, "gradient_checkpointing": True, "lora": 8, "lr": 1e-5}
    assert shlex.split(command(words, 2, changes)) == [
        "torchrun", "--nproc-per-node", "2", "train.py", "--recipe", "my runs/a.yaml", "--rewards",
        "a", "b", "--lr", "1e-6", "--seed", "1", "--micro_batch_tokens", "1024",
        "--gradient_checkpointing", "--lora", "8", "--lr", "1e-05"]


def test_a_plan_that_nothing_helps(capsys):
    words = ["--model", LARGE, "--dataset", "gsm8k_zh", "--algorithm", "ppo", "--device_gb", 12]
    out, err, code = told(words, capsys)
    assert code == 2 and err.count("\n") == 1 and "--devices 4 --shard full" in err
    assert "\npeak " in out and "This command" not in out


@pytest.mark.parametrize("recipe", [GSM8K, MATH])
def test_the_recipes_of_the_paper_are_its_first_code(recipe):
    """Token mean, the largest |A| of a device's whole batch, μ = 2, β = 0.04; its GRPO is the same
    row with P = 0."""
    words = ["--plan", "--recipe", str(recipe)]
    (_, row), (_, grpo) = (
        check(options.parse(Config, [*words, *more])) for more in ([], ["--pruning_rate", "0"]))
    assert row.loss.func is grpo_loss and row.token_weights is token_mean
    assert row.keep is KEEP["pooled"]
    assert (row.group_size, row.k, row.questions_per_step, row.mu, row.beta) == (16, 2, 8, 2, 0.04)
    assert (grpo.token_weights, grpo.k, grpo.questions_per_step) == (token_mean, 16, 1)


def test_a_real_run_is_planned_on_as_many_devices_as_there_are(monkeypatch):
    c = config(
        LARGE, shard="full", gradient_checkpointing=True, pruning_rate=0.875,
        micro_batch_tokens=8192, eval_dataset="gsm8k", devices=100,
    )
    # on 100 devices, as --plan was told
    whole = plan(c)
    assert eval_batch_size(compose(Config, vars(c))) == (whole.counts["evaluated at once"], [])
    c.plan = False  # a real run has as many as there are
    for devices, fits in ((2, False), (4, True)):
        monkeypatch.setattr(ranks, "world_size", lambda n=devices: n)
        _, notes = eval_batch_size(compose(Config, vars(c)))
        assert plan(c).devices == devices and len(notes) == (not fits)


@pytest.mark.parametrize("share, fits", [(1.001, True), (0.999, False)])
def test_a_device_gives_95_percent(share, fits):
    assert plan(with_memory(config(), share)).fits == fits
