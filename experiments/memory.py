"""Peak memory of a policy update: what pruning saves, and what scoring in chunks saves.

    python experiments/memory.py                               writes memory.json, .md and .png in
                                                               experiments/results

The model has the vocabulary of Qwen2.5 (151,936) and a small body with random weights.
`update.update` trains on k of the G = 16 completions of one question (μ = 1, forward and backward).
The figure is the peak memory of the process during the update, minus its memory before. Each point
has its own process. Needs Linux. If there is a GPU, its memory is measured.

Three ways are compared: - naive: all logits of all tokens, `model(ids).logits`, and their
log-softmax; - one micro-batch: ours, with all kept completions in one forward pass; the logits come
in chunks; - default: ours, with micro-batches of 2,048 tokens, which limit the body's memory, too,
whatever k is.

The (tokens × vocabulary) tensors that exist at the same time are also counted, operation by
operation, and compared with `engine.model.logprobs.CHUNK_ELEMENTS`. """

import ctypes
import math
import multiprocessing
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from algorithms import resolve
from engine.model import logprobs
from engine.model.logprobs import Policy
from engine.model.networks import Networks
from engine.model.precision import autocast, choose_dtype
from engine.model.sampling import Sampling
from engine.run.options import option, parse, run_program
from experiments.setting import heading, setting, write
from grpo import grpo_loss
from records import Batch, of_shares
from update import Limits, update

HIDDEN, LAYERS, PROMPT = 64, 12, 16
KEPT, LENGTHS = [16, 8, 4, 2, 1], [64, 128, 256, 512]
WAYS = {"naive": "naive", "whole": "ours, one micro-batch", "default": "ours, default"}


@dataclass
class Options:
    vocabulary: int = option(151_936, "how many tokens the model knows")
    chunk_elements: int = option(logprobs.CHUNK_ELEMENTS, "tokens × vocabulary scored at a time")
    tokens: int = option(
        4096, "points with more completion tokens than this, k times their length, are left out"
    )
    naive_tokens: int = option(
        1024, "the naive way is measured up to so many completion tokens: each needs 2.5 MB"
    )
    output: str = option("experiments/results", "folder of memory.json, memory.md and memory.png")
    quick: bool = option(
        False, "few points, small vocabulary and chunks: only to see that all of this still runs"
    )


class VocabularyTensors(TorchDispatchMode):
    """Watches every operation and counts the elements of the (tokens × vocabulary) tensors.

    `largest` is the count of the largest tensor; `most` is the largest sum over tensors that exist
    at the same time. Views share a storage, which counts once. The output head and its gradient do
    not count. """

    def __init__(self, vocabulary):
        super().__init__()
        self.vocabulary, self.living, self.largest, self.most = vocabulary, {}, 0, 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.shape[-1:] == (self.vocabulary,)
                and tensor.shape[:-1] != (HIDDEN,)
            ):
                storage = tensor.untyped_storage()
                self.living[storage._cdata] = (
                    StorageWeakRef(storage), storage.nbytes() // tensor.element_size(),
                )
        self.living = {key: entry for key, entry in self.living.items() if not entry[0].expired()}
        sizes = [size for _, size in self.living.values()]
        self.largest, self.most = max([self.largest, *sizes]), max(self.most, sum(sizes))
        return result


def make_model(vocabulary, device):
    torch.manual_seed(0)
    return (
        Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=vocabulary, hidden_size=HIDDEN, intermediate_size=3 * HIDDEN,
                num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=4,
                max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=None,
                eos_token_id=None,
            )
        )
        .to(device)
        .eval()
    )


def completions(k, length, vocabulary, device):
    """k completions of random tokens, each with its own random prompt."""
    prompts, tokens = (
        torch.randint(vocabulary, (k, PROMPT)).tolist(),
        torch.randint(vocabulary, (k, length), device=device),
    )
    return Batch(
        prompts, tokens, torch.full((k,), length, device=device), torch.randn(k, device=device)
    )


def ours(model, batch, micro_batch_tokens):
    batch.ref_logp = torch.full(
        batch.tokens.shape, -math.log(model.config.vocab_size), device=model.device
    )
    # AdamW would add its two moments, the same for every k
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    policy = Policy(model, choose_dtype("auto", model.device, 0))  # on every CPU float32
    networks = Networks(policy, tokenizer=None, optimizer=optimizer)
    minibatches = of_shares([batch], micro_batch_tokens, networks)
    update(
        networks, minibatches, resolve("cppo", mu=1), Sampling(batch.tokens.shape[1]),
        Limits(micro_batch_tokens),
    )


def naive(model, batch):
    ids = torch.cat([torch.tensor(batch.prompts, device=model.device), batch.tokens], 1)
    with autocast(choose_dtype("auto", model.device, 0), model.device):
        logits = model(ids).logits[:, PROMPT - 1 : -1]
    logp = logits.float().log_softmax(-1).gather(-1, batch.tokens.unsqueeze(-1)).squeeze(-1)
    ref_logp = torch.full_like(logp, -math.log(model.config.vocab_size))
    grpo_loss(logp, logp, batch.advantages, batch.mask, ref_logp=ref_logp)[0].backward()


def memory(name):
    """The memory of this process in bytes. name: VmRSS (held now) or VmHWM (the most held since the
    last reset)."""
    return 1024 * int(
        re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text()).group(1)
    )


def growth(step, device):
    """The peak memory during `step()`, minus the memory before it, in bytes."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = memory("VmRSS")
    step()
    return memory("VmHWM") - before


def return_what_is_freed():
    """Return freed memory to the system at once, so that the process holds only tensors that
    exist."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-3, 2**16)  # M_MMAP_THRESHOLD
        libc.malloc_trim(0)  # and what was freed before


def measure(point):
    """The figures of one point. Each point runs in its own process."""
    k, length, way, vocabulary, logprobs.CHUNK_ELEMENTS = point
    return_what_is_freed()
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = make_model(vocabulary, device)
    # what the very first update allocates for good
    naive(model, completions(1, 1, vocabulary, device))
    model.zero_grad()
    batch, one = completions(k, length, vocabulary, device), k * (PROMPT + length)
    row = {"k": k, "length": length, "way": way}
    if way == "watched":
        with VocabularyTensors(vocabulary) as tensors:
            ours(model, batch, one)
        return row | {
            "largest": tensors.largest, "most": tensors.most,
            "all_tokens": batch.tokens.numel() * vocabulary,
        }
    if way == "naive":
        return row | {"peak": growth(lambda: naive(model, batch), device)}
    return row | {
        "peak": growth(
            lambda: ours(model, batch, one if way == "whole" else Limits().micro_batch_tokens),
            device,
        )
    }


def page(result):
    """The results as Markdown."""
    peaks = {(row["k"], row["length"], row["way"]): row["peak"] for row in result["points"]}

    def table(column, values, point):
        rows = [
            f"| {column} | " + " | ".join(map(str, values)) + " |",
            "|---" * (len(values) + 1) + "|",
        ]
        for way, title in WAYS.items():
            cells = [peaks.get(point(value) + (way,)) for value in values]
            rows.append(
                f"| {title} | "
                + " | ".join("–" if cell is None else f"{cell / 1e6:,.0f}" for cell in cells)
                + " |"
            )
        return "\n".join(rows) + "\n"

    options, watch = result["options"], result["watched"]
    chunk = options["chunk_elements"]
    lines = [
        heading("Peak memory of a policy update", result),
        f"Vocabulary {options['vocabulary']:,}, chunks of {chunk:,} elements, body of {LAYERS} "
        f"layers of width {HIDDEN}. "
        "MB beyond what the process held before; –: not measured.\n",
    ]
    for length in sorted({n for k, n, _ in peaks if k == 1}):
        values = [k for k in KEPT if any(p[:2] == (k, length) for p in peaks)]
        lines.append(
            f"Completions of {length} tokens, k kept of 16:\n\n"
            + table("k", values, lambda k, n=length: (k, n))
        )
    for k in (16, 2):
        values = [n for n in LENGTHS if any(p[:2] == (k, n) for p in peaks)]
        if values:
            lines.append(
                f"k = {k}, by the completion's length:\n\n"
                + table("tokens", values, lambda n, k=k: (k, n))
            )
    lines.append(
        f"The largest (tokens × vocabulary) tensor in our update holds "
        f"{watch['largest'] / chunk:.3f} of a chunk, and those that live together at the worst "
        f"moment {watch['most'] / chunk:.3f} chunks. One with all tokens of that update (k = "
        f"{watch['k']}, {watch['length']} tokens each) would hold "
        f"{watch['all_tokens'] / chunk:.1f}."
    )
    return "\n".join(lines) + "\n"


def draw(points, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10, 4.2), constrained_layout=True, sharey=True
    )
    looks = {"naive": ("s", ":"), "whole": ("o", "-"), "default": ("^", "--")}

    def line(axis, rows, x, label, color, way):
        marker, style = looks[way]
        rows = sorted(rows, key=lambda row: row[x])
        axis.plot(
            [r[x] for r in rows], [r["peak"] / 1e6 for r in rows], style, marker=marker,
            color=color, label=label,
        )

    for way, title in WAYS.items():
        line(
            left, [r for r in points if r["way"] == way and r["length"] == 256], "k", title,
            "black", way,
        )
        for k, color in ((16, "black"), (2, "0.6")) if way != "default" else ():
            line(
                right, [r for r in points if r["way"] == way and r["k"] == k], "length",
                f"{title}, k = {k}", color, way,
            )
    left.set(
        title="completions of 256 tokens", xlabel="k, completions kept of 16",
        ylabel="peak of an update (MB)",
    )
    right.set(
        title="k = 16 (GRPO) and k = 2 (CPPO, P = 0.875)", xlabel="completion length (tokens)"
    )
    for axis, ticks in ((left, KEPT), (right, LENGTHS)):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter("{x:,.0f}")
        axis.set_xticks(ticks, map(str, ticks))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=95)
    plt.close(figure)


def main(argv):
    options = parse(Options, argv)
    points = [(k, 256, way) for k in KEPT for way in WAYS] + [
        (k, n, way) for k in (16, 2) for n in LENGTHS if n != 256 for way in WAYS
    ]
    points = [
        (k, n, way)
        for k, n, way in points
        if k * n <= (options.naive_tokens if way == "naive" else options.tokens)
    ]
    points.append((16, 64, "watched"))
    if options.quick:
        options.vocabulary, options.chunk_elements = 8192, 2**20
        points = [
            (16, 64, "whole"), (4, 64, "whole"), (1, 64, "whole"), (4, 64, "naive"),
            (8, 128, "watched"),
        ]
    points = [(*point, options.vocabulary, options.chunk_elements) for point in points]
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        rows = list(tqdm(pool.imap(measure, points, chunksize=1), total=len(points), desc="points"))
    result = {
        **setting(["torch", "transformers"]), "options": asdict(options), "points": rows[:-1],
        "watched": rows[-1],
    }
    write(options.output, "memory", result, page(result))
    draw(rows[:-1], Path(options.output) / "memory.png")
    print(page(result))


if __name__ == "__main__":
    run_program(main)
