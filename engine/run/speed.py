"""How long a run takes on four GPUs, calculated from the figures below. It has not been measured
yet.

A decoding step takes the longer of two times: reading the weights and the cache from memory, and
starting the kernels of all layers. The second one does not grow with the rows. Reading prompts,
scoring and updating take the time of their products: 2 operations for each parameter and token
forward, and 4 backward. What the devices send each other, rewards and evaluations are left out. """

import math
from dataclasses import dataclass

from engine.run.skeleton import widths


@dataclass(frozen=True)
class GPU:
    name: str
    bandwidth: float  # bytes a second
    # of dense matrix products, a second: in bfloat16, or in float32 if `number` is 4
    operations: float
    number: int = 2  # bytes per number


GPUS = [  # NVIDIA's data sheets
    GPU("A100 80 GB", 2.039e12, 312e12), GPU("H100 80 GB", 3.35e12, 989e12),
    GPU("RTX 4090 24 GB", 1.008e12, 165e12), GPU("T4 16 GB", 0.32e12, 8.1e12, 4),
]
OF_BANDWIDTH, OF_OPERATIONS = 0.6, 0.4  # the shares that a program reaches
# seconds to start a layer's kernels, from Qwen's speed table (A100, one row, 1.5B, 28 layers):
# transformers 39.68 tokens a second, vLLM 183.33. Adapters (peft) have as many kernels again: that
# is an estimate
START = {"own": 1 / 39.68 / 28, "vllm": 1 / 183.33 / 28}
# completions, as shares of max_new_tokens; prompts have MEAN of their longest length
MEAN, LONGEST = 0.3, 0.7


def seconds(config, model, parameters, questions, k, gpu, rollout):
    """(sampling, scoring, updating) in seconds, of a step on one device that takes so many
    questions and keeps k of each."""
    shape, rows, kept = model.config.get_text_config(), questions * config.group_size, questions * k
    _, _, kv_heads, head, _ = widths(shape)
    layers, prompt, completion = (
        shape.num_hidden_layers, MEAN * config.max_prompt_tokens, MEAN * config.max_new_tokens,
    )
    compute, memory = OF_OPERATIONS * gpu.operations, OF_BANDWIDTH * gpu.bandwidth

    cache = rows * (prompt + completion) * 2 * layers * kv_heads * head
    reading = gpu.number * (parameters + cache) / memory
    starting = START[rollout] * layers * (2 if config.lora else 1)
    sampling = (
        LONGEST * config.max_new_tokens * max(reading, starting)
        + 2 * parameters * questions * prompt / compute
    )

    forward = (
        2
        * parameters
        * (questions * prompt + kept * completion)
        / compute
        * (2 if config.algorithm == "ppo" else 1)
    )
    backward = (1 if config.lora else 2) + config.gradient_checkpointing  # in forward passes
    # π_ref; π_old for the mini-batches after the first
    scoring = forward * ((config.beta > 0) + 1 - 1 / config.minibatches)
    return sampling, scoring, config.mu * forward * (1 + backward)


def hours(config, a_step, questions, devices, of_data):
    """Hours of the run, if its data set has `of_data` questions and a device takes `questions` a
    step."""
    steps = config.steps or math.ceil(config.epochs * of_data / (questions * devices))
    return sum(a_step) * steps / 3600
