"""What a copier may rely on: the files of the paper and of the family work in another project.

allocate.py and answers/ need only Python, scores.py needs numpy, and grpo.py and records.py need
torch. rewards.py needs answers/ beside it. cppo.py and a file of the family need torch, and grpo.py
beside them.
"""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WITH_GRPO = ["cppo.py", *(f"family/{path.name}" for path in ROOT.glob("family/[!_]*.py"))]
ANSWERS = [f"answers/{path.name}" for path in ROOT.glob("answers/*.py")]
NEEDS = {"allocate.py": set(), "scores.py": {"numpy"}}
NEEDS |= dict.fromkeys([*ANSWERS, "rewards.py"], {"answers"})
NEEDS |= dict.fromkeys(["grpo.py", "records.py"], {"torch"})
NEEDS |= dict.fromkeys(WITH_GRPO, {"torch", "grpo"})


@pytest.mark.parametrize("file", NEEDS)
def test_a_copied_file_needs_no_more_than_it_says(file):
    """Python's own modules aside. An import inside a function counts, too."""
    names = []
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module)
    assert {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) <= NEEDS[file]
