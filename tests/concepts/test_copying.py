"""What a copier may rely on: the files of the paper and of the family work in another project.

grpo.py needs only torch. allocate.py and rewards.py need only Python. cppo.py and a file of the
family need torch, and grpo.py beside them.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WITHOUT_TORCH = ["allocate", "rewards"]
# these need grpo.py beside them
WITH_GRPO = {"cppo": ROOT / "cppo.py"} | {
    path.stem: path for path in sorted((ROOT / "family").glob("[!_]*.py"))
}

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
sys.path.insert(0, "cppo")
import cppo
x = torch.zeros(2, 3)
loss = cppo.cppo_loss(x, x, torch.tensor([1.0, 2.0]), torch.ones(2, 3))[0].item()
print(json.dumps([loaded, loss, cppo.prune(torch.tensor([[1.0, -2.0]]), 1).tolist()]))
"""


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """One interpreter for all files: (what each loaded, a loss, the kept) from the copies."""
    folder = tmp_path_factory.mktemp("copied")
    for name in [*WITHOUT_TORCH, "grpo", *WITH_GRPO]:
        (folder / name).mkdir()
        shutil.copy(WITH_GRPO.get(name, ROOT / f"{name}.py"), folder / name)
        if name in WITH_GRPO:
            shutil.copy(ROOT / "grpo.py", folder / name)
    names = [*WITHOUT_TORCH, "torch", "grpo", *WITH_GRPO]
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


def test_grpo_needs_only_torch(copied):
    assert copied[0]["grpo"] == []


@pytest.mark.parametrize("name", WITH_GRPO)
def test_cppo_and_the_family_need_only_torch_and_grpo(copied, name):
    assert set(copied[0][name]) <= {"grpo"}


def test_the_copies_compute_what_the_originals_do(copied):
    _, loss, kept = copied
    assert loss == pytest.approx(-1.5) and kept == [[1]]
