"""The notebooks run, hold a whole run, and show the project's functions as they are; the exercises
have solutions.

After a change of a function that a notebook shows, run it again: jupyter execute --inplace
notebooks/*.ipynb
"""

import ast
import re
import runpy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient

from tests.concepts import exercises

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
FOLDERS = (".", "family", "engine/*", "experiments")
MODULES = [path for folder in FOLDERS for path in ROOT.glob(f"{folder}/*.py")]

notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


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
    """What `show` has written: the source of functions."""
    outputs = [output.get("data", {}) for cell in cells for output in cell.outputs]
    return [data["text/markdown"] for data in outputs if "text/markdown" in data]


# --- they run ---


@pytest.fixture(scope="module")
def runs():
    """Every notebook, executed in a fresh kernel and in its own folder, two at a time: {path:
    notebook, or the error}."""
    def run(path):
        notebook, _ = read(path)
        client = NotebookClient(
            notebook, timeout=120, kernel_name="python3",
            resources={"metadata": {"path": str(FOLDER)}},
        )
        try:
            return client.execute()
        except Exception as error:  # CellExecutionError, if a cell fails
            return error

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setenv("OMP_NUM_THREADS", "1")
        return dict(zip(NOTEBOOKS, pool.map(run, NOTEBOOKS)))


@notebooks
def test_every_claim_of_a_notebook_holds(path, runs):
    assert not isinstance(runs[path], Exception), runs[path]


@notebooks
def test_the_source_beside_a_formula_is_that_of_today(path, runs):
    fresh = [cell for cell in runs[path].cells if cell.cell_type == "code"]
    again = f"a function has changed: jupyter execute --inplace notebooks/{path.name}"
    assert sources(read(path)[1]) == sources(fresh) != [], again


@notebooks
def test_committed_notebook_holds_a_whole_run(path):
    """Executed once, from top to bottom, without an error; small enough to be shown."""
    _, cells = read(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(output.get("name") == "stderr" for output in outputs)
    assert path.stat().st_size < 400_000


@notebooks
def test_notebook_defines_no_second_version(path):
    solutions = ast.parse((FOLDER / "solutions" / f"{path.stem}.py").read_text(encoding="utf-8"))
    own = set().union(functions(solutions), *(functions(python(cell)) for cell in read(path)[1]))
    for module in MODULES:  # what a module offers: its functions and classes, not their insides
        tree = ast.parse(module.read_text(encoding="utf-8"))
        again = own & {getattr(node, "name", None) for node in tree.body}
        assert not again, f"{path.name} defines anew: {again}"


# --- the exercises ---


def exercises_of(path):
    """{name of the function to write: its cell} of a notebook."""
    cells = [cell for cell in read(path)[1] if cell.source.startswith("# exercise")]
    return {next(iter(functions(python(cell)))): cell for cell in cells}


@notebooks
def test_a_notebook_has_three_exercises_with_a_hint_a_check_and_a_solution(path, capsys):
    solutions = runpy.run_path(str(FOLDER / "solutions" / f"{path.stem}.py"))
    notebook, _ = read(path)
    hints = sum("<details><summary>Hint</summary>" in cell.source for cell in notebook.cells)
    assert hints == len(exercises_of(path)) == 3
    for n, (name, cell) in enumerate(exercises_of(path).items(), 1):
        assert cell.source.startswith(f"# exercise {n}\n")
        assert cell.source.endswith(f"\n\nexercises.{name}({name})")
        [output] = cell.outputs
        assert output.text == f"{name}: not done yet, it returns None.\n"
        getattr(exercises, name)(solutions[name])
        assert capsys.readouterr().out == "green\n", name


MISTAKES = {  # exercise: a wrong answer that students give
    "leave_one_out": lambda rewards: rewards - rewards.mean(dim=1, keepdim=True),  # the whole group
    "without_gradient": lambda ratio, advantages: (ratio - 1).abs() > 0.2,  # without the sign of A
    "loss_in_two_parts": lambda logp, old_logp, advantages, mask: sum(  # a mean of means
        exercises.grpo_loss(logp[p], old_logp[p], advantages[p], mask[p], beta=0)[0] / 2
        for p in (slice(0, 2), slice(2, None))
    ),
    # signed
    "keep_per_token": lambda advantages, lengths, k: exercises.prune(
        advantages / lengths, k, rule="largest"
    ),
    "rows_of_the_batch": lambda kept, group_size: kept.flatten(),  # rows of the first question only
    # as if the right ones were always rarer
    "right_among_the_kept": lambda right, group_size, k: min(right, k),
    "empty_places": lambda B, G, P: B * G % int(G * (1 - P)),  # 15 · (1 − 0.8) is below 3 in floats
    # one rectangle
    "padding": lambda lengths, max_tokens: 1 - sum(lengths) / (len(lengths) * max(lengths)),
    "share_to_keep": lambda phases, speedup: 1 / speedup,  # as if all time were training
    "completion_tokens": lambda tokens, eos: tokens != eos,  # no EOS
    # keeps 1/|o|
    "dr_grpo_loss_of_a_step": lambda logp, old_logp, rewards, mask, L: exercises.grpo_loss(
        logp, old_logp, exercises.group_advantages(rewards, divide_by_std=False).flatten(), mask,
        beta=0,
    )[0],
    "reward_for_steps": lambda completions, answer: [
        2.0 * (gold in text) for text, gold in zip(completions, answer)
    ],
    # as if all were of one kind
    "still_without_signal": lambda p, G, rounds: (p**G) ** rounds + ((1 - p) ** G) ** rounds,
    # half of the places stay empty
    "right_kept_by_pods": lambda right, wrong, m: min(right, m // 2),
    # no token follows
    "advantages_of_tokens": lambda rewards, values, gamma, lam: [
        r - v for r, v in zip(rewards, values)
    ],
}


@pytest.mark.parametrize("name", [name for path in NOTEBOOKS for name in exercises_of(path)])
def test_a_wrong_answer_is_found_and_told_in_one_sentence(name, capsys):
    getattr(exercises, name)(MISTAKES[name])
    assert "a number is" in capsys.readouterr().out
    getattr(exercises, name)(lambda *arguments: torch.zeros(7, 7))
    assert "the shape of the answer is (7, 7)" in capsys.readouterr().out
