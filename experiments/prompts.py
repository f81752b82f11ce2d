"""What it saves to compute a question's prompt once for all its completions, in one update of GRPO
and of CPPO.

    python experiments/prompts.py                  writes prompts.json and prompts.md in results/
    python experiments/prompts.py --model DIR      short answers by this model, not random weights

One update (μ = 1, β = 0, forward and backward) on 16 kept completions: those of one question
(GRPO), of two (CPPO, P = 0.5), …, of sixteen (P = 0.9375, k = 1). Each update is made in two ways,
one after the other, round by round:

- plain rows: one pass over prompt + completion of each row;
- once: one pass over the different prompts, then one pass over the completions
  (engine/model/prompts.py), if `micro_batches.forward_cost` finds that this is cheaper.

Seconds are CPU seconds of one thread. Tokens are counted as the model gets them, padding included.
Memory is what autograd keeps for the backward pass of the largest micro-batch.
"""

import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from engine.model.loading import load_model
from engine.model.logprobs import Policy
from engine.run.options import option, parse, run_program
from engine.tasks import toy_model
from experiments.bench import (
    heading,
    in_turn,
    made_up,
    markdown_table,
    one_update,
    qwen,
    report,
)
from update import Limits

CASES = {  # tokens of the prompts, tokens of the completions on average
    "toy": (14, 34),
    "short answers": (150, 10),
    "GSM8K": (180, 250),
}
KEPT = [16, 8, 4, 2, 1]
WAYS = {"once": True, "rows": False}  # whether a prompt may be computed once


@dataclass
class Options:
    model: str | None = option(
        None, "hub name or folder of the model for the short answers; none: random weights"
    )
    rounds: int = option(3, "updates of each kind that are measured")
    output: str = option("experiments/results", "folder of prompts.json and prompts.md")


def updates(model, batch, once, repeats):
    """The same update, so many times."""
    for _ in range(repeats):
        one_update(model, batch, once=once, beta=0.0)


def tokens_and_memory(model, batch, once):
    """(tokens that the model gets in an update, bytes kept for the backward pass of its largest
    micro-batch)."""
    tokens, kept, most = 0, {}, 0
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def count(module, args, inputs):
        nonlocal tokens
        tokens += inputs["input_ids"].numel()

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # the tensor itself would keep its graph alive for ever

    policy = Policy(model, shares_prompts=once)
    hook = model.base_model.register_forward_pre_hook(count, with_kwargs=True)
    for micro_batch in batch.micro_batches(Limits().micro_batch_tokens, once):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            micro_batch.logprobs(policy, 1.0, with_entropy=True)
        most = max(most, sum(kept.values()))
    hook.remove()
    return tokens, most


def row(name, model, k, prompt, length, rounds):
    """Both ways on the same 16 completions, k of each question."""
    batch = made_up(16, k, prompt, (length // 2, length * 3 // 2), model.config.vocab_size)
    repeats = 20 if name == "toy" else 1  # an update of the toy is too short to be timed by itself
    updates(model, batch, True, 1)  # the first update allocates
    ways = {way: partial(updates, model, batch, once, repeats) for way, once in WAYS.items()}
    times = in_turn(ways, rounds, clock=time.process_time)
    found = {"case": name, "k": k}
    found["ratio"] = median(rows / once for once, rows in zip(times["once"], times["rows"]))
    for way, once in WAYS.items():
        tokens, memory = tokens_and_memory(model, batch, once)
        seconds = median(times[way]) / repeats
        found[way] = {"seconds": seconds, "tokens": tokens, "bytes": memory}
    return found


def measure(options):
    large = qwen(
        vocab_size=8192, hidden_size=512, intermediate_size=1408, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=2,
    )
    torch.manual_seed(0)
    models = {
        "toy": toy_model.make_model(toy_model.make_tokenizer()).eval(),
        "short answers": load_model(options.model, torch.device("cpu"), "float32")[0]
        if options.model else large,
        "GSM8K": large,
    }
    torch.set_num_threads(1)
    rows = [
        row(name, models[name], k, *lengths, options.rounds)
        for name, lengths in CASES.items() for k in KEPT
    ]
    return {
        "rows": rows,
        "parameters": {name: model.num_parameters() for name, model in models.items()},
    }


def page(result):
    name = result["options"]["model"]
    parameters = ", ".join(f"{case} {n:,}" for case, n in result["parameters"].items())
    lines = [["", "P (k)", "questions", "tokens, plain rows", "once", "seconds, plain rows", "once",
              "times as fast", "MB kept, plain rows", "once"]]
    for row in result["rows"]:
        plain, once, k = row["rows"], row["once"], row["k"]
        kept = "GRPO (16)" if k == 16 else f"{1 - k / 16} ({k})"
        lines.append([
            row["case"], kept, 16 // k, f"{plain['tokens']:,}", f"{once['tokens']:,}",
            f"{plain['seconds']:.3g}", f"{once['seconds']:.3g}", f"{row['ratio']:.2f}",
            f"{plain['bytes'] / 1e6:.0f}", f"{once['bytes'] / 1e6:.0f}",
        ])
    return (
        heading("A prompt is computed once for all its completions: one update", result)
        + "\n16 completions, μ = 1, β = 0, one thread, float32, CPU seconds, medians of "
        f"{result['options']['rounds']} rounds. Parameters: {parameters}; short answers: "
        f"{Path(name).name if name else 'random weights'}, the others: random weights.\n\n"
        + markdown_table(lines) + "\n"
    )


def main(argv):
    options = parse(Options, argv)
    report(options, "prompts", measure(options), page)


if __name__ == "__main__":
    run_program(main)
