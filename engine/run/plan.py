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
attention (Qwen, Llama, Mistral, …). """

import math
import os
from dataclasses import dataclass

import torch

from engine.base import ranks
from engine.base.errors import UserError
from engine.model.folders import prompt_room
from engine.model.logprobs import CHUNK_ELEMENTS
from engine.model.precision import TINY, choose_dtype
from engine.run.config import algorithm_of
from engine.run.skeleton import skeleton, widths
from micro_batches import cheaper, two_passes

GB = 10**9
# share of a device's memory; the rest is for CUDA's context, NCCL's buffers and gaps between
# tensors
USABLE = 0.95
PHASES = ("building", "generation", "update", "optimizer step", "evaluation")
# completions that an evaluation samples at a time; fewer if they would need more memory than
# training
EVALUATED = 256


@dataclass
class Plan:
    parameters: int
    trained: int
    devices: int
    questions: int  # per device and step, like the next two
    completions: int
    kept: int
    evaluated: int  # completions that an evaluation samples at a time; 0: no evaluation
    items: dict  # {name: bytes on a device in each of the PHASES}
    # bytes without which vLLM cannot start: its weights, and keys and values of one completion
    vllm: int
    checkpoint: int  # bytes on the disk

    @property
    def vllm_starts(self):
        return "vLLM" not in self.items or self.vllm <= self.items["vLLM"][0]

    @property
    def peaks(self):
        """Bytes on a device in each of the PHASES."""
        return [sum(column) for column in zip(*self.items.values())]


def judges(config):
    """Bytes of the reward models of a run, in float32, counted from their config.json."""
    total = 0
    for name in (
        word.split(":")[1] for word in config.rewards or () if word.startswith("RewardModel:")
    ):
        from transformers import AutoConfig, AutoModelForSequenceClassification

        try:
            with torch.device("meta"):
                model = AutoModelForSequenceClassification.from_config(
                    AutoConfig.from_pretrained(name, trust_remote_code=False),
                    trust_remote_code=False,
                )
        except (OSError, ValueError) as error:
            raise UserError(
                f"the config.json of the reward model {name} cannot be read "
                f"({str(error).split(chr(10))[0][:200]})."
            ) from None
        total += 4 * sum(p.numel() for p in model.parameters())
    return total


def saved_by_layer(shape, compute, stream, lora, on_gpu=True):
    """Bytes per token that a decoder layer keeps for its backward pass.

    compute: bytes per number in the layer's matrix products. stream: bytes per number in the
    residual stream. """
    hidden, heads, kv_heads, head, inner = widths(shape)
    if on_gpu and compute == 4:  # loading.repeat_keys_in_float32
        kv_heads = heads
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
    return norms + inputs + attention + 4 * compute * inner


def compute_bytes(config, on_gpu):
    """Bytes per number in the dtype that the run computes in. A CPU is planned in float32.

    --dtype auto follows the GPU of this machine, unless --device_gb names another one, which is
    taken to have bfloat16. """
    if not on_gpu:
        return 4
    here = config.device_gb is None and torch.cuda.is_available()
    choice = config.dtype if here or config.dtype != "auto" else "bfloat16"
    # a GPU's choice does not depend on the parameters
    return choose_dtype(choice, torch.device("cuda"), TINY).itemsize


def of_parameters(config, model, critic, devices, on_gpu):
    """(number of parameters, number of trained parameters, {item: bytes in each of the PHASES} that
    they need)."""
    shard, lora, compute = config.shard == "full", config.lora, compute_bytes(config, on_gpu)
    sizes = [p.numel() for p in model.parameters()]
    total = sum(sizes)
    if lora:  # the adapter of an (out, in) matrix: (rank, in) and (out, rank)
        # Conv1D: GPT-2's
        linear = (m for m in model.base_model.modules() if type(m).__name__ in ("Linear", "Conv1D"))
        sizes = [lora * n for m in linear for n in m.weight.shape]
    largest, trained = (
        max(sizes, default=0),
        sum(sizes) + (sum(p.numel() for p in model.base_model.parameters()) if critic else 0),
    )
    node = int(os.environ.get("LOCAL_WORLD_SIZE", devices))
    # devices that share one copy: those of a node
    sharing = (node if 1 < node < devices else devices) if shard else 1
    weights = (4 * trained + (compute * total if lora else 0)) // sharing
    gradients, moments = 4 * trained // sharing, 8 * trained // sharing
    reference = compute * total // sharing if config.beta and not lora else 0
    rollout = (
        compute * total if (shard or (compute == 2 and not lora)) and config.rollout == "own" else 0
    )
    # embedding, head, this layer and the next, and the gradients of these before they are divided
    if shard:
        layers = next(m for m in model.base_model.modules() if isinstance(m, torch.nn.ModuleList))
        layer = sum(p.numel() for p in layers[0].parameters())
        copy, new_gradient = compute * (total - layer * max(0, len(layers) - 2)) * 2, 0
    # the casts; and a tensor's new gradient, twice at most, before it is added to that of earlier
    # micro-batches
    else:
        copy, new_gradient = (2 * sum(sizes) if compute == 2 else 0), 8 * largest
    # a whole tensor for the copy: this device's share in the compute dtype, all shares, and these
    # as one tensor
    whole_tensor = compute * largest * (2 * devices + 1) // devices if shard else 0
    return total, trained, {
        "weights": (weights,) * 5,
        "gradients": (0, 0, gradients + new_gradient, gradients, 0),
        "optimizer": (0, moments, moments, moments, moments),
        "reference": (reference,) * 5,
        "compute copy": (whole_tensor, 0, copy, 0, 0),
        "rollout copy": (rollout, rollout, 0, 0, rollout),  # it rests during the update
    }


def of_a_row(config, model, on_gpu):
    """Bytes to sample one completion: (keys and values, logits, activations while its prompt is
    read)."""
    shape, compute = model.config.get_text_config(), compute_bytes(config, on_gpu)
    hidden, heads, kv_heads, head, inner = widths(shape)
    prompt = prompt_room(model, config.max_new_tokens, config.max_prompt_tokens)
    # keys and values; while the last layer gets more room, its old keys or values are there too, at
    # most as many again
    cache = (
        (prompt + config.max_new_tokens)
        * kv_heads
        * head
        * compute
        * (2 * shape.num_hidden_layers + 1)
    )
    # a token's logits; in float32 its log-softmax, and in float64 the sums of probabilities, which
    # choose the token
    logits = shape.vocab_size * (compute + 12)
    # the residual stream, what is added to it, and its norm; gate, up and their product; the keys
    # and values so far
    reading = (
        prompt * compute * (4 * hidden + 3 * inner + 2 * shape.num_hidden_layers * kv_heads * head)
    )
    if config.lora:  # what an adapter adds to gate or up is float32, and so is the sum
        reading += prompt * 8 * inner
    return cache, logits, reading


def of_tokens(config, model, questions, k, devices, on_gpu):
    """({item: bytes in each of the PHASES} that the tokens need, whether a mini-batch is one
    micro-batch).

    questions: per device and step. k: completions kept of each.
    """
    shape, compute = model.config.get_text_config(), compute_bytes(config, on_gpu)
    hidden, layers, vocabulary = shape.hidden_size, shape.num_hidden_layers, shape.vocab_size
    prompt, completion = (
        prompt_room(model, config.max_new_tokens, config.max_prompt_tokens), config.max_new_tokens,
    )
    rows, length = questions * config.group_size, prompt + completion
    cache, logits, reading = of_a_row(config, model, on_gpu)
    # whole questions are sampled together
    group, at_a_time = config.group_size, config.sample_batch_size or rows
    sampled = min(rows, math.ceil(at_a_time / group) * group)
    # a prompt once for its group
    reading = max(0, sampled // group * reading - sampled * (cache + logits))

    stream = 2 if compute == 2 and (config.shard == "full" or config.lora) else 4
    layer = saved_by_layer(shape, compute, stream, config.lora, on_gpu)
    per_token = (
        layers * stream * hidden + layer if config.gradient_checkpointing else layers * layer
    )
    # a mini-batch, which may begin and end within a question, and a device's share of it: whole
    # questions, at the worst
    kept = math.ceil(devices * questions * k / config.minibatches)
    asked = min(questions, math.ceil((math.ceil(kept / k) + (kept % k > 0)) / devices))
    kept = min(kept, asked * k)
    # a completion that is longer than a micro-batch gets a micro-batch of its own
    minibatch, _ = cheaper(two_passes(asked, prompt, kept, completion), kept * length)
    tokens = min(max(config.micro_batch_tokens, length), minibatch)
    # per token also the inputs of the final norm and of the head, and their gradients
    activations = tokens * (per_token + 5 * stream * hidden)
    # for a chunk of tokens, in float32: logits, logits / temperature, log-softmax
    chunk = (
        min(max(1, CHUNK_ELEMENTS // vocabulary), min(tokens - prompt, kept * completion))
        * vocabulary
        * 12
    )
    items = {
        "KV cache": (0, sampled * cache, 0, 0, 0),
        "activations": (0, reading, activations, 0, 0),
        "logits": (0, sampled * logits, chunk, 0, 0),
    }
    if config.rollout == "vllm":  # vLLM always holds its share, which has room for its weights too
        share = config.vllm_share * memory_of_device(config)
        items = {
            "vLLM": (share,) * 5, "activations": (0, 0, activations, 0, 0),
            "logits": (0, 0, chunk, 0, 0),
        }
    return items, tokens == minibatch


def evaluated(config, model, items, on_gpu):
    """(completions that an evaluation samples at a time, `items` with their memory added).

    They are at most EVALUATED, and need no more memory than training does. Each completion belongs
    to another question. """
    if not config.eval_dataset or config.rollout == "vllm":
        return (EVALUATED if config.eval_dataset else 0), items
    *training, evaluation = (sum(column) for column in zip(*items.values()))
    cache, logits, reading = of_a_row(config, model, on_gpu)
    room = (max(training) - evaluation) // max(cache + logits, reading)
    rows = int(min(EVALUATED, config.sample_batch_size or EVALUATED, max(1, room)))
    added = {
        "KV cache": rows * cache, "logits": rows * logits,
        "activations": rows * max(0, reading - cache - logits),
    }
    return rows, {name: (*row[:-1], row[-1] + added.get(name, 0)) for name, row in items.items()}


def plan(config, *, model=None, on_gpu=True):
    """The Plan of a run. config: the result of `config.check`. model: the result of `skeleton`."""
    model, algorithm = model or skeleton(config), algorithm_of(config)
    devices = (config.plan and config.devices) or ranks.world_size()
    questions = algorithm.questions_per_step
    rows, kept = questions * config.group_size, questions * algorithm.k
    total, trained, items = of_parameters(config, model, algorithm.critic, devices, on_gpu)
    token_items, one_micro_batch = of_tokens(config, model, questions, algorithm.k, devices, on_gpu)
    # gradients grow while activations are freed: the peaks do not add up
    if one_micro_batch and not algorithm.critic:
        *before, update, step, after = items["gradients"]
        items["gradients"] = (
            *before, max(update - step, update - token_items["activations"][2]), step, after,
        )
    if of_judges := judges(config):
        items["reward models"] = (0, *(of_judges,) * 4)
    at_a_time, items = evaluated(config, model, items | token_items, on_gpu)
    vllm = compute_bytes(config, on_gpu) * total + of_a_row(config, model, on_gpu)[0]
    checkpoint = 12 * trained + (
        compute_bytes(config, on_gpu) * total if config.refresh_reference else 0
    )
    return Plan(total, trained, devices, questions, rows, kept, at_a_time, items, vllm, checkpoint)


def memory_of_device(config):
    """Bytes of a device: --device_gb, else the memory of this machine's GPU, else 80 GB."""
    if config.device_gb is None and torch.cuda.is_available():
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return (config.device_gb or 80) * GB
