"""The JavaScript of docs/live in node, for the tests that compare it with the project's Python."""

import base64
import json
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.model.loading import load_model
from tasks import toy

LIVE = Path(__file__).parents[1] / "docs" / "live"
FILES = ["model", "toy", "sampling", "grpo", "cppo", "adamw", "step"]
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="no node here to run the page's JavaScript")

PROGRAM = """
const fs = require("fs"), vm = require("vm");
const { files, code, data } = JSON.parse(fs.readFileSync(0));
for (const file of files) vm.runInThisContext(fs.readFileSync(file, "utf8"), file);
Object.assign(globalThis, { given: data, bytes: Buffer.from(data.base64 ?? "", "base64") });
console.log(JSON.stringify(vm.runInThisContext(`(() => {${code}})()`)));
"""


def run_js(code, **data):
    """What the body of a function returns in node, after the files of docs/live were loaded.

    data: what the code sees as `given`. The page's weights are `bytes`, if base64 is given.
    """
    files = [str(LIVE / f"{name}.js") for name in FILES]
    given = json.dumps({"files": files, "code": code, "data": data})
    done = subprocess.run([NODE, "-e", PROGRAM], input=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@cache
def tensors():
    """[(name, shape)] of the weights in the order of the page's file."""
    return [(name, shape) for name, shape in run_js("return TENSORS;")]


@cache
def rounded_weights():
    """{name: weight} as the page holds them: rounded to float16."""
    weights = load_file(Path(toy.BASE, "model.safetensors"))
    return {name: weights[name].half() for name, _ in tensors()}


@cache
def weights_in_base64():
    numbers = flat(rounded_weights()).numpy().astype("<f2")
    return base64.b64encode(numbers.tobytes()).decode()


def model_of_page():
    """The toy in PyTorch with the weights of the page, in float64."""
    model, tokenizer = load_model(toy.BASE, torch.device("cpu"))
    model.load_state_dict(rounded_weights(), strict=False)  # the head is the embedding
    return model.double().eval(), tokenizer


def flat(named):
    """The tensors of {name: tensor} in the order of the page's file, one after the other."""
    return torch.cat([named[name].flatten() for name, _ in tensors()])
