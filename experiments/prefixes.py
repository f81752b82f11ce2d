"""Seconds of the forward and backward passes of one update: of all tokens, and of NAT's random
prefixes.

    python experiments/prefixes.py                       the toy: a minute
    python experiments/prefixes.py --model SmolLM2       a real model, too: 5 minutes

Writes prefixes_time.json and prefixes_time.md in results/.

The toy samples 16 completions of each of 4 questions, and the other model 16 of one question of
arithmetic. In each round every way makes the gradient of the same completions (GRPO's loss, without
a reference), with new prefixes. One thread; the seconds are those of the processor, so other work
counts little.
"""

import os
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from algorithms import resolve
from engine.data.questions import load_questions
from engine.model import loading
from engine.model.contract import Sampling
from engine.model.logprobs import Policy
from engine.model.networks import Networks
from engine.model.sampling import Sampler
from engine.run.command_line import option, parse, run_program
from experiments.bench import ROOT, heading, in_turn, markdown_table, report
from family.nat import prefix_factors
from records import Batch
from tasks import toy
from update import Limits, accumulate, prefixes

G = 16
WAYS = {"all tokens": None, "prefixes of half or more": 0.5, "any prefixes": 0.0}


@dataclass
class Options:
    model: str | None = option(None, "folder of a model besides the toy")
    longest: int = option(160, "longest completion of this model, in tokens", limits="[1, ∞)")
    rounds: int = option(4, "rounds; of the toy ten times as many", limits="[2, ∞)")
    output: str = option(str(ROOT / "experiments/results"), "folder of the two files")


def sampled(path, dataset, count, longest):
    """(Networks, Batch): a model, and G completions of each of `count` questions."""
    model, tokenizer = loading.load_model(path, torch.device("cpu"))
    questions, _ = load_questions(dataset, tokenizer, limit=count)
    prompts = [question["prompt"] for question in questions]
    drawn = Sampler(model, tokenizer).sample(prompts, G, Sampling(longest), seed=0)
    each = [prompt for prompt in prompts for _ in range(G)]
    advantages = torch.randn(len(each), generator=torch.Generator().manual_seed(1))
    batch = Batch(each, drawn.tokens, drawn.mask, advantages, old_logp=drawn.logp)
    batch.weights = drawn.mask / (len(each) * drawn.mask.sum(1, keepdim=True))
    return Networks(Policy(model), tokenizer), batch


def gradient(networks, batch, algorithm, share, computed):
    """One gradient. computed: a list, which gets the number of tokens that were computed."""
    if share is not None:
        factors = prefix_factors(batch.mask, torch.rand(len(batch.mask), 1), share=share)
        batch = prefixes(replace(batch, prefix_weights=factors))
    computed.append(int(batch.mask.sum()))
    networks.model.zero_grad()
    accumulate(networks, batch, algorithm, Limits())


def measure(name, completions, rounds):
    """The rows of a model. completions: arguments of `sampled`."""
    networks, batch = sampled(*completions)
    algorithm, computed = resolve("grpo", beta=0.0), {way: [] for way in WAYS}
    ways = {
        way: partial(gradient, networks, batch, algorithm, share, computed[way])
        for way, share in WAYS.items()
    }
    for function in ways.values():
        function()  # the first call is slower
    seconds = in_turn(ways, rounds, clock=time.process_time)
    whole, rows = seconds["all tokens"], []
    for way, own in seconds.items():
        ratios = [a / b for a, b in zip(own, whole)]
        rows.append({
            "model": name, "way": way, "prompt": len(batch.prompts[0]),
            "length": fmean(batch.mask.sum(1).tolist()),
            "tokens": fmean(computed[way]) / int(batch.mask.sum()),
            "seconds": median(own), "share": median(ratios), "shares": ratios,
        })
    return rows


def page(result):
    lines = [["", "", "prompt, tokens", "completion, mean", "tokens computed", "seconds",
              "share of the seconds (min to max)"]]
    for row in result["rows"]:
        lines.append([
            row["model"], row["way"], str(row["prompt"]), f"{row['length']:.0f}",
            f"{row['tokens']:.0%}", f"{row['seconds']:.3f}",
            f"{row['share']:.2f} ({min(row['shares']):.2f} to {max(row['shares']):.2f})"])
    return f"{heading('Time of random prefixes', result)}\n{markdown_table(lines)}\n"


def main(argv):
    options = parse(Options, argv)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = measure("the toy", (toy.BASE, "toy", 4, 48), 10 * options.rounds)
    if options.model:
        name = os.path.basename(os.path.normpath(options.model))
        completions = options.model, "arithmetic", 1, options.longest
        rows += measure(name, completions, options.rounds)
    report(options, "prefixes_time", {"rows": rows}, page)


if __name__ == "__main__":
    run_program(main)
