"""What it saves to compute a question's prompt once for all its completions, in one update of GRPO
and of CPPO.

    python experiments/prompts.py                              writes prompts.json and prompts.md in
                                                               experiments/results
    python experiments/prompts.py --model DIR                  short answers by this model, not by
                                                               random weights

One update (μ = 1, β = 0, forward and backward) on 16 kept completions: those of one question
(GRPO), of two (CPPO, P = 0.5), …, of sixteen (P = 0.9375, k = 1). Each update is made in two ways,
one after the other, round by round:

- plain rows: one pass over prompt + completion of each row; - once: one pass over the different
prompts, then one pass over the completions (engine/model/prompts.py), if
  `micro_batches.forward_cost` finds that this is cheaper.

Seconds are CPU seconds of one thread. Tokens are counted as the model gets them, padding included.
Memory is what autograd keeps for the backward pass of the largest micro-batch. """

import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from tqdm import tqdm
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from algorithms import resolve
from engine.model.loading import load_model
from engine.model.logprobs import Policy
from engine.model.networks import Networks
from engine.model.sampling import Sampling
from engine.run.options import option, parse, run_program
from engine.tasks import toy_model
from experiments.setting import heading, setting, write
from records import Batch, of_shares
from update import Limits, update

CASES = {  # tokens of the prompts, tokens of the completions on average
    "toy": (14, 34),
    "short answers": (150, 10),
    "GSM8K": (180, 250),
}
KEPT = [16, 8, 4, 2, 1]


@dataclass
class Options:
    model: str | None = option(
        None,
        "hub name or folder of the model for the short answers; default: random weights, as for "
        "GSM8K",
    )
    rounds: int = option(3, "updates of each kind that are measured")
    output: str = option("experiments/results", "folder of prompts.json and prompts.md")
    quick: bool = option(
        False, "one round with short texts: only to see that all of this still runs"
    )


def random_model(config):
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config).eval()


def completions(k, prompt, length, vocabulary):
    """16 completions of 16/k questions. Their lengths vary from half of `length` to one and a half
    times as much."""
    generator = torch.Generator().manual_seed(k)
    asked = [
        torch.randint(vocabulary, (prompt,), generator=generator).tolist() for _ in range(16 // k)
    ]
    lengths = torch.randint(length // 2, length * 3 // 2 + 1, (16,), generator=generator)
    tokens = torch.randint(vocabulary, (16, int(lengths.max())), generator=generator)
    return Batch(
        [q for q in asked for _ in range(k)], tokens, lengths, torch.randn(16, generator=generator)
    )


def seconds(model, batch, once):
    """CPU seconds of an update."""
    networks = Networks(
        Policy(model, shares_prompts=once), tokenizer=None,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
    )
    begin = time.process_time()
    minibatches = of_shares([batch], Limits().micro_batch_tokens, networks)
    update(
        networks, minibatches, resolve("grpo", mu=1, beta=0.0), Sampling(batch.tokens.shape[1]),
        Limits(),
    )
    return time.process_time() - begin


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

    hook = model.base_model.register_forward_pre_hook(count, with_kwargs=True)
    for part in batch.micro_batches(Limits().micro_batch_tokens, once):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            part.logprobs(Policy(model, shares_prompts=once), 1.0, with_entropy=True)
        most = max(most, sum(kept.values()))
    hook.remove()
    return tokens, most


def measure(options):
    torch.set_num_threads(1)
    toy = random_model(toy_model.make_config(toy_model.make_tokenizer()))
    large = random_model(
        Qwen2Config(
            vocab_size=8192, hidden_size=512, intermediate_size=1408, num_hidden_layers=8,
            num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=True,
            bos_token_id=None, eos_token_id=None,
        )
    )
    chosen = (
        load_model(options.model, torch.device("cpu"), "float32")[0] if options.model else large
    )
    torch.set_num_threads(1)
    models, cases, rows = {"toy": toy, "short answers": chosen, "GSM8K": large}, dict(CASES), []
    if options.quick:
        options.rounds, cases = 1, {"toy": (14, 34), "short answers": (150, 4)}
    bar = tqdm(total=len(cases) * len(KEPT) * (options.rounds + 1))
    for name, (prompt, length) in cases.items():
        model = models[name]
        for k in KEPT:
            bar.set_description(f"{name}, k = {k}")
            batch = completions(k, prompt, length, model.config.vocab_size)
            seconds(model, batch, True)  # the first update allocates
            bar.update()
            times = {True: [], False: []}
            for _ in range(options.rounds):
                for once, found in times.items():
                    # an update of the toy is too short to be timed by itself
                    repeats = 20 if model is toy else 1
                    found.append(sum(seconds(model, batch, once) for _ in range(repeats)) / repeats)
                bar.update()
            row = {
                "case": name, "k": k,
                "ratio": median(plain / shared for shared, plain in zip(*times.values())),
            }
            for way, once in (("once", True), ("rows", False)):
                tokens, memory = tokens_and_memory(model, batch, once)
                row[way] = {"seconds": median(times[once]), "tokens": tokens, "bytes": memory}
            rows.append(row)
    bar.close()
    return {**setting(["torch", "transformers"]), "options": asdict(options), "rows": rows,
            "parameters": {name: model.num_parameters() for name, model in models.items()}}


def page(result):
    name = result["options"]["model"]
    lines = [
        heading("A prompt is computed once for all its completions: one update", result),
        f"16 completions, μ = 1, β = 0, one thread, float32, CPU seconds, medians of "
        f"{result['options']['rounds']} rounds. Parameters: "
        f"{', '.join(f'{case} {n:,}' for case, n in result['parameters'].items())}; short answers: "
        f"{Path(name).name if name else 'random weights'}, the others: random weights.\n",
        "| | P (k) | questions | tokens, plain rows | once | seconds, plain rows | once | times as "
        "fast | MB kept, plain rows | once |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        plain, once, k = row["rows"], row["once"], row["k"]
        kept = "GRPO (16)" if k == 16 else f"{1 - k / 16} ({k})"
        lines.append(
            f"| {row['case']} | {kept} | {16 // k} | {plain['tokens']:,} | {once['tokens']:,} | "
            f"{plain['seconds']:.3g} | {once['seconds']:.3g} | {row['ratio']:.2f} | "
            f"{plain['bytes'] / 1e6:.0f} | {once['bytes'] / 1e6:.0f} |"
        )
    return "\n".join(lines) + "\n"


def main(argv):
    options = parse(Options, argv)
    result = measure(options)
    write(options.output, "prompts", result, page(result))
    print(page(result))


if __name__ == "__main__":
    run_program(main)
