"""Peak memory of a policy update: what pruning saves, and what scoring in chunks saves. And the
memory of a whole step of each algorithm, for reproduce.py.

    python experiments/memory.py                   writes memory.json and memory.md in
                                                   runs/results/

The model has the vocabulary of Qwen2.5 (151,936) and a small body with random weights.
`update.update` trains on k of the G = 16 completions of one question (μ = 1, forward and backward).
The figure is the peak memory of the process during the update, minus its memory before. Each point
has its own process. Needs Linux.

Two ways are compared:

- naive: all logits of all tokens, `model(ids).logits`, and their log-softmax; each token of a
  completion needs 2.5 MB, so only up to k = 4;
- ours: logits in chunks, and micro-batches of 2,048 tokens, which limit the body's memory, too.
"""

import ctypes
import math
import random
import re
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from algorithms import resolve
from engine.base.program import run_program
from engine.data.questions import load_questions
from engine.model.logprobs import Policy
from engine.model.networks import Networks, add_optimizer, networks_around
from engine.model.precision import choose_dtype
from engine.options.command_line import parse
from engine.options.config import config_of
from engine.scoring.score import Reward
from experiments.library import toy_model
from experiments.library.bench import (
    alone,
    every_second,
    heading,
    markdown_table,
    qwen,
    this_device,
)
from experiments.library.study import Options, publish
from grpo import grpo_loss, sequence_mean_weights
from loop.records import Batch
from loop.update import Limits, update
from tasks.table import task_of
from train import train_step

VOCABULARY, HIDDEN, LAYERS, PROMPT, TOKENS = 151_936, 64, 12, 16, 256
KEPT = [16, 8, 4, 2, 1]
WAYS = {"naive": "naive", "default": "ours"}
MOST_NAIVE = 4  # the largest k of the naive way
CPU = torch.device("cpu")


def resident(name):
    """The memory of this process in bytes. name: VmRSS (held now) or VmHWM (the most held since the
    last reset)."""
    found = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    return 1024 * int(found.group(1))


def growth(step, device):
    """The peak memory during `step()`, minus the memory before it, in bytes."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = resident("VmRSS")
    step()
    return resident("VmHWM") - before


def return_what_is_freed():
    """Return freed memory to the system at once, so that the process holds only tensors that
    exist."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-3, 2**16)  # M_MMAP_THRESHOLD
        libc.malloc_trim(0)  # and what was freed before


# --- an update ---


def completions(k, length):
    """k completions of random tokens, each of a question of its own, with a reference that knows
    nothing."""
    rng = torch.Generator().manual_seed(k)
    questions = torch.randint(VOCABULARY, (k, PROMPT), generator=rng).tolist()
    tokens = torch.randint(VOCABULARY, (k, length), generator=rng)
    advantages = torch.randn(k, generator=rng)
    mask = torch.ones(tokens.shape, dtype=torch.bool)
    batch = Batch(questions, tokens, mask, advantages, weights=sequence_mean_weights(mask))
    batch.ref_logp = torch.full(tokens.shape, -math.log(VOCABULARY))
    return batch


def ours(model, batch):
    """One update. Its optimizer does not move: AdamW would add its two moments."""
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    networks = Networks(Policy(model), None, optimizer=still)
    update(networks, [batch], resolve("grpo", mu=1), Limits())


def naive(model, batch):
    ids = torch.cat([torch.tensor(batch.prompts), batch.tokens], 1)
    logits = model(ids).logits[:, PROMPT - 1 : -1]
    logp = logits.float().log_softmax(-1).gather(-1, batch.tokens.unsqueeze(-1)).squeeze(-1)
    loss, _ = grpo_loss(logp, logp, batch.advantages, batch.mask, ref_logp=batch.ref_logp)
    loss.backward()


def peak_of_update(point):
    """The figures of one point."""
    k, way = point
    return_what_is_freed()
    torch.set_num_threads(1)
    model = qwen(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=4,
    )
    naive(model, completions(1, 1))  # what the very first update allocates for good
    model.zero_grad()
    batch = completions(k, TOKENS)
    work = naive if way == "naive" else ours
    return {"k": k, "way": way, "peak": growth(lambda: work(model, batch), CPU)}


def page(result):
    """The results as Markdown."""
    peaks = {(row["k"], row["way"]): f"{row['peak'] / 1e6:,.0f}" for row in result["points"]}
    lines = [["k", *KEPT]]
    for way, title in WAYS.items():
        lines.append([title, *(peaks.get((k, way), "–") for k in KEPT)])
    return (
        f"{heading('Peak memory of a policy update', result)}\nVocabulary {VOCABULARY:,}, body of "
        f"{LAYERS} layers of width {HIDDEN}. MB beyond what the process held before; –: not "
        f"measured. Completions of {TOKENS} tokens, k kept of 16:\n\n{markdown_table(lines)}\n"
    )


# --- a whole training step: what a reference costs, and what a critic costs ---


def networks_of(policy, tokenizer, config, algorithm):
    """The Networks of a policy that no run has."""
    networks = networks_around(policy, tokenizer, algorithm.critic, bool(algorithm.beta))
    add_optimizer(networks, config.update, task_of(config.data.dataset).critic_lr)
    return networks


def one_step(options, hidden_size, device):
    """Make the networks and one step with them on 16 kept completions (GFPO 8, PODS 4). Returns the
    bytes of [parameters, the optimizer's moments]."""
    config, algorithm = config_of(options | {"questions_per_step": 1, "max_new_tokens": 32})
    tokenizer = toy_model.make_tokenizer()
    questions, _ = load_questions("toy", tokenizer, limit=algorithm.questions_per_step)
    model = qwen(
        vocab_size=len(tokenizer), hidden_size=hidden_size, intermediate_size=2 * hidden_size,
        num_hidden_layers=10, num_attention_heads=8, num_key_value_heads=8,
        eos_token_id=tokenizer.eos_token_id,
    ).to(device)
    policy = Policy(model, choose_dtype("auto", device, 0))  # on every CPU float32
    networks = networks_of(policy, tokenizer, config, algorithm)
    reward, rng = Reward("every second", every_second), random.Random(1)
    train_step(networks, algorithm, [reward], config.sampling, Limits(), questions, rng)
    everything = [*networks.learners, *(networks.trained if networks.masters else [])]
    if networks.reference:
        everything.append(networks.reference.model)
    parameters = [p for network in everything for p in network.parameters()]
    moments = [t for state in networks.optimizer.state.values() for t in state.values()]
    return [sum(t.nbytes for t in tensors) for tensors in (parameters, moments)]


def peak_of_step(job):
    options, hidden_size = job
    return_what_is_freed()
    torch.set_num_threads(1)
    device, held = this_device(), []
    one_step(options, 32, device)  # what the very first step allocates for good
    peak = growth(lambda: held.extend(one_step(options, hidden_size, device)), device)
    return {"parameters": held[0], "optimizer": held[1], "peak": peak}


def of_steps(methods, hidden_size=512):
    """{name: {parameters, optimizer, peak}} in bytes, of one step of a model with 26 million
    parameters. methods: {name: options of train.py}."""
    # a fork cannot use a GPU that its parent has used; without one it saves the seconds of a start
    start = "spawn" if torch.cuda.is_available() else "fork"
    jobs = [(options, hidden_size) for options in methods.values()]
    return dict(zip(methods, alone(peak_of_step, jobs, start)))


def main(argv):
    options = parse(Options, argv)
    points = [(k, way) for k in KEPT for way in WAYS if way != "naive" or k <= MOST_NAIVE]
    publish(options.output, "memory", {"points": alone(peak_of_update, points)}, page)


if __name__ == "__main__":
    run_program(main)
