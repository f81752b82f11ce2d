"""How many steps a run makes, and how long they take: calculated from published figures of GPUs,
not measured.

The sum is over the phases of a step on one device. N: parameters; Q questions of a prompt and G
completions each, of which k are kept. Attention, evaluations, checkpoints and what devices send to
each other are left out.

    update      (6μ + 2 if there is a reference) · N operations for each token of the Q prompts and
                Q·k completions
    sampling    2N operations for each token of the prompts. Then a token of every completion at a
                time: the GPU reads the weights, and the keys and values of all rows so far. If
                there are very many rows, their 2N operations each take longer than that. Our own
                sampler needs LAUNCH for each layer, because Python starts each kernel.

A GPU reaches a share in SHARES of its published operations and bytes per second. PPO's critic is a
second network that is updated. Dynamic sampling is counted as if it sampled once.
"""

import json
import math
from collections import namedtuple
from pathlib import Path

GB = 10**9
SHARES = (0.45, 0.25)
# seconds; Qwen2.5's speed benchmark, transformers on an A100: 0.88 ms (0.5B) and 0.90 ms (1.5B)
LAUNCH = 0.9e-3

# gpus.json: memory in GB; operations in bfloat16 and bytes of bandwidth, both per second. From
# NVIDIA's data sheets (RTX 4090: the Ada whitepaper): dense, which is half of a figure "with
# sparsity", and with float32 sums. A100 of 80 GB, H100 and H200: SXM
Gpu = namedtuple("Gpu", "name memory operations bandwidth")
GPUS = [Gpu(*row) for row in json.loads(Path(__file__).with_name("gpus.json").read_text())]


def gpus_of(memory):
    """The GPUs of the table with about this memory, in bytes. A device has up to a tenth more than
    its name says."""
    return [gpu for gpu in GPUS if abs(memory / GB / gpu.memory - 1) < 0.1]


def questions_of_all_epochs(options, questions):
    """How many questions a run takes. questions: of an epoch."""
    return max(1, round(options.epochs * questions))


def length_of_run(options, questions, per_step):
    """Steps of the whole run. questions: of an epoch. per_step: of all devices."""
    of_all_epochs = math.ceil(questions_of_all_epochs(options, questions) / per_step)
    return min(options.steps or math.inf, of_all_epochs)


def step_seconds(p, gpu, share, length=1.0):
    """Seconds of a step. p: a Plan. share: of the GPU's published figures. length: of prompts and
    completions, as a share of what is allowed."""
    o = p.options
    prompt = length * p.prompt
    completion = length * o.max_new_tokens
    operation = 1 / (share * gpu.operations)  # seconds
    byte = 1 / (share * gpu.bandwidth)
    one_pass = 2 * p.parameters * operation  # seconds of a token

    rows = p.at_once * o.group_size
    half = prompt + completion / 2  # tokens of a row, on average
    cache = p.cache * rows * half
    read = byte * (p.compute * p.parameters + cache)
    decoding = max(read, rows * one_pass)
    if o.rollout != "vllm":
        decoding = max(decoding, LAUNCH * p.layers)
    times = p.questions / p.at_once
    sampling = times * completion * decoding
    sampling += p.questions * prompt * one_pass

    networks = 2 if p.algorithm.critic else 1
    passes = 3 * networks * o.mu  # a backward pass counts twice
    if o.beta or o.stop_kl:
        passes += 1
    kept = p.algorithm.k * completion
    tokens = p.questions * (prompt + kept)
    return sampling + tokens * passes * one_pass
