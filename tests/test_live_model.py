"""docs/live: the page's Qwen2 in JavaScript computes what PyTorch computes from the same weights:
logits, gradients, AdamW's steps, completions. Each backward function is the slope of its forward
function."""

import random

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from engine.model.contract import Sampling
from engine.model.logprobs import completion_mask
from engine.model.sampler import Sampler
from experiments.library import toy_model
from grpo import grpo_loss, token_logprobs
from tasks import toy
from tests.helpers.live import (
    flat,
    model_of_page,
    needs_node,
    rounded_weights,
    run_js,
    tensors,
    weights_in_base64,
)

pytestmark = needs_node
F64 = torch.float64
TEMPERATURE = 0.8


def test_the_weights_of_the_page_are_those_of_the_toy():
    here = run_js("return [...make_model(bytes).weights];", base64=weights_in_base64())
    assert torch.equal(torch.tensor(here, dtype=F64), flat(rounded_weights()).double())


# --- the whole model ---


def batches(tokenizer):
    """[(prompt, completions)]: token lists; two questions with completions of different lengths."""
    rng, found = random.Random(5), []
    for index in (3, 8):
        prompt, right = toy_model.demonstration(index, "wordy")
        completions = [tokenizer.encode(right) + [1], tokenizer.encode("<answer>5</answer>") + [1]]
        completions += [[rng.randrange(22) for _ in range(n)] for n in (1, 2, 11)]
        found.append((tokenizer.encode(prompt), completions))
    return found


JS_LOSS = """
const model = make_model(bytes), memory = {};
const N = 10, settings = { temperature: given.temperature, beta: 0.1, epsilon: 0.2 };
const batches = given.batches.map(([prompt, completions], b) => {
  const batch = completion_batch(prompt, completions);
  const [lengths, advantages, old_logp, ref_logp] = given.numbers[b];
  const of_tokens = advantages.flatMap((A, i) => Array(lengths[i]).fill(A));
  const weights = sequence_mean_weights(lengths, N);
  return { ...batch, weights, advantages: of_tokens, old_logp, ref_logp };
});
const { loss } = accumulate(model, settings, memory, batches);
return [loss, [...model.gradient]];
"""


def test_the_loss_and_the_gradient_of_every_weight():
    """Of both questions together. log π_old and log π_ref differ from log π, so that the clip and
    the KL act."""
    model, tokenizer = model_of_page()
    found = batches(tokenizer)
    rows = [torch.tensor(prompt + own) for prompt, completions in found for own in completions]
    start = len(found[0][0])  # both prompts are as long
    lengths = torch.tensor([len(row) - start for row in rows])
    tokens = pad_sequence(rows, batch_first=True)
    logits = model(tokens[:, :-1]).logits[:, start - 1 :]
    logp = token_logprobs(logits, tokens[:, start:], temperature=TEMPERATURE)
    mask, generator = completion_mask(logp, lengths), torch.Generator().manual_seed(0)
    A = torch.randn(10, generator=generator).double()
    old_logp, ref_logp = (
        logp.detach() + 0.3 * torch.randn(logp.shape, generator=generator) for _ in range(2))
    expected, _ = grpo_loss(logp, old_logp, A, mask, ref_logp=ref_logp, beta=0.1)
    expected.backward()

    def of_question(q, x):
        own = slice(5 * q, 5 * q + 5)
        return (x[own][mask[own]] if x.shape == mask.shape else x[own]).tolist()

    given = [[of_question(q, x) for x in (lengths, A, old_logp, ref_logp)] for q in range(2)]
    loss, gradient = run_js(JS_LOSS, base64=weights_in_base64(), batches=found, numbers=given,
                            temperature=TEMPERATURE)
    assert loss == pytest.approx(expected.item(), abs=1e-5)
    sizes = [p.numel() for p in rounded_weights().values()]
    for (tensor, _), own in zip(tensors(), torch.tensor(gradient, dtype=F64).split(sizes)):
        there = dict(model.named_parameters())[tensor].grad.flatten()
        assert there.norm() > 0, tensor
        assert (own - there).norm() < 1e-4 * there.norm(), tensor


# --- sampling ---


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
