"""The memory that a run needs on each device, item by item, before any weights are loaded.

Only the model's config.json is read. The parameters are counted on PyTorch's `meta` device, where a
tensor has a shape but no memory. Bytes per parameter on a GPU, which computes in bfloat16 (with
--dtype float32: 4 for each 2; no copies):

    weights          4    float32 masters. LoRA: 2 for a frozen parameter, 4 for a parameter of the
                     adapters
    gradients        4    for trained parameters only, as the next line; freed after the update
    optimizer        8    AdamW's two moments; its step is fused, and needs no more
    reference        2    if β > 0. LoRA: 0, because the reference is the policy without its
                     adapters
    compute copy     2    the casts that autocast keeps from a forward pass to its backward pass.
                     LoRA: only adapters
    rollout copy     2    a copy for sampling, which rests in the update. LoRA: 0. vLLM has its
                     --vllm_share instead, cache included

`--shard full` divides the first four by the number of devices of a node. Each pass then gathers the
layers one after the other in the compute dtype. The rollout copy is not divided. PPO's critic is a
second backbone that is trained. A reward model takes 4 bytes per parameter.

The rest grows with the tokens. The plan assumes the worst case: all prompts and completions are as
long as allowed. Activations are those of a dense decoder with RMSNorm, a gated MLP and fused
attention (Qwen, Llama, Mistral, …).
"""

import math
import os
from dataclasses import dataclass

import torch

from engine.base import ranks
from engine.base.errors import refuse
from engine.model.folders import prompt_room
from engine.model.logprobs import CHUNK_ELEMENTS
from engine.model.precision import TINY, choose_dtype
from engine.run.config import algorithm_of
from engine.run.shapes import skeleton, widths
from micro_batches import two_passes

GB = 10**9
# share of a device's memory; the rest is for CUDA's context, NCCL's buffers and gaps between
# tensors
USABLE = 0.95
PHASES = ("building", "generation", "update", "optimizer step", "evaluation")
# completions that an evaluation samples at a time; fewer if they would need more memory than
# training
EVALUATED = 256
JUDGE = "AutoModelForSequenceClassification"  # what transformers calls a reward model


@dataclass
class Plan:
    options: object  # of the run
    parameters: int
    trained: int
    devices: int
    device: int  # bytes of a device
    prompt: int  # tokens of the longest prompt
    # per device: questions, completions and kept of a step; completions evaluated at once
    counts: dict
    items: dict  # {name: bytes on a device in each of the PHASES}
    checkpoint: int  # bytes on the disk

    @property
    def peaks(self):
        """Bytes on a device in each of the PHASES."""
        return [sum(column) for column in zip(*self.items.values())]

    @property
    def fits(self):
        return max(self.peaks) <= USABLE * self.device


def device_of(device_gb, dtype):
    """(bytes of a device, bytes per number in the dtype that the run computes in).

    device_gb: of --plan; another device than this machine's is taken to have bfloat16. 0 or None:
    this machine's GPU, or 80 GB without one.
    """
    here, gpu = not device_gb and torch.cuda.is_available(), torch.device("cuda")
    size = torch.cuda.get_device_properties(gpu).total_memory if here else (device_gb or 80) * GB
    choice = dtype if here or dtype != "auto" else "bfloat16"
    # a GPU's choice does not depend on the parameters
    return size, choose_dtype(choice, gpu, TINY).itemsize


def parameter_memory(model, compute, *, devices, sharded, lora, critic, reference, own_sampler):
    """(number of trained parameters, {item: bytes in each of the PHASES} that parameters need).

    compute: bytes per number in products. reference, critic, own_sampler: whether there is one.
    """
    sizes = [p.numel() for p in model.parameters()]
    total = sum(sizes)
    if lora:  # the adapter of an (out, in) matrix: (rank, in) and (out, rank)
        # Conv1D: GPT-2's
        linear = (m for m in model.base_model.modules() if type(m).__name__ in ("Linear", "Conv1D"))
        sizes = [lora * n for m in linear for n in m.weight.shape]
    trained = sum(sizes) + critic * model.base_model.num_parameters()
    largest, frozen, sharing = max(sizes, default=0), compute * total if lora else 0, 1
    rollout = compute * total if own_sampler and (sharded or (compute == 2 and not lora)) else 0
    if sharded:
        node = int(os.environ.get("LOCAL_WORLD_SIZE", devices))
        # devices that share one copy: those of a node
        sharing = node if 1 < node < devices else devices
        # a whole tensor for the copy: this device's share in the compute dtype, all shares, and
        # these as one tensor
        whole_tensor = compute * largest * (2 * devices + 1) // devices
        # embedding, head, this layer and the next, and the gradients of these before they are
        # divided
        layers = next(m for m in model.base_model.modules() if isinstance(m, torch.nn.ModuleList))
        others = max(0, len(layers) - 2) * sum(p.numel() for p in layers[0].parameters())
        copy, new_gradient = compute * (total - others) * 2, 0
    else:
        # the casts; and a tensor's new gradient, twice at most, before it is added to that of
        # earlier micro-batches
        whole_tensor, copy, new_gradient = 0, 2 * sum(sizes) if compute == 2 else 0, 8 * largest
    gradients, moments = 4 * trained // sharing, 8 * trained // sharing
    return trained, {
        "weights": ((4 * trained + frozen) // sharing,) * 5,
        "gradients": (0, 0, gradients + new_gradient, gradients, 0),
        "optimizer": (0, moments, moments, moments, moments),
        "reference": (compute * total // sharing if reference and not lora else 0,) * 5,
        "compute copy": (whole_tensor, 0, copy, 0, 0),
        "rollout copy": (rollout, rollout, 0, 0, rollout),  # it rests during the update
    }


def bytes_per_completion(shape, compute, prompt, completion, lora):
    """Bytes to sample one completion: (keys and values, logits, activations while its prompt is
    read)."""
    hidden, _, kv_heads, head, inner = widths(shape)
    layers = shape.num_hidden_layers
    # keys and values; while the last layer gets more room, its old keys or values are there too, at
    # most as many again
    cache = (prompt + completion) * kv_heads * head * compute * (2 * layers + 1)
    # a token's logits; in float32 its log-softmax, and in float64 the sums of probabilities, which
    # choose the token
    logits = shape.vocab_size * (compute + 12)
    # the residual stream, what is added to it, and its norm; gate, up and their product; the keys
    # and values so far. What an adapter adds to gate or up is float32, and so is the sum
    of_a_token = compute * (4 * hidden + 3 * inner + 2 * layers * kv_heads * head)
    return cache, logits, prompt * (of_a_token + (8 * inner if lora else 0))


def sampling_memory(of_one, questions, group_size=1):
    """{item: bytes} of completions that are sampled together. of_one: see `bytes_per_completion`.

    A prompt is read once for its group, before the group has keys, values and logits.
    """
    cache, logits, reading = of_one
    completions = questions * group_size
    return {
        "KV cache": completions * cache,
        "activations": max(0, questions * reading - completions * (cache + logits)),
        "logits": completions * logits,
    }


def largest_micro_batch(limit, prompt, completion, questions, k, devices, minibatches):
    """(tokens of the largest micro-batch, tokens of completions in it at most, whether it is a
    whole mini-batch).

    limit: --micro_batch_tokens. questions: per device and step. k: completions kept of each.
    """
    # a mini-batch, which may begin and end within a question, and a device's share of it: whole
    # questions, at the worst
    kept = math.ceil(devices * questions * k / minibatches)
    asked = min(questions, math.ceil((math.ceil(kept / k) + (kept % k > 0)) / devices))
    kept = min(kept, asked * k)
    _, minibatch, _ = two_passes(asked, prompt, kept, completion, kept * (prompt + completion))
    # a completion that is longer than a micro-batch gets a micro-batch of its own
    tokens = min(max(limit, prompt + completion), minibatch)
    return tokens, min(tokens - prompt, kept * completion), tokens == minibatch


def token_memory(shape, compute, *, sharded, lora, checkpointing=False):
    """Bytes that an update keeps for the backward pass, per token of a micro-batch.

    compute: bytes per number in the layers' matrix products.
    """
    hidden, heads, kv_heads, head, inner = widths(shape)
    if compute == 4:  # loading.repeat_keys_in_float32
        kv_heads = heads
    stream = 2 if compute == 2 and (sharded or lora) else 4  # bytes per number between the layers
    # two norms: each keeps its input in float32 and, if its weight is trained, what that weight
    # multiplies
    norms = 2 * hidden * (4 + (0 if lora else stream))
    # the inputs of q, k, v, gate and up: a cast for each; without casts q, k, v share one tensor,
    # gate and up another. An adapter casts the attention's output, too
    casts = compute < (4 if lora else stream)
    inputs = compute * (hidden * (5 if casts else 2) + (heads * head if casts and lora else 0))
    # q, k, v, the output; and one float32 per head, from which the backward pass computes the
    # scores again
    attention = compute * (2 * heads + 2 * kv_heads) * head + 4 * heads
    # the MLP: gate, silu(gate), up, and silu(gate) · up
    layer, layers = norms + inputs + attention + 4 * compute * inner, shape.num_hidden_layers
    of_layers = layers * stream * hidden + layer if checkpointing else layers * layer
    # also the inputs of the final norm and of the head, and their gradients
    return of_layers + 5 * stream * hidden


def add_evaluation(items, of_one, most):
    """How many completions an evaluation samples at a time, each of another question: as many as
    need no more memory than training, `most` at most. Adds their memory to `items`."""
    cache, logits, reading = of_one
    *training, evaluation = (sum(column) for column in zip(*items.values()))
    free = (max(training) - evaluation) // max(cache + logits, reading)
    completions = min(most, max(1, free))
    for name, size in sampling_memory(of_one, completions).items():
        items[name] = (*items[name][:4], size)
    return completions


def plan(options):
    """The Plan of a run. options: all of its options, filled in, as attributes.

    Raises UserError if the model cannot be planned, or vLLM cannot start.
    """
    model, algorithm = skeleton(options.model, options.dataset), algorithm_of(options)
    shape, total = model.config.get_text_config(), model.num_parameters()
    device, compute = device_of(options.plan, options.dtype)
    devices = ranks.world_size()
    questions, group_size = algorithm.questions_per_step, options.group_size
    completion, lora, sharded = options.max_new_tokens, options.lora, options.shard == "full"
    prompt = prompt_room(model, completion, options.max_prompt_tokens)
    own_sampler, evaluated = options.rollout == "own", EVALUATED if options.eval_dataset else 0
    trained, items = parameter_memory(
        model, compute, devices=devices, sharded=sharded, lora=lora, critic=algorithm.critic,
        reference=options.beta > 0, own_sampler=own_sampler,
    )
    judges = [word.split(":")[1] for word in options.rewards if word.startswith("RewardModel:")]
    if judges:
        size = 4 * sum(skeleton(name, kind=JUDGE).num_parameters() for name in judges)
        items["reward models"] = (0, size, size, size, size)
    of_one = bytes_per_completion(shape, compute, prompt, completion, lora)
    if own_sampler:
        sampled = sampling_memory(of_one, questions, group_size)
    else:  # vLLM always holds its share, which has room for its weights too
        share, least = options.vllm_share * device, compute * total + of_one[0]
        refuse([(least > share, f"vLLM cannot start: its weights and the cache of one completion "
                 f"take {least / GB:.1f} GB, and --vllm_share {options.vllm_share:g} of a device "
                 f"is {share / GB:.1f} GB: raise --vllm_share, or use a smaller model.")])
        items["vLLM"], sampled = (share,) * 5, {"activations": 0, "logits": 0}
    tokens, scored, one_micro_batch = largest_micro_batch(
        options.micro_batch_tokens, prompt, completion, questions, algorithm.k, devices,
        options.minibatches)
    per_token = token_memory(
        shape, compute, sharded=sharded, lora=lora, checkpointing=options.gradient_checkpointing)
    # for a chunk of tokens, in float32: logits, logits / temperature, log-softmax
    chunk = 12 * shape.vocab_size * min(max(1, CHUNK_ELEMENTS // shape.vocab_size), scored)
    update = {"KV cache": 0, "activations": tokens * per_token, "logits": chunk}
    items |= {name: (0, size, update[name], 0, 0) for name, size in sampled.items()}
    # gradients grow while activations are freed: the peaks do not add up
    if one_micro_batch and not algorithm.critic:
        _, _, most, whole, _ = items["gradients"]
        items["gradients"] = (0, 0, max(most - whole, most - update["activations"]), whole, 0)
    if evaluated and own_sampler:
        evaluated = add_evaluation(items, of_one, evaluated)
    counts = {
        "questions": questions, "completions": questions * group_size,
        "kept": questions * algorithm.k, "evaluated at once": evaluated,
    }
    return Plan(
        options, total, trained, devices, device, prompt, counts, items,
        checkpoint=12 * trained)
