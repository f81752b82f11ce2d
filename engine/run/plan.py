"""Memory plan: what a run needs on each device, before any weights are loaded.

Memory may run out at two moments: while completions are sampled ("generation"), and in the update.
Loading, the optimizer's step and saving need less than these two.

Bytes per parameter on a GPU that computes in bfloat16. With --dtype float32 each 2 becomes a 4, and
there are no masters.

    weights          2    they sample, score and learn
    masters          4    of trained parameters: what the optimizer changes
    gradients        4    of trained parameters, in the update only; and 6 of the largest tensor,
                          while its gradient is new
    optimizer        8    of trained parameters: AdamW's two moments
    reference        2    if β > 0 or --stop_kl. LoRA: 0, because it is the policy without adapters

`--shard full` divides the masters, the gradients, the optimizer and the reference by the number of
devices. In place of the weights there are a copy to sample from, which has no memory during the
update, and in the update the layers that are gathered at a time. PPO's critic is a second
backbone that is trained. A sampler of the user's own is counted as if it were the builtin one.

The rest grows with the tokens. The plan takes the worst case: all prompts and completions are as
long as allowed. A layer is that of a dense decoder with RMSNorm, a gated MLP and fused attention
(Qwen, Llama, Mistral, …). Reward models are not counted.
"""

import math
from dataclasses import dataclass

import torch

from engine.base import ranks
from engine.base.errors import UserError
from engine.model.device_defaults import DEVICE_DEFAULTS
from engine.model.folders import prompt_room
from engine.model.networks import check_rank
from engine.model.precision import TINY, choose_dtype
from engine.model.prefix_sharing import SequenceCost, forward_cost
from engine.options.config import algorithm_of
from engine.run.shapes import skeleton, widths
from tasks.table import task_of

GB = 10**9
# share of a device's memory; the rest is for CUDA's context, NCCL's buffers and gaps between
# tensors
USABLE = 0.95
GPU = DEVICE_DEFAULTS["cuda"]
SMALLEST = DEVICE_DEFAULTS["cpu"].micro_batch_tokens  # that is tried


@dataclass
class Plan:
    devices: int
    device: int  # bytes of a device
    trained: int  # parameters
    questions: int  # of a step, on each device
    at_once: int  # of these, questions that are sampled together
    micro_batch_tokens: int  # the option, or what was chosen
    items: dict  # {name: (bytes in the generation, bytes in the update)} on each device

    @property
    def peaks(self):
        """(bytes in the generation, bytes in the update) on each device."""
        return tuple(map(sum, zip(*self.items.values())))

    @property
    def fits(self):
        return max(self.peaks) <= USABLE * self.device


def plan(options, devices=None):
    """The Plan of a run. options: all of its options, as attributes. devices: how many; None: as
    many as torchrun has started.

    Without --micro_batch_tokens the plan takes the largest power of two that fits, from 2,048 to
    16,384 tokens. With shards it takes half of that, because a run with shards cannot halve it if
    memory runs out.

    Raises UserError if the model cannot be planned.
    """
    tokens = options.micro_batch_tokens
    if tokens is None:
        tokens = GPU.micro_batch_tokens
        while tokens > SMALLEST and not plan_with(tokens, options, devices).fits:
            tokens //= 2
        if options.shard == "full":
            tokens //= 2
    return plan_with(tokens, options, devices)


def plan_with(micro_batch_tokens, options, devices):
    """The Plan with micro-batches of so many tokens."""
    algorithm = algorithm_of(options)
    model = skeleton(options.model)
    shape = model.config.get_text_config()
    devices = devices or ranks.world_size()
    device, compute = device_of(options.plan, options.dtype)
    trained, items = parameter_items(model, compute, options, devices, algorithm.critic)

    completion = options.max_new_tokens
    prompt = prompt_room(model, completion, options.max_prompt_tokens)
    row = prompt + completion
    _, _, keys, _ = widths(shape)
    # of one completion: the keys and values of its row; and for one token the logits, their
    # log-softmax in float32, and sums of probabilities in float64
    cache = 2 * compute * keys * shape.num_hidden_layers * row
    sampled = options.group_size * (cache + shape.vocab_size * (compute + 4 + 8))
    questions = algorithm.questions_per_step
    known = task_of(options.dataset).train_questions  # without a download
    if known and options.epochs:  # else nobody knows how many the run asks
        questions = min(questions, math.ceil(options.epochs * known / devices))
    at_once = questions
    free = USABLE * device - sum(generation for generation, _ in items.values())
    while at_once > 1 and at_once * sampled > free:  # so does our sampler
        at_once //= 2
    items["KV cache"] = (at_once * sampled, 0)

    most = minibatch_tokens(algorithm, devices, prompt, completion)
    # a completion that is longer than a micro-batch gets a micro-batch of its own
    tokens = min(max(micro_batch_tokens, row), most)
    activations = tokens * token_memory(shape, compute, options)
    items["activations"] = (0, activations)
    if tokens == most and not algorithm.critic:  # a single backward pass
        # gradients grow while activations shrink
        _, gradients = items["gradients"]
        items["gradients"] = (0, max(0, gradients - activations))
    # for a chunk of completion tokens, in float32: logits, logits / temperature, log-softmax
    chunk = min(GPU.chunk_elements, tokens * completion // row * shape.vocab_size)
    items["logits"] = (0, 12 * chunk)
    return Plan(devices, device, trained, questions, at_once, micro_batch_tokens, items)


def choose_micro_batch_tokens(options, device):
    """(tokens of a micro-batch on this device, sentences for the user): the option, or what suits
    the device. Ranks take the smallest of theirs."""
    if options.micro_batch_tokens is not None:
        return options.micro_batch_tokens, []
    if device.type == "cpu":
        return DEVICE_DEFAULTS["cpu"].micro_batch_tokens, []
    try:
        tokens = plan(options).micro_batch_tokens
    except UserError:  # a model that cannot be planned
        tokens = SMALLEST
    tokens = min(ranks.gather([tokens]))
    return tokens, [f"a micro-batch has up to {tokens:,} tokens (--micro_batch_tokens)."]


def device_of(gigabytes, dtype):
    """(bytes of a device, bytes per number in the dtype that the run computes in).

    gigabytes: of --plan. None or 0: this machine's GPU, or 80 GB without one. Another device than
    this machine's is taken to have bfloat16.
    """
    if not gigabytes and torch.cuda.is_available():
        gpu = torch.device("cuda")
        size = torch.cuda.get_device_properties(gpu).total_memory
        # a GPU's choice does not depend on the number of parameters
        return size, choose_dtype(dtype, gpu, TINY).itemsize
    return (gigabytes or 80) * GB, 4 if dtype == "float32" else 2


def parameter_items(model, compute, options, devices, critic):
    """(number of trained parameters, the items that grow with the parameters).

    compute: bytes per number in products. critic: whether there is one.
    """
    total = model.num_parameters()
    largest = max(p.numel() for p in model.parameters())
    trained = adapter_parameters(model, options.lora) if options.lora else total
    if critic:
        trained += model.base_model.num_parameters()
    weights = compute * (total + trained if options.lora else trained)
    masters = 4 * trained if compute == 2 else 0
    reference = compute * total if options.beta or options.stop_kl else 0
    # of the largest tensor: the head sums it in float32, then it is rounded
    new_gradient = (4 + compute) * largest
    gathered = rollout = 0
    sharing = 1  # devices that divide a network
    if options.lora:
        reference = new_gradient = 0
    if options.shard == "full":
        sharing = devices
        weights, masters = 0, 4 * trained
        rollout = compute * total
        # the gathered weights, and their gradients before the devices divide them
        gathered = 2 * compute * gathered_parameters(model)
        new_gradient = 0
    gradients = 4 * trained // sharing
    masters //= sharing
    reference //= sharing
    return trained, {
        "weights": (weights, weights),
        "masters": (masters, masters),
        "gradients": (0, gradients),
        "new gradient": (0, new_gradient),
        "optimizer": (2 * gradients, 2 * gradients),
        "reference": (reference, reference),
        "gathered": (0, gathered),
        "rollout copy": (rollout, 0),
    }


def adapter_parameters(model, rank):
    """Parameters of the adapters of all linear layers: (rank, in) and (out, rank) for each."""
    check_rank(model, rank)
    ends = 0
    for module in model.base_model.modules():
        if isinstance(module, torch.nn.Linear):
            ends += sum(module.weight.shape)
    return rank * ends


def gathered_parameters(model):
    """Parameters that a shard has whole at a time: the embedding, the head, and two layers."""
    shape = model.config.get_text_config()
    outside = shape.vocab_size * shape.hidden_size
    if not shape.tie_word_embeddings:
        outside *= 2
    layer = (model.num_parameters() - outside) // shape.num_hidden_layers
    return outside + 2 * layer


def minibatch_tokens(algorithm, devices, prompt, completion):
    """Tokens that a device computes for a mini-batch, each prompt once if that is less.

    prompt, completion: tokens of each. A device has whole questions of a mini-batch, or one device
    has all of it.
    """
    questions = math.ceil(algorithm.questions_per_step / algorithm.minibatches)
    whole = devices * algorithm.questions_per_step * algorithm.k / algorithm.minibatches
    kept = min(questions * algorithm.k, math.ceil(whole))
    rows = [SequenceCost(i, i % questions, prompt, completion) for i in range(kept)]
    tokens, _ = forward_cost(rows, GPU.second_pass)
    return tokens


def token_memory(shape, compute, options):
    """Bytes that an update keeps for its backward pass, per token of a micro-batch.

    compute: bytes per number in products.
    """
    layers = shape.num_hidden_layers
    hidden, queries, keys, inner = widths(shape)
    # of the two norms (one kernel each: loading.fuse_norms), of q, k and v, and of gate and up
    inputs = 4 * hidden
    # q, k, v, and what attention returns
    attention = queries + 2 * keys + queries
    # the MLP: gate, silu(gate), up, and silu(gate) · up
    layer = compute * (inputs + attention + 4 * inner)
    # the inputs of the final norm and of the head, and the gradients of both
    ends = 5 * compute * hidden
    if options.gradient_checkpointing:
        return layers * compute * hidden + layer + ends
    return layers * layer + ends
