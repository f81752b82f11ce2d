"""What a copier may rely on: the files of the paper and of the family work in another project.

grpo.py and cppo.py need only torch. allocate.py and rewards.py need only Python. A file of the
family needs torch, and grpo.py beside it.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WITHOUT_TORCH = ["allocate", "rewards"]
PAPER = ["cppo", "grpo"]
FAMILY = sorted(path.stem for path in (ROOT / "family").glob("*.py") if path.stem != "__init__")

# Imports each file in a folder of its own, and prints what it loaded: all but Python's own modules
# and what torch had loaded by itself.
PROGRAM = """
import json, sys

loaded = {}
for name in json.loads(sys.argv[1]):
    if name == "torch":
        import torch
        continue
    sys.modules.pop("grpo", None)  # that of the file before
    before = set(sys.modules)
    sys.path.insert(0, name)
    __import__(name)
    sys.path.remove(name)
    new = {module.split(".")[0] for module in set(sys.modules) - before}
    loaded[name] = sorted(new - set(sys.stdlib_module_names) - {"torch", name})
import cppo, grpo
x = torch.zeros(2, 3)
loss = grpo.cppo_loss(x, x, torch.tensor([1.0, 2.0]), torch.ones(2, 3))[0].item()
print(json.dumps([loaded, loss, cppo.prune(torch.tensor([[1.0, -2.0]]), 1).tolist()]))
"""


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """One interpreter for all files: (what each loaded, a loss, the kept) from the copies."""
    folder = tmp_path_factory.mktemp("copied")
    for name in [*WITHOUT_TORCH, *PAPER, *FAMILY]:
        (folder / name).mkdir()
        source = ROOT / "family" if name in FAMILY else ROOT
        shutil.copy(source / f"{name}.py", folder / name)
        if name in FAMILY:
            shutil.copy(ROOT / "grpo.py", folder / name)
    names = [*WITHOUT_TORCH, "torch", *FAMILY, *PAPER]
    done = subprocess.run(
        [sys.executable, "-I", "-B", "-c", PROGRAM, json.dumps(names)], cwd=folder,
        capture_output=True, text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_allocate_and_rewards_need_nothing_but_python(copied, name):
    """They are imported before torch, so torch would be in the list."""
    assert copied[0][name] == []


@pytest.mark.parametrize("name", PAPER)
def test_grpo_and_cppo_need_only_torch(copied, name):
    assert copied[0][name] == []


@pytest.mark.parametrize("name", FAMILY)
def test_a_file_of_the_family_needs_only_torch_and_grpo(copied, name):
    assert set(copied[0][name]) <= {"grpo"}


def test_the_copies_compute_what_the_originals_do(copied):
    _, loss, kept = copied
    assert loss == pytest.approx(-1.5) and kept == [[1]]
