"""docs/live: the page's Qwen2 in JavaScript computes what PyTorch computes from the same weights:
logits, gradients, AdamW's steps, completions. Each backward function is the slope of its forward
function."""

import random

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from engine.model.contract import Sampling
from engine.model.logprobs import completion_mask
from engine.model.sampling import Sampler, sample_token
from experiments import toy_model
from family.drgrpo import constant_weights
from grpo import grpo_loss, sequence_mean_weights, token_logprobs
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


def test_the_weights_of_the_page_are_all_weights_of_the_toy():
    weights = rounded_weights()
    assert {name: list(weight.shape) for name, weight in weights.items()} == dict(tensors())
    assert sum(weight.numel() for weight in weights.values()) == 108_608
    here = run_js("return [...make_model(bytes).weights];", base64=weights_in_base64())
    assert torch.equal(torch.tensor(here, dtype=F64), flat(weights).double())


def test_float16_is_read_as_torch_reads_it():
    here = run_js("return [...Array(65536).keys()].map(from_float16);")
    there = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    finite = there.isfinite()
    here = torch.tensor(here, dtype=F64)
    assert torch.equal(here[finite], there[finite].double())


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


def torch_loss(model, case, token_weights):
    """The project's loss of all batches together."""
    _, found, numbers = case
    loss, N = 0, sum(len(completions) for _, completions in found)
    for batch, (lengths, advantages, old_logp, ref_logp) in zip(found, numbers):
        logp = padded(logits_and_logp(model, batch)[1], lengths)
        mask = completion_mask(logp, lengths)
        loss += grpo_loss(
            logp, padded(old_logp, lengths), advantages, mask, ref_logp=padded(ref_logp, lengths),
            beta=0.1, weights=token_weights(mask, N))[0]
    return loss


WEIGHTS = {
    "sequence_mean": lambda mask, N: sequence_mean_weights(mask, num_sequences=N),
    "constant": lambda mask, N: constant_weights(mask, max_tokens=48, num_sequences=N),
}
JS_BATCHES = """
const model = make_model(bytes), memory = {};
const N = 10, settings = { temperature: given.temperature, beta: 0.1, epsilon: 0.2 };
const batches = given.batches.map(([prompt, completions], b) => {
  const batch = completion_batch(prompt, completions);
  const [lengths, advantages, old_logp, ref_logp] = given.numbers[b];
  const weights = given.constant
    ? constant_weights(lengths, 48, N) : sequence_mean_weights(lengths, N);
  const of_tokens = advantages.flatMap((A, i) => Array(lengths[i]).fill(A));
  return { ...batch, weights, advantages: of_tokens, old_logp, ref_logp };
});
"""


@pytest.fixture(scope="module")
def case():
    """(model, batches, numbers of each)"""
    model, tokenizer = model_of_page()
    found = batches(tokenizer)
    return model, found, [numbers_of(model, batch, seed) for seed, batch in enumerate(found)]


def in_js(code, case, constant=False):
    _, found, numbers = case
    given = [[x.tolist() for x in of_batch] for of_batch in numbers]
    return run_js(
        JS_BATCHES + code, base64=weights_in_base64(), batches=found, numbers=given,
        temperature=TEMPERATURE, constant=constant)


def test_logits_and_log_probabilities(case):
    model, found, _ = case
    here = in_js("""return batches.map(batch => {
      const logits = forward(model, batch, memory);
      const logp = token_logprobs(logits, batch.targets, given.temperature);
      return [[...logits].slice(0, batch.rows.length * TOKENS), [...logp]];
    });""", case)
    for batch, (logits, logp) in zip(found, here):
        prompt, completions = batch
        with torch.no_grad():
            there, there_logp = logits_and_logp(model, batch)
        # the rows: the prompt once, then each completion without its last token
        n = len(prompt)
        rows = [there[0, :n]]
        rows += [own[n : n + len(tokens) - 1] for own, tokens in zip(there, completions)]
        close(logits, torch.cat(rows).flatten(), 1e-4)
        close(logp, there_logp, 1e-5)


def close(here, there, tolerance):
    here = torch.tensor(here, dtype=F64)
    torch.testing.assert_close(here, there.double(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_loss_and_the_gradient_of_every_weight(case, name):
    model, *_ = case
    loss, gradient = in_js("""
      const { loss } = accumulate(model, settings, memory, batches);
      return [loss, [...model.gradient]];""", case, constant=name == "constant")
    model.zero_grad()
    expected = torch_loss(model, case, WEIGHTS[name])
    expected.backward()
    assert loss == pytest.approx(expected.item(), abs=1e-5)
    sizes = [p.numel() for p in rounded_weights().values()]
    for (tensor, _), own in zip(tensors(), torch.tensor(gradient, dtype=F64).split(sizes)):
        there = dict(model.named_parameters())[tensor].grad.flatten()
        assert there.norm() > 0, tensor
        assert (own - there).norm() < 1e-4 * there.norm(), tensor


@pytest.mark.parametrize("steps", [1, 3])
def test_the_weights_after_steps_of_adamw(case, steps):
    weights, norms = in_js(f"""
      const state = make_adamw(model.weights.length), norms = [];
      for (let i = 0; i < {steps}; i++) {{
        accumulate(model, settings, memory, batches);
        norms.push(clip_gradient(model.gradient));
        adamw_step(model.weights, model.gradient, state, 3e-4);
      }}
      return [[...model.weights], norms];""", case)
    model, _ = model_of_page()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.0)
    for norm in norms:
        optimizer.zero_grad()
        torch_loss(model, case, WEIGHTS["sequence_mean"]).backward()
        there = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        assert norm == pytest.approx(there, rel=1e-4)
        assert there > 1, "the limit does not act"
        optimizer.step()
    there = flat(dict(model.named_parameters())).detach()
    assert (there - flat(rounded_weights()).double()).abs().max() > 2e-4 * steps
    # a few gradients are as small as transformers' rounding to float32, and AdamW scales them up
    off = (torch.tensor(weights, dtype=F64) - there).abs()
    assert off.max() < 3e-5 and (off > 1e-6).sum() < 10


# --- sampling ---


def test_a_drawn_token():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(500, 22, generator=generator, dtype=F64)
    u = torch.rand(500, generator=generator, dtype=F64)
    for temperature in (1.0, 0.6, 2.0, 0.0):
        here = run_js(
            "return given.u.map((u, i) => sample_token(given.logits[i], given.temperature, u));",
            logits=logits.tolist(), u=u.tolist(), temperature=temperature)
        there, _ = sample_token(logits, Sampling(1, temperature=temperature), u)
        assert here == there.tolist()


JS_SAMPLE = """
const sampling = { temperature: given.temperature, max_new_tokens: 48 };
return sample(make_model(bytes), given.prompts, given.G, sampling, given.uniform, {});"""


@pytest.mark.parametrize("temperature,questions,G", [(0.0, 64, 1), (1.0, 6, 8), (0.7, 3, 8)])
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


def test_the_log_probability_of_a_token_in_closed_form():
    logits = torch.tensor([[0.0, 1.0, 2.0] + [-30.0] * 19], dtype=F64)
    targets = [{"row": 0, "token": token} for token in (0, 2, 2)]
    here = run_js("return [...token_logprobs(Float64Array.from(given.x), given.targets, 0.5)];",
                  x=logits.flatten().tolist(), targets=targets)
    there = token_logprobs(logits.expand(3, 1, -1), torch.tensor([[0], [2], [2]]), temperature=0.5)
    close(here, there.flatten(), 1e-6)


# --- finite differences: each backward function by itself ---

DIFFERENCES = """
const rng = make_rng(3), M = 7;
const random = size => Float64Array.from({ length: size }, () => 2 * rng() - 1);
const inner = (a, b) => a.reduce((sum, x, i) => sum + x * b[i], 0);
// a prompt of 3 tokens, and two completions
const of = (position, place, start, shared) =>
  ({ token: place + 1, position, place, start, prefix: 0, shared });
const rows = [of(0, 0, 0, 0), of(1, 1, 0, 0), of(2, 2, 0, 0), of(3, 3, 3, 3), of(4, 4, 3, 3),
              of(3, 5, 5, 3), of(4, 6, 5, 3)];
const batch = { rows, places: M, longest: 6 };
const targets = [[0, 3], [2, 7], [2, 8], [5, 21]].map(([row, token]) => ({ row, token }));

// The largest difference between the gradients that `backward` returns, [∂inputs…] of Σ c · y, and
// central differences of `forward`, at 40 numbers of each input.
function error(inputs, forward, backward) {
  const c = random(forward(...inputs).length);
  const gradients = backward(c, ...inputs);
  let worst = 0;
  inputs.forEach((x, n) => {
    for (let trial = 0; trial < 40; trial++) {
      const i = Math.floor(rng() * x.length), old = x[i], h = 1e-5;
      x[i] = old + h;
      const above = inner(c, forward(...inputs));
      x[i] = old - h;
      const slope = (above - inner(c, forward(...inputs))) / (2 * h);
      x[i] = old;
      worst = Math.max(worst, Math.abs(slope - gradients[n][i]));
    }
  });
  return worst;
}
const zero = (...sizes) => sizes.map(size => new Float64Array(size));
const found = {};

found.linear = error([random(M * 64), random(192 * 64)],
  (x, W) => linear(zero(M * 192)[0], x, W, M, 192, 64),
  (c, x, W) => {
    const [dx, dW] = zero(M * 64, 192 * 64);
    linear_backward(dx, dW, c, x, W, M, 192, 64);
    return [dx, dW];
  });

found.rms_norm = error([random(M * 64), random(64)],
  (x, w) => rms_norm(zero(M * 64)[0], x, w, M),
  (c, x, w) => {
    const [dx, dw] = zero(M * 64, 64);
    rms_norm_backward(dx, dw, c, x, w, M);
    return [dx, dw];
  });

found.rotary = error([random(M * ROW)],
  x => rotary(zero(M * ROW)[0], x, rows, 1),
  c => [rotary(zero(M * ROW)[0], c, rows, -1)]);

found.attention = error([random(M * ROW)],
  qkv => attention(...zero(M * 64, M * 4 * 6), qkv, batch),
  (c, qkv) => {
    const [a, p, dqkv] = zero(M * 64, M * 4 * 6, M * ROW);
    attention(a, p, qkv, batch);
    return [attention_backward(dqkv, c, a, p, qkv, batch)];
  });

found.swiglu = error([random(M * 384)],
  gu => swiglu(zero(M * 192)[0], gu, M),
  (c, gu) => [swiglu_backward(zero(M * 384)[0], c, gu, M)]);

found.token_logprobs = error([random(M * TOKENS)],
  logits => token_logprobs(logits, targets, 0.7),
  (c, logits) => {
    const [dlogits] = zero(M * TOKENS), logp = token_logprobs(logits, targets, 0.7);
    token_logprobs_backward(dlogits, c, logp, logits, targets, 0.7);
    return [dlogits];
  });

// a whole layer, and all of its weights
const size = model_size => model_size.reduce((a, b) => a * b);
const model = make_model(bytes), model_layer = model.parts.layers[1];
const names = Object.keys(model_layer);
found.layer = error([random(M * 64), ...names.map(name => model_layer[name])],
  x => layer_forward(model_layer, x, batch, {}),
  (c, x) => {
    const memory = {}, scratch = {}, g = c.slice(), dw = model.gradients.layers[1];
    const make = (name, columns) => room(scratch, name, M * columns);
    layer_forward(model_layer, x, batch, memory);
    layer_backward(g, model_layer, dw, batch, memory, make);
    return [g, ...names.map(name => dw[name])];
  });

found.model = error([model.weights],
  () => forward(model, batch, {}),
  c => {
    const memory = {};
    model.gradient.fill(0);
    forward(model, batch, memory);
    backward(model, batch, memory, c);
    return [model.gradient];
  });
return found;
"""


def test_each_backward_function_is_the_slope_of_its_forward_function():
    found = run_js(DIFFERENCES, base64=weights_in_base64())
    assert len(found) == 8
    assert max(found.values()) < 1e-6, found
    # the largest slopes are far above this limit


def test_memory_is_used_again():
    """A smaller batch after a larger one gives the same numbers as in fresh memory, and no array is
    made anew."""
    here = run_js("""
      const model = make_model(bytes), memory = {};
      const small = completion_batch([6, 16, 7], [[7, 8, 1], [9]]);
      const large = completion_batch([6, 16, 7, 18, 19], [[7, 8, 9, 10, 1], [9, 9, 9, 1]]);
      const run = (batch, memory) => {
        const logits = forward(model, batch, memory);
        model.gradient.fill(0);
        backward(model, batch, memory, logits.slice());
        return JSON.stringify([[...logits.slice(0, batch.rows.length * TOKENS)],
                               [...model.gradient]]);
      };
      run(large, memory);
      const arrays = { ...memory, ...memory.layers[0] };
      const same = run(small, memory) === run(small, {});
      const now = { ...memory, ...memory.layers[0] };
      const kept = Object.keys(arrays).filter(name => arrays[name] === now[name]);
      return [same, kept.length === Object.keys(now).length];
    """, base64=weights_in_base64())
    assert here == [True, True]
