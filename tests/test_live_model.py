"""docs/live: the page's Qwen2 in JavaScript computes what PyTorch computes from the same weights:
logits, gradients, AdamW's steps, completions. Each backward function is the slope of its forward
function."""

import random

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from engine.model.contract import Sampling
from engine.model.logprobs import completion_mask
from engine.model.sampling import Sampler
from experiments.library import toy_model
from grpo import grpo_loss, sequence_mean_weights
from tasks import toy
from tests.live import (
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
        texts = [right, f"<answer>{index}</answer>"]
        completions = [tokenizer.encode(text) + [1] for text in texts]
        completions += [[rng.randrange(22) for _ in range(n)] for n in (1, 2, 11)]
        found.append((tokenizer.encode(prompt), completions))
    return found


def numbers_of(model, batch, seed):
    """(lengths, advantages, log π_old, log π_ref) of a batch, the last two for each token of its
    completions, one after the other. Both differ from log π, so that the clip and the KL act."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([len(tokens) for tokens in batch[1]])
    advantages = torch.randn(len(lengths), generator=generator).double()
    with torch.no_grad():
        logp = logits_and_logp(model, batch)[1]
    noise = 0.3 * torch.randn(2, len(logp), generator=generator).double()
    return lengths, advantages, *(logp + noise)


def logits_and_logp(model, batch):
    """(logits of all rows (N, L, V), log-probabilities of the completions' tokens (Σ T,))"""
    prompt, completions = batch
    whole = [torch.tensor(prompt + tokens) for tokens in completions]
    tokens = pad_sequence(whole, batch_first=True)
    logits = model(tokens).logits
    logp = []
    for row, own in zip(logits, completions):
        predicting = row[len(prompt) - 1 : len(prompt) + len(own) - 1] / TEMPERATURE
        logp.append(predicting.log_softmax(-1)[range(len(own)), own])
    return logits, torch.cat(logp)


def padded(numbers, lengths):
    return pad_sequence(numbers.split(lengths.tolist()), batch_first=True)


def torch_loss(model, found, numbers):
    """The project's loss of all batches together."""
    loss, N = 0, sum(len(completions) for _, completions in found)
    for batch, (lengths, advantages, old_logp, ref_logp) in zip(found, numbers):
        logp = padded(logits_and_logp(model, batch)[1], lengths)
        mask = completion_mask(logp, lengths)
        loss += grpo_loss(
            logp, padded(old_logp, lengths), advantages, mask, ref_logp=padded(ref_logp, lengths),
            beta=0.1, weights=sequence_mean_weights(mask, num_sequences=N))[0]
    return loss


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
    model, tokenizer = model_of_page()
    found = batches(tokenizer)
    numbers = [numbers_of(model, batch, seed) for seed, batch in enumerate(found)]
    given = [[x.tolist() for x in of_batch] for of_batch in numbers]
    loss, gradient = run_js(JS_LOSS, base64=weights_in_base64(), batches=found, numbers=given,
                            temperature=TEMPERATURE)
    expected = torch_loss(model, found, numbers)
    expected.backward()
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
