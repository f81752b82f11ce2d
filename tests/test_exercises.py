"""notebooks/exercises/make.py, --solutions and --function: each function is tested alone, and a
student's work is never lost."""

import ast
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from notebooks.exercises.make import FILES, ROOT, TESTS, exercises, given, main, make
from tests import conftest

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


def run(folder, tests, *words):
    """(the files of passed tests, those of failed ones, the output) of the tests with a student's
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
    return passed, failed, done.stdout


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
            assert ROOT / re.fullmatch(form, ast.unparse(statement))[1] in TESTED[str(file)]
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


def test_a_function_without_a_folder_is_told_in_one_sentence():
    with pytest.raises(pytest.UsageError, match="--function needs --solutions"):
        conftest.pytest_configure(SimpleNamespace(getoption={"function": "prune"}.get))


def blank_ones(output):
    """The functions that the output calls blank."""
    lines = re.findall(r"^SKIPPED .*: not written yet: (.*)", output, re.MULTILINE)
    return {name for line in lines for name in line.split(", ")}


def test_a_file_that_is_done_is_green_a_blank_one_is_left_out_and_a_mistake_is_red(tmp_path):
    """Tests of what is no exercise, such as test_copying, are not run: they would count as a
    student's success."""
    make(tmp_path)
    write(tmp_path, "family/drgrpo.py", NAMES["family/drgrpo.py"])
    write(tmp_path, "cppo.py", NAMES["cppo.py"])
    text = (tmp_path / "cppo.py").read_text().replace(".abs() >= threshold", " >= threshold")
    (tmp_path / "cppo.py").write_text(text)
    names = ("grpo_advantages", "cppo", "drgrpo", "tis", "copying")
    passed, failed, output = run(tmp_path, [TESTS / f"test_{name}.py" for name in names])
    assert set(passed) == {"cppo", "drgrpo"} and failed == ["cppo"]
    assert blank_ones(output) == {
        "group_advantages", "sequence_importance_weights", "truncated_importance_weights"}


@pytest.mark.parametrize("line, right", [
    ("return advantages.abs().topk(k).indices", True), ("return advantages.topk(k).indices", False)
])
def test_one_function_is_judged_while_the_others_are_blank(line, right, tmp_path):
    """It is right in any order, and whichever of equal |A| it takes."""
    make(tmp_path)
    fill(tmp_path, "cppo.py", "prune", line)
    passed, failed, output = run(tmp_path, [TESTS / "test_cppo.py"])
    assert (failed == []) == right and len(passed) + len(failed) > 8
    assert blank_ones(output) == {*NAMES["cppo.py"]} - {"prune"}


def test_with_function_all_others_are_the_projects(tmp_path):
    """Another one is wrong, the others are blank. Both parts are asked."""
    make(tmp_path)
    write(tmp_path, "cppo.py", ["prune"])
    fill(tmp_path, "cppo.py", "batch_rows", 'raise ValueError("wrong")')
    words = "--function", "prune", "-m", "ours or not ours"
    passed, failed, output = run(tmp_path, [TESTS / "test_cppo.py"], *words)
    assert len(passed) > 14 and not failed and "SKIPPED" not in output


def test_a_blank_function_that_is_asked_for_is_red(tmp_path):
    make(tmp_path)
    passed, failed, output = run(tmp_path, [TESTS / "test_cppo.py"], "--function", "keep_count")
    assert not passed and failed and "NotImplementedError: write keep_count;" in output


@pytest.mark.slow
def test_every_function_has_a_test_about_it_and_the_right_ones_pass_all(tmp_path):
    """The first functions of all files are wrong, then the second ones, and so on."""
    every = [test for tests in TESTED.values() for test in tests]
    make(tmp_path / "blank")
    passed, failed, output = run(tmp_path / "blank", every)
    assert not passed and not failed
    assert blank_ones(output) == {name for names in NAMES.values() for name in names}

    for n in range(max(map(len, NAMES.values()))):
        files = [file for file in NAMES if n < len(NAMES[file])]
        make(tmp_path / str(n))
        for file in files:
            fill(tmp_path / str(n), file, NAMES[file][n], f'raise ValueError("{NAMES[file][n]};")')
        _, _, output = run(tmp_path / str(n), [test for file in files for test in TESTED[file]])
        assert {*re.findall(r"ValueError: (\w+);", output)} == {NAMES[file][n] for file in files}

    for file, names in NAMES.items():
        write(tmp_path / "blank", file, names)
    passed, failed, _ = run(tmp_path / "blank", every)
    assert failed == [] and {f"test_{name}" for name in passed} == {test.stem for test in every}
