"""engine/run/checks.py and config.py: what is refused before any work, and in which words."""

import errno
import json
import re
import shutil
from pathlib import Path

import pytest
import torch

import eval as evaluation
import train
from engine.base.errors import UserError
from engine.run import checkpoint, checks
from engine.run.config import Config, check, notes_of
from engine.run.options import parse
from engine.run.state import in_one_sentence

RULES = Path(__file__).parents[2] / "examples/my_rule.py"
BAD = [
    # which completions are kept
    ("--pruning_rate 1", "--pruning_rate must lie in [0, 1), not 1.0."),
    ("--pruning_rate -0.1", "--pruning_rate must lie in [0, 1), not -0.1."),
    ("--pruning_rate nan", "must lie in [0, 1)"),
    (
        "--pruning_rate 0.95",
        "the pruning rate 0.95 keeps none of 16 completions: lower --pruning_rate.",
    ),
    ("--algorithm grpo --pruning_rate 0.5", "grpo keeps every completion"),
    (
        "--algorithm gfpo --keep largest_abs",
        "gfpo keeps completions by shortest: it cannot be combined with pruning by |A|",
    ),
    ("--algorithm cppo --keep shortest", "cppo prunes by |A|"),
    (
        "--algorithm cppo --keep all",
        "cppo keeps only some completions: --keep all needs an algorithm that keeps all, as grpo.",
    ),
    (
        "--algorithm gfpo --keep all",
        "gfpo keeps only some completions: --keep all needs an algorithm that keeps all, as grpo.",
    ),
    (
        "--algorithm gfpo_adaptive --group_size 4",
        "keeps up to 8 completions of a question: --group_size 4 is too small",
    ),
    (
        "--algorithm gfpo_adaptive --keep max_variance",
        "by --keep shortest or efficiency, not by max_variance",
    ),
    ("--algorithm gfpo_adaptive --keep largest_abs", "it cannot be combined with pruning by |A|"),
    (
        "--algorithm pods --pruning_rate 0.9375",
        "max_variance keeps 1 completion of a question, which has nothing",
    ),
    (
        "--keep best",
        "unknown rule --keep best: there are all, largest_abs, largest, smallest_abs, random, "
        "pooled, shortest, ",
    ),
    ("--keep mine:rule", "unknown rule --keep mine:rule: there are all, largest_abs, "),
    ("--keep mine.py:rule", "--keep: the file mine.py does not exist."),
    (
        f"--keep {RULES}",
        f"--keep: name a function of the file, as {RULES}:FUNCTION. It has per_token, group_length.",
    ),
    # options that not every algorithm takes
    ("--algorithm gppo", "unknown algorithm 'gppo': there are grpo, cppo"),
    ("--algorithm grpo --max_rollouts 8", "--max_rollouts does not fit grpo: leave it out"),
    (
        "--algorithm grpo --lam 0.9",
        "--lam does not fit grpo: leave it out, or take an algorithm that it belongs to (ppo)",
    ),
    ("--algorithm grpo --lam 0", "--lam does not fit grpo"),
    ("--algorithm grpo --critic_lr 1e-3", "--critic_lr does not fit grpo: leave it out"),
    (
        "--algorithm ppo --keep random",
        "--keep does not fit ppo: leave it out, or take an algorithm that it belongs to (grpo, ",
    ),
    ("--algorithm ppo --keep pooled", "--keep does not fit ppo: leave it out"),
    ("--algorithm ppo --pruning_rate 0.5", "--pruning_rate does not fit ppo: leave it out"),
    ("--algorithm ppo --allocation true", "--allocation does not fit ppo: leave it out"),
    (
        "--algorithm gfpo_adaptive --pruning_rate 0.5",
        "--pruning_rate does not fit gfpo_adaptive: leave it out",
    ),
    (
        "--algorithm gfpo_adaptive --allocation true",
        "--allocation does not fit gfpo_adaptive: leave it out",
    ),
    ("--algorithm dapo --stop_kl 1", "--stop_kl needs a reference model: set --beta above 0."),
    (
        "--rollout vllm --sample_batch_size 64",
        "vLLM decides by itself how many completions it samples at a time",
    ),
    # numbers
    ("--sample_batch_size 0", "--sample_batch_size must be at least 1, not 0"),
    ("--algorithm ppo --lam 1.5", "--lam must lie in [0, 1], not 1.5"),
    ("--algorithm ppo --lam -0.5", "--lam must lie in [0, 1], not -0.5"),
    ("--algorithm ppo --critic_lr -1", "--critic_lr must be at least 0, not -1"),
    ("--algorithm ppo --group_size 0", "--group_size must be at least 1, not 0"),
    ("--group_size 1", "--group_size must be at least 2"),
    ("--overlong_cache 49", "--overlong_cache must lie in 1 … --max_new_tokens (48), not 49"),
    ("--minibatches 0", "--minibatches must be at least 1"),
    ("--target_kl 0", "--target_kl must be above 0"),
    ("--epochs -1", "--epochs must be at least 0, not -1"),
    ("--epochs inf", "--epochs must be at most 1,000,000,000,000, not inf."),
    ("--epochs 1e308", "--epochs must be at most 1,000,000,000,000, not 1e+308."),
    (
        "--seed 9223372036854775807",
        "--seed must be at most 1,000,000,000,000, not 9223372036854775807.",
    ),
    (
        "--seed -9223372036854775808",
        "--seed must be at least -1,000,000,000,000, not -9223372036854775808.",
    ),
    ("--steps 0", "--steps must be at least 1"),
    ("--steps many", "invalid int value: 'many'"),
    ("--lr nan", "--lr must be at least 0"),
    ("--top_p 0", "--top_p must lie in (0, 1], not 0.0."),
    ("--top_p nan", "--top_p must lie in (0, 1], not nan."),
    ("--warmup 1", "--warmup must lie in [0, 1), not 1.0."),
    ("--temperature 0", "--temperature must be above 0"),
    ("--plan --devices 0", "--devices must be at least 1, not 0."),
    ("--plan --device_gb 0", "--device_gb must be above 0, not 0.0."),
    # how the weights are held
    ("--shard half", "--shard must be none or full, not half."),
    ("--plan --shard half", "--shard must be none or full, not half."),
    ("--lora 0", "--lora must be at least 1, not 0."),
    ("--lora 4 --shard full", "--lora cannot be combined with --shard full"),
    ("--lora 4 --refresh_reference 2", "--lora cannot be combined with --refresh_reference"),
    # options without an effect
    ("--device_gb 24", "--device_gb is for --plan: leave it out."),
    (
        "--plan --check_rewards",
        "--check_rewards cannot be combined with --plan: leave one of them out.",
    ),
    (
        "--dataset arithmetic --model . --plan --eval_questions 5",
        "--eval_questions needs something to evaluate: set --eval_dataset.",
    ),
    (
        "--merge_lora",
        "--merge_lora has nothing to merge: give the adapters' rank too, for example --lora 16.",
    ),
    (
        "--algorithm dapo --refresh_reference 5",
        "--refresh_reference needs a reference model: set --beta above 0.",
    ),
    # what is not there
    ("--rewards x.py:f", "the file x.py does not exist"),
    ("--dataset gsm9k", "unknown data set 'gsm9k'"),
    ("--dataset nowhere.jsonl", "nowhere.jsonl does not exist"),
    ("--model ./nowhere", "the model folder ./nowhere does not exist"),
    ("--resume", "--output_dir"),
    ("--resume --output_dir nowhere", "nothing to resume: nowhere holds no run"),
    ("--recipe nowhere.yaml", "the recipe nowhere.yaml does not exist"),
    ("--prunning_rate 0.5", "unknown option --prunning_rate: did you mean --pruning_rate?"),
]


@pytest.mark.parametrize("words, message", BAD, ids=[words for words, _ in BAD])
def test_bad_input_is_refused_in_one_sentence_before_any_work(
    words, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for work in ("train", "build"):
        monkeypatch.setattr(train, work, lambda *_, **__: pytest.fail("it was not refused"))
    monkeypatch.setattr(
        train.plan_command, "print_plan", lambda *_: pytest.fail("it was not refused")
    )
    with pytest.raises(UserError) as error:
        train.main(words.split())
    assert message in str(error.value) and "\n" not in str(error.value)
    if "must " in message and message.endswith("."):  # that is all: no other option is named
        assert str(error.value) == message
    assert list(tmp_path.iterdir()) == []  # nothing was begun


def test_adapters_are_no_model_to_train_from(tmp_path):
    """transformers would load them frozen, and the first update would find nothing to learn."""
    for name in ("adapter_config.json", "adapter_model.safetensors", "tokenizer.json"):
        (tmp_path / name).touch()
    with pytest.raises(
        UserError, match="holds adapters, not a whole model: train from the merged model instead"
    ):
        train.main(["--model", str(tmp_path)])


@pytest.mark.parametrize("program", [train.main, evaluation.main])
@pytest.mark.parametrize("damage", ["model.safetensors", "checksums.json"])
def test_a_damaged_checkpoint_is_no_model_whoever_loads_it(small, tmp_path, program, damage):
    older, newest = (tmp_path / f"run/checkpoint-{step:06d}" for step in (1, 2))
    for folder in (older, newest):
        shutil.copytree(small, folder)
        (folder / "networks").mkdir()
        (folder / "networks/optimizer").write_text("not loaded")
        (folder / "checksums.json").write_text(json.dumps(checkpoint.checksums(folder)))
        (folder / "networks/optimizer").unlink()
    file = newest / damage
    file.write_bytes(file.read_bytes()[:-9] + b"something")
    for name in (newest, tmp_path / "run"):
        with pytest.raises(
            UserError,
            match=f"^{newest} is damaged: {damage} is not as the run wrote it. Name an earlier "
                  "checkpoint",
        ):
            program(["--model", str(name), "--output_dir", str(tmp_path / "out")])
    assert checks.unchanged(str(older)) == str(older)
    if damage == "model.safetensors":
        (newest / "checksums.json").unlink()  # as the sentence says
        assert checks.unchanged(str(newest)) == str(newest)


def test_logits_that_are_not_finite_end_a_run_in_a_sentence_about_the_learning_rate(
    small, tmp_path
):
    words = ["--model", small, "--lr", "1e12", "--warmup", "0", "--steps", "3", "--eval_questions", "1", "--questions_per_step", "1",
             "--output_dir", str(tmp_path / "run")]  # fmt: skip
    with pytest.raises(
        UserError,
        match="^the model's logits are no longer finite, .* lower --lr. To go on from "
              "checkpoint-000000: ",
    ):
        train.main(words)


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        UserError,
        match="^the folder .*file/run of the run cannot be made .*: name another --output_dir.$",
    ):
        train.main(["--output_dir", str(tmp_path / "file/run")])


def test_a_run_that_is_refused_after_its_model_is_loaded_leaves_no_empty_folder(
    small, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="leaves no room for a prompt"):
        train.main(["--model", small, "--max_new_tokens", "100000"])
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize("error, words", [
    (torch.OutOfMemoryError("x"), "^out of memory .*`--plan` shows what takes it. "), (OSError(errno.ENOSPC, "x"), "^the disk is full, "),
    (OSError(errno.EROFS, "x"), "^the folder is read-only: make it writable. "),
    (PermissionError(errno.EACCES, "x"), "^the folder is read-only"),
    (FloatingPointError("x"), "^the model's logits .*lower --lr. "),
    (OSError(errno.EIO, "x"), None), (RuntimeError("x"), None),
])  # fmt: skip
def test_what_the_user_can_change_ends_a_run_in_one_sentence(error, words, tmp_path):
    found = in_one_sentence(error, tmp_path)
    assert (
        isinstance(found, UserError) and re.search(words, str(found)) if words else found is error
    )


def test_a_rule_that_its_file_does_not_have_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text("def by_length(rollout, advantages, k):\n    pass\n")
    with pytest.raises(
        UserError, match="^--keep: .*mine.py has no function 'rule'. It has by_length.$"
    ):
        train.main(["--keep", f"{tmp_path}/mine.py:rule"])


@pytest.mark.parametrize("words, note", [
    ("--devices 2", "--devices is for --plan: torchrun says how many devices train."),
    ("--reward_timeout 5", "--reward_timeout limits only a reward of your own, FILE.py:FUNCTION."),
    ("--mu 1 --minibatches 1 --clip_high 0.28", "--clip_high has no effect: in the only update of "
                                                "a step every ratio is 1; set --mu or "),
    ("--mu 1 --minibatches 1 --target_kl 0.1", "--target_kl has no effect: in the only update"),
    ("--pruning_rate 0 --keep random", "--keep has no effect: no completion is pruned; see "
                                       "--pruning_rate."),
    ("--algorithm grpo --allocation false", "--allocation has no effect: no completion is pruned"),
    ("--steps 5 --refresh_reference 5", "--refresh_reference comes after the last step."),
    ("--system_prompt think", "--system_prompt has no effect: the toy's model reads only the "
                              "question."),
    ("--lora 4", "--lora: the learning rate is 0.0003, that of all weights. Adapters usually need "
                 "about ten times as much: --lr 0.003."),
])  # fmt: skip
def test_an_option_without_an_effect_is_noted(words, note):
    config = parse(Config, words.split())
    [found] = notes_of(config, check(config))
    assert found.startswith(note)


@pytest.mark.parametrize("words", [
    "", "--devices 1", "--plan --devices 2", "--mu 2 --clip_high 0.28", "--minibatches 2 --mu 1 "
                                                                        "--target_kl 0.1",
    "--pruning_rate 0.5 --keep random", "--eval_questions 5", "--steps 9 --refresh_reference 5",
    "--algorithm grpo --allocation true", "--algorithm grpo --keep all",
    "--algorithm gfpo", "--algorithm ppo --beta 0", "--algorithm dapo", "--model . --plan "
                                                                        "--system_prompt think "
                                                                        "--dataset gsm8k",
])  # fmt: skip
def test_an_option_with_an_effect_is_not_noted(words):
    config = parse(Config, words.split())
    algorithm = check(config)
    assert notes_of(config, algorithm) == []
    again = parse(
        Config, [],
        earlier=[
            f"--{name}={value}"
            for name, value in vars(config).items()
            if value not in (None, False) and not isinstance(value, list)
        ],
    )
    # as a resumed run reads its options, with all values filled in
    assert notes_of(again, check(again)) == []
