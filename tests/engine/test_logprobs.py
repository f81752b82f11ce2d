"""Log-probabilities of completions under a real model, against one plain forward pass per
sequence."""

import copy

import pytest
import torch
from torch.nn.functional import linear
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Qwen2Config,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from engine.model import logprobs
from engine.model.critic import Critic
from engine.model.logprobs import Policy, completion_mask, recompute_layers
from engine.model.prefix_sharing import can_share_prefix
from loop.batches import split_into_micro_batches
from loop.records import Batch
from tests.helpers.examples import seeded
from tests.helpers.training import at_pace, completion_logprobs

SIZES = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


CONFIGS = {
    "qwen2, tied": Qwen2Config(**SIZES, num_key_value_heads=2, tie_word_embeddings=True),
    "llama, untied": LlamaConfig(**SIZES, num_key_value_heads=4, tie_word_embeddings=False),
    "mistral, sliding window": MistralConfig(
        **SIZES, num_key_value_heads=2, sliding_window=4, initializer_range=0.1
    ),
    "gpt2": GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    # the forward of its layers asks `self.training` for the dropout
    "opt": OPTConfig(
        vocab_size=40, hidden_size=32, word_embed_proj_dim=32, ffn_dim=48, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64,
    ),
    # its convolutions keep a state beside keys and values
    "lfm2": Lfm2Config(
        **SIZES, num_key_value_heads=2, full_attn_idxs=[1], initializer_range=0.1
    ),
    # its positions are a part of the mask
    "bloom": BloomConfig(
        vocab_size=40, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.1
    ),
    "sharp": LlamaConfig(
        **SIZES | {"vocab_size": 500, "initializer_range": 0.3}, num_key_value_heads=4
    ),
}


def make(kind):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[kind]).eval()


def rows_of(*group_sizes, width=7):
    """(prompts, tokens, mask) of completions of questions with prompts of unequal lengths. Some
    completions have one token, the last one has none; what stands on padding is nonsense."""
    generator, prompts = seeded(1), []
    for size, length in zip(group_sizes, (3, 9, 1, 5)):
        prompts += [torch.randint(0, 40, (length,), generator=generator).tolist()] * size
    tokens = torch.randint(0, 40, (len(prompts), width), generator=generator)
    lengths = [7, 4, 1, 2, 6, 3, 5, 1] * 2
    lengths = torch.tensor([*lengths[: len(prompts) - 1], 0])
    return prompts, tokens, completion_mask(tokens, lengths)


def plain_scores(model, prompts, tokens, mask, temperature=1.0):
    """The definition, one sequence at a time: (log-probabilities, entropies), (N, T) float64."""
    logp = torch.zeros(tokens.shape, dtype=torch.float64)
    entropies = logp.clone()
    for i, (prompt, n) in enumerate(zip(prompts, mask.sum(1).tolist())):
        sequence = torch.tensor([prompt + tokens[i, :n].tolist()])
        logits = model(sequence).logits[0, len(prompt) - 1 :][:n]
        x = (logits.double() / temperature).log_softmax(-1)
        logp[i, :n] = x.gather(1, tokens[i, :n, None]).squeeze(1)
        entropies[i, :n] = -(x.exp() * x).sum(1)
    return logp, entropies


@pytest.mark.parametrize("kind, temperature, of_entropy", [
    ("qwen2, tied", 0.6, 0), ("llama, untied", 1.0, 0), ("gpt2", 1.0, 1), ("sharp", 0.6, 3),
])
def test_scores_and_gradients_equal_those_of_plain_forward_passes(
    kind, temperature, of_entropy, monkeypatch
):
    """of_entropy: its weight in the loss; 0: the loss does not look at it."""
    model, rows = make(kind), rows_of(1, 1, 1, 1)
    # five tokens at a time: several chunks
    at_pace(monkeypatch, chunk_elements=5 * model.config.vocab_size)
    weights = torch.linspace(-1, 1, 28).view(4, 7)
    found = completion_logprobs(model, *rows, temperature=temperature, with_entropy=True)
    expected = plain_scores(model, *rows, temperature)
    gradients = []
    for logp, entropy in (found, expected):
        loss = (logp * weights).sum()
        if of_entropy:
            loss = loss + of_entropy * (entropy * weights.flip(0)).sum()
        gradients.append(torch.autograd.grad(loss, [*model.parameters()]))
    for one, other in zip(found, expected):
        assert one.dtype == torch.float32
        assert_close(one.double(), other, rtol=1e-4, atol=1e-4)
    assert_close(*gradients, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("elements, tokens_per_chunk", [(40 * 3, 3), (39, 1)])
def test_no_more_than_one_chunk_of_logits_is_worked_on_and_none_is_held(
    elements, tokens_per_chunk, monkeypatch
):
    """A chunk holds at least one token, even if the vocabulary is larger than a chunk."""
    at_pace(monkeypatch, chunk_elements=elements)
    model, rows, sizes, held = make("llama, untied"), rows_of(1, 1, 1, 1), [], []
    monkeypatch.setattr(
        logprobs, "linear", lambda x, *rest: sizes.append(len(x)) or linear(x, *rest))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: held.append(x) or x, lambda x: x):
        logp = completion_logprobs(model, *rows)
    # nothing of (tokens, vocabulary) waits for the backward pass, but the head's weight, (40, 32)
    assert 40 not in {x.shape[-1] for x in held if x.dim() > 1 and len(x) != 32}
    logp.sum().backward()
    assert max(sizes) == tokens_per_chunk and sum(sizes) == 2 * rows[2].sum()


@pytest.fixture
def wide():
    """A head of 500 × 32 with sharp logits; ragged rows as one micro-batch."""
    lengths = torch.tensor([30, 30, 25, 20, 30, 7, 30, 30])
    tokens = torch.randint(500, (8, 30), generator=seeded(2))
    return make("sharp"), ([[3, 4, 5]] * 8, tokens, completion_mask(tokens, lengths))


def heads_gradient(model, args, tokens_per_chunk, monkeypatch):
    """The gradients of the head's weight and bias."""
    at_pace(monkeypatch, chunk_elements=500 * tokens_per_chunk)
    model.zero_grad()
    logp = completion_logprobs(model, *args)
    (logp * torch.linspace(-1, 1, logp.numel()).view_as(logp)).sum().backward()
    return [p.grad.float() for p in model.lm_head.parameters()]


def test_the_error_of_the_heads_gradients_does_not_grow_with_the_chunks(wide, monkeypatch):
    """In bfloat16 each chunk's gradient is a bfloat16 product. Their sum is float32."""
    model, args = wide
    half = copy.deepcopy(model)
    half.lm_head = torch.nn.Linear(32, 500).bfloat16()  # with a bias
    model.lm_head = copy.deepcopy(half.lm_head).float()
    exact = heads_gradient(copy.deepcopy(model).double(), args, 500, monkeypatch)
    for ours, theirs in zip(heads_gradient(model, args, 7, monkeypatch), exact):
        assert (ours - theirs).norm() < 1e-5 * theirs.norm()
    errors = []
    for tokens_per_chunk in (500, 20, 1):
        gradients = heads_gradient(half, args, tokens_per_chunk, monkeypatch)
        errors.append([(g - x).norm() / x.norm() for g, x in zip(gradients, exact)])
    for first, *others in zip(*errors):
        assert first < 0.01 and max(others) < 1.3 * first, errors


def test_words_that_the_head_never_writes_have_no_entropy_and_no_gradient(wide):
    """A bias of −∞ takes words out of the vocabulary. The entropy and all gradients are those of a
    head without these words."""
    model, (prompts, tokens, mask) = wide
    rows = prompts, tokens.clamp(max=399), mask
    head = model.lm_head = torch.nn.Linear(32, 500)
    small = copy.deepcopy(model)
    for p in small.lm_head.parameters():
        p.data = p.data[:400]
    head.bias.data[400:] = -torch.inf
    (found, gradients, _), (expected, right, _) = (
        scored(each, rows, once=False) for each in (model, small))
    assert not head.bias.grad[400:].any()
    gradients = {name: gradients[name][: len(gradient)] for name, gradient in right.items()}
    assert_close((found, gradients), (expected, right), rtol=1e-4, atol=1e-5)


def test_a_head_that_is_frozen_has_no_gradient(wide):
    model, args = wide
    model.lm_head.requires_grad_(False)
    completion_logprobs(model, *args).sum().backward()
    assert model.lm_head.weight.grad is None
    assert model.model.norm.weight.grad.abs().sum() > 0


# --- a prompt that several rows share is computed once ---

KINDS = ["qwen2, tied", "gpt2", "mistral, sliding window"]


def scored(model, rows, *, once, **options):
    """((log-probabilities, entropies), gradients, tokens that went through the model in each pass)
    of these rows, in two passes or one."""
    computed = []
    hook = model.base_model.register_forward_pre_hook(
        lambda module, args, inputs: computed.append(inputs["input_ids"].numel()), with_kwargs=True)
    logp, entropy = completion_logprobs(
        model, *rows, with_entropy=True, can_share_prefix=once, shares_prefix=once, **options)
    hook.remove()
    model.zero_grad()
    weights = torch.linspace(-1, 1, logp.numel()).view(logp.shape)
    (logp * weights + 2 * entropy * weights.flip(0)).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return (logp.detach(), entropy.detach()), gradients, computed


def assert_equal_scores(found, expected):
    assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    assert_close(found[1], expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group_sizes, width", [
    ((16,), 7), ((1, 4, 8, 3), 7), ((2, 1), 1), ((2, 1), 0),
])
def test_a_prompt_that_is_computed_once_gives_the_scores_and_gradients_of_plain_rows(
    kind, group_sizes, width
):
    """Also completions of one token, and none at all."""
    model, rows = make(kind), rows_of(*group_sizes, width=width)
    once, plain = (scored(model, rows, once=once, temperature=0.7) for once in (True, False))
    assert_equal_scores(once, plain)
    longest = max(map(len, rows[0]))
    # the prompts, once; of the completions all but the last token, after which nothing is predicted
    assert once[2] == [len(group_sizes) * longest, len(rows[0]) * max(1, width - 1)]
    assert len(plain[2]) == 1


def test_a_prompt_is_computed_once_with_gradient_checkpointing_too():
    """The backward pass computes a layer again. It must not find the keys of the first time beside
    its own."""
    model, rows = make("qwen2, tied"), rows_of(2, 5, 3)
    plain = scored(model, rows, once=False)
    recompute_layers(model)
    runs = count_of_layers_run(model)
    once = scored(model, rows, once=True)
    assert_equal_scores(once, plain)
    assert len(runs) == 2 * 2 * 2  # two layers, two passes, forward and again


def count_of_layers_run(model):
    runs = []
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            first = next(m for m in layer.modules() if not list(m.children()))
            first.register_forward_pre_hook(lambda *_: runs.append(1))
    return runs


@pytest.mark.parametrize("prompts, shares, passes", [
    ([[1] * 250] * 8, True, 2), ([[i] * 50 for i in range(8)], True, 1), ([[1] * 5] * 8, True, 1),
    ([[1] * 250] * 8, False, 3),  # a model that reads plain rows: 3, 3 and 2
])
def test_rows_are_read_in_one_pass_unless_a_second_one_pays(prompts, shares, passes):
    tokens = torch.zeros((8, 5), dtype=torch.long)
    batch = Batch(prompts, tokens, tokens == 0, torch.zeros(8))
    policy, read = Policy(make("qwen2, tied"), can_share_prefix=shares), []
    policy.model.base_model.register_forward_pre_hook(lambda *_: read.append(1))
    for _, micro_batch in split_into_micro_batches(batch, 1000, policy):
        policy.logprobs(micro_batch)
    assert len(read) == passes


def test_a_model_whose_cache_does_not_hold_all_that_it_knows_reads_plain_rows():
    other, rows = make("lfm2"), rows_of(4, 4)
    assert not can_share_prefix(other.base_model)
    assert all(can_share_prefix(make(kind).base_model) for kind in KINDS)
    batch = Batch(*rows, None)
    found = Policy(other, can_share_prefix=False).logprobs(batch)
    expected, _ = plain_scores(other, *rows)
    assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    Critic(other.base_model, can_share_prefix=False)(batch)  # it can read them, too


def test_gradient_checkpointing_leaves_dropout_off():
    model, rows, results = make("opt"), rows_of(1, 1, 1, 1), []
    calls = count_of_layers_run(model)
    for _ in range(2):
        model.zero_grad()
        logp = completion_logprobs(model, *rows)
        logp.sum().backward()
        results.append([logp.detach(), *(p.grad for p in model.parameters())])
        recompute_layers(model)
    assert len(calls) == 2 * 3  # the second time each of two layers was computed again
    assert_close(*results, rtol=0, atol=0)
    assert not any(m.training for m in model.modules())
