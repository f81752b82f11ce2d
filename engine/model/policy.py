"""The policy: a causal language model of transformers, and the log-probabilities it gives to sampled completions."""

import contextlib
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging

from allocate import micro_batches
from engine.run.checkpoint import checkpoints
from engine.run.options import UserError
from grpo import token_entropies, token_logprobs

logging.disable_progress_bar()  # of loading and saving weights; the run has a bar of its own

CHUNK_ELEMENTS = 2**24  # tokens × vocabulary scored at a time: 64 MB in float32, and at most three such tensors live at once


def resolve(name):
    """A hub name, a model's folder, or a run's folder (its newest checkpoint) as what `load` can load.

    Raises UserError where a folder lacks weights or a tokenizer.
    """
    folder = Path(name)
    if not folder.is_dir():
        if name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise UserError(f"the model folder {name} does not exist.")
        return name
    if checkpoints(folder):
        folder = checkpoints(folder)[-1]
    if not list(folder.glob("*.safetensors")) and not list(folder.glob("pytorch_model*.bin")):
        raise UserError(f"the model folder {folder} holds no weights (*.safetensors).")
    if not any((folder / f).exists() for f in ("config.json", "adapter_config.json")):
        raise UserError(f"the model folder {folder} holds no config.json.")
    if not any((folder / f).exists() for f in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise UserError(f"the model folder {folder} holds no tokenizer (tokenizer.json): save it there with the weights.")
    return str(folder)


def load(name, device, dtype=torch.float32):
    """(model, tokenizer) of a hub name or a folder. Weights are float32 and dropout is off, in training too:
    otherwise the policy that is scored differs from the policy that sampled, and the first ratio is not 1.
    dtype: another one for weights that are never trained."""
    name = resolve(name)
    try:
        adapter = Path(name, "adapter_config.json").exists()
        if not adapter and AutoConfig.from_pretrained(name).is_encoder_decoder:  # transformers would take the decoder alone
            raise UserError(f"the model {name} is an encoder-decoder: only causal language models can be trained here.")
        tokenizer = AutoTokenizer.from_pretrained(name)
        model, loading = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, output_loading_info=True)
    except (OSError, ValueError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"the model {name} cannot be loaded: {reason}") from None
    if loading["missing_keys"]:  # transformers would make them up at random
        raise UserError(f"the weights of {name} lack {min(loading['missing_keys'])}: it is no causal language model, or not all of one.")
    if tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer of {name} has no end-of-sequence token, so no completion would end: set its eos_token.")
    model.to(device).eval()
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    check_head(model, name)
    if device.type == "cpu" and model.num_parameters() < 10_000_000:
        torch.set_num_threads(1)  # several threads make a tiny model several times slower
    return model, tokenizer


@torch.no_grad()
def check_head(model, name):
    """`completion_logprobs` takes the output head by itself; refuse a model that does more to its logits than that,
    and one that `sample` cannot sample from."""
    ids = torch.arange(4, device=model.device).unsqueeze(0)
    exact = 1e-3 if model.dtype == torch.float32 else 0.1
    ours = model.get_output_embeddings()(model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    out = model(input_ids=ids, use_cache=True)
    if getattr(out, "past_key_values", None) is None:
        raise UserError(f"the model {name} keeps no keys and values, from which completions are sampled here: use another model.")
    if not torch.allclose(ours, out.logits, rtol=exact, atol=exact):
        raise UserError(f"the model {name} rescales its logits after the output head, which is not supported: use another model.")


def prompt_room(model, max_new_tokens, max_prompt_tokens):
    """The longest prompt that leaves room for max_new_tokens in the model's context, and at most max_prompt_tokens."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context is None:
        return max_prompt_tokens
    if context <= max_new_tokens:
        raise UserError(f"the model's context of {context} tokens leaves no room for a prompt: lower --max_new_tokens {max_new_tokens}.")
    return min(max_prompt_tokens, context - max_new_tokens)


def completion_mask(tokens, lengths):
    """(N, T) bool: 1 on completion tokens. Made from the lengths, so that EOS counts even where it is also the padding."""
    return torch.arange(tokens.shape[1], device=tokens.device) < lengths.to(tokens.device, non_blocking=True).unsqueeze(1)


@contextlib.contextmanager
def layers_recomputed(model):
    """Gradient checkpointing, if it is switched on: the backward pass computes each layer again instead of keeping what is inside it.

    transformers' layers do this by themselves in training mode only, and some layers then turn their dropout on. So here no
    layer is put into training mode. Outside of this block the layers are as they were, for the sampler needs their cache.
    """
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


def compute_dtype(device):
    """bf16 on a GPU, float32 on a CPU: of arithmetic, and of weights that are not trained."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def autocast(device):
    """Arithmetic in `compute_dtype`; the weights themselves stay float32 (at lr 1e-6 bf16 swallows updates)."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


def with_parameters(network, make):
    """A copy of a network whose parameters are `make` of the network's. Its buffers stay as they were loaded: rotary frequencies
    rounded to bfloat16 would turn the keys of a thousandth token by a radian."""
    memo = {id(p): torch.nn.Parameter(make(p.detach()), requires_grad=p.requires_grad) for p in network.parameters()}
    return deepcopy(network, memo)


def frozen_copy(network, dtype):
    """A copy of a network that does not learn, with its weights in `dtype`."""
    return with_parameters(network, lambda p: p.to(dtype, copy=True)).requires_grad_(False)


@dataclass
class Batch:
    """N completions with all that a loss needs: a whole step's on this device, or one micro-batch of them."""

    prompts: list[list[int]]
    tokens: torch.Tensor  # (N, T), T the longest of these completions
    lengths: torch.Tensor  # (N,), on the CPU, wherever the rest is: shapes follow from it, and nobody waits for a GPU to tell them
    advantages: torch.Tensor  # (N,); PPO: the scores (N,) at first, then (N, T)
    sampled_logp: torch.Tensor | None = None  # (N, T), as the sampler's arithmetic has it
    old_logp: torch.Tensor | None = None  # (N, T), of the same policy as the update's arithmetic has it
    ref_logp: torch.Tensor | None = None
    old_values: torch.Tensor | None = None  # PPO: (N, T), the critic's when the batch was sampled
    returns: torch.Tensor | None = None  # PPO: (N, T), what it should have said

    def __post_init__(self):
        self.lengths = self.lengths.cpu()

    @property
    def mask(self):
        return completion_mask(self.tokens, self.lengths)

    def rows(self, indices):
        indices = torch.as_tensor(indices, dtype=torch.long)
        lengths, on_device = self.lengths[indices], indices.to(self.tokens.device, non_blocking=True)
        longest = int(lengths.max()) if len(lengths) else 0
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("prompts", "lengths")}
        rows = {name: x[on_device] if x.dim() == 1 else x[on_device, :longest] for name, x in tensors.items() if x is not None}
        return Batch([self.prompts[i] for i in indices], lengths=lengths, **rows)

    def cut_into(self, max_tokens):
        """Micro-batches of at most `max_tokens` prompt and completion tokens, padding included."""
        return [self.rows(i) for i in micro_batches([len(p) + n for p, n in zip(self.prompts, self.lengths.tolist())], max_tokens)]

    def logprobs(self, model, temperature, **options):
        """`completion_logprobs` of these completions under `model`, or under what has a function of that name."""
        score = getattr(model, "completion_logprobs", partial(completion_logprobs, model))
        with autocast(self.tokens.device):
            return score(self.prompts, self.tokens, self.lengths, temperature=temperature, **options)


def join(batches):
    """Several batches as one; the shorter ones are padded."""
    longest = max(batch.tokens.shape[1] for batch in batches)

    def columns(name):
        return [torch.nn.functional.pad(x, (0, longest - x.shape[1])) for x in (getattr(batch, name) for batch in batches)]

    return Batch(
        [prompt for batch in batches for prompt in batch.prompts], torch.cat(columns("tokens")),
        torch.cat([batch.lengths for batch in batches]), torch.cat([batch.advantages for batch in batches]),
        torch.cat(columns("sampled_logp")) if batches[0].sampled_logp is not None else None,
    )


def halve(parts, config):
    """Micro-batches of half as many tokens, from now on, with what is known of their completions."""
    config.micro_batch_tokens //= 2
    tqdm.write(f"out of memory in an update: it is repeated, and --micro_batch_tokens is {config.micro_batch_tokens} from now on.")
    return [smaller for part in parts for smaller in part.cut_into(config.micro_batch_tokens)]


def nothing(device):
    """One completion without a token, which adds nothing to any sum: with it a rank that has no more micro-batches takes part in the
    exchange of sharded weights."""
    zero = torch.zeros((1, 0), device=device)
    return Batch([[0]], zero.long(), torch.zeros(1, dtype=torch.long), zero.sum(1), zero)
