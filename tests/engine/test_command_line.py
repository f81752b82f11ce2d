"""engine/options/command_line.py: command line, recipe, and a user's mistakes in a sentence."""

import math
import re
import sys
from dataclasses import dataclass

import pytest

from engine.base.errors import UserError
from engine.base.program import run_program
from engine.options.command_line import flat, option, parse, parse_given, within
from engine.options.config import Config as RunConfig
from engine.options.names import NAMES, bare
from tests.helpers.runs import ROOT


@dataclass
class Config:
    steps: int = option(10, "how many steps")
    lr: float = option(1e-3, "learning rate, 100% yours")
    name: str = option("toy", "what it is called")
    limit: int | None = option(None, "at most so many; none: all", limits="[1, ∞)")
    resume: bool = option(False, "go on")
    allocation: bool = option(True, "fill the pruned places")
    recipe: str | None = option(None, "a YAML file of options")
    seeds: list[int] | None = option(None, "numbers")
    more: dict | None = option(None, "as JSON")


EVERY = """
steps: 3  # ⌊B·G/k⌋
lr: 1e-6
name: a b
limit: 7
resume: true
allocation: false
seeds: [12, 3]
more:
  a: false
"""
READ = {"steps": 3, "lr": 1e-6, "name": "a b", "limit": 7, "resume": True, "allocation": False,
        "seeds": [12, 3], "more": {"a": False}}


@pytest.mark.parametrize("recipe, words, changed", [
    (EVERY, "", READ),  # YAML itself takes 1e-6, without a point, for text
    # the command line wins; None, or nothing in a recipe, is as if it was not given
    (EVERY.replace("[12, 3]", ""), "--allocation --steps=4 --limit None --name None",
     READ | {"steps": 4, "limit": None, "name": "toy", "allocation": True, "seeds": None}),
    # a negative number is no option
    ("", '--lr -1e-6 --steps -3 --seeds 12 3 --resume --allocation no --more {"a":false}',
     READ | {"lr": -1e-6, "steps": -3, "name": "toy", "limit": None}),
])  # fmt: skip
def test_options_come_from_the_command_line_and_a_recipe(recipe, words, changed, tmp_path):
    (file := tmp_path / "recipe.yaml").write_text(recipe, encoding="utf-8")
    named = f"--recipe {file}" if recipe else ""
    expected = Config(**changed, recipe=str(file) if recipe else None)
    for written in (f"{named} {words}", f"{words} {named}"):
        assert parse(Config, written.split()) == expected
        # only what was given, for the layers
        assert ("name" in parse_given(Config, written.split())) == (changed["name"] != "toy")


@pytest.mark.parametrize("recipe, named", [
    (b"step: 3", "steps"), (b"\xff\xfe\x00", "YAML"), (b"resume: perhaps", "perhaps"),
    (b"lr: 1\nsteps: 3\nsteps: 4", "gives --steps twice"),
])
def test_a_mistake_in_a_recipe_is_a_sentence_that_names_both(recipe, named, tmp_path):
    (file := tmp_path / "recipe.yaml").write_bytes(recipe)
    with pytest.raises(UserError, match=f"^[^\n]*{file}[^\n]*{named}[^\n]*$"):
        parse(Config, ["--recipe", str(file)])


def test_a_number_lies_within_its_limits_or_is_refused():
    assert [x for x in (0, 0.999, 1, -0.1, math.nan) if within("[0, 1)", x)] == [0, 0.999]
    assert [x for x in (9.9e11, 0, 1e12, math.inf) if within("(0, ∞)", x)] == [9.9e11]
    assert within("[0, 1]", 1)
    with pytest.raises(UserError, match="--limit: must lie in"):
        parse(Config, ["--limit=0"])


@pytest.mark.parametrize("word, said", [
    ("--no-allocation", "`--help` lists"),  # it is not understood, and does not mean its opposite
    ("--al", "`--help` lists"), ("--alocation", "did you mean --allocation[?]"),
    ("--gruop_size", "did you mean --group_size[?]"),
    ("--num-generations=8", ": num_generations is here --group_size[.] .* says more[.]$"),
    ("--overlong_cache", "is here --overlong_buffer"),  # an earlier name of ours
    ("cppo", "did you mean --algorithm cppo[?]$"),  # no option stands before it
    ("actor_rollout_ref.actor.clip_ratio_c=3", "no option, but examples/my_loss.py bounds"),
    ("--delta", "no option, but examples/my_loss.py bounds"),
    ("--entropy_coef", "no option, but examples/my_loss.py has a bonus"),
    ("trainer.n_gpus_per_node=2", "no option, but torchrun --nproc-per-node N"),
    ("n_gpus_per_node=2", "no option, but torchrun --nproc-per-node N"),
    ("--bf16", "is here --dtype bfloat16"), ("--resume_from_checkpoint", "is here --resume[.]"),
    ("--eval_steps", "is here --eval_every"),
])
def test_a_word_that_is_no_option_leads_to_one(word, said):
    with pytest.raises(UserError, match=f"^unknown option {word.split('=')[0]}.*{said}"):
        parse(RunConfig, [word])


# of TRL 1.16.0 with transformers 5.23, and of verl 0.9.1: like a name of ours, or of the table
FOREIGN = """
adam_epsilon auto_find_batch_size data_seed dataset_config dataset_streaming dataset_test_split
dataset_train_split debug deepspeed ds3_gather_for_generation enable_jit_checkpoint
eval_accumulation_steps eval_delay eval_on_start eval_strategy generation_batch_size label_names
log_completions log_level logging_dir lora_dropout lora_task_type lr_scheduler_kwargs max_p min_p
num_completions_to_print num_generations_eval per_device_eval_batch_size run_name
sapo_temperature_neg save_only_model save_strategy shuffle_dataset torch_compile use_cache
vllm_importance_sampling_cap vllm_max_model_length warmup_style
actor.loss_scale_factor actor.optim.min_lr_ratio actor.pad_to_length actor.ppo_micro_batch_size
actor.rollout_n actor.use_dynamic_bsz critic.model.path critic.optim.lr data.prompt_key
data.val_batch_size ref.log_prob_micro_batch_size rollout.dtype rollout.seed
rollout.val_kwargs.temperature trainer.balance_batch trainer.device trainer.val_only
algorithm.kl_ctrl.type algorithm.rollout_correction.rollout_rs
"""


@pytest.mark.parametrize("name", FOREIGN.split())
def test_a_name_of_trl_or_verl_that_is_only_like_another_one_does_not_lead_to_it(name):
    with pytest.raises(UserError) as refused:
        parse(RunConfig, [f"actor_rollout_ref.{name}=1" if "." in name else f"--{name}"])
    known = NAMES.get(bare(name), "`--help` lists all options")
    said = str(refused.value)
    assert f"is here {known}. " in said or said.endswith(f": {known}.")


@pytest.mark.parametrize("here", sorted(set(NAMES.values())))
def test_what_stands_here_for_a_name_of_trl_or_verl_is_there(here):
    option = re.match(r"--(\w+)|no option, (?:but|because) ", here)
    assert option[1] is None or option[1] in flat(RunConfig())
    for path in re.findall(r"[\w/]+/\w+[.]py", here):
        assert (ROOT / path).exists()


def test_the_names_of_the_page_are_those_of_the_table():
    rows = re.findall(r"^\| `--(.*)", (ROOT / "docs/names.md").read_text(), re.MULTILINE)
    for row in rows:
        here, *elsewhere = row.split(" | ")
        for name in re.findall("`(.+?)`", " ".join(elsewhere)):
            assert NAMES[bare(name)].startswith(f"--{here.split('`')[0]}"), name
    assert len(rows) == 10


def test_help_lists_every_option_once_and_those_that_are_used_most_first(capsys):
    with pytest.raises(SystemExit, match="0"):
        parse(RunConfig, ["--help"])
    out = capsys.readouterr().out
    about, *_ = (sys.modules["__main__"].__doc__ or "").split("\n\n")
    assert about.strip() in out  # what the program is
    shown = re.findall(r"^  (--\w+)", out, re.MULTILINE)
    assert shown[:6] == [f"--{name}" for name in RunConfig.most_used]
    assert sorted(shown) == sorted(f"--{name}" for name in flat(RunConfig()))


def raising(error):
    def main(argv):
        assert argv == ["--steps", "3"]
        raise error

    return main


@pytest.mark.parametrize("error, code, said", [
    (UserError("no model: name one."), 2, "error: no model: name one.\n"),
    (KeyboardInterrupt(), 130, "interrupted\n"),
])
def test_a_program_ends_with_a_code_and_one_line(error, code, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "--steps", "3"])
    with pytest.raises(SystemExit) as end:
        run_program(raising(error))
    assert end.value.code == code and capsys.readouterr() == ("", said)
    with pytest.raises(ZeroDivisionError):  # its own mistake keeps its traceback
        run_program(raising(ZeroDivisionError()))
