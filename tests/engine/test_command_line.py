"""engine/options/command_line.py: command line, recipe, and a user's mistakes in a sentence."""

import math
import re
import subprocess
import sys
from dataclasses import dataclass, field

import pytest

from engine.base.errors import UserError
from engine.base.program import run_program
from engine.options.command_line import flat, given, option, parse, within
from engine.options.config import Config as RunConfig
from engine.options.names import NAMES
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


@dataclass
class Inner:
    share: float = option(0.5, "a share", limits="[0, 1)")


EVERY = "steps: 3  # ⌊B·G/k⌋\nlr: 0.5\nname: a b\nlimit: 7\nresume: true\nallocation: false\n"


@pytest.mark.parametrize("recipe, words, changed", [
    ("", "", {}), ("", "--steps 3 --lr 1e-6 --name ab", {"steps": 3, "lr": 1e-6, "name": "ab"}),
    ("", "--seeds 12 3", {"seeds": [12, 3]}), ("seeds: [12, 3]", "", {"seeds": [12, 3]}),
    ("", '--more {"a":false}', {"more": {"a": False}}),
    ("more:\n  a: false", "", {"more": {"a": False}}),
    ("", "--lr -1e-6 --steps -3", {"lr": -1e-6, "steps": -3}),  # a number is no option
    (EVERY, "", {"steps": 3, "lr": 0.5, "name": "a b", "limit": 7, "resume": True,
                 "allocation": False}),
    # the command line wins
    ("steps: 3\nname: recipe\nallocation: false\n", "--allocation --steps=4",
     {"steps": 4, "name": "recipe"}),
    ("lr: 1e-6", "", {"lr": 1e-6}),  # YAML itself takes it, without a point, for text

    ("steps:\nlimit: null", "", {}),  # as if it was not given; also on the command line:
    ("steps: 3\nlimit: 7", "--limit None --seeds None --name None --steps=None", {}),
    ("", "--resume --allocation no", {"resume": True, "allocation": False}),
])  # fmt: skip
def test_options_come_from_the_command_line_and_a_recipe(recipe, words, changed, tmp_path):
    (file := tmp_path / "recipe.yaml").write_text(recipe, encoding="utf-8")
    named = f"--recipe {file}" if recipe else ""
    expected = Config(**changed, recipe=str(file) if recipe else None)
    for written in (f"{named} {words}", f"{words} {named}"):
        assert parse(Config, written.split()) == expected
        # only what was given, for the layers
        found = given(Config, written.split())
        assert changed.items() <= found.items() and ("name" in found) == ("name" in changed)


@pytest.mark.parametrize("words, named", [
    ("steps", "steps"), ("--steps many", "many"), ("--steps", "--steps"),
    ("--resume perhaps", "perhaps"), ("--recipe none.yaml", "none.yaml cannot be read"),
    ("--more [1]", "--more: invalid json_object value: '[1]'"),
])
def test_a_mistake_is_a_sentence_that_names_it(words, named):
    refused(words, named)


@pytest.mark.parametrize("recipe, named", [
    (b"step: 3", "steps"), (b"learning_rate: 1e-6", "is here --lr."), (b"7: 3", "--7"),
    (b"num_generations: 8", "`--help` lists"),  # this program has no --group_size
    (b"steps: [3", "YAML"), (b"\xff\xfe\x00", "YAML"), (b"- steps\n- 3", "option: value"),
    (b"steps: 3\nrecipe: other.yaml", "without another recipe"),
    (b"lr:\n  peak: 1", "--lr: invalid float value: '{\"peak\": 1}'"),
])
def test_a_mistake_in_a_recipe_is_a_sentence_that_names_both(recipe, named, tmp_path):
    (file := tmp_path / "recipe.yaml").write_bytes(recipe)
    refused(f"--recipe {file}", named, str(file))


def refused(words, *named):
    with pytest.raises(UserError) as error:
        parse(Config, words.split())
    said = str(error.value)
    assert all(name in said for name in named) and "\n" not in said


@dataclass
class Outer:
    rest: Config = field(default_factory=Config)
    inner: Inner = field(default_factory=Inner)


def test_a_number_lies_within_its_limits_or_is_refused():
    assert [x for x in (0, 0.999, 1, -0.1, math.nan) if within("[0, 1)", x)] == [0, 0.999]
    assert [x for x in (9.9e11, 0, 1e12, math.inf) if within("(0, ∞)", x)] == [9.9e11]
    assert within("[0, 1]", 1)
    with pytest.raises(UserError, match="--share: must lie in"):
        parse(Outer, ["--share=1"])


@pytest.mark.parametrize("word, said", [
    ("--no-allocation", "`--help` lists"),  # it is not understood, and does not mean its opposite
    ("--al", "`--help` lists"), ("--alocation", "did you mean --allocation[?]"),
    ("--num-generations=8", ": num_generations is here --group_size[.] See docs/names.md[.]$"),
    ("actor_rollout_ref.rollout.n=8", ": rollout.n is here --group_size[.] See docs/names.md[.]$"),
    ("--max_grad_norm", ": max_grad_norm is here 1.0: Limits in loop/update.py[.] See"),
    # the nearest right thing is a name of another program
    ("--lerning_rate", ": learning_rate is here --lr[.]"), ("--xyz", "`--help` lists"),
    ("--no_use_vllm", "`--help` lists"),
    # no option stands before it
    ("cppo", "did you mean --algorithm cppo[?]$"), ("gsm8k", "did you mean --dataset gsm8k[?]$"),
    (str(ROOT), f"did you mean --model {ROOT}[?]$"), ("lr", "`--help` lists"),
])  # fmt: skip
def test_a_word_that_is_no_option_leads_to_one(word, said):
    with pytest.raises(UserError, match=f"^unknown option {word.split('=')[0]}.*{said}"):
        parse(RunConfig, [word])


@pytest.mark.parametrize("here", NAMES)
def test_a_name_of_trl_or_verl_leads_to_an_option_that_is_there(here):
    assert set(re.findall(r"--(\w+)", here)) <= set(flat(RunConfig()))


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


@pytest.mark.parametrize("main, code, said", [
    (raising(UserError("no model: name one.")), 2, "error: no model: name one.\n"),
    (raising(KeyboardInterrupt()), 130, "interrupted\n"), (lambda argv: None, None, ""),
])  # fmt: skip
def test_a_program_ends_with_a_code_and_at_most_one_line(main, code, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "--steps", "3"])
    with pytest.raises(SystemExit) as end:
        run_program(main)
    assert end.value.code == code and capsys.readouterr() == ("", said)
    with pytest.raises(ZeroDivisionError):  # its own mistake keeps its traceback
        run_program(raising(ZeroDivisionError()))


PRINTS = """
from engine.base.program import run_program
run_program(lambda argv: print("a line", flush=True))
"""


def test_a_closed_pipe_ends_a_program_with_a_sentence():
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", PRINTS], cwd=ROOT, stdout=pipe, stderr=pipe, text=True)
    process.stdout.close()  # as head -1 does
    assert process.stderr.read() == (
        "error: stopped, because the program that read the output has ended.\n")
    assert process.wait(timeout=120) == 2
