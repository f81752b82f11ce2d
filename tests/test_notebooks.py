"""The notebooks run, and that is their test: each claim in them is an assert. What they show of the
project's files is that of today.

After a change of a function that a notebook shows, run it again: jupyter execute --inplace
notebooks/[1-7]*.ipynb
"""

import re

import pytest

from tests.helpers.runs import ROOT

HOW = "pip install -r requirements-dev.txt"
nbclient = pytest.importorskip("nbclient", reason=HOW)
nbformat = pytest.importorskip("nbformat", reason=HOW)
pytest.importorskip("ipykernel", reason=HOW)

FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("[1-9]_*.ipynb"))
LAB = FOLDER / "lab.ipynb"
# only a slow test runs those that take long
LONG = ("2_cppo", "3_allocation", "4_training", "5_family")
RUN = [pytest.param(path, marks=pytest.mark.slow) if path.stem in LONG else path
       for path in NOTEBOOKS]


def read(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook, [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_every_claim_holds(path, monkeypatch):
    """The cells are executed here, not in a kernel, which would import torch anew, and nothing is
    drawn."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.chdir(FOLDER)
    import plots

    monkeypatch.setattr(plots, "picture", plots.plt.close)
    monkeypatch.setattr(plots, "display", lambda *_, **options: None)
    names = {"__name__": "__main__"}
    for cell in read(path)[1]:
        exec(compile(cell.source, path.name, "exec"), names)


@pytest.mark.parametrize("path", [*NOTEBOOKS, LAB], ids=lambda path: path.stem)
def test_a_notebook_holds_a_whole_run_and_the_source_of_today(path):
    _, cells = read(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert "error" not in [output.output_type for output in outputs]
    shown = [output.get("data", {}).get("text/markdown", "") for output in outputs]
    for file, code in re.findall(r"`(.*)`\n\n```python\n([^`]*)", "\n\n".join(shown)):
        assert code in (ROOT / file).read_text(), f"it shows an old {file}"


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
    client = nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources=resources)
    client.execute()
    assert (tmp_path / "grpo-cppo/runs/compared.png").is_file()
