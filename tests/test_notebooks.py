"""What is stored in a notebook is what a reader gets: its texts are those of a run of today, and
what it shows of the project's files is in them.

After a change of a function that a notebook shows, run it again: jupyter execute --inplace
notebooks/[0-9]*.ipynb
"""

import re

import pytest

from tests.helpers.runs import ROOT

HOW = "pip install -r requirements-dev.txt"
nbclient = pytest.importorskip("nbclient", reason=HOW)
nbformat = pytest.importorskip("nbformat", reason=HOW)
pytest.importorskip("ipykernel", reason=HOW)

FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("[0-9]_*.ipynb"))
LAB = FOLDER / "lab.ipynb"
# only a slow test runs those that take long
LONG = ("4_training",)
# these train a model: their seconds and accuracies differ from machine to machine
TRAINED = ("4_training",)
RUN = [pytest.param(path, marks=pytest.mark.slow) if path.stem in LONG else path
       for path in NOTEBOOKS]


def read(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook, [cell for cell in notebook.cells if cell.cell_type == "code"]


def words_and_numbers(text):
    """The words of each line, and all numbers of a text."""
    number = r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?"
    words = [re.sub(number, " ", line).split() for line in text.splitlines()]
    return words, [float(found.replace(",", "")) for found in re.findall(number, text)]


@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_a_run_of_today_prints_what_is_stored(path, monkeypatch, capsys):
    """The same words, and numbers that agree to two digits. The cells are executed here, not in a
    kernel, which would import torch anew, and nothing is drawn."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.chdir(FOLDER)
    import plots

    monkeypatch.setattr(plots, "picture", plots.plt.close)
    monkeypatch.setattr(plots, "display", lambda *_, **options: None)
    names = {"__name__": "__main__"}
    for cell in read(path)[1]:
        exec(compile(cell.source, path.name, "exec"), names)
        stored = "".join(output.text for output in cell.outputs if "text" in output)
        words, numbers = words_and_numbers(stored)
        words_now, numbers_now = words_and_numbers(capsys.readouterr().out)
        assert words_now == words
        if path.stem not in TRAINED:
            assert numbers_now == pytest.approx(numbers, rel=0.01, abs=0.005)


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
