"""The notebooks run from top to bottom, hold their outputs, and define no second version of the project's functions."""

import ast
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MODULES = sorted([*ROOT.glob("*.py"), *ROOT.glob("engine/*.py")])

notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook, [cell for cell in notebook.cells if cell.cell_type == "code"]


def functions(tree):
    """Names of the functions and classes that a piece of code defines, at any depth, and of lambdas bound to a name."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def python(cell):
    """A cell's Python: without IPython's lines (%matplotlib inline)."""
    return ast.parse("\n".join(line for line in cell.source.splitlines() if not line.startswith(("%", "!"))))


def test_there_are_notebooks():
    assert NOTEBOOKS


@notebooks
def test_notebook_runs(path, monkeypatch):
    """In a fresh kernel, in its own folder; every assert in it holds."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = {p: p.stat().st_mtime_ns for p in path.parent.iterdir()}
    notebook, _ = read(path)
    client = NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}})
    client.execute()  # raises CellExecutionError where a cell does
    assert {p: p.stat().st_mtime_ns for p in path.parent.iterdir()} == before  # and it leaves nothing behind


@notebooks
def test_committed_notebook_holds_a_whole_run(path):
    """Executed once, from top to bottom, without an error; small enough to be shown."""
    _, cells = read(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs and any("image/png" in output.get("data", {}) for output in outputs)
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert path.stat().st_size < 400_000


@notebooks
def test_notebook_defines_no_second_version(path):
    _, cells = read(path)
    ours = {}
    for module in MODULES:  # what a module offers: its functions and classes, not their insides
        for node in ast.parse(module.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                ours[node.name] = module.name
    again = {name: ours[name] for cell in cells for name in functions(python(cell)) if name in ours}
    assert not again, f"{path.name} defines anew: {again}"


@pytest.mark.parametrize(
    "source, found",
    [
        ("def prune(a): pass", {"prune"}),
        ("if True:\n    def prune(a): pass", {"prune"}),
        ("prune = lambda a: a", {"prune"}),
        ("prune = 3\nx = prune", set()),
        ("%matplotlib inline\nclass Batch: pass", {"Batch"}),
    ],
)
def test_the_check_finds_definitions(source, found):
    assert functions(python(nbformat.v4.new_code_cell(source))) == found
