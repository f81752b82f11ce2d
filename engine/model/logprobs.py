"""Token log-probabilities through a chunked output head: all logits never exist together."""

from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import linear, pad
from torch.utils.checkpoint import checkpoint

from engine.model.device_defaults import DEVICE_DEFAULTS
from engine.model.prefix_sharing import forward_shared_prefix, forward_whole, on_device
from grpo import token_entropies, token_logprobs

# the adapters with which a run has started, if it has any; those that learn are "default"
START = "start"


@dataclass
class Policy:
    """A model with what scoring has to know of it: the policy that learns, or the reference."""

    model: torch.nn.Module  # a causal language model of transformers
    dtype: torch.dtype = torch.float32  # of its arithmetic
    can_share_prefix: bool = True  # whether it can compute a prompt once for several completions
    temperature: float = 1.0  # the sampler's
    at_start: bool = False  # LoRA's reference: the same model, with the adapters of its start
    sharded: bool = False  # whether the devices divide its weights

    def logprobs(self, batch, with_entropy=False):
        """log π(o_t | q, o_<t) of the completions of a Batch: (N, T) float32, 0 outside the mask.

        with_entropy: returns a pair; its second entry is the entropies of π(· | q, o_<t), (N, T)
        float32 in nats.

        Only hidden states that predict a token in the mask go through the output head, one chunk
        at a time. The backward pass computes each chunk again. So the logits of all tokens never
        exist together.
        """
        model = self.model
        if self.at_start and START in model.peft_config:
            model.set_adapter(START)
        elif self.at_start:
            model.disable_adapters()
        try:
            states, targets, positions = completion_states(
                model.base_model, batch, self.can_share_prefix)
            head = model.get_output_embeddings()
            size = max(1, DEVICE_DEFAULTS[states.device.type].chunk_elements // len(head.weight))
            scores = ChunkedHeadLogprobs.apply(
                states, targets, head.weight, head.bias, size, self.temperature, with_entropy)
        finally:
            if self.at_start:
                model.enable_adapters()
                model.set_adapter("default")
        scores = [scatter_to_tokens(x, positions, batch.tokens.shape) for x in scores]
        return tuple(scores) if with_entropy else scores[0]


def completion_mask(tokens, lengths):
    """(N, T) bool: 1 on completion tokens. Made from the lengths: EOS counts even if padding has
    the same id."""
    return torch.arange(tokens.shape[1], device=tokens.device) < lengths.unsqueeze(1)


def computed_lengths(mask):
    """(N,) int64: how many tokens of each row are computed, up to its last one in the mask."""
    lengths = torch.arange(mask.shape[1] + 1, device=mask.device)
    return (pad(mask, (1, 0)) * lengths).amax(1)


def recompute_layers(network):
    """Gradient checkpointing: if a gradient is needed, keep only the input of each layer, and
    compute the layer again in the backward pass.

    transformers' layers do this by themselves, but only in training mode, in which some layers turn
    their dropout on.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    for layer in network.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.forward = partial(recomputed, layer.forward)


def recomputed(forward, *args, **options):
    if not torch.is_grad_enabled():  # the sampler needs the layer's cache
        return forward(*args, **options)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options)


def completion_states(backbone, batch, can_share_prefix=True):
    """(states (M, H), targets (M,), positions (M,)): the hidden states that predict the M tokens
    in the mask of a Batch, row by row.

    Its mask is on the CPU: to read a mask on a GPU, the host would wait. targets: the tokens.
    positions: where they are in tokens.flatten(). If `batch.shares_prefix`, each different
    prompt is computed once, in a first pass. can_share_prefix: whether the model could do so.
    """
    prompts, tokens, mask = batch.prompts, batch.tokens, batch.mask
    if batch.shares_prefix:
        hidden, before = forward_shared_prefix(backbone, prompts, tokens)
    else:
        lengths = computed_lengths(mask)
        hidden, before = forward_whole(backbone, prompts, tokens, lengths, can_share_prefix)
    row, t = mask.nonzero(as_tuple=True)
    # token t of a row is predicted by the state in column before[row] + t
    sources = row * hidden.shape[1] + before[row] + t
    positions = row * tokens.shape[1] + t
    sources, positions = on_device(torch.stack([sources, positions]), tokens.device)
    states = hidden.flatten(0, 1)[sources]
    targets = tokens.flatten()[positions]
    return states, targets, positions


def scatter_to_tokens(x, positions, shape):
    """(N, T) float32: the numbers x (M,) at the positions that `completion_states` returns, and 0
    elsewhere."""
    zeros = torch.zeros(shape, device=x.device)
    return zeros.flatten().index_copy(0, positions, x).view(shape)


class ChunkedHeadLogprobs(torch.autograd.Function):
    """Returns the log-probabilities of the targets (M,) and, if `with_entropy`, the entropies (M,).
    The logits are states @ weight.T + bias. They are computed for `size` tokens at a time.

    The products are computed in the weight's dtype, all else in float32. The backward pass computes
    each chunk's logits again. It adds up the gradients of the weight and of the bias in float32, so
    that their error does not grow with the number of chunks.
    """

    @staticmethod
    def forward(ctx, states, targets, weight, bias, size, temperature, with_entropy):
        ctx.save_for_backward(states, targets, weight, bias)
        ctx.size, ctx.temperature = size, temperature
        logp, entropy = [], []
        for s, target in zip(states.split(size), targets.split(size)):
            logits = linear(s.to(weight.dtype), weight, bias)[None]
            logp.append(token_logprobs(logits, target[None], temperature=temperature)[0])
            if with_entropy:  # in two halves: token_entropies makes three tensors of this size
                for half in logits.chunk(2, dim=1):
                    entropy.append(token_entropies(half, temperature=temperature)[0])
        ctx.set_materialize_grads(False)  # of the entropy, if a loss does not use it
        return (torch.cat(logp), torch.cat(entropy)) if with_entropy else (torch.cat(logp),)

    @staticmethod
    def backward(ctx, grad_logp, grad_entropy=None):
        states, targets, weight, bias = ctx.saved_tensors
        grad_states = torch.empty_like(states)
        grad_weight = grad_bias = None
        if ctx.needs_input_grad[2]:
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        if ctx.needs_input_grad[3]:
            grad_bias = torch.zeros_like(bias, dtype=torch.float32)
        for start in range(0, len(states), ctx.size):
            chunk = slice(start, start + ctx.size)
            s = states[chunk].to(weight.dtype)
            target = targets[chunk].unsqueeze(1)
            g = grad_logp[chunk].unsqueeze(1) / ctx.temperature
            logp = torch.log_softmax(linear(s, weight, bias).float() / ctx.temperature, -1)
            if grad_entropy is not None:
                # ∂ H / ∂ logits_v = −π(v) (log π(v) + H) / temperature, and 0 if π(v) is 0
                h = grad_entropy[chunk].unsqueeze(1) / ctx.temperature
                finite = logp.masked_fill(logp == -torch.inf, 0.0)
                minus_entropy = (logp.exp() * finite).sum(1, keepdim=True)
                entropy_part = -h * logp.exp() * (finite - minus_entropy)
            # ∂ log π(o) / ∂ logits_v = (1[v = o] − π(v)) / temperature
            grad_logits = logp.exp_().mul_(-g).scatter_add_(1, target, g)
            if grad_entropy is not None:
                grad_logits = grad_logits + entropy_part
            grad_logits = grad_logits.to(weight.dtype)
            grad_states[chunk] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight += grad_logits.T @ s
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0, dtype=torch.float32)
        return grad_states, None, grad_weight, grad_bias, None, None, None
