"""Tokens per second of four ways to sample completions: three of transformers, and this project's
`sample`.

    python experiments/generation.py                           the toy, 16 and 128 completions: a
                                                               minute on a CPU
    python experiments/generation.py --models 0.5b,1.5b        shapes of Qwen2.5 in bf16, on a GPU

Writes generation.json and generation.md in experiments/results. Their figures for other models and
rows are kept.

All four sample G = 16 completions of each question at temperature 1, from the same model with
random weights. In each round every way takes its turn: - generate, dynamic cache: `model.generate`
with its defaults; - generate, static cache: the same with `cache_implementation="static"`;
torch.compile compiles its decoding steps; - continuous batching: transformers' paged cache and
scheduler. They keep running between the calls, and a question is
  forked into its completions;
- ours: the loop of this project. It takes a completion out of the batch when the completion has
ended.

There are two kinds of lengths: all alike, and ragged (log-normal, with a mean of a third of the
longest, as on GSM8K). Only tokens of completions count, not the tokens that `generate` computes for
a completion after its end. Random weights do not say EOS at the right moment, so the lengths are
imposed: on `generate` by a stopping criterion, on continuous batching by each request's limit, and
on our loop by a token that stands for EOS and is sampled at the right moment only.

All ways must agree: each one also decodes greedily, and its tokens must be those of the first way.
If two tokens differ, the model must give them nearly the same probability. This happens in bf16, if
rounding decides between them. """

import json
import os
import sys
import tempfile
import time
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
from tqdm import tqdm
from transformers import (
    CompileConfig,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    StoppingCriteria,
)
from transformers.generation.continuous_batching.requests import RequestState
from transformers.generation.continuous_batching.utils import WorkloadHints
from transformers.utils.logging import set_verbosity_error

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from engine.base.errors import UserError
from engine.model import kv_cache, sampling
from engine.model.prompts import left_pad
from engine.model.sampling import Sampling, sample
from engine.run.options import option, parse, run_program
from engine.tasks import toy_model
from experiments.setting import heading, setting, write

G = 16
WAYS = {"dynamic": "generate, dynamic cache", "static": "generate, static cache, compiled",
        "continuous": "continuous batching", "ours": "ours"}
NAMES = {"toy": "the toy", "135m": "SmolLM2-135M", "0.5b": "Qwen2.5-0.5B", "1.5b": "Qwen2.5-1.5B"}
# tokens of the longest prompt and completion
SIZES = {"toy": (12, 48), "135m": (12, 12), "0.5b": (128, 256), "1.5b": (128, 256)}
# width, of the MLP, layers, heads
QWEN = {"0.5b": (896, 4864, 24, 14), "1.5b": (1536, 8960, 28, 12)}


@dataclass
class Options:
    models: str = option(
        "toy", "of toy, 135m (the shape of SmolLM2-135M), 0.5b, 1.5b (Qwen2.5), with commas between"
    )
    rows: str = option("16,128", "completions sampled together, multiples of 16")
    seconds: float = option(
        30,
        "rounds begin until so many seconds of them have passed, for each model and number of "
        "rows; at least two",
    )
    output: str = option("experiments/results", "folder of generation.json and generation.md")
    quick: bool = option(
        False,
        "the toy, 16 rows, 12 tokens, nothing compiled: only to see that all of this still runs",
    )


def make_model(name, device):
    """A model of this shape with random weights, bf16 on a GPU.

    The weights of its layers are larger than usual, compared with the embedding. Otherwise such a
    model would only repeat its last token, and any two ways of sampling would agree. """
    torch.manual_seed(0)
    if name == "toy":
        model = toy_model.make_model(toy_model.make_tokenizer())
    elif name == "135m":
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
                num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192,
                tie_word_embeddings=True,
            )
        )
    else:
        model = make_qwen(*QWEN[name], device)
    # the toy's: here nothing but the lengths ends a completion
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    with torch.no_grad():
        for module in model.base_model.layers.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.mul_(3 if name == "toy" else 10)
    return model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32).eval()


def make_qwen(width, mlp, layers, heads, device, vocabulary=151_936):
    """A Qwen2.5 of this shape with random weights, float32, made on the device."""
    with torch.device(device):
        return Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=vocabulary, hidden_size=width, intermediate_size=mlp,
                num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=2,
                max_position_embeddings=32_768, tie_word_embeddings=True, bos_token_id=None,
                eos_token_id=None,
                rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            )
        )


def ragged(rows, mean, longest, generator):
    """(rows,) lengths of completions, log-normal as on GSM8K: the longest of 100 is about three
    times the mean."""
    spread = 0.45
    draws = torch.randn(rows, generator=generator) * spread - spread**2 / 2
    return (mean * draws.exp()).round().long().clamp(1, longest)


def stand_in(model):
    """The token that stands for EOS in our loop, in a list. No way may decode it greedily, so that
    all can agree."""
    return [model.config.vocab_size - 1]


@contextmanager
def imposed(lengths, end):
    """In this block, `sample` ends completion i with its token number lengths[i], which is `end`,
    and no earlier.

    lengths: (N,) on the CPU. end: a token of the model, because on a GPU the model goes on reading
    after `end` for a while. """
    draw, keep, left, step = sampling.sample_token, kv_cache.keep_rows, lengths, 0

    # completions that have ended are gone: on a CPU at once, on a GPU after some tokens
    def keep_and_follow(cache, rows, device):
        nonlocal left
        order = keep(cache, rows, device)
        left = left[order.cpu()]
        return order

    def draw_until(logits, how, u):
        nonlocal step
        never = torch.tensor([end]).to(logits.device, non_blocking=True)
        token, logp = draw(logits.index_fill(1, never, -torch.inf), how, u)
        step += 1
        return token.masked_fill((left == step).to(token.device), end), logp

    with (
        patch.object(sampling, "sample_token", draw_until),
        patch.object(kv_cache, "keep_rows", keep_and_follow),
    ):
        yield


class Ended(StoppingCriteria):
    """Tells `generate` which completions have ended. Until all have ended, `generate` computes all
    of them."""

    def __init__(self, lengths, width):
        self.lengths, self.width = lengths, width

    def __call__(self, ids, scores, **kwargs):
        return ids.shape[1] - self.width >= self.lengths


class Generate:
    """transformers' `generate`. how: options of its cache."""

    def __init__(self, model, prompts, longest, **how):
        self.model = model
        self.ids, self.mask = left_pad(prompts, 0, model.device)
        self.config = GenerationConfig(
            do_sample=True, top_k=0, num_return_sequences=G, max_new_tokens=longest, pad_token_id=0,
            eos_token_id=None,
            **how,
        )

    def __call__(self, lengths, greedy=False):
        """Token lists of the completions, question by question."""
        self.config.top_k, self.config.suppress_tokens = (
            int(greedy), stand_in(self.model) if greedy else None,
        )
        width = self.ids.shape[1]
        ended = Ended(lengths.to(self.model.device), width)
        out = self.model.generate(
            self.ids, attention_mask=self.mask, generation_config=self.config,
            stopping_criteria=[ended],
        )
        return [row[:n] for row, n in zip(out[:, width:].tolist(), lengths.tolist())]

    def close(self):
        pass


class Continuous:
    """transformers' continuous batching. Its thread waits for requests; greedy decoding needs
    another thread."""

    def __init__(self, model, prompts, longest):
        self.model, self.prompts, self.longest, self.manager, self.greedy = (
            model, prompts, longest, None, False,
        )
        rows = G * len(prompts)
        self.room = {  # its default is all memory, but the other ways need some too
            # of 256 tokens; one more than each row can fill
            "num_blocks": rows * (2 + (max(map(len, prompts)) + longest) // 256),
            # of one forward pass: it never has to wait
            "max_batch_tokens": rows + sum(map(len, prompts)),
        }

    def start(self, greedy):
        self.close()
        self.greedy = greedy
        self.manager = self.model.init_continuous_batching(
            GenerationConfig(
                do_sample=True, top_k=int(greedy), num_return_sequences=G,
                max_new_tokens=self.longest, eos_token_id=-1,
                suppress_tokens=stand_in(self.model) if greedy else None,
            ),
            ContinuousBatchingConfig(**self.room, seed=0),
            WorkloadHints(max(map(len, self.prompts)), self.longest, G * len(self.prompts)),
        )
        self.manager.warmup()
        self.manager.start()

    def __call__(self, lengths, greedy=False):
        if self.manager is None or greedy != self.greedy:
            self.start(greedy)
        names = [
            f"{q}" if i == 0 else f"{q}__child#{i - 1}"
            for q in range(len(self.prompts))
            for i in range(G)
        ]
        limits, done, fork = dict(zip(names, lengths.tolist())), {}, RequestState.fork

        def fork_with_limit(state, name):
            child = fork(state, name)
            child.max_new_tokens = child._new_tokens_limit = limits[name]
            return child

        with patch.object(RequestState, "fork", fork_with_limit):
            for q, prompt in enumerate(self.prompts):
                self.manager.add_request(prompt, request_id=f"{q}", max_new_tokens=limits[f"{q}"])
            while len(done) < len(names):
                result = self.manager.get_result(timeout=1)
                if result is not None and result.error is None:
                    done[result.request_id] = result.generated_tokens
                elif result is not None or not self.manager.is_running():
                    raise RuntimeError(result.error if result else "its thread has ended")
        return [done[name] for name in names]

    def close(self):
        if self.manager is not None:
            self.manager.stop()
            self.manager.destroy()


class Ours:
    """This project's `sample`."""

    def __init__(self, model, prompts, longest):
        self.model, self.prompts, self.longest = model, prompts, longest

    def __call__(self, lengths, greedy=False):
        end = stand_in(self.model)
        with imposed(lengths, *end):
            drawn = sample(
                self.model, self.prompts, G, Sampling(self.longest, 0.0 if greedy else 1.0),
                stop_ids=end, pad_id=0,
            )
        return [row[:n] for row, n in zip(drawn.tokens.tolist(), drawn.lengths.tolist())]

    def close(self):
        pass


def make_ways(model, prompts, longest, compiles):
    """{name: way}. Each way has its own model, because continuous batching and compiling change the
    model."""
    everywhere = CompileConfig()
    everywhere._compile_all_devices = True  # else `generate` compiles on accelerators only
    static = {"compile_config": everywhere} if compiles else {"disable_compile": True}
    return {
        "dynamic": Generate(model, prompts, longest),
        "static": Generate(
            deepcopy(model), prompts, longest, cache_implementation="static", **static
        ),
        "continuous": Continuous(deepcopy(model), prompts, longest),
        "ours": Ours(deepcopy(model), prompts, longest),
    }


def timed(way, lengths, device):
    """Seconds that one call takes."""
    begin = time.perf_counter()
    way(lengths)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


@torch.no_grad()
def agreement(model, prompts, theirs, ours):
    """{same: share of equal completions, gap: the largest difference of log-probabilities}.

    The gap is between the first two tokens that differ. A completion's last token is left out: in
    our loop it stands for EOS. """
    same, gap = 0, 0.0
    for i, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        assert len(a) == len(b)
        t = next((t for t, pair in enumerate(zip(a[:-1], b)) if pair[0] != pair[1]), None)
        if t is None:
            same += 1
        else:
            ids = torch.tensor([prompts[i // G] + a[:t]], device=model.device)
            logp = model(ids, logits_to_keep=1).logits[0, -1].float().log_softmax(-1)
            gap = max(gap, abs(logp[a[t]] - logp[b[t]]).item())
    return {"same": same / len(ours), "gap": gap}


def measure(name, rows, options, device):
    """The results of one model with one number of rows, for every way."""
    model, (prompt, longest) = make_model(name, device), SIZES[name]
    longest = 12 if options.quick else longest
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
    ways = make_ways(model, prompts, longest, compiles=not options.quick)
    bar = tqdm(desc=f"{name}, {rows} rows, rounds")
    try:
        result = first_calls(ways, lengths["alike"], device)
        begin, rounds = time.perf_counter(), 0
        while rounds < 2 or time.perf_counter() - begin < options.seconds:
            for way in ways:
                for kind, n in lengths.items():
                    result[way].setdefault(kind, []).append(timed(ways[way], n, device))
            rounds += 1
            bar.update()
        greedy = {name: way(lengths["ragged"], greedy=True) for name, way in ways.items()}
    finally:
        bar.close()
        for way in ways.values():
            way.close()
    for way, completions in greedy.items():
        result[way]["greedy"] = agreement(model, prompts, greedy["dynamic"], completions)
        tolerance = 0.5 if device.type == "cuda" else 1e-3
        assert result[way]["greedy"]["gap"] < tolerance, (
            f"{WAYS[way]} decodes other tokens: {result[way]['greedy']}"
        )
    return {
        "parameters": model.num_parameters(), "dtype": str(model.dtype).removeprefix("torch."),
        "prompt": prompt, "longest": longest,
        "tokens": {kind: n.sum().item() for kind, n in lengths.items()}, "rounds": rounds,
        "ways": result,
        "different_tokens": len({token for row in greedy["dynamic"] for token in row}),
    }


def first_calls(ways, lengths, device):
    """{way: {first: seconds until it has sampled two tokens; on a GPU also peak: bytes of memory}}.

    A way that fails is removed from `ways`, and its entry is {error: the reason}.
    """
    result = {}
    for name, way in list(ways.items()):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        try:
            result[name] = {"first": timed(way, torch.full_like(lengths, 2), device)}
            if device.type == "cuda":
                timed(way, lengths, device)
                result[name]["peak"] = torch.cuda.max_memory_allocated() - before
        except Exception as error:
            result[name] = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
            ways.pop(name).close()
    return result


def rate(point, way, kind):
    """Tokens per second, the median over the rounds."""
    return point["tokens"][kind] / median(point["ways"][way][kind])


def speedup(point, way, kind):
    """The speed-up over `generate` with the dynamic cache: the median of the ratios within a round.

    If the machine is slow in a round, it is slow for both.
    """
    ways = point["ways"]
    return median(theirs / ours for theirs, ours in zip(ways["dynamic"][kind], ways[way][kind]))


def conclusion(points):
    """Which way is fastest, in one sentence for each kind of lengths."""
    sentences = []
    for kind, title in (("alike", "one length"), ("ragged", "ragged lengths")):
        won = {}
        for point in points:
            best = max(
                (way for way in WAYS if kind in point["ways"][way]),
                key=lambda way: speedup(point, way, kind),
            )
            where = f"{NAMES[point['model']]}, {point['rows']} rows ({speedup(point, best, kind):.2f} times the default)"
            won.setdefault(best, []).append(where)
        parts = [f"{WAYS[best]} for {'; '.join(where)}" for best, where in won.items()]
        sentences.append(f"Fastest with {title}: {', and '.join(parts)}.")
    return "\n\n".join(sentences) + "\n"


def page(result):
    """The results as Markdown."""
    points = result["points"]
    lines = [
        heading("Ways of generating", points[0]),
        "Tokens per second, medians over the rounds; × is the speed over that of `generate` with "
        "the dynamic cache, round by round. First call: seconds until two tokens of each "
        "completion are there, compiling and setting up included, which the rounds do not include. "
        "Same: completions whose greedily decoded tokens are the first way's.\n",
        conclusion(points),
    ]
    for point in points:
        lines.append(
            f"{NAMES[point['model']]}, {point['parameters']:,} random weights, {point['dtype']}, "
            f"{point['rows']} rows, prompts of up to {point['prompt']} tokens, completions of up "
            f"to {point['longest']} (ragged: {point['tokens']['ragged'] / point['rows']:.1f} on "
            f"average), {point['rounds']} rounds. `{point['command']}`, {point['date']}, "
            f"{point['device']}:\n"
        )
        memory = any("peak" in row for row in point["ways"].values())
        lines.append(
            "| | one length | × | ragged | × | first call, s | same |"
            + (" peak MB |" if memory else "")
        )
        lines.append("|---|---|---|---|---|---|---|" + ("---|" if memory else ""))
        for way, title in WAYS.items():
            row, title = (
                point["ways"][way],
                title.replace(
                    "compiled", "not compiled" if point["options"]["quick"] else "compiled"
                ),
            )
            if "error" in row:
                lines.append(
                    f"| {title} | does not run here: {row['error']} | | | | | |"
                    + (" |" if memory else "")
                )
                continue
            cells = []
            for kind in ("alike", "ragged"):
                cells += [f"{rate(point, way, kind):,.0f}", f"{speedup(point, way, kind):.2f}"]
            cells += [f"{row['first']:.1f}", f"{row['greedy']['same']:.0%}"] + (
                [f"{row['peak'] / 1e6:,.0f}"] if memory else []
            )
            lines.append(f"| {title} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def main(argv):
    options = parse(Options, argv)
    if options.quick:
        options.models, options.rows, options.seconds = "toy", "16", 0
    models, rows = options.models.split(","), [int(n) for n in options.rows.split(",")]
    if unknown := [name for name in models if name not in NAMES]:
        raise UserError(
            f"--models does not know {', '.join(unknown)}: there are {', '.join(NAMES)}."
        )
    if any(n < G or n % G for n in rows):
        raise UserError(
            f"--rows must be multiples of {G}, the completions of one question, not {options.rows}."
        )
    set_verbosity_error()  # of advice on how to set up continuous batching
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    path = Path(options.output) / "generation.json"
    known = json.loads(path.read_text(encoding="utf-8"))["points"] if path.is_file() else []
    points = {(point["model"], point["rows"]): point for point in known}
    where = {
        **setting(["torch", "transformers"]), "options": asdict(options),
        "device": torch.cuda.get_device_name()
        if device.type == "cuda"
        else "one thread of the CPU",
    }
    for name, n in product(models, rows):
        # nothing compiled before
        with (
            tempfile.TemporaryDirectory() as empty,
            patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=empty),
        ):
            points[name, n] = {
                "model": name, "rows": n,
                **where,
                **measure(name, n, options, device),
            }
        order = sorted(points, key=lambda key: (list(NAMES).index(key[0]), key[1]))
        result = {"points": [points[key] for key in order]}
        write(options.output, "generation", result, page(result))
    print(page(result))


if __name__ == "__main__":
    run_program(main)
