"""How many steps a run makes, and how long they take: calculated from published figures of GPUs,
not measured.

The sum is over the phases of a step on one device. N: parameters; Q questions of a prompt and G
completions each, of which k are kept. Attention, evaluations, checkpoints and what devices send to
each other are left out.

    update      (6μ + 2 if β > 0) · N operations for each token of the Q prompts and Q·k completions
    sampling    2N operations for each token of the prompts. Then a token of every completion at a
                time: the GPU reads the weights, and the keys and values of all rows so far. If
                there are very many rows, their 2N operations each take longer than that. Our own
                sampler needs LAUNCH for each layer, because Python starts each kernel.

A GPU reaches a share in SHARES of its published operations and bytes per second. PPO's critic is a
second network that is updated. Dynamic sampling is counted as if it sampled once.
"""

import math
from collections import namedtuple

GB = 10**9
SHARES = (0.45, 0.25)
# seconds; Qwen2.5's speed benchmark, transformers on an A100: 0.88 ms (0.5B) and 0.90 ms (1.5B)
LAUNCH = 0.9e-3

Gpu = namedtuple("Gpu", "name memory operations bandwidth")  # GB; per second: bfloat16, bytes
# NVIDIA's data sheets (RTX 4090: the Ada whitepaper): dense, that is half of a figure "with
# sparsity"; with float32 sums; H100, H200 and A100 of 80 GB: SXM
GPUS = (
    Gpu("RTX 4090", 24, 165e12, 1.008e12),
    Gpu("A100", 40, 312e12, 1.555e12),
    Gpu("L40S", 48, 362e12, 0.864e12),
    Gpu("A100", 80, 312e12, 2.039e12),
    Gpu("H100", 80, 989e12, 3.35e12),
    Gpu("H200", 141, 989e12, 4.8e12),
)


def gpus_of(memory):
    """The GPUs of the table with about this memory, in bytes. A device has up to a tenth more than
    its name says."""
    return [gpu for gpu in GPUS if abs(memory / GB / gpu.memory - 1) < 0.1]


def length_of_run(options, questions, per_step):
    """(questions of all epochs, steps of the whole run). questions: of an epoch. per_step: of all
    devices."""
    total = max(1, round(options.epochs * questions))
    steps = math.ceil(total / per_step)
    if options.steps:
        steps = min(options.steps, steps)
    return total, steps


def step_seconds(p, gpu, share, length=1.0):
    """Seconds of a step. p: a Plan. share: of the GPU's published figures. length: of prompts and
    completions, as a share of what is allowed."""
    o = p.options
    N = p.parameters
    prompt = length * p.prompt
    completion = length * o.max_new_tokens
    operations = share * gpu.operations
    bandwidth = share * gpu.bandwidth

    rows = p.at_once * o.group_size
    # a row holds half of its completion on average
    held = prompt + completion / 2
    read = p.compute * N + p.cache * rows * held
    computed = 2 * N * rows
    token = max(read / bandwidth, computed / operations)
    if o.rollout == "own":
        token = max(token, LAUNCH * p.layers)
    sampling = completion * token * p.questions / p.at_once
    sampling += 2 * N * p.questions * prompt / operations

    networks = 2 if p.algorithm.critic else 1
    passes = 6 * networks * o.mu + 2 * (o.beta > 0)
    tokens = p.questions * (prompt + p.algorithm.k * completion)
    return sampling + passes * N * tokens / operations
