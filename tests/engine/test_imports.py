"""What is not imported where it is not needed: it would take seconds before the first word."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEAVY = [
    "transformers.modeling_utils", "transformers.modeling_layers", "torch._dynamo",
    "torch.distributed.fsdp", "sympy", "torch.distributed.checkpoint", "torch.distributed.tensor",
    "matplotlib", "datasets", "peft", "vllm", "math_verify",
]
ASK = """
import contextlib, sys
import eval, train
for main in (eval.main, train.main):
    with contextlib.suppress(SystemExit):
        main(["--help"])
train.main(["--list"])
assert "transformers" not in sys.modules
print("heavy:", [name for name in {heavy} if name in sys.modules])
"""

MISTAKES = [
    "--bogus", "--lr fast", "--algorithm nope", "--shard full --lora 4",
    "--dataset nope", "--dataset nope.jsonl", "--model ./nope",
    "--rewards nope", "--rewards RewardModel:./nope", "--rewards math_accuracy --dataset gsm8k "
                                                      "--steps 0", "--recipe nope.yaml",
    "--keep nope.py:f", "--resume --output_dir nope", "--check_rewards --dtype half", "--plan "
                                                                                      "--devices 0",
]  # fmt: skip
ASK_AFTER_MISTAKES = """
import sys
import train
from engine.base.errors import UserError
for words in {mistakes}:
    try:
        train.main(words.split())
    except UserError as error:
        print(error)
print("heavy:", [name for name in {heavy} if name in sys.modules])
"""


def test_a_users_mistake_is_told_before_anything_slow_is_imported():
    """What is left is torch, which takes two seconds."""
    code = ASK_AFTER_MISTAKES.format(mistakes=MISTAKES, heavy=["transformers", *HEAVY])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *told, heavy = done.stdout.splitlines()
    assert len(told) == len(MISTAKES) and heavy == "heavy: []"


def test_help_and_list_import_no_code_of_models():
    code = ASK.format(heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "heavy: []"
    assert "--compare" in done.stdout and "gspo_token" in done.stdout
