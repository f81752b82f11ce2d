"""Makes the exercises: the files of the paper and of the family, and the parts of a loop
(seams.py), without the bodies of their functions.

    python notebooks/exercises/make.py                                     # writes mine/
    python notebooks/exercises/judge.py notebooks/exercises/mine/cppo.py   # tests yours

The signature, the docstring and a check of the arguments stay. Your code replaces
`raise NotImplementedError(...)`. judge.py tests each function alone, and all others are the
project's. It also judges the cells of the notebooks.

The tests ask for what the papers say. They ask for no order of the kept completions and for no
choice among equal ones, for example.

rewards.py is not an exercise: its private functions would give most answers away.
"""

import argparse
import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MINE = ROOT / "notebooks/exercises/mine"
TESTS = ROOT / "tests" / "concepts"
FAMILY = sorted(path.relative_to(ROOT) for path in ROOT.glob("family/[!_]*.py"))
SEAMS = Path("notebooks/exercises/seams.py")
FILES = [Path("grpo.py"), Path("cppo.py"), Path("allocate.py"), *FAMILY, SEAMS]


def exercises(source):
    """The functions of a file that a student writes, as nodes of its syntax tree: the public
    ones."""
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return [node for node in functions if not node.name.startswith("_")]


def given(function):
    """What a student is given of a body: the docstring, and an assert that follows it."""
    return function.body[: 1 + isinstance(function.body[1], ast.Assert)]


def blank_ones(source):
    """The names of the functions that a student has not written yet: nothing but a docstring or an
    assert stands before the NotImplementedError."""
    return [function.name for function in exercises(source)
            if ast.unparse(function.body[-1]).startswith("raise NotImplementedError")
            and all(isinstance(line, ast.Expr | ast.Assert) for line in function.body[:-1])]


def blank(source, tests):
    """The source with one line in place of each exercise's body: what is `given` stays.

    tests: {name: text} of the test files. The line names the one that mentions the function most
    often.
    """
    lines = source.split("\n")
    # from the last to the first: line numbers above a cut stay right
    for function in reversed(exercises(source)):
        word = re.compile(rf"\b{function.name}\b")
        test = max(tests, key=lambda name: len(word.findall(tests[name])))
        sentence = f"write {function.name}; tests/concepts/{test} tests it"
        lines[given(function)[-1].end_lineno : function.end_lineno] = [
            f'    raise NotImplementedError("{sentence}")'
        ]
    return "\n".join(lines)


def make(folder):
    """Write the files into a folder. A file that exists is kept. Returns (made, kept), two lists of
    files."""
    made, kept = [], []
    for name in FILES:
        path = folder / name
        if path.exists():
            kept.append(path)
            continue
        tests = {
            test.name: test.read_text() for test in sorted(TESTS.glob(f"test_{name.stem}*.py"))
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(blank((ROOT / name).read_text(), tests))
        made.append(path)
    return made, kept


def main(argv=None):
    parser = argparse.ArgumentParser(description="Writes the exercises: functions to fill in.")
    parser.add_argument(
        "folder", nargs="?", type=Path, default=MINE,
        help="where to; none: notebooks/exercises/mine",
    )
    folder = parser.parse_args(argv).folder
    made, kept = make(folder)
    if made:
        print(f"made in {folder}: {', '.join(str(path.relative_to(folder)) for path in made)}")
    if kept:
        names = ", ".join(str(path.relative_to(folder)) for path in kept)
        print(
            f"kept, because they may hold your work: {names}. To make one again, delete it first."
        )


if __name__ == "__main__":
    main()
