"""engine/run/checks.py and config.py: what is refused before any work."""

import errno
import os
import re
from pathlib import Path

import pytest
import torch

import train
from engine.base.errors import UserError, one_line
from engine.run.config import Config, check, notes_of
from engine.run.options import flat, parse
from engine.run.state import in_one_sentence

RULES = Path(__file__).parents[2] / "examples/my_rule.py"
BAD = [  # each is refused, and the sentence names an option or a value of it
    "--pruning_rate 1", "--pruning_rate nan", "--pruning_rate 0.95",
    "--algorithm grpo --pruning_rate 0.5", "--algorithm gfpo --keep largest_abs",
    "--algorithm cppo --keep shortest", "--algorithm cppo --keep all",
    "--algorithm gfpo_adaptive --group_size 4", "--algorithm gfpo_adaptive --keep max_variance",
    "--algorithm gfpo_adaptive --keep largest_abs", "--algorithm pods --pruning_rate 0.9375",
    "--keep best", "--keep mine:rule", "--keep mine.py:rule", f"--keep {RULES}", "--algorithm gppo",
    "--algorithm grpo --max_rollouts 8", "--algorithm grpo --lam 0.9",
    "--algorithm grpo --critic_lr 1e-3", "--algorithm ppo --keep random",
    "--algorithm ppo --pruning_rate 0.5", "--algorithm ppo --allocation true",
    "--algorithm gfpo_adaptive --pruning_rate 0.5", "--algorithm gfpo_adaptive --allocation true",
    "--algorithm dapo --stop_kl 1", "--rollout vllm --sample_batch_size 64",
    "--algorithm ppo --lam 1.5", "--algorithm ppo --critic_lr -1", "--group_size 1",
    "--overlong_cache 49", "--target_kl 0", "--epochs -1", "--epochs inf",
    "--seed 9223372036854775807", "--steps 0", "--steps many", "--lr nan", "--top_p 0",
    "--warmup 1", "--temperature 0", "--plan --devices 0", "--shard half", "--lora 4 --shard full",
    "--lora 4 --refresh_reference 2", "--device_gb 24", "--plan --check_rewards",
    "--dataset arithmetic --model . --plan --eval_questions 5", "--merge_lora",
    "--algorithm dapo --refresh_reference 5", "--rewards x.py:f", "--dataset gsm9k",
    "--dataset nowhere.jsonl", "--model ./nowhere", "--resume", "--resume --output_dir nowhere",
    "--recipe nowhere.yaml", "--prunning_rate 0.5", "--output_dir mine/by_length.py/run",
    "--keep mine/by_length.py:rule",  # the file has no such function
    "--model mine",  # adapters: transformers would load them frozen
    "--importance_low 0.5", "--importance_low 0.5 --importance_cap 1.0",
    "--importance_low 0.5 --importance_cap 0.9", "--importance_low 1 --importance_cap 5",
    "--algorithm sapo --clip_high 0.3",
    "--algorithm rloo --max_rollouts 4",
]


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_refused_in_one_sentence_before_any_work(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors", "tokenizer.json"):
        (tmp_path / "mine" / name).touch()
    (tmp_path / "mine/by_length.py").write_text("def by_length(*given):\n    pass\n")
    for work in ("train", "build"):
        monkeypatch.setattr(train, work, lambda *_, **__: pytest.fail("it was not refused"))
    monkeypatch.setattr(
        train.plan_command, "print_plan", lambda *_: pytest.fail("it was not refused"))
    with pytest.raises(UserError) as error:
        train.main(words.split())
    named = {word.partition(":")[0].lstrip("-") for word in words.split()}
    assert named & set(re.findall(r"[\w./-]*\w", str(error.value).replace("--", "")))
    assert "\n" not in str(error.value) and os.listdir() == ["mine"]  # nothing was begun


def test_a_run_that_is_refused_after_its_model_is_loaded_leaves_no_empty_folder(
    small, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="leaves no room for a prompt"):
        train.main(["--model", small, "--max_new_tokens", "100000"])
    assert list((tmp_path / "runs").iterdir()) == []


def test_ctrl_c_twice_ends_a_run_at_once(tmp_path, monkeypatch, capsys):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "train", stopped)
    assert train.main(["--output_dir", str(tmp_path / "run")]) == 130
    assert "stopped at once. There was no checkpoint yet" in capsys.readouterr().out


@pytest.mark.parametrize("error, words", [
    (torch.OutOfMemoryError("x"), "^out of memory .*`--plan` shows what takes it. "),
    (OSError(errno.ENOSPC, "x"), "^the disk is full, "),
    (OSError(errno.EROFS, "x"), "^the folder is read-only: make it writable. "),
    (PermissionError(errno.EACCES, "x"), "^the folder is read-only"),
    (FloatingPointError("x"), "^the model's logits .*lower --lr. "),
    (BrokenPipeError(errno.EPIPE, "x"), "^stopped, because "),
    (OSError(errno.EIO, "x"), None), (RuntimeError("x"), None),
])  # fmt: skip
def test_what_the_user_can_change_ends_a_run_in_one_sentence(error, words, tmp_path):
    found = in_one_sentence(error, tmp_path)
    assert re.search(words or "x$", str(found)) and (type(found) is UserError) == bool(words)


def test_a_long_message_is_cut_between_two_words():
    words = " ".join(f"https://example.org/{i}" for i in range(99))
    cut = one_line(ValueError(f"no\nanswer {words}"))
    assert cut.startswith("ValueError: no answer https://example.org/0 ") and len(cut) < 320
    assert set(cut.split()[1:]) <= {"no", "answer", "…", *words.split()} and cut.endswith(" …")
    assert one_line(ValueError("short")) == "ValueError: short"


@pytest.mark.parametrize("words, option", [
    ("--devices 2", "--devices"), ("--reward_timeout 5", "--reward_timeout"),
    ("--mu 1 --minibatches 1 --clip_high 0.28", "--clip_high"),
    ("--mu 1 --minibatches 1 --target_kl 0.1", "--target_kl"),
    ("--pruning_rate 0 --keep random", "--keep"),
    ("--algorithm grpo --allocation false", "--allocation"),
    ("--steps 5 --refresh_reference 5", "--refresh_reference"),
    ("--system_prompt think", "--system_prompt"), ("--lora 4", "--lora"),
    *((words, None) for words in [
        "", "--devices 1", "--plan --devices 2", "--mu 2 --clip_high 0.28",
        "--minibatches 2 --mu 1 --target_kl 0.1", "--pruning_rate 0.5 --keep random",
        "--eval_questions 5", "--steps 9 --refresh_reference 5",
        "--algorithm grpo --allocation true", "--algorithm grpo --keep all", "--algorithm gfpo",
        "--algorithm sapo", "--algorithm cispo --max_rollouts 4 --clip_high 2", "--algorithm rloo",
        "--importance_low 0.5 --importance_cap 5", "--importance_cap 1.0",
        "--algorithm ppo --beta 0",
        "--model . --plan --system_prompt think --dataset gsm8k",
    ]),
])  # fmt: skip
def test_an_option_without_an_effect_is_noted_and_no_other(words, option):
    config, algorithm = check(parse(Config, words.split()))
    notes = notes_of(config, algorithm)
    assert [note.split()[0].strip(":") for note in notes] == [option] * bool(option)
    # a resumed run reads its options with all values filled in
    assert notes_of(*check(parse(Config, [], flat(config)))) == notes
