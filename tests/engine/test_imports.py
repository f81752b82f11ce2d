"""What is not imported where it is not needed: it would take seconds before the first word."""

import ast
import subprocess
import sys

import pytest

from tests.helpers.runs import ROOT

HEAVY = (
    "transformers torch._dynamo torch.distributed.fsdp torch.distributed.checkpoint sympy "
    "torch.distributed.tensor matplotlib datasets peft vllm math_verify").split()
MISTAKES = """\
--bogus
--lr fast
--algorithm nope
--shard full --lora 4
--dataset nope
--dataset nope.jsonl
--model ./nope
--rewards nope
--rewards math_accuracy --dataset gsm8k --steps 0
--recipe nope.yaml
--keep nope.py:f
--resume --output_dir nope
--check_rewards --dtype half
--plan -1
--lr_schedule linear""".splitlines()
ASK = f"""
import contextlib, sys
import algorithms, eval, train
from engine.base.errors import UserError
from tools import compare
for words in {MISTAKES}:
    try:
        train.main(words.split())
    except UserError as error:
        print(error)
for main in (eval.main, train.main, compare.main):
    with contextlib.suppress(SystemExit):
        main(["--help"])
print(algorithms.table())
print("heavy:", [name for name in {HEAVY} if name in sys.modules])
"""


def test_mistakes_help_and_the_table_are_told_before_anything_slow_is_imported():
    """What is left is torch, which takes two seconds."""
    done = subprocess.run([sys.executable, "-c", ASK], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert lines[len(MISTAKES)].startswith("usage: ") and lines[-1] == "heavy: []"
    assert "--benchmark" in done.stdout and "--output_dir FOLDER" in done.stdout
    assert "gspo_token" in done.stdout


PROGRAMS = [
    path.relative_to(ROOT) for folder in ("", "tools", "docs", "docs/live", "experiments", "judges",
                                          "experiments/library", "examples", "notebooks/exercises")
    for path in sorted(ROOT.joinpath(folder).glob("*.py")) if "__main__" in path.read_text()]


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_help_tells_how_and_changes_nothing(program, tmp_path):
    words = [sys.executable, ROOT / program, "--help"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr and not [*tmp_path.iterdir()]
    first = ast.get_docstring(ast.parse((ROOT / program).read_text())).splitlines()[0]
    assert first in done.stdout or program.stem in done.stdout or program.name == "algorithms.py"
