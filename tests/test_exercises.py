"""notebooks/exercises/make.py and --solutions: blank functions are red, right ones green, and a
student's work is never lost."""

import ast
import os
import re
import subprocess
import sys
from itertools import takewhile
from types import SimpleNamespace

import pytest

from notebooks.exercises.make import FILES, ROOT, TESTS, exercises, is_check, main, make
from tests import conftest

NAMES = {
    str(file): [function.name for function in exercises((ROOT / file).read_text())]
    for file in FILES
}
TESTED = [test for file in FILES for test in TESTS.glob(f"test_{file.stem}*.py")]


def write(folder, file, names):
    """Do what a student does: put the body of each of these functions in place of its
    NotImplementedError."""
    source, text = (ROOT / file).read_text(), (folder / file).read_text()
    for function in exercises(source):
        if function.name in names:
            given = [function.body[0], *takewhile(is_check, function.body[1:])][-1].end_lineno
            body = "\n".join(source.split("\n")[given : function.end_lineno])
            [line] = re.findall(rf'    raise NotImplementedError\("write {function.name};.*', text)
            text = text.replace(line, body)
    (folder / file).write_text(text)


def run(folder, tests, *words):
    """(passed, failed, which functions the failed tests ask for) of the tests with a student's
    folder."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rpfE", "--tb=line"]
    command += [*words, *map(str, tests), "--solutions", str(folder)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode in (0, 1) and "ERROR" not in done.stdout, done.stdout[-3000:]
    passed, failed = (
        re.findall(rf"^{word} \S*/test_(\w+)\.py::", done.stdout, re.MULTILINE)
        for word in ("PASSED", "FAILED")
    )
    return passed, failed, set(re.findall(r"NotImplementedError: write (\w+);", done.stdout))


# --- what is made ---


def test_only_the_bodies_are_gone(tmp_path):
    """The signature, the docstring and the checks stay; with the bodies put back the file is the
    project's, letter for letter."""
    assert make(tmp_path) == ([tmp_path / file for file in FILES], [])
    for file in FILES:
        made, source = (tmp_path / file).read_text(), (ROOT / file).read_text()
        for blank, whole in zip(exercises(made), exercises(source), strict=True):
            *_, statement = blank.body  # the docstring, checks of the arguments, and:
            form = rf"raise NotImplementedError\('write {whole.name}; (\S+) tests it'\)"
            assert ROOT / re.fullmatch(form, ast.unparse(statement))[1] in TESTED
        write(tmp_path, file, NAMES[str(file)])
        assert (tmp_path / file).read_text() == source


def test_the_work_of_a_student_is_kept(tmp_path, capsys):
    (tmp_path / "family").mkdir()
    mine = {tmp_path / "cppo.py": "mine", tmp_path / "family/gspo.py": ""}
    for path, text in mine.items():
        path.write_text(text)
    main([str(tmp_path)])
    made, kept = capsys.readouterr().out.splitlines()
    assert "grpo.py" in made and "cppo.py" not in made and "cppo.py, family/gspo.py" in kept
    main([str(tmp_path)])
    assert all(path.read_text() == text for path, text in mine.items())


# --- how it is tested ---


@pytest.mark.parametrize("folder", ["nowhere", ".", "file"])
def test_a_folder_without_exercises_is_told_in_one_sentence(folder, tmp_path):
    (tmp_path / "file").write_text("")
    config = SimpleNamespace(getoption={"solutions": str(tmp_path / folder)}.get)
    with pytest.raises(pytest.UsageError, match="python notebooks/exercises/make.py"):
        conftest.pytest_configure(config)


def test_a_test_whose_file_is_missing_is_told_in_one_sentence(tmp_path):
    config = SimpleNamespace(getoption={"solutions": str(tmp_path)}.get)
    items = [SimpleNamespace(getparent=lambda kind: None)]
    with pytest.raises(pytest.UsageError, match="not there; `python notebooks/exercises/make.py`"):
        conftest.pytest_collection_modifyitems(items, config)


def test_a_file_that_is_done_is_green_while_others_are_blank_and_a_mistake_is_red(tmp_path):
    """Tests of what is no exercise, such as test_copying, are not run: they would count as a
    student's success."""
    make(tmp_path)
    write(tmp_path, "family/drgrpo.py", NAMES["family/drgrpo.py"])
    write(tmp_path, "cppo.py", NAMES["cppo.py"])
    text = (tmp_path / "cppo.py").read_text().replace(".abs() >= threshold", " >= threshold")
    (tmp_path / "cppo.py").write_text(text)
    names = ("grpo_advantages", "cppo", "drgrpo", "tis", "copying")
    passed, failed, asked = run(tmp_path, [TESTS / f"test_{name}.py" for name in names], "-n", "0")
    assert set(passed) == {"cppo", "drgrpo"}
    assert set(failed) == {"cppo", "grpo_advantages", "tis"}
    assert failed.count("cppo") == 1
    assert asked == {
        "group_advantages", "sequence_importance_weights", "truncated_importance_weights"}


@pytest.mark.slow
def test_every_blank_function_fails_a_test_and_the_right_ones_pass_all(tmp_path):
    """As a student works: all is blank; then the functions that the failed tests ask for are
    written; and so on."""
    make(tmp_path)
    left = {name for names in NAMES.values() for name in names}
    processes = ["-n", "2"]  # the first time
    while left:
        _, failed, asked = run(tmp_path, TESTED, *processes)
        assert failed and asked and asked <= left, f"no test notices that these are blank: {left}"
        for file, names in NAMES.items():
            write(tmp_path, file, asked & set(names))
        left, processes = left - asked, ["-n", "0"]
    passed, failed, _ = run(tmp_path, TESTED, *processes)
    assert failed == [] and {f"test_{name}" for name in passed} == {test.stem for test in TESTED}
