"""engine/run/command_line.py: command line, recipe, and a user's mistakes as one sentence each."""

import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from engine.base.errors import UserError
from engine.run import command_line
from engine.run.command_line import compose, flat, given, option, parse, run_program, tell
from engine.run.config import Config as RunConfig


@dataclass
class Config:
    steps: int = option(10, "how many steps")
    lr: float = option(1e-3, "learning rate, 100% yours")
    name: str = option("toy", "what it is called")
    limit: int | None = option(None, "at most so many; none: all")
    resume: bool = option(False, "go on")
    allocation: bool = option(True, "fill the pruned places")
    recipe: str | None = option(None, "a YAML file of options")
    seeds: list[int] | None = option(None, "numbers")


EVERY = "steps: 3  # ⌊B·G/k⌋\nlr: 0.5\nname: a b\nlimit: 7\nresume: true\nallocation: false\n"


@pytest.mark.parametrize("recipe, words, changed", [
    (None, "", {}), (None, "--steps 3 --lr 1e-6 --name ab", {"steps": 3, "lr": 1e-6, "name": "ab"}),
    (None, "--steps=3 --lr=1e-6 --limit=2", {"steps": 3, "lr": 1e-6, "limit": 2}),
    (None, "--seeds 12 3", {"seeds": [12, 3]}), ("seeds: [12, 3]", "", {"seeds": [12, 3]}),
    (EVERY, "", {"steps": 3, "lr": 0.5, "name": "a b", "limit": 7, "resume": True,
                 "allocation": False}),
    # the command line wins
    ("steps: 3\nname: recipe\nallocation: false\n", "--allocation --steps=4",
     {"steps": 4, "name": "recipe"}),
    # YAML itself takes 1e-6, without a point, for text
    *((f"lr: {value}", "", {"lr": 1e-6}) for value in ("1e-6", "1.0e-6", "0.000001", "'1e-6'")),
    # an empty value leaves the default
    *((text, "", {}) for text in ("limit:", "limit: null", "limit: ~", "steps:\nlimit:")),
    (None, "--resume", {"resume": True}),
    (None, "--resume --allocation no", {"resume": True, "allocation": False}),
    (None, "--resume=0 --allocation=1", {}),
    (None, "--resume True --allocation False", {"resume": True, "allocation": False}),
    (None, "--allocation=false --allocation", {}),
], ids=str)
def test_options_come_from_the_command_line_and_a_recipe(recipe, words, changed, tmp_path):
    (file := tmp_path / "recipe.yaml").write_text(recipe or "", encoding="utf-8")
    named, expected = ["--recipe", str(file)] if recipe else [], Config(**changed)
    expected.recipe = str(file) if recipe else None
    assert parse(Config, [*named, *words.split()]) == expected
    assert parse(Config, [*words.split(), *named]) == expected
    # only what was given, for the layers
    assert changed.items() <= given(Config, [*named, *words.split()]).items()
    assert "name" in changed or "name" not in given(Config, [*named, *words.split()])


@pytest.mark.parametrize("recipe, words, named", [
    *((None, words, named) for words, named in [
        ("--step 3", "--steps"), ("--lrr=3", "--lr"), ("--zzzzzz 3", "--zzzzzz"),
        ("steps", "steps"), ("--steps many", "many"), ("--steps 1.5", "1.5"),
        ("--steps", "--steps"), ("--resume perhaps", "perhaps"), ("--seeds one", "--seeds"),
        ("--recipe none.yaml", "none.yaml cannot be read"), ("--recipe .", "IsADirectoryError"),
    ]),
    *((text.encode(), "", named) for text, named in [
        ("step: 3", "steps"), ("learning_rate: 1e-6", "docs/names.md"), ("7: 3", "--7"),
        ("steps: [3", "YAML"), ("steps: " + "1" * 5000, "YAML"),
        ("steps: " + "[" * 5000, "YAML"),
        ("", "option: value"), ("- steps\n- 3", "option: value"), ("steps: [3, 4]", " 4"),
        ("lr: 1\nsteps: 3\nsteps: 4", "gives --steps more than once"),
        ("steps: 3\nrecipe: other.yaml", "without another recipe"),
        ("lr:\n  peak: 1", "--lr: invalid float value: \"{'peak': 1}\""),
        ("steps: many", "--steps"), ("resume: perhaps", "--resume"),
    ]),
    (b"\xff\xfe\x00", "", "YAML"),
], ids=lambda value: str(value)[:30])
def test_a_mistake_is_a_sentence_that_names_it_and_the_recipe(recipe, words, named, tmp_path):
    (file := tmp_path / "recipe.yaml").write_bytes(recipe or b"")
    words = words.split() if recipe is None else ["--recipe", str(file)]
    with pytest.raises(UserError) as error:
        parse(Config, words)
    assert named in str(error.value) and "\n" not in str(error.value)
    assert recipe is None or str(file) in str(error.value)


@dataclass
class Inner:
    share: float = option(0.5, "a share", limits="[0, 1)")
    above: float | None = option(None, "above 0", limits="(0, ∞)")


@dataclass
class Outer:
    inner: Inner = field(default_factory=Inner)
    rest: Config = field(default_factory=Config)


def test_a_config_of_records_has_each_option_in_its_record():
    config = parse(Outer, ["--share", "0.25", "--steps", "3"])
    assert config == Outer(Inner(0.25), Config(3)) == compose(Outer, {"share": 0.25, "steps": 3})
    assert flat(config) == {"share": 0.25, "above": None} | vars(Config(3))


@pytest.mark.parametrize("word, fits", [
    ("--share=0", True), ("--share=0.999", True), ("--above=9.9e11", True),
    ("--share=1", False), ("--share=-0.1", False), ("--share=nan", False),
    ("--above=0", False), ("--above=inf", False), ("--above=1e12", False),
])  # fmt: skip
def test_a_number_outside_its_limits_is_refused(word, fits):
    with nullcontext() if fits else pytest.raises(UserError, match=word.partition("=")[0]):
        parse(Outer, [word])


@pytest.mark.parametrize("word, said", [
    ("--no-allocation", "`--help` lists"), ("--no_resume=1", "`--help` lists"),  # not its opposite
    ("--al", "`--help` lists"), ("--alocation", "did you mean --allocation[?]"),
    ("--recipe-s", "did you mean --recipe[?]"),
    ("--num_generations=8", "[.] docs/names.md says: --group_size$"),
    ("--num-generations", "[.] docs/names.md says: --group_size$"),
    ("actor_rollout_ref.rollout.n=8", "[.] docs/names.md says: --group_size$"),
    ("data.max_response_length=8", "[.] docs/names.md says: --max_new_tokens$"),
    ("--max_grad_norm", "[.] docs/names.md says: 1.0: Limits in update.py$"),
    ("--save_total_limit", "says: --save_every, --log; two checkpoints are kept$"),
    ("--lam", "[.] docs/names.md says: a number of the row, in algorithms.py$"),
])
def test_a_word_that_is_no_option_leads_to_one(word, said):
    with pytest.raises(UserError, match=f"^unknown option {word.split('=')[0]}.*{said}"):
        parse(RunConfig, [word])


def test_without_the_page_of_names_the_help_is_named(monkeypatch):
    monkeypatch.setattr(command_line, "NAMES", Path("nowhere"))
    with pytest.raises(UserError, match="^unknown option --num_generations: `--help` lists"):
        parse(Config, ["--num_generations", "8"])


def test_help_lists_every_option_with_its_line(capsys):
    with pytest.raises(SystemExit, match="0"):
        parse(Config, ["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--lr X learning rate, 100% yours (default: 0.001)" in text
    for name in flat(Config()):
        assert text.count(f"--{name} ") == 1


def test_what_is_used_most_comes_first_and_each_option_once(capsys):
    with pytest.raises(SystemExit, match="0"):
        parse(RunConfig, ["--help"])
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split()[0] for line in lines if line.startswith("  --")]
    assert shown[:6] == [f"--{name}" for name in RunConfig.most_used]
    assert sorted(shown) == sorted(f"--{name}" for name in flat(RunConfig()))
    assert max(map(len, lines)) <= 100 and "usage: " in lines[0]


def raising(error):
    def main(argv):
        assert argv == ["--steps", "3"]
        raise error

    return main


@pytest.mark.parametrize("main, code, said", [
    (raising(UserError("no model: name one.")), 2, "error: no model: name one.\n"),
    (raising(KeyboardInterrupt()), 130, "interrupted\n"), (lambda argv: None, None, ""),
    (raising(BrokenPipeError()), 2, "error: stopped, because the program that read the output has "
                                    "ended.\n"),
])  # fmt: skip
def test_a_program_ends_with_a_code_and_at_most_one_line(main, code, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "--steps", "3"])
    with pytest.raises(SystemExit) as end:
        run_program(main)
    assert end.value.code == code and capsys.readouterr() == ("", said)
    with pytest.raises(ZeroDivisionError):  # its own mistake keeps its traceback
        run_program(raising(ZeroDivisionError()))


def test_of_several_processes_the_first_one_tells_a_mistake_to_the_user_and_to_torchrun(
    tmp_path, monkeypatch, capsys
):
    codes = []
    for rank in (1, 0):
        file = tmp_path / f"attempt_0/{rank}/error.json"  # as torchrun names it
        file.parent.mkdir(parents=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        codes.append(tell("error: no model: name one."))
    assert codes == [2, 0] and capsys.readouterr().err == "error: no model: name one.\n"
    assert not file.exists()
    failure = ProcessFailure(1, 1, 2, str(tmp_path / "attempt_0/1/error.json"))
    report = ChildFailedError("train.py", {1: failure}).format_msg()
    assert "traceback : error: no model: name one.\n====" in report
    assert f"time      : {time.strftime('%Y-%m-%d')}" in report  # the first one is reported
