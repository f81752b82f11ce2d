"""How long a run takes on four GPUs, calculated from the figures below. It has not been measured
yet.

A decoding step takes the longer of two times: reading the weights and the cache from memory, and
starting the kernels of all layers. The second one does not grow with the rows. Reading prompts,
scoring and updating take the time of their products: 2 operations for each parameter and token
forward, and 4 backward. What the devices send each other, rewards and evaluations are left out.
"""

import math
from pathlib import Path

from engine.run.shapes import widths
from engine.tasks.table import TASKS

# NVIDIA's data sheets: bytes a second, operations of dense matrix products a second, and the bytes
# of their numbers
GPUS = {
    "A100 80 GB": (2.039e12, 312e12, 2), "H100 80 GB": (3.35e12, 989e12, 2),
    "RTX 4090 24 GB": (1.008e12, 165e12, 2), "T4 16 GB": (0.32e12, 8.1e12, 4),
}
OF_BANDWIDTH, OF_OPERATIONS = 0.6, 0.4  # the shares that a program reaches
# seconds to start a layer's kernels, from Qwen's speed table (A100, one row, 1.5B, 28 layers):
# transformers 39.68 tokens a second, vLLM 183.33. Adapters (peft) have as many kernels again: that
# is an estimate
START = {"sampling": 1 / 39.68 / 28, "with vLLM": 1 / 183.33 / 28}
# completions, as shares of max_new_tokens; prompts have MEAN of their longest length
MEAN, LONGEST = 0.3, 0.7


def questions_of(dataset):
    """How many questions a data set has; None: nobody knows without a download."""
    if dataset in TASKS:
        return TASKS[dataset].train_questions
    # `config.check` has read every line
    return sum(bool(line.strip()) for line in Path(dataset).read_text("utf-8-sig").split("\n"))


def times(p, of_data):
    """Lines: seconds of a step and hours of the run of a Plan, and of one that keeps all
    completions. of_data: how many questions the data set has. """
    options, (_, _, kv_heads, head, _) = p.options, widths(p.shape)
    layers, group_size = p.shape.num_hidden_layers, options.group_size
    prompt, completion = MEAN * options.max_prompt_tokens, MEAN * options.max_new_tokens
    ways = {options.algorithm: (p.questions, p.kept)}
    if p.kept < p.completions:
        ways["all kept"] = options.questions_per_step, options.questions_per_step * group_size
    # passes: π_ref, and π_old for the mini-batches after the first; then forward and backward
    scored = (options.beta > 0) + 1 - 1 / options.minibatches
    updated = options.mu * ((2 if options.lora else 3) + options.gradient_checkpointing)
    networks = 2 if options.algorithm == "ppo" else 1
    columns = (*START, "scoring", "update", "hours", "with vLLM")
    lines = [
        "\nSeconds of a step and hours of the run: calculated, not yet measured.",
        f"{'':28}" + "".join(f"{title:>11}" for title in columns),
    ]
    for gpu, (bandwidth, operations, number) in GPUS.items():
        forward = 2 * p.parameters / (OF_OPERATIONS * operations)  # seconds per token
        for name, (questions, kept) in ways.items():
            cache = questions * group_size * (prompt + completion) * 2 * layers * kv_heads * head
            reading = number * (p.parameters + cache) / (OF_BANDWIDTH * bandwidth)
            starting = [start * layers * (2 if options.lora else 1) for start in START.values()]
            sampling = [
                LONGEST * options.max_new_tokens * max(reading, start)
                + forward * questions * prompt
                for start in starting
            ]
            once = networks * forward * (questions * prompt + kept * completion)
            training = [once * scored, once * updated]
            steps = options.steps or math.ceil(options.epochs * of_data / (questions * p.devices))
            hours = [(seconds + sum(training)) * steps / 3600 for seconds in sampling]
            figures = "".join(f"{x:11.1f}" for x in (*sampling, *training, *hours))
            lines.append(f"{gpu:16}{name:12}{figures}")
    return lines
