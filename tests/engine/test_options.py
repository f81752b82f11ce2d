"""engine/run/options.py: command line, recipe, and a user's mistakes as one sentence each."""

import math
import re
import subprocess
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from engine.base.errors import UserError
from engine.run import config as run

from engine.run.options import (
    THEIRS,
    as_words,
    check_limits,
    compose,
    flat,
    option,
    option_fields,
    parse,
    run_program,
    tell,
)

ROOT = Path(__file__).parents[2]

@dataclass
class Config:
    steps: int = option(10, "how many steps")
    lr: float = option(1e-3, "learning rate, 100% yours")
    name: str = option("toy", "what it is called")
    limit: int | None = option(None, "at most so many; none: all")
    resume: bool = option(False, "go on")
    allocation: bool = option(True, "fill the pruned places")
    recipe: str | None = option(None, "a YAML file of options")


@pytest.fixture
def recipe(tmp_path):
    """Write a recipe and return the words that name it."""

    def write(text):
        (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
        return ["--recipe", str(tmp_path / "recipe.yaml")]

    return write


def test_an_empty_command_line_gives_the_defaults():
    assert parse(Config, []) == Config(10, 1e-3, "toy", None, False, True, None)


@pytest.mark.parametrize("words", [
    ["--steps", "3", "--lr", "1e-6", "--name", "a b"], ["--steps=3", "--lr=1e-6", "--name=a b"],
])
def test_the_command_line_sets_options_of_every_type(words):
    assert parse(Config, words) == Config(steps=3, lr=1e-6, name="a b")


def test_a_list_takes_several_words_of_its_type():
    @dataclass
    class Lists:
        seeds: list[int] | None = option(None, "numbers")
        rewards: list[str] | None = option(None, "names")

    assert parse(Lists, []) == Lists()
    assert parse(Lists, ["--seeds", "12", "3", "--rewards", "a:1", "b"]) == Lists(
        [12, 3], ["a:1", "b"]
    )
    with pytest.raises(UserError, match="--seeds"):
        parse(Lists, ["--seeds", "one"])


def test_a_recipe_sets_options_of_every_type(recipe):
    words = recipe(
        "steps: 3  # ⌊B·G/k⌋\nlr: 0.5\nname: a b\nlimit: 7\nresume: true\nallocation: false\n"
    )
    assert parse(Config, words) == Config(3, 0.5, "a b", 7, True, False, words[1])


def test_the_command_line_wins_over_the_recipe_wherever_it_stands(recipe):
    words = recipe("steps: 3\nname: recipe\nallocation: false\n")
    for argv in (["--steps", "4", *words, "--allocation"], [*words, "--allocation", "--steps=4"]):
        config = parse(Config, argv)
        assert (config.steps, config.name, config.allocation) == (4, "recipe", True)


def test_earlier_words_give_way_to_recipe_and_command_line(recipe):
    config = parse(
        Config, [*recipe("lr: 0.2\nsteps: 2"), "--lr", "0.3"],
        earlier=["--lr=0.1", "--steps=1", "--name=earlier"],
    )
    assert (config.lr, config.steps, config.name) == (0.3, 2, "earlier")


@pytest.mark.parametrize("value", ["1e-6", "1E-6", "1.0e-6", "0.000001", "'1e-6'"])
def test_a_small_number_in_a_recipe_is_a_float(recipe, value):
    # YAML itself takes 1e-6, without a point, for text
    assert parse(Config, recipe(f"lr: {value}")).lr == 1e-6


@pytest.mark.parametrize(
    "words, resume, allocation",
    [
        ([], False, True),
        (["--resume"], True, True),
        (["--resume", "--allocation", "no"], True, False),
        (["--resume=false", "--allocation=true"], False, True),
        (["--resume", "True", "--allocation", "False"], True, False),
        (["--allocation=false", "--allocation"], False, True),
    ],
)
def test_flags_on_the_command_line(words, resume, allocation):
    config = parse(Config, words)
    assert (config.resume, config.allocation) == (resume, allocation)


@pytest.mark.parametrize("text", ["limit:", "limit: null", "limit: ~", "steps:\nlimit:"])
def test_an_empty_value_in_a_recipe_leaves_the_default(recipe, text):
    config = parse(Config, recipe(text))
    assert (config.limit, config.steps) == (None, 10)


def test_options_survive_the_way_through_words():
    config = Config(3, 1e-6, "--odd=name", None, True, False, None)
    assert parse(Config, as_words(vars(config), Config, "the saved options")) == config


@pytest.mark.parametrize("words, named", [
    (["--step", "3"], "--steps"), (["--lrr=3"], "--lr"), (["--zzzzzz", "3"], "--zzzzzz"),
    (["steps"], "steps"), (["--steps", "many"], "many"), (["--steps", "1.5"], "1.5"),
    (["--steps"], "--steps"), (["--resume", "perhaps"], "perhaps"),
])  # fmt: skip
def test_a_mistake_on_the_command_line_is_a_sentence_that_names_it(words, named):
    with pytest.raises(UserError) as error:
        parse(Config, words)
    assert named in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("text, named", [
    ("step: 3", "steps"), ("learning_rate: 1e-6", "lr"), ("7: 3", "'7'"), ("steps: [3", "YAML"),
    ("steps: " + "1" * 5000, "YAML"), ("steps: " + "[" * 5000, "YAML"), ("", "option: value"),
    ("- steps\n- 3", "option: value"), ("steps: [3, 4]", "'steps'"), ("lr:\n  peak: 1", "'lr'"),
    ("steps: many", "--steps"), ("lr: fast", "--lr"), ("resume: perhaps", "--resume"),
])  # fmt: skip
def test_a_mistake_in_a_recipe_is_a_sentence_that_names_the_recipe(recipe, text, named):
    words = recipe(text)
    with pytest.raises(UserError) as error:
        parse(Config, words)
    assert named in str(error.value) and words[1] in str(error.value)
    assert "\n" not in str(error.value)


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
    with pytest.raises(TypeError, match="shares"):
        compose(Outer, {"shares": 1})


@pytest.mark.parametrize("share, above, fits", [
    (0.0, None, True), (0.999, 1e12, True), (1.0, None, False), (-0.1, None, False),
    (math.nan, None, False), (0.5, 0.0, False), (0.5, math.inf, False), (0.5, 2e12, False),
])  # fmt: skip
def test_a_number_outside_its_limits_is_refused(share, above, fits):
    config = Outer(Inner(share, above))
    if fits:
        return check_limits(config)
    with pytest.raises(UserError, match="--share" if above is None else "--above"):
        check_limits(config)


def test_a_recipe_that_does_not_exist_or_is_no_text_is_a_sentence(tmp_path):
    with pytest.raises(UserError, match="none.yaml does not exist"):
        parse(Config, ["--recipe", str(tmp_path / "none.yaml")])
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for name in (tmp_path, tmp_path / "binary.yaml"):
        with pytest.raises(UserError, match="cannot be read"):
            parse(Config, ["--recipe", str(name)])


@pytest.mark.parametrize("word, ours", [
    ("--learning_rate", "--lr"), ("--learning-rate=1e-6", "--lr"),
    ("--num_generations", "--group_size"), ("--epsilon_high", "--clip_high"),
    ("actor_rollout_ref.actor.optim.lr=1e-6", "--lr"),
    ("actor_rollout_ref.rollout.n=5", "--group_size"),
    ("--per_device_train_batch_size", "--questions_per_step or --micro_batch_tokens"),
])  # fmt: skip
def test_a_name_of_trl_or_verl_is_answered_with_ours(word, ours):
    with pytest.raises(UserError) as error:
        parse(run.Config, [word, "1"])
    assert ours in str(error.value)


def test_the_page_of_names_agrees_with_the_names_that_are_answered():
    """Of each row of docs/names.md whose first cell holds options: each name of TRL and of verl,
    without folder and value."""
    options, page = (
        {f.name for f in option_fields(run.Config)},
        (ROOT / "docs/names.md").read_text(encoding="utf-8"),
    )
    found = {}
    for row in page.split("\n## ")[0].splitlines():
        _, here, _, *theirs = row.replace("\\|", "").split("|") if "`--" in row else [""] * 3
        ours = set(re.findall(r"--(\w+)", here))
        assert ours <= options
        for name in re.findall(r"`([\w.]+)", " ".join(theirs)):
            found.setdefault(name.rpartition(".")[2], set()).update(ours)
    known = {}
    for ours, theirs in THEIRS.items():
        for name in theirs.split():
            known.setdefault(name, set()).add(ours)
    assert all(known[name] <= found[name] for name in known)
    values = {"grpo", "dapo", "dr_grpo", "group", "none", "seq", "token"}  # of options
    assert set(found) - set(known) - options == values


def test_help_lists_every_option_with_its_line(capsys):
    with pytest.raises(SystemExit) as end:
        parse(Config, ["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0
    for f in fields(Config):
        assert f"--{f.name}" in text
    for words in (
        "how many steps", "learning rate, 100% yours", "what it is called", "go on",
        "a YAML file of options",
    ):
        assert words in text


def test_a_users_mistake_ends_the_program_with_one_line_and_code_2():
    code = (
        "from engine.base.errors import UserError\nfrom engine.run.options import run_program\n"
        "def main(argv):\n    raise UserError('no model: name one.')\nrun_program(main)")
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (
        2, "", "error: no model: name one.\n",
    )


def test_a_process_that_is_ended_while_it_tells_leaves_no_part_of_a_report(tmp_path, monkeypatch):
    """torchrun ends the other processes of a job when one has failed. A report without text would
    end torchrun, too."""
    file = tmp_path / "attempt_0" / "0" / "error.json"
    file.parent.mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))

    def ended(path, *text, **options):
        path.touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", ended)
    with pytest.raises(KeyboardInterrupt):
        tell("error: …")
    assert not file.exists()


def test_of_several_processes_the_first_one_tells_a_mistake_to_the_user_and_to_torchrun(
    tmp_path, monkeypatch, capsys
):
    def main(argv):
        raise UserError("no model: name one.")

    monkeypatch.setattr(sys, "argv", ["train.py"])
    codes = []
    for rank in (1, 0):
        file = tmp_path / f"attempt_0/{rank}/error.json"  # as torchrun names it
        file.parent.mkdir(parents=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        with pytest.raises(SystemExit) as end:
            run_program(main)
        codes.append(end.value.code)
    assert codes == [2, 0] and capsys.readouterr().err == "error: no model: name one.\n"
    assert not file.exists()
    failure = ProcessFailure(
        local_rank=1, pid=1, exitcode=2, error_file=str(tmp_path / "attempt_0/1/error.json")
    )
    assert (
        "traceback : error: no model: name one.\n===="
        in ChildFailedError("train.py", {1: failure}).format_msg()
    )


def test_run_program_hands_over_the_command_line_and_ends_with_0(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--steps", "3"])
    seen = []
    with pytest.raises(SystemExit) as end:
        run_program(seen.extend)
    assert seen == ["--steps", "3"] and not end.value.code


def test_ctrl_c_ends_the_program_quietly():
    def main(argv):
        raise KeyboardInterrupt

    with pytest.raises((SystemExit, KeyboardInterrupt)) as end:
        run_program(main)
    assert getattr(end.value, "code", None) == 130


def test_a_mistake_of_the_program_itself_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        run_program(lambda argv: 1 / 0)
