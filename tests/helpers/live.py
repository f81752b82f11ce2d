"""The JavaScript of docs/live in node, for the tests that compare it with the project's Python."""

import base64
import json
import random
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.utils.rnn import pad_sequence

from engine.model.loading import load_model
from engine.model.logprobs import completion_mask
from engine.model.sampler_interface import Completions, Sampling
from loop.records import FIRST_STEP, Parts
from loop.update import Limits
from tasks import toy
from tests.helpers.examples import named
from train import train_step

LIVE = Path(__file__).parents[2] / "docs" / "live"
FILES = ["model", "toy", "sampling", "grpo", "cppo", "adamw", "step"]
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="no node here to run the page's JavaScript")

PROGRAM = """
const vm = require("vm");
const { script, code, data } = JSON.parse(require("fs").readFileSync(0));
Object.assign(globalThis, { given: data, bytes: Buffer.from(data.base64 ?? "", "base64") });
vm.runInThisContext(script);
console.log(JSON.stringify(vm.runInThisContext(`(() => {${code}})()`)));
"""


@cache
def script_of_live():
    return "".join((LIVE / f"{name}.js").read_text() for name in FILES)


def run_js(code, **data):
    """What the body of a function returns in node, after the script of docs/live has run.

    data: what the code sees as `given`. The page's weights are `bytes`, if base64 is given.
    """
    given = json.dumps({"script": script_of_live(), "code": code, "data": data})
    done = subprocess.run([NODE, "-e", PROGRAM], input=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def close(here, there, tolerance=1e-9):
    """Numbers of the page and a tensor of ours."""
    here = torch.tensor(here, dtype=torch.float64)
    torch.testing.assert_close(here, there.double(), rtol=0, atol=tolerance)


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


def completions_of(texts, tokenizer):
    """The Completions that the page has sampled. One of fewer than 48 tokens has ended."""
    rows = [tokenizer.encode(text) + [tokenizer.eos_token_id] for text in texts]
    tokens = pad_sequence([torch.tensor(row[:48]) for row in rows], batch_first=True)
    lengths = torch.tensor([min(len(row), 48) for row in rows])
    mask = completion_mask(tokens, lengths)
    return Completions(tokens, lengths, lengths < 0, torch.zeros(tokens.shape), mask)


def trained_on(texts, networks, algorithm, asked, reward, *, temperature=1.0, so_far=FIRST_STEP):
    """`train_step` on these completions of the page, in place of sampled ones."""
    drawn = completions_of(texts, networks.tokenizer)
    networks.sampler.sample = lambda *_: drawn
    parts = Parts(networks, algorithm, named(reward), Sampling(48, temperature), Limits())
    return train_step(parts, asked, random.Random(0), so_far)
