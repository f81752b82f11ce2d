"""examples/vllm_sampler.py with a stand-in for vLLM. test_examples.py has a run with vLLM."""

import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from engine.model.sampler_interface import Sampling
from examples.vllm_sampler import VLLM
from experiments.library.toy_model import make_tokenizer


@pytest.fixture
def generate(monkeypatch):
    """The method of a stand-in for vLLM that draws the tokens 5 and 6."""
    llm, likely = MagicMock(), SimpleNamespace(logprob=-0.5)
    drawn = SimpleNamespace(
        token_ids=[5, 6], logprobs=[{5: likely}, {6: likely}], finish_reason="stop")
    result = SimpleNamespace(outputs=[drawn])
    found = llm.return_value.generate
    found.side_effect = lambda requests, *_, **__: [result] * len(requests)
    package = SimpleNamespace(LLM=llm, SamplingParams=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    return found


def test_each_completion_draws_by_its_seed_its_place_and_its_number(small, generate):
    """Whichever rank asks for it. It ends with the token that completes a text of `stop`."""
    tokenizer = make_tokenizer()
    text = tokenizer.decode([5, 6])
    sampling, seeds = Sampling(20, stop=[text[-1]]), []
    sampler = VLLM(small, tokenizer, torch.float32, sampling, stop_ids=[1], longest=99, seed=0)
    for prompts, places in [([[3], [4], [5]], None), ([[3], [5]], [0, 2])]:
        drawn = sampler.sample(prompts, 2, sampling, 7, places)
        requests, options = generate.call_args.args
        assert [request["prompt_token_ids"] for request in requests[::2]] == prompts
        assert drawn.tokens.tolist() == [[5, 6]] * 2 * len(prompts) and not drawn.truncated.any()
        assert (drawn.logp == -0.5).all() and (drawn.lengths == 2).all() and drawn.mask.all()
        assert drawn.texts(tokenizer)[0] == text[:-1] and options[0].detokenize
        seeds.append([how.seed for how in options])
    first, second = seeds
    assert len({*first}) == 6 and second == first[:2] + first[4:]
    assert sampler.sample([], 2, sampling, 7).tokens.shape == (0, 1)
