"""The concept tests of this project for other people's code: docs/conformance.md."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path


def check(module):
    """For a test of your own: passes, or raises AssertionError with what is wrong.

    module: your module, imported from a file, that maps our names to your functions. What is ✓, ◐
    or ≈ passes. △, ✗ and – do not.
    """
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "verdicts.json"
        # in a process of its own, because both sides may have a grpo.py
        done = subprocess.run(
            [sys.executable, "-P", "-m", "conformance", module.__file__, "--json", file],
            env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
        if not file.exists():
            raise RuntimeError(done.stderr)
        found = json.loads(file.read_text(encoding="utf-8"))
    lines = [found["error"]] if found["error"] else []
    for row in found["functions"]:
        if row["sign"] in "△✗–":
            lines += [f"{row['function']}: {row['sign']} {row['sentence']}"]
            lines += [f"    {line}" for line in row["lines"]]
    if lines:
        raise AssertionError("\n".join(lines))
