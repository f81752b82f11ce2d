"""Tokens per second of three ways to sample completions: two of transformers, and this project's
`sample`.

    python experiments/generation.py                      the toy, 16 and 128 completions: a minute
    python experiments/generation.py --models toy 135m    and the shape of SmolLM2-135M

Writes generation.json and generation.md in results/.

All sample G = 16 completions of each question at temperature 1, from the same model with
random weights, on one thread of the CPU. In each round every way takes its turn:

- generate, dynamic cache: `model.generate` with its defaults;
- generate, static cache: the same with `cache_implementation="static"`; torch.compile compiles its
  decoding steps;
- ours: the loop of this project. It takes a completion out of the batch when the completion has
  ended.

There are two kinds of lengths: all alike, and ragged (log-normal, with a mean of a third of the
longest, as on GSM8K). Only tokens of completions count, not the tokens that `generate` computes for
a completion after its end. Random weights do not say EOS at the right moment, so the lengths are
imposed: on `generate` by a stopping criterion, on our loop by a token that stands for EOS and is
sampled at the right moment only.

tests/engine/test_sampling.py proves that our loop decodes greedily as `generate` does.
"""

import os
import sys
import tempfile
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from unittest.mock import patch

import torch
from transformers import CompileConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from engine.base.errors import UserError
from engine.model import kv_cache, sampling
from engine.model.contract import Sampling
from engine.model.prompts import left_pad
from engine.model.sampling import Sampler
from engine.run.command_line import option, parse, run_program
from experiments import toy_model
from experiments.bench import heading, in_turn, markdown_table, report

G = 16
WAYS = {"dynamic": "generate, dynamic cache", "static": "generate, static cache, compiled",
        "ours": "ours"}
NAMES = {"toy": "the toy", "135m": "SmolLM2-135M"}
SIZES = {"toy": (12, 48), "135m": (12, 12)}  # tokens of the longest prompt and completion


@dataclass
class Options:
    models: list[str] | None = option(
        None, "of toy and 135m (the shape of SmolLM2-135M); none: the toy"
    )
    rows: list[int] | None = option(
        None, "completions sampled together, multiples of 16; none: 16 and 128"
    )
    seconds: float = option(
        30,
        "rounds begin until so many seconds of them have passed, for each model and number of "
        "rows; at least two",
    )
    output: str = option("experiments/results", "folder of generation.json and generation.md")
    compile: bool = option(True, "whether the static cache's decoding steps are compiled")


def make_model(name):
    """A model of this shape with random weights. Nothing but the lengths ends a completion."""
    torch.manual_seed(0)
    if name == "toy":
        model = toy_model.make_model(toy_model.make_tokenizer())
    else:
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
            num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192,
            tie_word_embeddings=True,
        ))
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    return model.eval()


def ragged(rows, mean, longest, generator):
    """(rows,) lengths of completions, log-normal as on GSM8K: the longest of 100 is about three
    times the mean."""
    spread = 0.45
    draws = torch.randn(rows, generator=generator) * spread - spread**2 / 2
    return (mean * draws.exp()).round().long().clamp(1, longest)


# --- the ways: each is a function, lengths (N,) → token lists, question by question ---


def generate(model, prompts, longest, **cache):
    """transformers' `generate`. cache: options of its cache."""
    ids, mask = left_pad(prompts, 0, model.device)
    config, width = GenerationConfig(
        do_sample=True, top_k=0, num_return_sequences=G, max_new_tokens=longest, pad_token_id=0,
        **cache,
    ), ids.shape[1]

    def way(lengths):
        # until all completions have ended, `generate` computes all of them
        ended = [lambda rows, scores, **options: rows.shape[1] - width >= lengths]
        out = model.generate(
            ids, attention_mask=mask, generation_config=config, stopping_criteria=ended
        )
        return [row[:n] for row, n in zip(out[:, width:].tolist(), lengths.tolist())]

    return way


def ours(model, prompts, longest):
    """This project's sampler."""
    end = model.config.vocab_size - 1  # the token that stands for EOS
    sampler = Sampler(model, SimpleNamespace(eos_token_id=end, pad_token_id=0))
    sampler.stop_ids = [end]

    def way(lengths):
        with imposed(lengths, end):
            drawn = sampler.sample(prompts, G, Sampling(longest), seed=0)
        return [row[:n] for row, n in zip(drawn.tokens.tolist(), drawn.lengths.tolist())]

    return way


@contextmanager
def imposed(lengths, end):
    """In this block, `sample` ends completion i with its token number lengths[i], which is `end`,
    and no earlier. lengths: (N,)."""
    draw, keep, left, step = sampling.sample_token, kv_cache.keep_rows, lengths, 0

    def keep_and_follow(cache, rows, device):  # completions that have ended are gone
        nonlocal left
        order = keep(cache, rows, device)
        left = left[order]
        return order

    def draw_until(logits, how, u):
        nonlocal step
        token, logp = draw(logits.index_fill(1, torch.tensor([end]), -torch.inf), how, u)
        step += 1
        return token.masked_fill(left == step, end), logp

    with (
        patch.object(sampling, "sample_token", draw_until),
        patch.object(kv_cache, "keep_rows", keep_and_follow),
    ):
        yield


def make_ways(model, prompts, longest, compiles):
    """{name: way}. Each has its own model, because compiling changes the model."""
    everywhere = CompileConfig()
    everywhere._compile_all_devices = True  # else `generate` compiles on accelerators only
    static = {"compile_config": everywhere} if compiles else {"disable_compile": True}
    return {
        "dynamic": generate(deepcopy(model), prompts, longest),
        "static": generate(
            deepcopy(model), prompts, longest, cache_implementation="static", **static),
        "ours": ours(model, prompts, longest),
    }


# --- the measurement ---


def measure(name, rows, options):
    """The results of one model with one number of rows, for every way."""
    model, (prompt, longest) = make_model(name), SIZES[name]
    draws = torch.Generator().manual_seed(0)
    widths = torch.randint(prompt // 2, prompt + 1, (rows // G,), generator=draws).tolist()
    prompts = [
        torch.randint(model.config.vocab_size, (n,), generator=draws).tolist() for n in widths
    ]
    lengths = {
        "alike": torch.full((rows,), longest), "ragged": ragged(rows, longest / 3, longest, draws),
    }
    # another number of rows would be taken for a reason to compile for any number
    torch.compiler.reset()
    ways = make_ways(model, prompts, longest, options.compile)
    two = torch.full((rows,), 2)
    first = in_turn({name: partial(way, two) for name, way in ways.items()}, 1)
    calls = {(name, kind): partial(way, n)
             for name, way in ways.items() for kind, n in lengths.items()}
    seconds = in_turn(calls, 2, options.seconds)
    return {
        "model": name, "rows": rows, "parameters": model.num_parameters(), "prompt": prompt,
        "longest": longest, "tokens": {kind: n.sum().item() for kind, n in lengths.items()},
        "rounds": len(seconds["ours", "alike"]),
        "ways": {way: {"first": first[way][0], **{kind: seconds[way, kind] for kind in lengths}}
                 for way in ways},
    }


def page(result):
    """The results as Markdown."""
    text = (
        heading("Ways of generating", result)
        + "\nTokens per second, medians over the rounds, on one thread of the CPU; × is the speed "
        "over that of `generate` with the dynamic cache, round by round. First call: seconds until "
        "two tokens of each completion are there, compiling and setting up included, which the "
        "rounds do not include.\n"
    )
    for point in result["points"]:
        lines = [["", "one length", "×", "ragged", "×", "first call, s"]]
        for way, title in WAYS.items():
            row, cells = point["ways"][way], []
            for kind in ("alike", "ragged"):
                rate = point["tokens"][kind] / median(row[kind])
                # within a round: if the machine is slow for a while, it is slow for both
                ratios = (a / b for a, b in zip(point["ways"]["dynamic"][kind], row[kind]))
                cells += [f"{rate:,.0f}", f"{median(ratios):.2f}"]
            lines.append([title, *cells, f"{row['first']:.1f}"])
        text += (
            f"\n{NAMES[point['model']]}, {point['parameters']:,} random weights, float32, "
            f"{point['rows']} rows, prompts of up to {point['prompt']} tokens, completions of up "
            f"to {point['longest']} (ragged: {point['tokens']['ragged'] / point['rows']:.1f} on "
            f"average), {point['rounds']} rounds:\n\n{markdown_table(lines)}\n"
        )
    return text


def main(argv):
    options = parse(Options, argv)
    models, rows = options.models or ["toy"], options.rows or [16, 128]
    if not set(models) <= set(NAMES) or any(n < G or n % G for n in rows):
        raise UserError(f"--models knows {', '.join(NAMES)}; --rows must be multiples of {G}.")
    torch.set_num_threads(1)
    points = []
    for name, n in product(models, rows):
        with (  # nothing compiled before
            tempfile.TemporaryDirectory() as empty,
            patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=empty),
        ):
            points.append(measure(name, n, options))
    report(options, "generation", {"points": points}, page)


if __name__ == "__main__":
    run_program(main)
