"""The exercises: judge.py tests each function alone, and a student's work is never lost."""

import ast
import re
import runpy

import pytest
import torch

from notebooks.exercises.judge import judge, judge_file, ours, run, verdict
from notebooks.exercises.make import FILES, ROOT, TESTS, exercises, given, main, make

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


def test_each_function_is_judged_alone_and_a_blank_one_is_not_solved(tmp_path, capfd):
    """`prune` is right in any order, and whichever of equal |A| it takes."""
    make(tmp_path)
    size = "(advantages.abs() + 1) * (1 if allowed is None else allowed)"
    fill(tmp_path, "cppo.py", "prune", f"return ({size}).topk(k).indices")
    fill(tmp_path, "cppo.py", "keep_count", "return int(group_size * (1 - pruning_rate))")
    judge_file(tmp_path / "cppo.py", [])
    lines = capfd.readouterr().out.splitlines()
    said = dict(line.split(": ", 1) for line in lines if not line.startswith(" "))
    assert said.pop("prune") == "green" and "in floats" in said.pop("keep_count")
    assert said and set(said.values()) == {"not solved yet."}
    assert said.keys() == {*NAMES["cppo.py"]} - {"prune", "keep_count"}


@pytest.mark.parametrize("file", FILES, ids=str)
def test_the_projects_function_is_green_and_another_one_is_red(file):
    for name in NAMES[str(file)]:
        assert verdict(getattr(ours(name), name), name) == "green", name
        results = run(lambda *_, **options: torch.tensor(7.0), name).values()
        assert "failed" in [outcome for outcome, _ in results], name


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
    words, line = said(lambda *_, **options: torch.tensor(7.0)).splitlines()
    # a sentence of several words, and the file
    one = r'\w+: ✗ \d+ of \d+ tests fail. The first one says: "(\w+ ){3,}\w+" \(tests/\S+\).'
    assert re.fullmatch(one, words) and re.fullmatch("    .+: yours .+, right .+", line)


def test_each_exercise_of_a_notebook_has_its_solution():
    for path in sorted(ROOT.glob("notebooks/[1-9]_*.ipynb")):
        judged = re.findall(r'"judge\((\w+)\)"', path.read_text())
        solutions = exercises((ROOT / f"notebooks/solutions/{path.stem}.py").read_text())
        assert judged == [function.name for function in solutions] != []
