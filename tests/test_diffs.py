"""family/diffs: each patch makes a relative of nano.py, whose step is the step of the row of
algorithms.py. The relatives are in family/diffs/build.py, and so is what a patch leaves out."""

import math
import shutil
import subprocess
from types import ModuleType

import pytest
import torch

from algorithms import ALGORITHMS, resolve
from engine.data.questions import load_questions
from family.diffs import build
from family.diffs.build import NO_DIFF, RELATIVES, changed_lines, patched
from tests.helpers.nano import nano_step, train_py_step
from tests.helpers.runs import ROOT

PATCH = shutil.which("patch")
ROW = {"dapo_oversampled": "dapo"}  # of a patch with another name
# what a patch changes in its row, as its first line says
CHANGED = {
    "dapo": {"max_rollouts": 1}, "dapo_oversampled": {"max_rollouts": 1},
    "gspo": {"minibatches": 1}, "cppo_published": {"pruning_rate": 0.875},
    "pods": {"pruning_rate": 0.875},
}


def module(name):
    made = ModuleType(name)
    made.__file__ = str(ROOT / "nano.py")
    exec(patched(name), vars(made))
    return made


def test_every_row_is_a_patch_or_says_why_not():
    rows = {ROW.get(name, name) for name in RELATIVES}
    for name in ALGORITHMS:
        assert name in rows or name in NO_DIFF, (
            f"add {name} to RELATIVES in family/diffs/build.py, or to NO_DIFF with the reason")


STALE = "stale: python family/diffs/build.py"


@pytest.mark.parametrize("name", RELATIVES)
def test_a_patch_is_short_and_is_what_its_pairs_make(name):
    assert len(changed_lines(name)) <= 12
    assert (build.HERE / f"{name}.patch").read_text(encoding="utf-8") == build.patch(name), STALE


def test_the_page_shows_the_lines_of_each_patch():
    page = build.PAGE.read_text(encoding="utf-8")
    assert build.page(page) == page, STALE
    assert page.count("```diff") == len(RELATIVES)


def completions(nano, model, tokenizer, questions):
    """What nano.sample returns. Every third completion is cut off after 1 to 7 tokens, so the
    lengths of the shortest ones differ, too."""
    tokens, seen, mask = nano.sample(model, tokenizer, nano.TOY, questions)
    number, place = torch.arange(len(mask))[:, None], torch.arange(mask.shape[1])
    mask &= (number % 3 > 0) | (place <= number % 7)
    L = tokens.shape[1] - mask.shape[1]
    tokens[:, L:] *= mask
    seen[:, L:] = mask
    return tokens, seen, mask


@pytest.mark.parametrize("name", RELATIVES)
def test_one_step_moves_the_weights_as_the_row_does(name, small):
    """And the numbers of the row are those of the patch. (A clip does not act in every step.)"""
    nano = module(name)
    model, tokenizer = nano.load(small)
    model.cpu()  # a GPU would compute in bfloat16
    algorithm = resolve(ROW.get(name, name), **CHANGED.get(name, {}))
    assert (nano.G, nano.K) == (algorithm.group_size, algorithm.k)
    assert (nano.MU, nano.BETA) == (algorithm.mu, algorithm.beta)
    if algorithm.clip_low:
        assert (nano.EPS_LOW, nano.EPS_HIGH) == (algorithm.clip_low, algorithm.clip_high)
    assert nano.Q > 1 or not algorithm.over_all_devices  # else the batch is only one group
    nano.MAX_GRAD_NORM = math.inf  # without a limit a gradient that is too long is seen
    questions, _ = load_questions("toy", tokenizer, limit=nano.Q)
    if name == "dapo_oversampled":
        questions[0]["answer"] = "?"  # nothing can be learned from this one
    torch.manual_seed(1)
    asked = [question for question in questions for _ in range(nano.G)]
    drawn = completions(nano, model, tokenizer, asked)
    nano.sample = lambda *_: drawn
    moved, *_ = nano_step(nano, model, tokenizer, questions)
    if name == "dapo_oversampled":
        questions, drawn = questions[1:2], [x[nano.G : 2 * nano.G] for x in drawn]
    right, _ = train_py_step(algorithm, model, tokenizer, questions, drawn, math.inf)
    assert moved.norm() > 1e-3 and (moved - right).norm() < 1e-4 * moved.norm()


@pytest.mark.skipif(not PATCH, reason="needs the program patch")
@pytest.mark.parametrize("name", RELATIVES)
def test_the_program_patch_makes_a_file_that_trains_the_toy(name, tmp_path, capsys):
    shutil.copy(ROOT / "nano.py", tmp_path)
    subprocess.run([PATCH, "nano.py", build.HERE / f"{name}.patch"], cwd=tmp_path, check=True)
    assert (tmp_path / "nano.py").read_text(encoding="utf-8") == patched(name)
    nano = module(name)
    nano.STEPS, nano.FOLDER = 2, str(tmp_path / "model")
    nano.main([])
    assert "step   2" in capsys.readouterr().out
