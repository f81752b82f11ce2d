"""The exercises: make.py and --solutions test each function alone, and a student's work is never
lost; the cells of the notebooks judge a function by its tests."""

import ast
import re
import runpy
from types import SimpleNamespace

import pytest
import torch

from notebooks.exercises.judge import judge
from notebooks.exercises.make import FILES, ROOT, TESTS, exercises, given, main, make
from tests import conftest
from tests.helpers.runs import python

NAMES = {
    str(file): [function.name for function in exercises((ROOT / file).read_text())]
    for file in FILES
}
TESTED = {str(file): [*TESTS.glob(f"test_{file.stem}*.py")] for file in FILES}


def write(folder, file, names):
    """Do what a student does: put the body of each of these functions in place of its
    NotImplementedError."""
    source, text = (ROOT / file).read_text(), (folder / file).read_text()
    for function in exercises(source):
        if function.name in names:
            first = given(function)[-1].end_lineno
            body = "\n".join(source.split("\n")[first : function.end_lineno])
            [line] = re.findall(rf'    raise NotImplementedError\("write {function.name};.*', text)
            text = text.replace(line, body)
    (folder / file).write_text(text)


def fill(folder, file, name, line):
    """Put a line in place of a function's NotImplementedError."""
    text = (folder / file).read_text()
    (folder / file).write_text(re.sub(rf"raise .*write {name};.*", line, text))


def run(*words):
    """(the files of passed tests, those of failed ones, the output) of pytest."""
    options = "-m pytest -p no:cacheprovider -q -rpfE --tb=line".split()
    code, output = python(*options, *words)
    passed, failed = (
        re.findall(rf"^{word} \S*/test_(\w+)\.py::", output, re.MULTILINE)
        for word in ("PASSED", "FAILED")
    )
    assert (code == 0) == (passed != [] and not failed)
    return passed, failed, output


def blank_ones(output):
    """The functions that the output calls blank."""
    lines = re.findall(r"^SKIPPED .*: not solved yet: (.*)", output, re.MULTILINE)
    return {name for line in lines for name in line.split(", ")}


# --- the files ---


def test_only_the_bodies_are_gone(tmp_path):
    """The signature, the docstring and the checks stay; with the bodies put back the file is the
    project's, letter for letter."""
    assert make(tmp_path) == ([tmp_path / file for file in FILES], [])
    for file in FILES:
        made, source = (tmp_path / file).read_text(), (ROOT / file).read_text()
        for blank, whole in zip(exercises(made), exercises(source), strict=True):
            *_, statement = blank.body  # the docstring, checks of the arguments, and:
            form = rf"raise NotImplementedError\('write {whole.name}; (\S+) tests it'\)"
            assert ROOT / re.fullmatch(form, ast.unparse(statement))[1] in TESTED[str(file)]
        write(tmp_path, file, NAMES[str(file)])
        assert (tmp_path / file).read_text() == source


def test_the_work_of_a_student_is_kept(tmp_path, capsys):
    mine = tmp_path / "cppo.py"
    mine.write_text("mine")
    main([str(tmp_path)])
    made, kept = capsys.readouterr().out.splitlines()
    assert "grpo.py" in made and "cppo.py" not in made and "cppo.py" in kept
    assert mine.read_text() == "mine"


def test_a_mistake_is_red_and_a_blank_function_is_left_out(tmp_path):
    """Tests of what is no exercise, such as test_copying, are not run: they would count as a
    student's success. `prune` is right in any order, and whichever of equal |A| it takes."""
    make(tmp_path)
    write(tmp_path, "family/drgrpo.py", NAMES["family/drgrpo.py"])
    fill(tmp_path, "cppo.py", "prune", "return advantages.abs().topk(k).indices")
    fill(tmp_path, "cppo.py", "keep_count", "return int(group_size * (1 - pruning_rate))")
    names = ("grpo_advantages", "cppo", "drgrpo", "copying")
    files = [TESTS / f"test_{name}.py" for name in names]
    passed, failed, output = run(*files, "--solutions", tmp_path)
    assert set(passed) == {"cppo", "drgrpo"} and failed == ["cppo"]
    blank = {"group_advantages", *NAMES["cppo.py"]} - {"prune", "keep_count"}
    assert blank_ones(output) == blank

    # one function alone, with the second part: all others are the project's
    fill(tmp_path, "cppo.py", "prune_below", "return advantages.abs() >= threshold")
    words = "--solutions", tmp_path, "-m", "ours or not ours", "--function", "prune_below"
    passed, failed, output = run(TESTS / "test_cppo.py", *words)
    assert passed and not failed and "SKIPPED" not in output


def test_a_blank_folder_is_not_green(tmp_path):
    make(tmp_path)
    output = run(TESTS / "test_cppo.py", "--solutions", tmp_path)[2]
    assert "not solved yet: write one of the functions first" in output


@pytest.mark.parametrize("options, sentence", [
    ({"solutions": "nowhere"}, "`python notebooks/exercises/make.py` makes them"),
    ({"function": "prune"}, "--function needs --solutions"),
])
def test_options_without_files_are_told_in_one_sentence(options, sentence):
    with pytest.raises(pytest.UsageError, match=sentence):
        conftest.pytest_configure(SimpleNamespace(getoption=options.get))


@pytest.mark.slow
def test_every_function_has_a_test_about_it(tmp_path):
    every = [test for tests in TESTED.values() for test in tests]
    make(tmp_path)
    write(tmp_path, "cppo.py", ["prune"])
    passed, failed, output = run(*every, "--solutions", tmp_path)
    assert passed and not failed
    assert blank_ones(output) == {name for names in NAMES.values() for name in names} - {"prune"}


# --- the cells of the notebooks ---

SOLUTIONS = {
    name: function
    for path in sorted(ROOT.glob("notebooks/solutions/*.py"))
    for name, function in runpy.run_path(str(path)).items() if name.startswith("my_")
}
@pytest.mark.parametrize("name", SOLUTIONS)
def test_a_cell_says_green_not_solved_yet_or_what_the_first_failing_test_says(name, capsys):
    def said(function):
        function.__name__ = name
        judge(function)
        return capsys.readouterr().out

    assert said(SOLUTIONS[name]) == "green\n"
    assert said(lambda *_, **options: None) == f"{name}: not solved yet.\n"
    # a sentence of several words, and the file
    one = r'\w+: \d+ of \d+ tests fail. The first one says: "(\w+ ){3,}\w+" \(tests/\S+\). .+\n'
    assert re.fullmatch(one, said(lambda *_, **options: torch.tensor(7.0)))


def test_each_exercise_of_a_notebook_has_its_solution():
    for path in sorted(ROOT.glob("notebooks/[1-9]_*.ipynb")):
        judged = re.findall(r'"judge\((\w+)\)"', path.read_text())
        solutions = exercises((ROOT / f"notebooks/solutions/{path.stem}.py").read_text())
        assert judged == [function.name for function in solutions] != []
