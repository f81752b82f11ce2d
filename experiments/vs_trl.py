"""Seconds per step and per question: this project's GRPO and CPPO beside TRL's GRPOTrainer, and
beside CPPO in TRL.

    pip install trl
    python experiments/vs_trl.py                   writes vs_trl.json and vs_trl.md in
                                                   runs/results/
    python experiments/vs_trl.py --mu 2            CPPO's published μ: two updates per batch;
                                                   vs_trl_mu2.*
    python experiments/vs_trl.py --prompt 150      long prompts, as word problems have;
                                                   vs_trl_prompt150.*
    python experiments/vs_trl.py --shape Qwen/Qwen2.5-0.5B --tokens 128 --prompt 150 --rounds 3
                                                   a published shape, for a GPU

All four train the same Qwen2 (random weights, about 406,000 parameters, float32, one CPU thread; on
a GPU in bfloat16) on the same prompts and with the same reward: G = 16 completions per question, 8
questions per step of GRPO, β = 0.04, ε = 0.2, one update per batch of completions. CPPO (P = 0.875,
with allocation) takes 64 questions per step, so it is compared per question. CPPO in TRL is
examples/cppo_in_trl.py, which samples 64 questions too and trains on as many completions as GRPO.
All completions have the same length: the tokenizer's EOS is a token that the model does not have,
or, in a published shape, nearly never samples.

One round is one step of each. TRL's trainers run in threads of their own and wait for their turns,
so if the machine is slow for a while, it is slow for all four. Speed-ups are ratios within a round.

TRL is set up to be fast at this size: without gradient checkpointing, logging or saving, and with a
batch of 32 completions, four batches per step. This was the fastest batch among 16, 32, 64 and 128.
Ours is `train.train_step`, so the benchmark measures what `train.py` runs.
tests/test_cppo_in_trl.py proves that both sides have the same gradient.
"""

import math
import random
import sys
import tempfile
import threading
from copy import deepcopy
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median, quantiles

import torch
from transformers import PrinterCallback, TrainerCallback

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from engine.base.errors import UserError
from engine.base.program import run_program
from engine.data.questions import load_questions
from engine.model.loading import fewer_kernels, keep_freed_memory
from engine.model.logprobs import Policy
from engine.model.precision import choose_dtype
from engine.options.command_line import option, parse
from engine.options.config import config_of
from engine.scoring.score import Reward
from experiments.library import toy_model
from experiments.library.bench import (
    every_second,
    finish,
    heading,
    in_turn,
    markdown_table,
    networks_of,
    published,
    questions_of_step,
    qwen,
    seconds_of,
    this_device,
)
from experiments.library.study import publish
from loop.records import Parts
from loop.update import Limits
from train import train_step

LEARNING_RATE, RATE = 1e-4, 0.875
BATCHES = 4  # of a step of TRL
NAMES = {"trl": "TRL, GRPO", "trl_cppo": f"TRL, CPPO, P = {RATE}",
         "grpo": "ours, GRPO", "cppo": f"ours, CPPO, P = {RATE}"}
PER_STEP = {"trl": 8, "trl_cppo": 64, "grpo": 8, "cppo": 64}  # questions


@dataclass
class Options:
    rounds: int = option(20, "rounds measured: a step of each of the four")
    warmup: int = option(3, "rounds before them that are not measured")
    tokens: int = option(32, "length of every completion")
    prompt: int = option(
        0,
        "tokens of every prompt: digits stand before the question; 0: the toy's own prompts, about "
        "10 tokens",
    )
    mu: int = option(1, "μ, updates on each batch of completions; TRL's num_iterations")
    shape: str | None = option(None, "a published shape, as Qwen/Qwen2.5-0.5B; none: a tiny model")
    beside: list[str] | None = option(
        None, f"which stand beside TRL's GRPO: of {', '.join(list(NAMES)[1:])}; none: all")
    micro_batch_tokens: int = option(2048, "tokens in a micro-batch of ours")
    seconds: float = option(math.inf, "no round begins after so many seconds")
    output: str = option("runs/results", "folder of vs_trl.json and vs_trl.md")


def make_model(shape, device):
    """(model, tokenizer): the toy's tokenizer with an EOS that the tiny model does not have, so it
    is never sampled. A published shape has it, as one of 151,936 tokens."""
    tokenizer = toy_model.make_tokenizer()
    vocabulary = len(tokenizer)
    tokenizer.add_special_tokens({"eos_token": "<never>"})
    if shape:
        return published(shape, device), tokenizer
    model = qwen(
        vocab_size=vocabulary, hidden_size=128, intermediate_size=352, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=1024,
        initializer_range=0.1, pad_token_id=tokenizer.pad_token_id,
    )
    return model.to(device), tokenizer


class Ours:
    """One of our algorithms in training. `step()` trains on the next questions and notes the
    seconds of its sampling."""

    def __init__(self, algorithm, model, tokenizer, questions, options):
        chosen = {
            "algorithm": algorithm, "mu": options.mu, "minibatches": 1, "lr": LEARNING_RATE,
            "questions_per_step": PER_STEP["grpo"], "max_new_tokens": options.tokens,
        }
        if algorithm == "cppo":
            chosen["pruning_rate"] = RATE
        config, self.algorithm = config_of(chosen)
        self.sampling, self.micro_batch_tokens = config.sampling, options.micro_batch_tokens
        self.per_step = self.algorithm.questions_per_step
        assert self.per_step == PER_STEP[algorithm]
        dtype = choose_dtype("auto", model.device, model.num_parameters())
        model = deepcopy(model)
        fewer_kernels(model, model.device)
        policy = Policy(model, dtype)
        self.networks = networks_of(policy, tokenizer, config, self.algorithm)
        self.questions, self.generate = questions, []

    def step(self):
        steps = len(self.generate)
        questions = questions_of_step(self.questions, steps, self.per_step, seed=0)
        reward, rng = Reward("every second", every_second), random.Random(steps + 1)
        torch.backends.cuda.enable_cudnn_sdp(False)  # as for a loaded model
        limits = Limits(self.micro_batch_tokens)
        parts = Parts(self.networks, self.algorithm, [reward], self.sampling, limits)
        metrics, *_ = train_step(parts, questions, rng)
        assert metrics["length"] > 0.99 * self.sampling.max_new_tokens
        self.generate.append(metrics["seconds/generate"])


class Theirs(TrainerCallback):
    """A trainer of TRL in a thread of its own. `step()` lets it make a step and notes the seconds
    of its sampling."""

    def __init__(self, trainer, mu):
        self.trainer, self.mu = trainer, mu
        self.generate, self.sampling, self.turns = [], 0.0, threading.Barrier(2)
        generate = trainer.model.generate

        def timed(*args, **kwargs):
            found = []
            self.sampling += seconds_of(lambda: found.append(generate(*args, **kwargs)))
            return found[0]

        trainer.model.generate = timed
        trainer.add_callback(self)
        threading.Thread(target=self.train, daemon=True).start()
        self.turns.wait()

    def train(self):
        torch.set_num_threads(1)  # is a setting of the thread
        try:
            self.trainer.train()
        finally:  # if the training fails, `step` fails too, in place of waiting for ever
            self.turns.abort()

    def take_turns(self):
        """Hand the turn over, and wait until the other side hands it back."""
        self.turns.wait()
        self.turns.wait()

    def on_train_begin(self, *args, **kwargs):
        self.take_turns()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.mu == 0:  # TRL counts each of the μ updates as a step
            finish()
            self.take_turns()

    def step(self):
        self.sampling = 0.0
        torch.backends.cuda.enable_cudnn_sdp(True)  # PyTorch's default
        self.take_turns()
        self.generate.append(self.sampling)


def make_trainer(kind, model, tokenizer, questions, options, folder, per_step, **more):
    """A trainer of TRL that takes `per_step` questions a step."""
    from datasets import Dataset
    from trl import GRPOConfig

    gpu = model.device.type == "cuda"
    model.save_pretrained(folder)  # TRL reads policy and reference from there
    config = GRPOConfig(
        output_dir=folder, model_init_kwargs={"dtype": "float32"}, use_cpu=not gpu, bf16=gpu,
        fp16=False, gradient_checkpointing=False, disable_dropout=True, dataloader_pin_memory=False,
        per_device_train_batch_size=per_step * 16 // BATCHES, gradient_accumulation_steps=BATCHES,
        num_generations=16, max_completion_length=options.tokens, num_iterations=options.mu,
        max_steps=options.mu * (options.warmup + options.rounds),
        loss_type="grpo", scale_rewards="group", beta=0.04, epsilon=0.2, temperature=1.0,
        # TRL's default weights the KL by the ratio (DeepSeek-V3.2); GRPO's eq. 3 does not
        use_bias_correction_kl=False,
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant", weight_decay=0.0,
        max_grad_norm=1.0, report_to="none", logging_strategy="no", save_strategy="no",
        eval_strategy="no", disable_tqdm=True,
    )
    rows = Dataset.from_list([{"prompt": q["question"]} for q in questions])
    trainer = kind(
        folder, reward_funcs=every_second, args=config, train_dataset=rows,
        processing_class=tokenizer, **more,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def measure(options):
    """Run the rounds. Returns the contents of the results page."""
    from trl import GRPOTrainer

    from examples.cppo_in_trl import CPPOTrainer

    torch.set_num_threads(1)
    keep_freed_memory()  # as for a loaded model; it serves TRL, too
    device = this_device()
    model, tokenizer = make_model(options.shape, device)
    questions, _ = load_questions("toy", tokenizer, limit=512)
    if options.prompt:
        lengthen(questions, tokenizer, options.prompt)
    kinds = {"trl": (GRPOTrainer, {}), "trl_cppo": (CPPOTrainer, {"pruning_rate": RATE})}
    everyone = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            if name != "trl" and name not in (options.beside or NAMES):
                continue
            if name in kinds:
                kind, more = kinds[name]
                trainer = make_trainer(
                    kind, model, tokenizer, questions, options, folder, PER_STEP[name], **more
                )
                everyone[name] = Theirs(trainer, options.mu)
            else:
                everyone[name] = Ours(name, model, tokenizer, questions, options)
        steps = {name: one.step for name, one in everyone.items()}
        totals = in_turn(steps, options.warmup + options.rounds, options.seconds)
    seconds = {}
    for name, one in everyone.items():
        pairs = list(zip(one.generate, totals[name]))[options.warmup :]
        seconds[name] = [{"generate": part, "total": total} for part, total in pairs]
    return {
        "parameters": model.num_parameters(), "device": device.type,
        "questions_per_step": {name: PER_STEP[name] for name in everyone}, "seconds": seconds,
    }


def lengthen(questions, tokenizer, length):
    """Write digits before each question, so that its prompt has this many tokens."""
    for question in questions:
        digits_before = "7" * (length - len(question["prompt"]))
        question["question"] = digits_before + question["question"]
        question["prompt"] = tokenizer.encode(question["question"])


def show(values, digits):
    """Their median, and the quartiles in brackets."""
    if len(values) < 4:
        return f"{median(values):.{digits}f}"
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return f"{middle:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def page(result):
    """The results as Markdown."""
    options = result["options"]
    lines = [["", "questions a step", "seconds a step", "of it generation", "ms a question",
              "speed-up"]]
    of_trl = [row["total"] / PER_STEP["trl"] for row in result["seconds"]["trl"]]
    for name, rows in result["seconds"].items():
        questions = result["questions_per_step"][name]
        totals = [row["total"] for row in rows]
        generation = [row["generate"] for row in rows]
        ms = [1e3 * total / questions for total in totals]
        speedups = [1e3 * trl / own for trl, own in zip(of_trl, ms)]
        lines.append([
            NAMES[name], questions, show(totals, 3), show(generation, 3), show(ms, 1),
            show(speedups, 2),
        ])
    where = "float32, one thread"
    if result.get("device") == "cuda":
        where = "bfloat16, on a GPU"
    return (
        heading("GRPO and CPPO beside TRL's GRPOTrainer", result)
        + f"\nQwen2 with {result['parameters']:,} random weights, {where}; G = 16; "
        f"prompts of {options['prompt'] or 'about 10'} tokens, completions of {options['tokens']}; "
        f"μ = {options['mu']}; {options['rounds']} rounds after {options['warmup']} of warm-up. "
        "Medians, with quartiles in brackets. The speed-up is TRL's time for a question over ours, "
        f"round by round.\n\n{markdown_table(lines)}\n"
    )


def main(argv):
    options = parse(Options, argv)
    if find_spec("trl") is None:
        raise UserError("this benchmark needs TRL, which is not installed: `pip install trl`.")
    name = "vs_trl"
    if options.mu > 1:
        name += f"_mu{options.mu}"
    if options.prompt:
        name += f"_prompt{options.prompt}"
    result = {"options": asdict(options)} | measure(options)
    publish(options.output, name, result, page, packages=["trl"])


if __name__ == "__main__":
    run_program(main)
