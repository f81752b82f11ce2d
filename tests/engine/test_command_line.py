"""engine/run/command_line.py: command line, recipe, and a user's mistakes as one sentence each."""

import sys
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from engine.base.errors import UserError
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
        ("--recipe none.yaml", "none.yaml does not exist"), ("--recipe .", "does not exist"),
    ]),
    *((text.encode(), "", named) for text, named in [
        ("step: 3", "steps"), ("learning_rate: 1e-6", "docs/names.md"), ("7: 3", "--7"),
        ("steps: [3", "YAML"), ("steps: " + "1" * 5000, "YAML"), ("steps: " + "[" * 5000, "YAML"),
        ("", "option: value"), ("- steps\n- 3", "option: value"), ("steps: [3, 4]", " 4"),
        ("lr: 1\nsteps: 3\nsteps: 4", "gives steps more than once"),
        ("steps: 3\nrecipe: other.yaml", "names another recipe"),
        ("lr:\n  peak: 1", "--lr"), ("steps: many", "--steps"), ("resume: perhaps", "--resume"),
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


@pytest.mark.parametrize("word, cure", [
    ("--no-allocation", "write --allocation false"), ("--no_resume=1", "write --resume false"),
    ("--no-limit", "`--help` lists"),  # it is no switch
])
def test_a_switch_is_not_said_to_be_its_opposite(word, cure):
    with pytest.raises(UserError, match=cure):
        parse(Config, [word])


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


def test_an_option_may_be_written_with_hyphens():
    words = ["--group-size=8", "--micro-batch-tokens", "99", "--output_dir=a-b"]
    assert given(RunConfig, words) == {
        "group_size": 8, "micro_batch_tokens": 99, "output_dir": "a-b"}


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
