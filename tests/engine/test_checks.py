"""engine/options/checks.py and config.py: what is refused before any work."""

import errno
import os
import re

import pytest

import train
from algorithms import ALGORITHMS
from engine.base.errors import UserError
from engine.options.checks import notes_on_options
from engine.options.command_line import parse_given
from engine.options.config import Config, config_of, layers
from engine.run.begin import open_run
from engine.run.interrupt import as_user_error
from tasks import toy
from tasks.table import TASKS
from tests.helpers.runs import run, written

BAD = """
--pruning_rate 1
--pruning_rate 0.95
--algorithm grpo --pruning_rate 0.5
--algorithm gfpo --keep largest_abs
--algorithm cppo --keep shortest
--algorithm cppo --keep all
--algorithm gfpo_adaptive --group_size 4
--algorithm gfpo_adaptive --keep max_variance
--algorithm gfpo_adaptive --keep largest_abs
--algorithm pods --pruning_rate 0.9375
--keep best
--keep mine:rule
--keep mine.py:rule
--keep mine/by_length.py
--keep mine/by_length.py:rule
--algorithm gppo
--algorithm ppo --keep random
--algorithm ppo --token_weights constant
--algorithm gspo --token_weights constant
--algorithm pods --scale_rewards none
--algorithm rloo --scale_rewards group
--algorithm ppo --pruning_rate 0.5
--algorithm ppo --allocation true
--algorithm gfpo_adaptive --pruning_rate 0.5
--algorithm gfpo_adaptive --allocation true
--sampler vllm
--group_size 1
--overlong_buffer 49
--target_kl 0
--epochs -1
--seed 9223372036854775807
--steps 0
--steps many
--warmup 1
--temperature 0
--plan -1
--shard half
--lora 4 --shard full
--algorithm ppo --lora 4
--rewards x.py:f
--dataset gsm9k
--dataset nowhere.jsonl
--model ./nowhere
--resume
--resume --output_dir nowhere
--recipe nowhere.yaml
--prunning_rate 0.5
--output_dir mine/by_length.py/run
--output_dir mine/by_length.py
--dataset arithmetic
--eval_dataset math
--model mine
--model mine --lora 8
--algorithm gspo --min_prefix 0
--algorithm ppo --min_prefix 0
--algorithm deepseek_v32 --min_prefix 0.5
--min_prefix 0 --sampler_correction sequence_mask
--min_prefix 0 --sampler_correction sequence_truncate
--min_prefix 1.5
--sampler_correction 2
--columns question=q
--dataset mine/data.jsonl --columns q
--dataset math --model mine/no --eval_dataset gsm8k --columns answer=solution
--output_dir mine
--check_rewards --plan
--lr -1e-4
--stop=
--shard full
--rewards toy_accuracy,format_reward
--dataset toy_code --eval_dataset toy
"""


@pytest.mark.parametrize("words", BAD.strip().splitlines())
def test_bad_input_is_refused_in_one_sentence_before_any_work(words, tmp_path, monkeypatch):
    """The sentence names an option or a value of it. mine: its adapters have rank 4, its file of
    rules has no `rule`."""
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "mine/data.jsonl", [{"q": "1", "a": "1"}])
    (tmp_path / "mine/by_length.py").write_text("def by_length(*given):\n    pass\n")
    (tmp_path / "mine/adapter_config.json").write_text('{"r": 4}')
    for work in ("train", "begin_run", "print_plan"):
        monkeypatch.setattr(train, work, lambda *_, **__: pytest.fail("it was not refused"))
    with pytest.raises(UserError) as error:
        train.main(words.split())
    named = {re.split("[:=]", word)[0].lstrip("-") for word in words.split()}
    assert named & set(re.findall(r"[\w./-]*\w", str(error.value).replace("--", "")))
    assert "\n" not in str(error.value) and os.listdir() == ["mine"]  # nothing was begun


RULES = """
def rows(rollout, advantages, k): return "rows"
def mask(rollout, advantages, k): return advantages.abs() > 1
def level(rollout, advantages, k): return [row["level"] for row in rollout.questions]
def short(rollout): return rollout.lengths
def means(rollout): return rollout.total.mean(1, keepdim=True)
"""


@pytest.mark.parametrize("algorithm, name, said", [
    ("cppo", "rows", "TypeError"), ("cppo", "short", "TypeError: .*takes 1 positional"),
    ("gfpo", "mask", "TypeError: .*missing 2"), ("gfpo", "means", "a metric must be finite"),
    ("cppo", "mask", None), ("gfpo", "short", None),
    ("cppo", "level", None),  # it may need more than is made up
])
def test_a_rule_or_a_metric_of_ones_own_is_tried_before_any_work(algorithm, name, said, tmp_path):
    (tmp_path / "mine.py").write_text(RULES)
    words = ["--algorithm", algorithm, "--keep", f"{tmp_path}/mine.py:{name}"]
    if not said:
        assert open_run(words)
        return
    with pytest.raises(UserError, match=f"{name} does not fit {algorithm}: .*{said}") as error:
        open_run(words)
    assert "\n" not in str(error.value) and "a metric, for --algorithm gfpo, " in str(error.value)


def test_adapters_need_no_shards_and_the_refusal_says_why():
    with pytest.raises(UserError, match="shards would only add memory.*train.py --lora 4"):
        open_run("--lora 4 --shard full".split())


def test_ctrl_c_twice_ends_a_run_at_once(tmp_path, monkeypatch, capsys):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "train", stopped)
    assert run("toy", tmp_path / "run") == 130
    assert "stopped at once. There was no checkpoint yet" in capsys.readouterr().out


@pytest.mark.parametrize("error, words", [
    (OSError(errno.ENOSPC, "x"), "^nothing can be written [(]x[)]: make room"),
    (FloatingPointError("x"), "^the model's logits .*lower --lr. "), (RuntimeError("x"), None),
])
def test_what_the_user_can_change_ends_a_run_in_one_sentence(error, words, tmp_path):
    found = as_user_error(error, tmp_path)
    assert re.search(words or "x$", str(found)) and (type(found) is UserError) == bool(words)


@pytest.mark.parametrize("words, noted", [
    ("--lora 4", "--lora"), ("--clip_low 1", "--clip_low"), ("--algorithm gfpo", ""),
])
def test_an_option_that_surprises_is_noted_and_no_other(words, noted):
    config, _ = config_of(parse_given(Config, words.split()))
    notes = notes_on_options(config.options)
    assert [note.split()[0].strip(":") for note in notes] == noted.split()


def test_each_layer_wins_over_those_before_it(tmp_path):
    """defaults | data set's row | algorithm's row | recipe | command line. What is between them,
    the run that is resumed: test_folder.py."""
    (tmp_path / "recipe.yaml").write_text("beta: 0.5\nmu: 3\n")
    words = f"--algorithm gspo --dataset math --model {toy.BASE} --recipe {tmp_path}/recipe.yaml"
    o = open_run(f"{words} --mu 5".split())[0].options
    task = TASKS["math"]
    row = ALGORITHMS["gspo"]
    assert (o.seed, o.epochs, o.rewards) == (42, task.epochs, list(task.rewards))
    assert (o.clip_high, o.minibatches, o.beta, o.mu) == (row.clip_high, 4, 0.5, 5)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_data_set_does_not_change_what_an_algorithm_is(name):
    """The toy asks for two mini-batches. RLOO, Lite PPO and MaxRL make one update, so every ratio
    is 1."""
    expected = {"gspo": 4, "gspo_token": 4, "rloo": 1, "lite_ppo": 1, "maxrl": 1}.get(name, 2)
    chosen = {"algorithm": name, "dataset": "toy"}
    assert layers(chosen)["minibatches"] == expected
    assert layers(chosen | {"minibatches": 3})["minibatches"] == 3
