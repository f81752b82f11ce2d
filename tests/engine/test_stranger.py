"""A stranger's folder runs no code: Python files are named on the command line, or by the run.json
of a run that is resumed."""

import shutil

import pytest

import eval as evaluation
import train
from engine.base.errors import UserError
from engine.options.command_line import option_fields
from engine.options.config import Config
from tests.helpers.runs import json_of, run, written
from tools import compare, doctor

pytestmark = pytest.mark.usefixtures("undrawn")
BRIEF = ("--questions_per_step 1 --group_size 4 --pruning_rate 0.5 --max_new_tokens 8 --steps 1 "
         "--eval_questions 2")
FEW = ["--questions", "2", "--samples", "0"]
# {option of train.py whose values are words: whether it is a list}
WORDS = {f.name: "list" in str(f.type) for _, f in option_fields(Config()) if "str" in str(f.type)}
GIVEN = {"rewards": "--judge", "sampler": "--sampler"}  # the options of eval.py for these two


@pytest.fixture(scope="module")
def honest(small, tmp_path_factory):
    """The folder of a run."""
    folder = tmp_path_factory.mktemp("honest") / "run"
    run(small, folder, BRIEF)
    return folder


@pytest.fixture
def plant(honest, tmp_path):
    """plant(names, form) → the folder of a stranger's run. Its run.json names a Python file for
    each of these options. The file leaves a mark if it is imported."""
    def plant(names, form="{}:planted"):
        folder = shutil.copytree(honest, tmp_path / "stranger", symlinks=True)
        code = folder / "code.py"
        code.write_text(
            "from pathlib import Path\n"
            "Path(__file__).with_name('mark').touch()\n"
            "def planted(completions, **columns):\n"
            "    return [1.0] * len(completions)\n")
        options = json_of(folder / "run.json")
        for name in names:
            word = form.format(code)
            options[name] = [word] if WORDS[name] else word
        written(folder / "run.json", [options])
        return folder

    return plant


def is_marked(folder):
    return (folder / "mark").exists()


@pytest.mark.parametrize("name", WORDS)
def test_an_evaluation_imports_no_file_that_the_run_names(name, plant):
    folder = plant([name])
    for model in (folder, folder / "checkpoint-000001"):
        try:
            evaluation.main(["--model", str(model), *FEW])
            sentence = ""
        except UserError as error:
            sentence = str(error)
        assert not is_marked(folder)
        for option, given in GIVEN.items():
            wanted = f"add {given}={folder}/code.py:planted, or"
            assert (wanted in sentence) == (name == option), sentence


@pytest.mark.parametrize("form", ["{}", "{}:", "{}:2", "{}:planted:2"])
@pytest.mark.parametrize("name", GIVEN)
def test_no_form_of_a_name_opens_the_door(name, form, plant):
    folder = plant([name], form)
    with pytest.raises(UserError, match=f"add {GIVEN[name]}="):
        evaluation.check({"model": str(folder)})
    assert not is_marked(folder)


def test_an_evaluation_says_all_that_is_missing_and_takes_what_the_command_line_names(plant):
    folder = plant(["rewards", "sampler"])
    words = ["--model", str(folder), *FEW]
    both = f"add --sampler={folder}/code.py:planted --judge={folder}/code.py:planted, or"
    with pytest.raises(UserError, match=both):
        evaluation.main(words)
    words += ["--sampler", "builtin"]
    with pytest.raises(UserError, match=f"add --judge={folder}/code.py:planted, or"):
        evaluation.main(words)
    evaluation.main([*words, "--judge", "toy_accuracy"])
    assert not is_marked(folder)
    evaluation.main([*words, "--judge", f"{folder}/code.py:planted"])
    assert is_marked(folder)


def test_the_other_programs_import_no_file_that_the_run_names(plant, honest, tmp_path):
    folder = plant(WORDS)
    with pytest.raises(UserError, match="add --sampler=.* --judge="):
        evaluation.main(["--model", str(folder)])
    compare.main([str(honest), str(folder)])
    doctor.main([str(folder)])
    assert run(folder, tmp_path / "new", BRIEF) == 0
    assert train.main(["--model", str(folder), "--plan"]) == 0
    assert not is_marked(folder)
