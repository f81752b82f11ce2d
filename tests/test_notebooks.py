"""The notebooks run, hold a whole run, and show the project's functions as they are; the exercises
have solutions.

After a change of a function that a notebook shows, run it again: jupyter execute --inplace
notebooks/[1-7]*.ipynb

The lab, notebooks/lab.ipynb, trains for minutes, so only a slow test runs it, and with few steps.
"""

import ast
import re
import runpy
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient

from tests.concepts import exercises

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("[1-9]_*.ipynb"))
LAB = FOLDER / "lab.ipynb"
FOLDERS = (".", "family", "tasks", "engine/*", "experiments")
MODULES = [path for folder in FOLDERS for path in ROOT.glob(f"{folder}/*.py")]

notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
# only a slow test runs those that take long
LONG = ("2_cppo", "3_allocation", "4_training", "5_family")
RUN = [pytest.param(path, marks=pytest.mark.slow) if path.stem in LONG else path
       for path in NOTEBOOKS]


def read(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook, [cell for cell in notebook.cells if cell.cell_type == "code"]


def functions(tree):
    """Names of the functions and classes that a piece of code defines, at any depth."""
    kinds = ast.FunctionDef | ast.ClassDef
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def python(cell):
    """A cell's Python: without IPython's lines (%matplotlib inline)."""
    return ast.parse(re.sub(r"^[%!].*", "", cell.source, flags=re.MULTILINE))


def sources(cells):
    """What `show` has written: the source of functions, as Markdown and as plain text."""
    outputs = [output.get("data", {}) for cell in cells for output in cell.outputs]
    return [data for data in outputs if "text/markdown" in data]


# --- they run ---


@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_every_claim_holds(path, monkeypatch):
    """The cells are executed here, not in a kernel, which would import torch anew. No picture is
    drawn, and what is shown stands in the notebook."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.chdir(FOLDER)
    import plots

    shown, names = [], {"__name__": "__main__"}
    monkeypatch.setattr(plots, "picture", plots.plt.close)
    monkeypatch.setattr(plots, "display", lambda code, raw: shown.append(code))
    _, cells = read(path)
    for cell in cells:
        exec(compile(cell.source, path.name, "exec"), names)
    assert sources(cells) == shown != []


@notebooks
def test_the_source_beside_a_formula_is_that_of_today(path):
    again = f"a function has changed: jupyter execute --inplace notebooks/{path.name}"
    for shown in sources(read(path)[1]):
        file, code = re.findall(r"`(.*)`\n\n```python\n([^`]*)", shown["text/markdown"])[0]
        assert code in (ROOT / file).read_text(encoding="utf-8"), again


@pytest.mark.parametrize("path", [*NOTEBOOKS, LAB], ids=lambda path: path.stem)
def test_committed_notebook_holds_a_whole_run(path):
    """Executed once, from top to bottom, without an error; small enough to be shown."""
    _, cells = read(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(output.get("name") == "stderr" for output in outputs)
    assert path.stat().st_size < 400_000


def test_no_notebook_defines_a_second_version():
    own = set()
    for path in NOTEBOOKS:
        solutions = (FOLDER / "solutions" / f"{path.stem}.py").read_text(encoding="utf-8")
        own |= functions(ast.parse(solutions))
        own |= set().union(*(functions(python(cell)) for cell in read(path)[1]))
    for module in MODULES:  # what a module offers: its functions and classes, not their insides
        tree = ast.parse(module.read_text(encoding="utf-8"))
        again = own & {getattr(node, "name", None) for node in tree.body}
        assert not again, f"a notebook defines anew: {again}"


# --- the lab ---


def test_the_lab_shows_the_sections_of_its_page_and_runs_their_commands():
    page, (_, cells) = (ROOT / "docs/lab.md").read_text(encoding="utf-8"), read(LAB)
    sections = [f"## {section}" for section in page.split("\n## ")[1:]]
    assert [data["text/markdown"] for data in sources(cells)] == sections
    page = page.replace("examples/my_rule.py:per_token", "runs/mine.py:keep")
    commands = re.findall(r"^    (python \w.*)", page, re.MULTILINE)
    run = [line for cell in cells for line in re.findall("^%%bash\n(.*)", cell.source)]
    assert [line.split(" | ")[0] for line in run] == commands and len(commands) == 6


def test_the_lab_alone_asks_for_the_address_of_the_project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for address, sentence in ("", "write its address"), ("nowhere", "git cannot clone 'nowhere'"):
        monkeypatch.setenv("REPOSITORY", address)
        with pytest.raises(SystemExit, match=sentence):
            exec(read(LAB)[1][0].source, {})


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this folder is not a git repository")
def test_the_lab_runs_alone_in_an_empty_folder(tmp_path, monkeypatch):
    """It clones what is committed here. pip is left out, and each run is short."""
    monkeypatch.setenv("REPOSITORY", ROOT.as_uri())
    notebook, cells = read(LAB)
    few = "python -c 'import nano; nano.STEPS = 10; nano.main([])'"
    shorter = {
        '[*pip, "-e", f"{project}[train]"]': '["true"]',
        "python nano.py": few, "--epochs 0.25": "--steps 2 --eval_questions 8",
    }
    for long, short in shorter.items():
        assert any(long in cell.source for cell in cells)
        for cell in cells:
            cell.source = cell.source.replace(long, short)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    assert (tmp_path / "grpo-cppo/runs/lab.png").is_file()


# --- the exercises ---


@notebooks
def test_the_exercises_accept_their_solutions_and_tell_each_known_mistake(path, capsys):
    def said(name, function):
        getattr(exercises, name)(function)
        return capsys.readouterr().out

    solutions = runpy.run_path(str(FOLDER / "solutions" / f"{path.stem}.py"))
    notebook, cells = read(path)
    hints = sum("<details><summary>Hint</summary>" in cell.source for cell in notebook.cells)
    blank = [cell for cell in cells if cell.source.startswith("# exercise")]
    assert hints == len(blank) > 0
    for n, cell in enumerate(blank, 1):
        [name] = functions(python(cell))
        assert cell.source.startswith(f"# exercise {n}\n")
        assert cell.source.endswith(f"\n\nexercises.{name}({name})")
        assert cell.outputs[0].text == f"{name}: not done yet, it returns None.\n"
        assert said(name, solutions[name]) == "green\n", name
        for why, mistake in exercises.MISTAKES[name].items():
            out = said(name, mistake)
            assert "a number is" in out and out.endswith(f" This is what you get if {why}.\n")
        assert "the shape of the answer is (7, 7)" in said(name, lambda *_: torch.zeros(7, 7))


def test_a_mistake_that_nobody_knows_has_no_reason(capsys):
    exercises.loss_of_a_part(lambda *part: 2 * exercises.grpo_loss(*part[:4], beta=0)[0])
    out = capsys.readouterr().out
    assert "a number is" in out and "This is" not in out
