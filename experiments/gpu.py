"""What a training step costs on one GPU: the seconds and the memory of sampling, log-probabilities
and update.

    python experiments/gpu.py                                  under nine minutes on one H100 or
                                                               H200
    python experiments/gpu.py --models 0.5b --seconds 200      only the smaller model, in less time

Writes gpu.json and gpu.md in experiments/results after every point. So a run that is stopped keeps
what it has measured.

The models have the shapes of Qwen2.5-1.5B and 0.5B and random weights. As in `train.py`, the model
that learns is float32 with bf16 autocast; the reference and the copy that samples are bf16. A model
with random weights does not say EOS at the right moment, so the lengths are imposed: prompts of 100
to 200 tokens, and log-normal completions with a mean of 225 and at most 1,024 tokens, as on GSM8K.
The sections, for each model:

- exactness: log-probabilities in bf16 against float32, and the sampler's against the scorer's; -
steps: GRPO on one question, and CPPO with and without allocation; G = 16, β = 0.04, μ = 2; -
decoding: the time per token, against the time that the GPU needs to read weights, keys and values
from memory; - micro-batches: one update (μ = 1) cut into larger or smaller forward passes, without
and with gradient checkpointing; - TRL, if it is installed: a step of its GRPOTrainer beside one of
ours.

The limits are measured, too: that of the arithmetic by a large bf16 matrix product, that of the
memory by a large copy. A point that runs out of memory says so, and the next point follows. Each
section has a share of the time, and also gets the time that the sections before it did not use. """

import gc
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from algorithms import resolve
from cppo import batch_rows, keep_count, prune
from engine.base.errors import UserError
from engine.model.logprobs import completion_logprobs
from engine.model.networks import Networks
from engine.model.precision import choose_dtype, frozen_copy
from engine.model.sampling import Sampling, sample
from engine.run.options import option, parse, run_program
from engine.tasks import toy_model
from experiments.generation import QWEN, G, imposed, make_qwen, ragged
from experiments.setting import heading, setting, write
from records import Batch, of_shares
from update import Limits, update

PRUNING = [0.5, 0.75, 0.875, 0.9375]
# of a model's time
SHARES = {"exactness": 0.07, "steps": 0.53, "decoding": 0.1, "micro-batches": 0.15, "TRL": 0.15}


@dataclass(frozen=True)
class Work:
    """How much is measured."""

    prompt: tuple[int, int] = (100, 200)  # tokens: from, to
    mean: int = 225  # tokens of a completion
    longest: int = 1024
    decode_rows: tuple[int, ...] = (16, 64, 256)
    decode_tokens: int = 64
    micro_batches: tuple[int, ...] = (2048, 8192, 16384, 32768)  # tokens
    kept: int = 64  # completions of the update that is cut into them
    repeats: int = 2  # of every update; the fastest counts
    matrix: int = 8192  # n of an n × n product
    copied: int = 2**31  # bytes


QUICK = Work((4, 8), 6, 16, (16, 32), 4, (64, 256), 16, 1, 256, 2**22)
TINY = (32, 64, 2, 4)  # of a model, as in generation.QWEN


@dataclass
class Options:
    models: str = option(
        "1.5b,0.5b", "of 1.5b and 0.5b, with a comma between; the first gets its results first"
    )
    seconds: float = option(510, "for all of it; a point that has begun is finished")
    output: str = option("experiments/results", "folder of gpu.json and gpu.md")
    quick: bool = option(
        False, "a tiny model and short lengths: only to see that all of this still runs"
    )


# what is measured: the project's own functions, called here and nowhere else


class Subject:
    """A model with all that its training needs. On a CPU all peaks of memory are None."""

    def __init__(self, shape, vocabulary, work, device):
        torch.manual_seed(0)
        self.work, self.device, self.draws = work, device, torch.Generator().manual_seed(0)
        self.model = make_qwen(*shape, device, vocabulary).eval()
        self.model.compute_dtype = choose_dtype("auto", device, self.model.num_parameters())
        self.reference, self.copy = (
            frozen_copy(self.model, self.model.compute_dtype) for _ in range(2)
        )
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-6, weight_decay=0.0, fused=True
        )
        self.rolled = {}

    def prompts(self, count):
        low, high = self.work.prompt
        widths = torch.randint(low, high + 1, (count,), generator=self.draws).tolist()
        return [
            torch.randint(self.model.config.vocab_size, (n,), generator=self.draws).tolist()
            for n in widths
        ]

    def sampled(self, model, prompts, lengths):
        """Completions of imposed lengths (N,)."""
        end = model.config.vocab_size - 1
        with imposed(lengths, end):
            return sample(model, prompts, G, Sampling(int(lengths.max())), stop_ids=[end], pad_id=0)

    def roll_out(self, questions):
        """(seconds, peak, batch) of sampling G completions of each question. Done once for each
        number of questions."""
        if questions not in self.rolled:
            prompts = self.prompts(questions)
            lengths = ragged(questions * G, self.work.mean, self.work.longest, self.draws)
            seconds, peak, drawn = self.measured(lambda: self.sampled(self.copy, prompts, lengths))
            advantages = torch.randn(questions * G, generator=self.draws).to(self.device)
            batch = Batch(
                [p for p in prompts for _ in range(G)], drawn.tokens, drawn.lengths, advantages
            )
            self.rolled[questions] = seconds, peak, batch
        return self.rolled[questions]

    def made_up(self, count):
        """A batch of `count` completions of random tokens, which were not sampled."""
        lengths = ragged(count, self.work.mean, self.work.longest, self.draws)
        tokens = torch.randint(
            self.model.config.vocab_size, (count, int(lengths.max())), generator=self.draws
        )
        advantages = torch.randn(count, generator=self.draws)
        return Batch(
            self.prompts(count), tokens.to(self.device), lengths.to(self.device),
            advantages.to(self.device),
        )

    def trained(self, batch, algorithm, mu, micro_batch_tokens, repeats):
        """{logprobs, update: seconds; logprobs_peak, update_peak: bytes}.

        Of the reference's log-probabilities, and of μ updates on the batch.
        """
        networks = Networks(self.model, tokenizer=None, optimizer=self.optimizer)
        row, sampling = resolve(algorithm, mu=mu), Sampling(self.work.longest)
        logprobs, updates = [], []
        for _ in range(repeats):
            [minibatch] = of_shares([batch], micro_batch_tokens, networks)
            logprobs.append(self.measured(partial(self.score, minibatch.micro_batches))[:2])
            learn = partial(
                update, networks, [minibatch], row, sampling, Limits(micro_batch_tokens)
            )
            updates.append(self.measured(learn)[:2])
        self.optimizer.zero_grad()
        return {"logprobs": min(s for s, _ in logprobs), "logprobs_peak": logprobs[0][1],
                "update": min(s for s, _ in updates), "update_peak": updates[-1][1]}

    @torch.no_grad()
    def score(self, micro_batches):
        for batch in micro_batches:
            batch.ref_logp = batch.logprobs(self.reference, 1.0)

    def measured(self, f):
        """(seconds, bytes, result) of f(); bytes is the largest memory that PyTorch held during the
        call."""
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        result = f()
        if cuda:
            torch.cuda.synchronize()
        return (
            time.perf_counter() - begin, torch.cuda.max_memory_allocated() if cuda else None,
            result,
        )


def limits(work, device):
    """{flops: floating-point operations, bandwidth: bytes} per second that this machine reaches in
    simple work."""

    def best(f):
        f()
        times = []
        for _ in range(10):
            if device.type == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            f()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        return min(times)

    a, b = torch.randn(2, work.matrix, work.matrix, device=device, dtype=torch.bfloat16)
    source = torch.zeros(work.copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return {
        "flops": 2 * work.matrix**3 / best(lambda: a @ b),
        "bandwidth": 2 * work.copied / best(lambda: target.copy_(source)),
    }


def flops(model, batch):
    """The floating-point operations of one update on the batch, forward and backward, if nothing is
    computed twice.

    A weight costs 2 operations per token forward and 4 backward. The output head sees completion
    tokens only. Causal attention over a row of s tokens costs 2 · s · width operations per token
    and layer, for scores and values together, and three times as many with the backward pass. """
    config = model.config
    body, head = (
        sum(p.numel() for p in model.base_model.layers.parameters() if p.dim() == 2),
        config.vocab_size * config.hidden_size,
    )
    rows = [(len(p) + n, n) for p, n in zip(batch.prompts, batch.lengths.tolist())]
    return sum(
        6 * (body * s + head * n) + 6 * config.num_hidden_layers * config.hidden_size * s**2
        for s, n in rows
    )


# the sections: each a list of points, (labels, function) with the function returning the figures


def exactness(subject, limit):
    @torch.no_grad()
    def point():
        prompts, work = subject.prompts(1), subject.work
        # of one length: no token ends one
        drawn = sample(subject.copy, prompts, G, Sampling(work.mean), stop_ids=[-1], pad_id=0)
        batch = Batch(
            prompts * G, drawn.tokens, drawn.lengths, torch.zeros(G, device=subject.device)
        )
        scored = batch.logprobs(subject.model, 1.0)
        # no autocast
        exact = completion_logprobs(subject.model, batch.prompts, batch.tokens, batch.lengths)
        bf16 = (scored - exact)[batch.mask].abs()
        sampler = (scored - drawn.logp)[batch.mask].abs()
        return {"bf16_max": bf16.max().item(), "bf16_mean": bf16.mean().item(),
                "sampler_max": sampler.max().item(), "sampler_mean": sampler.mean().item()}

    return [({}, point)]


def steps(subject, limit):
    def point(algorithm, rate, allocation):
        k = keep_count(G, rate)
        questions = G // k if allocation else 1
        seconds, peak, batch = subject.roll_out(questions)
        batch = batch.rows(batch_rows(prune(batch.advantages.view(questions, G), k), G).cpu())
        row = {
            "k": k, "questions": questions, "kept": len(batch.prompts),
            "tokens": batch.lengths.sum().item(),
            "sampled": subject.rolled[questions][2].lengths.sum().item(), "sample": seconds,
            "sample_peak": peak,
        }
        row |= subject.trained(
            batch, algorithm, 2, Limits().micro_batch_tokens, subject.work.repeats
        )
        return row | {
            "utilisation": 2 * flops(subject.model, batch) / row["update"] / limit["flops"]
        }

    cases = [
        ("grpo", 0.0, False),
        *[("cppo", rate, True) for rate in reversed(PRUNING)],
        *[("cppo", rate, False) for rate in PRUNING],
    ]
    return [
        ({"algorithm": a, "P": rate, "allocation": alone}, lambda c=(a, rate, alone): point(*c))
        for a, rate, alone in cases
    ]


def decoding(subject, limit):
    def point(rows, dtype):
        prompts, n, config = (
            subject.prompts(rows // G), subject.work.decode_tokens, subject.model.config,
        )
        # the sampler casts float32 weights to bf16 once for each call; a bf16 copy has them so
        model = subject.model if dtype == "float32" else frozen_copy(subject.model, torch.bfloat16)
        first, last = [
            subject.measured(lambda t=t: subject.sampled(model, prompts, torch.full((rows,), t)))[0]
            for t in (1, n + 1)
        ]
        # on average n/2 tokens have been decoded; bf16: 2 bytes each
        width = sum(map(len, prompts)) / len(prompts) + n / 2
        cache = (
            rows
            * width
            * config.num_hidden_layers
            * 2
            * config.num_key_value_heads
            * config.hidden_size
            // config.num_attention_heads
        )
        floor = 2 * (model.num_parameters() + cache) / limit["bandwidth"]
        per_token = (last - first) / n
        return {
            "prompt_and_first": first, "per_token": per_token, "floor": floor,
            "tokens_per_second": rows / per_token,
        }

    return [({"rows": rows, "weights": dtype}, lambda c=(rows, dtype): point(*c))
            for dtype in ("float32", "bfloat16") for rows in subject.work.decode_rows]


def micro_batches(subject, limit):
    batch = subject.made_up(subject.work.kept)

    def point(tokens, checkpointing):
        if checkpointing:
            subject.model.gradient_checkpointing_enable({"use_reentrant": False})
        try:
            row = subject.trained(batch, "grpo", 1, tokens, subject.work.repeats)
        finally:
            subject.model.gradient_checkpointing_disable()
        return row | {
            "utilisation": flops(subject.model, batch) / row["update"] / limit["flops"],
            "completions": len(batch.prompts),
        }

    cases = [(tokens, False) for tokens in subject.work.micro_batches] + [
        (tokens, True) for tokens in subject.work.micro_batches
    ]
    return [
        ({"micro_batch_tokens": t, "checkpointing": c}, lambda c=(t, c): point(*c))
        for t, c in cases
    ]


def beside_trl(subject, limit):
    """GRPO on one question, μ = 1. All completions have the mean length, because TRL can impose one
    length only."""
    work, cuda = subject.work, subject.device.type == "cuda"
    width = sum(work.prompt) // 2

    def ours():
        prompts, lengths = [[7] * width], torch.full((G,), work.mean)
        seconds, peak, drawn = subject.measured(
            lambda: subject.sampled(subject.copy, prompts, lengths)
        )
        batch = Batch(
            prompts * G, drawn.tokens, drawn.lengths,
            torch.randn(G, generator=subject.draws).to(subject.device),
        )
        row = subject.trained(batch, "grpo", 1, 2**20, work.repeats)  # in one piece, as TRL has it
        return {"seconds": seconds + row["logprobs"] + row["update"], "peak": row["update_peak"]}

    def theirs():
        from datasets import Dataset
        from transformers import TrainerCallback
        from trl import GRPOConfig, GRPOTrainer

        ends = []

        def reward(completions, completion_ids, **_):
            assert all(len(ids) == work.mean for ids in completion_ids)
            return [float(i % 2) for i in range(len(completions))]

        class Times(TrainerCallback):
            def on_step_end(self, *args, **kwargs):
                ends.append(subject.measured(lambda: time.perf_counter())[2])

        with tempfile.TemporaryDirectory() as folder:
            subject.model.save_pretrained(folder)  # TRL reads policy and reference from there
            config = GRPOConfig(
                output_dir=folder, model_init_kwargs={"dtype": "float32"}, use_cpu=not cuda,
                bf16=cuda, gradient_checkpointing=False, per_device_train_batch_size=G,
                num_generations=G, max_completion_length=work.mean, max_steps=1 + work.repeats,
                generation_kwargs={"min_new_tokens": work.mean}, loss_type="grpo", beta=0.04,
                learning_rate=1e-6, report_to="none", logging_strategy="no", save_strategy="no",
                disable_tqdm=True, dataloader_pin_memory=False,
            )
            rows = Dataset.from_list([{"prompt": "7" * width}] * G)
            trainer = GRPOTrainer(
                folder, reward_funcs=reward, args=config, train_dataset=rows,
                processing_class=toy_model.make_tokenizer(), callbacks=[Times()],
            )
            _, peak, _ = subject.measured(trainer.train)
        return {"seconds": min(b - a for a, b in zip(ends, ends[1:])), "peak": peak}

    return (
        [({"library": "this project"}, ours), ({"library": "TRL"}, theirs)]
        if find_spec("trl")
        else []
    )


SECTIONS = {
    "exactness": exactness, "steps": steps, "decoding": decoding, "micro-batches": micro_batches,
    "TRL": beside_trl,
}


def run_points(points, until, done):
    """Run the points until the time is over; call done(row) after each.

    If a point fails or is left out, its row has an "error" with the reason.
    """
    for labels, point in points:
        try:
            row = point() if time.perf_counter() < until else {"error": "left out: no time"}
        except torch.OutOfMemoryError:
            row = {"error": "out of memory"}
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        done(labels | row)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


# the page


def table(columns, rows):
    """A Markdown table. columns: {heading: row → text}. A row with an error shows its labels and
    the error."""
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for row in rows:
        cells, error = [], row.get("error", "")
        for show in columns.values():
            try:
                cells.append(show(row))
            except KeyError:
                cells.append(error)
                error = ""
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def gigabytes(value):
    return "–" if value is None else f"{value / 1e9:.1f}"


def show_exactness(rows):
    return table(
        {
            "bf16 against float32: largest": lambda r: f"{r['bf16_max']:.1e}",
            "mean": lambda r: f"{r['bf16_mean']:.1e}",
            "sampler against scorer: largest": lambda r: f"{r['sampler_max']:.1e}",
            "mean ": lambda r: f"{r['sampler_mean']:.1e}",
        },
        rows,
    )


def show_steps(rows):
    def total(row):
        return row["sample"] + row["logprobs"] + row["update"]

    def speed(row):
        return row["questions"] / total(row)

    return table(
        {
            "": lambda r: r["algorithm"].upper() + (f", P = {r['P']}" if r["P"] else ""),
            "allocation": lambda r: "yes" if r["allocation"] else "no",
            "completions": lambda r: str(r["questions"] * G), "kept": lambda r: str(r["kept"]),
            "sampling, s": lambda r: f"{r['sample']:.2f}",
            "log-probabilities": lambda r: f"{r['logprobs']:.3f}",
            "update": lambda r: f"{r['update']:.3f}",
            "completions/s": lambda r: f"{speed(r) * G:.2f}",
            "speed-up": lambda r: f"{speed(r) / speed(rows[0]):.2f}",
            "tokens sampled/s": lambda r: f"{r['sampled'] / r['sample']:,.0f}",
            "utilisation": lambda r: f"{r['utilisation']:.1%}",
            "peak GB: sampling": lambda r: gigabytes(r["sample_peak"]),
            "log-probabilities ": lambda r: gigabytes(r["logprobs_peak"]),
            "update ": lambda r: gigabytes(r["update_peak"]),
        },
        rows,
    )


def show_decoding(rows):
    return table(
        {
            "weights": lambda r: r["weights"], "rows": lambda r: str(r["rows"]),
            "tokens/s": lambda r: f"{r['tokens_per_second']:,.0f}",
            "ms a token": lambda r: f"{r['per_token'] * 1e3:.2f}",
            "the memory's floor": lambda r: f"{r['floor'] * 1e3:.2f}",
            "share of it": lambda r: f"{r['floor'] / r['per_token']:.0%}",
            "prompt and first token, ms": lambda r: f"{r['prompt_and_first'] * 1e3:.0f}",
        },
        rows,
    )


def show_micro_batches(rows):
    return table(
        {
            "tokens": lambda r: f"{r['micro_batch_tokens']:,}",
            "checkpointing": lambda r: "yes" if r["checkpointing"] else "no",
            "log-probabilities, s": lambda r: f"{r['logprobs']:.3f}",
            "update, s": lambda r: f"{r['update']:.3f}",
            "utilisation": lambda r: f"{r['utilisation']:.1%}",
            "peak GB": lambda r: gigabytes(r["update_peak"]),
        },
        rows,
    )


def show_beside_trl(rows):
    return table(
        {
            "": lambda r: r["library"], "seconds a step": lambda r: f"{r['seconds']:.2f}",
            "peak GB": lambda r: gigabytes(r["peak"]),
        },
        rows,
    )


SHOW = {
    "exactness": ("Distance of log-probabilities, of random weights", show_exactness),
    "steps": (
        "Steps of training. Peaks include weights, gradients, AdamW's moments and the reference",
        show_steps,
    ),
    "decoding": (
        "Decoding: `sample` with the float32 weights of training, and with a bf16 copy of them",
        show_decoding,
    ),
    "micro-batches": ("One update (μ = 1) by the size of its micro-batches", show_micro_batches),
    "TRL": (
        "GRPO on one question, completions of the mean length, μ = 1. TRL's peak includes our "
        "weights and moments",
        show_beside_trl,
    ),
}


def page(result):
    """The results so far, as Markdown."""
    limit, work = result["limits"], result["work"]
    lines = [
        heading("A step of training on one GPU", result),
        f"{result['device']}: a bf16 matrix product reaches {limit['flops'] / 1e12:.1f} TFLOP/s, "
        f"a copy {limit['bandwidth'] / 1e9:,.0f} GB/s. Random weights, float32 with bf16 autocast, "
        f"a bf16 copy samples; lengths imposed: prompts of {work['prompt'][0]} to "
        f"{work['prompt'][1]} tokens, completions log-normal with a mean of {work['mean']}, at "
        f"most {work['longest']}; G = {G}. Utilisation is the model's operations in an update, "
        "AdamW's step in its time, over what the matrix product reaches.\n",
    ]
    for model in result["models"]:
        lines.append(f"## {model['name']}: {model['parameters']:,} parameters\n")
        for name, rows in ((name, rows) for name, rows in model["sections"].items() if rows):
            title, show = SHOW[name]
            lines.append(f"{title}:\n\n{show(rows)}")
    return "\n".join(lines)


def main(argv):
    begin, options = time.perf_counter(), parse(Options, argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.quick:
        raise UserError(
            "this benchmark needs a GPU: with --quick a CPU runs a tiny model, to see that it "
            "works."
        )
    names = ["tiny"] if options.quick else options.models.split(",")
    if unknown := set(names) - {*QWEN, "tiny"}:
        raise UserError(
            f"--models does not know {', '.join(unknown)}: there are {', '.join(QWEN)}."
        )
    work = QUICK if options.quick else Work()
    result = {
        **setting(["torch", "transformers"]), "options": asdict(options), "work": asdict(work),
        "limits": limits(work, device),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU", "models": [],
    }
    for i, name in enumerate(names):
        left = options.seconds - (time.perf_counter() - begin)
        budget = left / (len(names) - i)
        shape, vocabulary = (TINY, 512) if name == "tiny" else (QWEN[name], 151_936)
        subject = Subject(shape, vocabulary, work, device)
        model = {
            "name": name if name == "tiny" else f"Qwen2.5-{name.upper()}",
            "parameters": subject.model.num_parameters(),
        }
        result["models"].append(model | {"sections": (sections := {})})
        until = time.perf_counter()
        for section, points in SECTIONS.items():
            until += budget * SHARES[section]
            rows = sections[section] = []

            def done(row, rows=rows):
                rows.append(row)
                write(options.output, "gpu", result, page(result))

            run_points(
                tqdm(points(subject, result["limits"]), desc=f"{name}, {section}"), until, done
            )
        del subject
        gc.collect()
    print(page(result))


if __name__ == "__main__":
    run_program(main)
