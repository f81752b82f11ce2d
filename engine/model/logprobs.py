"""Log-probabilities that a causal language model gives to sampled completions, without ever holding all logits."""

import contextlib
from functools import partial

import torch
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from grpo import token_entropies, token_logprobs

CHUNK_ELEMENTS = 2**24  # tokens × vocabulary scored at a time: 64 MB in float32, and at most three such tensors live at once


def completion_mask(tokens, lengths):
    """(N, T) bool: 1 on completion tokens. Made from the lengths, so that EOS counts even where it is also the padding."""
    return torch.arange(tokens.shape[1], device=tokens.device) < lengths.to(tokens.device, non_blocking=True).unsqueeze(1)


@contextlib.contextmanager
def layers_recomputed(model):
    """Gradient checkpointing, if it is switched on: the backward pass computes each layer again instead of keeping what is inside it.

    transformers' layers do this by themselves in training mode only, and some layers then turn their dropout on. So here no
    layer is put into training mode. Outside of this block the layers are as they were, for the sampler needs their cache.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer) and m.gradient_checkpointing]
    layers = layers if torch.is_grad_enabled() else []
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def completion_states(backbone, prompts, tokens, lengths):
    """What predicts the M tokens of the completions, row by row: (hidden states (M, H), these tokens (M,), their places (M,)).

    prompts: N token lists. tokens: (N, T) int64, padded on the right. lengths: (N,), on the CPU, so that nothing here waits for
    a GPU. The places are those in tokens.flatten(). A row is prompt + completion with all padding on the right, where a
    causal model cannot see it: no attention mask is needed.
    """
    lengths, starts = lengths.cpu(), torch.tensor([len(p) for p in prompts])
    width = int((starts + lengths).max())
    row, t = (torch.arange(tokens.shape[1]) < lengths.unsqueeze(1)).nonzero(as_tuple=True)
    # o_t of row i stands at column |q_i| + t
    places = torch.stack([row * tokens.shape[1] + t, row * width + starts[row] + t])
    places, where = places.to(tokens.device, non_blocking=True)
    ids = torch.tensor([p + [0] * (width - len(p)) for p in prompts]).to(tokens.device, non_blocking=True)
    targets = tokens.flatten()[places]
    ids = ids.flatten().index_copy(0, where, targets).view(ids.shape)
    with layers_recomputed(backbone):
        hidden = backbone(input_ids=ids, use_cache=False).last_hidden_state
    return hidden.flatten(0, 1)[where - 1], targets, places  # predicted by the hidden state one column before it


def spread(x, places, shape):
    """(N, T) float32 with the numbers x (M,) at these places, as `completion_states` gives them, and 0 elsewhere."""
    return torch.zeros(shape, device=x.device).flatten().index_copy(0, places, x).view(shape)


class ThroughHead(torch.autograd.Function):
    """`score` of the logits states @ weight.T + bias, `size` tokens at a time.

    The weight is cast to autocast's dtype once. The backward pass computes each chunk's logits again, and adds up the gradients of
    the weight and of the bias in float32, so that their error does not grow with the number of chunks.
    """

    @staticmethod
    def forward(ctx, states, targets, weight, bias, size, temperature, with_entropy):
        dtype = linear(states[:0], weight[:0]).dtype  # autocast's, if it is on
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        ctx.save_for_backward(states, targets, weight, bias)
        ctx.size, ctx.temperature = size, temperature
        chunks = zip(states.split(size), targets.split(size))
        logp, *entropy = cat(score(linear(s.to(dtype), weight, bias), t, temperature, with_entropy) for s, t in chunks)
        ctx.mark_non_differentiable(*entropy)
        return logp, *entropy

    @staticmethod
    def backward(ctx, upstream, *_):
        states, targets, weight, bias = ctx.saved_tensors
        of_states = torch.empty_like(states)
        of_weight, of_bias = (
            torch.zeros_like(x, dtype=torch.float32) if needed else None for x, needed in zip((weight, bias), ctx.needs_input_grad[2:4])
        )
        columns = states, of_states, targets.unsqueeze(1), upstream.unsqueeze(1) / ctx.temperature
        for s, of_s, target, g in zip(*(x.split(ctx.size) for x in columns)):
            s = s.to(weight.dtype)
            logp = torch.log_softmax(linear(s, weight, bias).float() / ctx.temperature, -1)
            # ∂ log π(o) / ∂ logits_v = (1[v = o] − π(v)) / temperature
            of_logits = logp.exp_().mul_(-g).scatter_add_(1, target, g).to(weight.dtype)
            of_s.copy_(of_logits @ weight)
            if of_weight is not None:
                of_weight += of_logits.T @ s
            if of_bias is not None:
                of_bias += of_logits.sum(0, dtype=torch.float32)
        return of_states, None, of_weight, of_bias, None, None, None


def score(logits, targets, temperature, with_entropy):
    """Log-probabilities of the targets (M,) given their logits (M, V), in a tuple. with_entropy: and entropies, without a gradient."""
    logp = token_logprobs(logits.unsqueeze(0), targets.unsqueeze(0), temperature=temperature).squeeze(0)
    if not with_entropy:
        return (logp,)
    halves = logits.detach().unsqueeze(0).chunk(2, dim=1)  # the entropy makes three tensors of the size of what it is given
    return logp, torch.cat([token_entropies(half, temperature=temperature) for half in halves], dim=1).squeeze(0)


def cat(chunks):
    """Tuples of tensors as one tuple of longer ones."""
    return [torch.cat(column) for column in zip(*chunks)]


def completion_logprobs(model, prompts, tokens, lengths, *, temperature=1.0, with_entropy=False):
    """log π(o_t | q, o_<t) of completions under `model`. Takes what `completion_states` takes.

    Returns (N, T) float32 with 0 on padding. `temperature` is the sampler's. with_entropy: (that, entropies of π(· | q, o_<t),
    (N, T) float32 in nats, without a gradient).

    Only hidden states that predict a completion token go through the output head, a chunk at a time, and the backward
    pass computes each chunk again, so that no more than one chunk of (tokens × vocabulary) is ever worked on.
    """
    states, targets, places = completion_states(model.base_model, prompts, tokens, lengths)
    head, size = model.get_output_embeddings(), max(1, CHUNK_ELEMENTS // model.config.get_text_config().vocab_size)
    if type(head) is torch.nn.Linear:
        scores = ThroughHead.apply(states, targets, head.weight, head.bias, size, temperature, with_entropy)
    else:  # such as a head with an adapter
        scores = cat(
            checkpoint(lambda s, t: score(head(s), t, temperature, with_entropy), s, t, use_reentrant=False, preserve_rng_state=False)
            for s, t in zip(states.split(size), targets.split(size))
        )
    logp, *entropy = (spread(x, places, tokens.shape) for x in scores)
    return (logp, *entropy) if with_entropy else logp
