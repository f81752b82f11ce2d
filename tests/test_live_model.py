"""docs/live: the page's Qwen2 in JavaScript samples as PyTorch does from the same weights. What it
computes backward, and AdamW's steps, are in test_live_algorithm.py: the weights after two steps."""

import pytest
import torch

from engine.model.contract import Sampling
from engine.model.sampler import Sampler
from tasks import toy
from tests.helpers.live import (
    flat,
    model_of_page,
    needs_node,
    rounded_weights,
    run_js,
    weights_in_base64,
)

pytestmark = needs_node
F64 = torch.float64


def test_the_weights_of_the_page_are_those_of_the_toy():
    here = run_js("return [...make_model(bytes).weights];", base64=weights_in_base64())
    assert torch.equal(torch.tensor(here, dtype=F64), flat(rounded_weights()).double())


JS_SAMPLE = """
const sampling = { temperature: given.temperature, max_new_tokens: 48 };
return sample(make_model(bytes), given.prompts, given.G, sampling, given.uniform, {});"""


@pytest.mark.parametrize("temperature,questions,G", [(0.0, 16, 1), (0.7, 4, 8)])
def test_completions_token_by_token(temperature, questions, G):
    """Greedy ones, and ones that given uniform numbers draw."""
    model, tokenizer = model_of_page()
    prompts = [tokenizer.encode(toy.question(i)["question"]) for i in range(questions)]
    prompts[1] = prompts[1][2:]  # a shorter prompt
    shape = (questions, G, 48)
    uniform = torch.rand(shape, dtype=F64, generator=torch.Generator().manual_seed(2))
    here = run_js(JS_SAMPLE, base64=weights_in_base64(), prompts=prompts, G=G,
                  temperature=temperature, uniform=uniform.flatten().tolist())
    sampler = Sampler(model.float(), tokenizer)
    there = sampler.sample(prompts, G, Sampling(48, temperature=temperature), seed=2)
    rows = zip(there.tokens.tolist(), there.lengths.tolist())
    assert here == [tokens[:length] for tokens, length in rows]
    assert len(set(map(len, here))) > 1  # they end at different times
