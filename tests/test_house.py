"""The house: imports go one way, there is no circle, and no function is long. The imports inside
functions count, too."""

import ast
import sys

import pytest

from tests.helpers.runs import ROOT

# each knows itself and those before it
ROOMS = ["base", "model", "data", "scoring", "options", "run", "report"]
LABORATORY = {"experiments", "conformance", "examples", "notebooks", "tests"}
FOLDERS = (".", "loop", "answers", "family", "tasks", "judges", "tools", "engine/*")
FILES = [
    path.relative_to(ROOT)
    for folder in FOLDERS for path in sorted(ROOT.glob(f"{folder}/*.py"))]
MODULES = {
    ".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
TREES = {
    name: ast.parse((ROOT / path).read_text()) for name, path in MODULES.items()}
PARTS = {name.split(".")[0] for name in MODULES}  # of the house
KNOWS = {  # the parts that a part may import; any other part may import all
    **dict.fromkeys(["grpo", "cppo", "allocate", "scores", "family"], {"grpo"}),
    "rewards": {"answers"}, "answers": {"answers"}, "judges": {"judges", "answers"},
    "algorithms": PARTS - {"engine"},
}


def imported(tree):
    """The modules and functions that a file imports, with the folders of their paths."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


IMPORTED = {name: imported(tree) for name, tree in TREES.items()}
GRAPH = {name: names & set(MODULES) for name, names in IMPORTED.items()}


# --- imports ---


def test_a_room_knows_only_the_rooms_before_it_and_not_the_loop():
    for name, others in GRAPH.items():
        if name.startswith("engine."):
            room = ROOMS.index(name.split(".")[1])
            later = [other for other in others if other.startswith("engine.")
                     and ROOMS.index(other.split(".")[1]) > room]
            later += [other for other in others if other.split(".")[0] in ("train", "loop", "eval")]
            assert not later, f"{name} imports {later}"


def test_a_part_of_the_house_imports_only_what_it_may():
    """The paper and the family know no machine, nothing knows the laboratory, only programs know
    the tools, and a data set is plain Python."""
    for name, others in IMPORTED.items():
        part, known = name.split(".")[0], {other.split(".")[0] for other in others}
        assert not known & LABORATORY, name
        assert known & PARTS <= KNOWS.get(part, PARTS), name
        assert "tools" not in known or part == "tools", name
        if part == "tasks":
            assert known <= {"tasks", *sys.stdlib_module_names}, name


def test_there_is_no_circle():
    left = dict(GRAPH)
    while done := [name for name, others in left.items() if not others & set(left)]:
        left = {name: others for name, others in left.items() if name not in done}
    assert not left, f"these import each other: {', '.join(left)}"


# --- names ---


# functions that mean the same in each file, or that stand in a file to be copied alone
DOUBLES = {"main", "question", "questions", "options_of"}


def test_one_function_has_one_name():
    """nano.py has names of its own, because it is copied alone."""
    files = {}
    for name, tree in TREES.items():
        for node in tree.body if name != "nano" else ():
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                files.setdefault(node.name, []).append(name)
    doubles = {name for name, others in files.items() if len(others) > 1}
    assert doubles <= DOUBLES, {name: files[name] for name in doubles - DOUBLES}


# --- how much there is to read ---


def long_functions(tree):
    """{function: its lines} of those with more than 45, from `def` to the end. Docstrings are left
    out."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            lines = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node) is not None:
                docstring = node.body[0]
                lines -= docstring.end_lineno - docstring.lineno + 1
            if lines > 45:
                found[node.name] = lines
    return found


@pytest.mark.parametrize("name", TREES)
def test_a_function_has_at_most_45_lines(name):
    assert not long_functions(TREES[name])
