"""engine/run/plan_command.py: what `--plan` prints, and the command that it finds when a run does
not fit."""

import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import Qwen2Config

import train
from algorithms import KEEP, token_mean
from engine.base import ranks
from engine.run import options, speed
from engine.run.config import Config, check, open_run
from engine.run.plan import GB, USABLE, plan
from engine.run.plan_command import Cure, climb, command, cure, cure_on_any, fit, head_room, ladder
from engine.run.skeleton import skeleton
from grpo import grpo_loss

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL, MIDDLE, LARGE = (f"Qwen/Qwen2.5-{size}-Instruct" for size in ("0.5B", "1.5B", "7B"))


def config(model=SMALL, **given):
    """Options as they are after the command line was checked."""
    c = Config(
        plan=True, **{"model": model, "dataset": "gsm8k", "devices": 1, "device_gb": 80} | given
    )
    check(c)
    return c


def peak(c):
    return max(plan(c).peaks)


def told(words, capsys):
    """What `train.py --plan` prints, and with which exit code it ends."""
    with pytest.raises(SystemExit) as ended, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", "--plan", *map(str, words)])
        options.run_program(train.main)
    return *capsys.readouterr(), ended.value.code


def cured(c):
    """{option: value} of the Cure of a run, or None. The run with these options is accepted, and
    fits."""
    found = cure_on_any(c, skeleton(c))
    if found is None:
        return None
    values = {"devices": found.devices} | {
        name: value for _, change in found.changes for name, value in change.items()
    }
    after = replace(c, **values)
    check(after)
    assert peak(after) == max(found.plan.peaks) <= USABLE * c.device_gb * GB
    return {name: value for name, value in values.items() if value != getattr(c, name)}


def test_a_plan_that_fits(capsys):
    out, err, code = told(["--recipe", RECIPES / "gsm8k_1.5b_cppo.yaml", "--device_gb", 80], capsys)
    assert (
        code == 0
        and err == ""
        and out.endswith("It fits.\nRoom is left for --questions_per_step 8.\n")
    )
    assert "\nprompts of 512 tokens, completions of 1,024, micro-batches of 8,192\n" in out
    lines = {line[:18].strip(): line[18:].split() for line in out.splitlines()}
    # as published: one training device, 8 questions a step, 934 steps; ours makes one more, of the
    # one question left
    assert (
        lines["questions"] == ["8", "8"]
        and lines["completions"] == ["128", "128"]
        and lines["kept"] == ["16", "16"]
    )
    assert lines["steps per epoch"] == ["935", "(7,473", "questions)"]  # 934 · 8 + 1
    assert lines["weights"] == ["6.17"] * 5 and lines["KV cache"] == [
        "-", "5.74", "-", "-", "11.48",
    ]
    assert lines["evaluated at once"] == ["256", "256"]
    assert (
        "\nA checkpoint takes 18.5 GB of the disk. With --save_total_limit 2, and one more while "
        "it is written: 55.6 GB.\n"
        in out
    )
    # seconds of sampling, the same with vLLM, scoring, updating; hours with each sampler
    assert re.search(r"\nA100 80 GB +cppo_published +18.1 +3.9 +0.2 +0.9 +5.0 +1.3\n", out)
    assert re.search(r"\nA100 80 GB +all kept +18.1 +3.9 +0.1 +0.8 +39.3 +9.9\n", out)
    assert [float(peak) for peak in lines["peak"]] == pytest.approx(
        [12.35, 30.71, 60.45, 27.79, 37.11]
    )


def test_the_command_for_a_device_of_24_gb(capsys, monkeypatch):
    out, err, code = told(["--model", MIDDLE, "--dataset", "gsm8k", "--device_gb", 24], capsys)
    assert code == 3 and err == "" and "It fits." not in out
    line = next(line.strip() for line in out.splitlines() if line.startswith("    python"))
    assert line == f"python train.py --model {MIDDLE} --dataset gsm8k --lora 16 --lr 1e-05"
    assert (
        "\nIt does not fit: it needs 39.8 GB in the update, and a device of 24 GB has 22.8 GB for "
        "it.\n\nThis command fits."
        in out
    )
    # all 16 bytes of a parameter, and no change that lowers them
    assert max(map(len, out[out.index("All weights") :].splitlines())) <= 120
    out = " ".join(out.split())
    assert (
        "All weights cannot be trained on 1 device of 24 GB: even with --micro_batch_tokens 256 "
        "--sample_batch_size 16 "
        in out
    )
    assert (
        "(weights 6.2, gradients 8.0, AdamW 12.3, compute copy 3.1, activations 0.5, logits 0.2)"
        in out
    )
    assert "2 devices of 24 GB can, with --shard full." in out
    # the command is a command line that fits
    again, _, code = told([*shlex.split(line)[2:], "--device_gb", "24"], capsys)
    assert code == 0 and "It fits.\nRoom is left for --micro_batch_tokens " in again


LORA, CHECKPOINTING, SHARDS = (
    {"lora": 16, "lr": 1e-5}, {"gradient_checkpointing": True}, {"shard": "full"},
)
CURES = [  # options, share of the peak that there is room for, what is changed
    ({}, 0.99, {"micro_batch_tokens": 1024}),  # the least that helps
    ({"questions_per_step": 4, "lora": 16}, 0.8, {"sample_batch_size": 128}),  # of 256 completions
    ({}, 0.76, {**CHECKPOINTING, "beta": 0.0}),  # before LoRA, which trains other weights
    ({}, 0.57, LORA),  # alone: what was tried before it is taken back
    ({"stop_kl": 1.0}, 0.76, LORA),  # --beta 0 is refused with --stop_kl
    ({"algorithm": "ppo"}, 0.76, {"devices": 2, **SHARDS}),  # which takes no adapters
    ({"devices": 2}, 0.76, SHARDS),  # the devices that there are
    ({"devices": 2}, 0.34, LORA),
    # LoRA has replicas only
    ({"devices": 4, **SHARDS}, 0.5, {**CHECKPOINTING, **LORA, "shard": "none"}),
    (
        {}, 0.105,
        {
            "micro_batch_tokens": 1024, "sample_batch_size": 16,
            **CHECKPOINTING,
            **LORA, "max_new_tokens": 512,
        },
    ),
    ({}, 0.01, None),
]


@pytest.mark.parametrize("given, share, changes", CURES)
def test_a_cure_changes_the_least(given, share, changes):
    c = config(**given, device_gb=1000)
    assert cured(replace(c, device_gb=share * peak(c) / USABLE / GB)) == changes


def test_vllm_takes_no_adapters_and_samples_in_no_parts():
    assert cured(config(MIDDLE, rollout="vllm", device_gb=40)) == {"devices": 2, **SHARDS}


def test_vllm_that_cannot_start_is_refused_or_gets_a_larger_share(tmp_path, capsys):
    assert cured(
        config(
            LARGE, rollout="vllm", vllm_share=0.1, shard="full", devices=4,
            gradient_checkpointing=True,
        )
    ) == {"vllm_share": 0.2}
    Qwen2Config(
        hidden_size=5120, num_hidden_layers=64, intermediate_size=27_648, num_attention_heads=40,
        num_key_value_heads=8, vocab_size=152_064, tie_word_embeddings=False,
    ).save_pretrained(tmp_path)  # 32B
    words = [
        "--model", tmp_path, "--dataset", "gsm8k", "--rollout", "vllm", "--shard", "full",
        "--gradient_checkpointing", "--devices", 16,
    ]
    out, err, code = told([*words, "--device_gb", 80], capsys)
    assert code == 2 and "It fits." not in out
    assert (
        "error: the run does not fit: vLLM cannot start, because its weights and the keys and "
        "values of one completion need 65.9 GB, and --vllm_share 0.3 of a device is 24.0 GB; " in err
    )


def test_a_decoding_step_takes_as_long_for_16_rows_as_for_128():
    c = config(MIDDLE, micro_batch_tokens=8192)
    model, a100, t4 = skeleton(c), speed.GPUS[0], speed.GPUS[-1]
    own, vllm = (
        [speed.seconds(c, model, 1.54e9, n, 2, a100, rollout) for n in (1, 8)]
        for rollout in ("own", "vllm")
    )
    for one, eight in (own, vllm):
        assert one[0] <= eight[0] < 1.05 * one[0]  # the prompts of 8 questions are read, too
    # kernels that start: 717 tokens of 25.2 ms and of 5.5 ms; 28 layers
    assert own[0][0] == pytest.approx(0.7 * 1024 / 39.68, rel=0.01) and vllm[0][0] == pytest.approx(
        0.7 * 1024 / 183.33, rel=0.01
    )
    # 8 prompts of 154 tokens and 16 completions of 307; forward once for the reference, twice
    # forward and backward
    forward = 2 * 1.54e9 * (8 * 153.6 + 16 * 307.2) / (0.4 * 312e12)
    assert vllm[1][1:] == pytest.approx((forward, c.mu * 3 * forward))
    # a T4 waits for its memory: 4 bytes of each parameter for each token
    assert speed.seconds(c, model, 1.54e9, 1, 2, t4, "vllm")[0] > 0.7 * 1024 * 4 * 1.54e9 / (
        0.6 * 0.32e12
    )
    assert speed.hours(c, (10.0, 1.0, 1.0), 8, 2, 7473) == pytest.approx(12 * 468 / 3600)


def test_one_device_has_nothing_to_shard():
    for devices in (1, 2):
        c = config(devices=devices)
        assert (SHARDS in [change for _, changes in ladder(c, plan(c)) for change in changes]) == (
            devices == 2
        )


def test_all_weights_on_more_devices():
    c = config(MIDDLE, device_gb=24)
    *_, (_, least) = climb(c, skeleton(c), full=True)
    assert max(least.peaks) > USABLE * 24 * GB and least.trained == least.parameters
    assert (
        cure(c, skeleton(c), full=True) is None
        and cure_on_any(c, skeleton(c), full=True).devices == 2
    )


def test_the_command_has_the_options_of_the_user_and_the_changes():
    words = [
        "--plan", "--recipe", "my runs/a.yaml", "--devices=2", "--rewards", "a", "b", "--lr",
        "1e-6", "--micro-batch-tokens", "4096", "--device_gb", "24", "--seed", "1",
    ]
    found = Cure(
        2,
        [
            ("", {"micro_batch_tokens": 1024}), ("", {"gradient_checkpointing": True}),
            ("", {"lora": 8, "lr": 1e-5}),
        ],
        None,
    )
    assert command(words, found) == (
        "torchrun --nproc-per-node 2 train.py --recipe 'my runs/a.yaml' --rewards a b --seed 1 "
        "--micro_batch_tokens 1024 --gradient_checkpointing --lora 8 --lr 1e-05")
    assert open_run(
        [
            "--model", SMALL, "--dataset", "gsm8k", "--plan", "--gradient_checkpointing", "--lora",
            "8",
        ]
    )[0].gradient_checkpointing


def test_what_the_head_room_buys():
    c = config(MIDDLE, device_gb=80, pruning_rate=0.875)
    room = head_room(c, skeleton(c), Cure(1, [], plan(c)))
    assert set(room) == {"micro_batch_tokens", "questions_per_step"}
    for name, value in room.items():
        assert peak(replace(c, **{name: value})) <= 76 * GB < peak(replace(c, **{name: 2 * value}))
    c = config(SMALL, device_gb=1000, max_new_tokens=64, sample_batch_size=16)
    # 16 completions of 512 + 64 tokens are in one micro-batch; more questions, sampled in parts,
    # need no memory
    assert head_room(c, skeleton(c), Cure(1, [], plan(c))) == {"micro_batch_tokens": 8192}


def test_a_plan_that_nothing_helps(capsys):
    out, err, code = told(
        ["--model", LARGE, "--dataset", "gsm8k_zh", "--algorithm", "ppo", "--device_gb", 12], capsys
    )
    assert (
        code == 2
        and "\nsteps per epoch   unknown\n" in out
        and "This command" not in out
        and err.count("\n") == 1
    )
    assert err.endswith("no change of the options was found that helps: use a smaller model.\n")


def test_the_math_recipe_fits_three_devices_of_80_gb_and_not_two(capsys):
    words = ["--recipe", RECIPES / "math_7b_cppo.yaml", "--device_gb", 80]
    out, _, code = told(words, capsys)
    lines = {line[:18].strip(): line[18:].split() for line in out.splitlines()}
    # three training devices
    assert code == 0 and lines["questions"] == ["8", "24"] and lines["kept"] == ["16", "48"]
    assert "\nsteps per epoch   313 (7,500 questions)\n" in out  # of MATH
    out, err, code = told([*words, "--devices", 2], capsys)
    assert code == 3 and err == "" and " --micro_batch_tokens 2048 --sample_batch_size 64\n" in out


@pytest.mark.parametrize("recipe", ["gsm8k_1.5b_cppo", "math_7b_cppo"])
def test_the_recipes_of_the_paper_are_its_first_code(recipe):
    """Token mean, the largest |A| of a device's whole batch, μ = 2, β = 0.04; its GRPO is the same
    row with P = 0."""
    words = ["--plan", "--recipe", str(RECIPES / f"{recipe}.yaml")]
    row, grpo = (
        check(options.parse(Config, [*words, *more])) for more in ([], ["--pruning_rate", "0"])
    )
    assert row.loss is grpo_loss and row.token_weights is token_mean and row.keep is KEEP["pooled"]
    assert (row.group_size, row.k, row.questions_per_step, row.mu, row.beta) == (16, 2, 8, 2, 0.04)
    assert (grpo.token_weights, grpo.k, grpo.questions_per_step) == (token_mean, 16, 1)


def test_questions_of_a_file_are_counted(tmp_path, capsys):
    (tmp_path / "some.jsonl").write_text('{"question": "1+1", "answer": 2}\n' * 65)
    out, _, _ = told(
        [
            "--model", SMALL, "--dataset", tmp_path / "some.jsonl", "--devices", 2,
            "--questions_per_step", 2,
        ],
        capsys,
    )
    assert "\nsteps per epoch   5 (65 questions)\n" in out  # 2 devices with ⌊2·16/4⌋ questions


def test_a_real_run_is_planned_on_as_many_devices_as_there_are(monkeypatch):
    c = config(
        LARGE, shard="full", gradient_checkpointing=True, pruning_rate=0.875,
        micro_batch_tokens=8192, devices=100,
    )
    assert fit(c) == (plan(c).evaluated, [])  # on 100 devices, as --plan was told
    c.plan = False  # a real run has as many as there are
    for devices, fits in ((2, False), (4, True)):
        monkeypatch.setattr(ranks, "world_size", lambda n=devices: n)
        evaluated, notes = fit(c)
        assert evaluated == plan(c).evaluated and len(notes) == (not fits)
    assert c.plan is False and c.devices == 100
    monkeypatch.setattr(ranks, "world_size", lambda: 2)
    assert fit(c)[1][0].startswith("--plan: the run does not fit: it needs ")
    assert (
        "; it fits with --micro_batch_tokens 2048 --sample_batch_size 64, which needs "
        in fit(c)[1][0]
    )


@pytest.mark.parametrize("share, notes", [(1.001, 0), (0.999, 1)])
def test_a_device_gives_95_percent(share, notes):
    c = config()
    assert len(fit(replace(c, device_gb=share * peak(c) / 0.95 / GB))[1]) == notes
