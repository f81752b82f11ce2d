"""Train a language model with GRPO or CPPO on questions whose answers can be checked.

    torchrun train.py                                         the embedded default: no download, no GPU, minutes
    torchrun --nproc-per-node 2 train.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset gsm8k
    python train.py --help                                    every option

`train_step` below reads like the papers' algorithm box:

    for each step:
      1 sample G completions o_1 … o_G of each question from the policy π_old
      2 score them: rewards r
      3 advantages A over all G completions of a question
      4 keep: all of them (GRPO), or the k with the largest |A| (CPPO, which therefore takes more questions per step)
      5 log-probabilities of the reference policy, for the kept completions only
      6 μ updates on the kept completions; those of π_old come for free from the first of them, when π_θ is still π_old

Where we depart from the papers' published runs: on several devices each samples its own questions, and the loss is
normalised over the kept completions of all devices, so that the update does not depend on how they were shared out.
"""

import json
import math
import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from allocate import questions_per_step
from cppo import cppo_loss, keep_count, prune, prune_pooled
from engine import checkpoint, data, distributed, logs, policy, toy
from engine.options import UserError, as_words, option, parse, run
from engine.policy import Batch
from engine.rollout import Sampling, sample, stop_tokens
from eval import examine
from grpo import group_advantages, grpo_loss, sequence_mean_weights
from plot import curves


@dataclass(frozen=True)
class Algorithm:
    advantages: Callable  # (Q, G) rewards → (Q, G) advantages
    keep: str | None  # the rule by which completions are kept; None keeps all
    pruning_rate: float  # the default of --pruning_rate
    loss: Callable
    weights: Callable  # what each token of the batch counts
    clip: tuple[float, float]  # (low, high)
    beta: float  # of the KL term


ALGORITHMS = {
    "grpo": Algorithm(
        advantages=group_advantages, keep=None, pruning_rate=0.0,
        loss=grpo_loss, weights=sequence_mean_weights, clip=(0.2, 0.2), beta=0.04,
    ),
    "cppo": Algorithm(
        advantages=group_advantages, keep="largest_abs", pruning_rate=0.75,
        loss=cppo_loss, weights=sequence_mean_weights, clip=(0.2, 0.2), beta=0.04,
    ),
}

TOY = {"lr": 3e-4, "questions_per_step": 8, "max_new_tokens": toy.MAX_NEW_TOKENS}
OF_UPDATES = ("loss", "kl", "clip_fraction", "ratio_mean", "ratio_max", "grad_norm")  # None in a step without an update
COUNTS = ("questions", "completions", "kept", "tokens_generated", "tokens_trained")  # of a step, over all devices
REAL = {"lr": 1e-6, "questions_per_step": 1, "max_new_tokens": 1024}  # CPPO's published setting


@dataclass
class Config:
    algorithm: str = option("cppo", f"one of {', '.join(ALGORITHMS)}")
    model: str = option("toy", "hub name, model folder, folder of a run (its newest checkpoint), or toy: the toy's base model")
    dataset: str = option("toy", "toy, gsm8k (from the hub), or a .jsonl file with the columns question and answer")
    recipe: str | None = option(None, "a YAML file of options; the command line wins over it")
    output_dir: str | None = option(None, "folder of the run; none: a new one under runs/")
    resume: bool = option(False, "go on with the run in --output_dir, from its newest checkpoint and with its options")
    seed: int = option(42, "of the sampling and of the order of the questions")

    epochs: float = option(1.0, "passes over the questions")
    steps: int | None = option(None, "stop after this many steps; none: when the epochs are over")
    questions_per_step: int | None = option(None, "B, questions per device and step before allocation; none: 8 on the toy, else 1")
    group_size: int = option(16, "G, completions sampled per question")
    pruning_rate: float | None = option(None, "P of CPPO: ⌊G(1−P)⌋ completions are kept per question; none: 0.75")
    keep: str | None = option(None, "which ones CPPO keeps: largest_abs, largest, smallest_abs (|A|, A) or random; none: largest_abs")
    allocation: bool = option(True, "CPPO: fill the pruned places with more questions, ⌊B·G/k⌋ instead of B")
    prune_pooled: bool = option(False, "CPPO as in the published code: keep the largest |A| of all the device's questions together")

    temperature: float = option(1.0, "sampling temperature")
    top_p: float = option(1.0, "nucleus sampling; below 1 the sampled and the scored policy differ")
    top_k: int = option(0, "sample from the most likely tokens only; 0: all; else the sampled and the scored policy differ")
    max_new_tokens: int | None = option(None, "longest completion in tokens; none: 48 on the toy, else 1024")
    max_prompt_tokens: int = option(512, "questions with a longer prompt are skipped and counted")
    system_prompt: str | None = option(None, "of the chat; none: asks for <think> and <answer> tags")

    mu: int = option(2, "μ, updates on each batch of completions")
    beta: float | None = option(None, "β, weight of the KL to the reference; 0: no reference model; none: the algorithm's, 0.04")
    clip_low: float | None = option(None, "ε below 1; none: the algorithm's, 0.2")
    clip_high: float | None = option(None, "ε above 1; none: the algorithm's, 0.2")
    lr: float | None = option(None, "peak learning rate of AdamW; none: 3e-4 on the toy, else 1e-6")
    warmup: float = option(0.1, "share of the steps in which the learning rate rises; then it falls along a cosine")
    max_grad_norm: float = option(1.0, "gradients longer than this are scaled down to it")
    micro_batch_tokens: int = option(2048, "prompt and completion tokens, padding included, in one forward pass")

    eval_dataset: str | None = option(None, "questions scored before and after, as --dataset; none: the toy's held-out ones, else nothing")
    eval_questions: int = option(512, "how many of them")
    save_every: int = option(50, "steps between checkpoints")


def check(config):
    """Fill in what depends on other options; refuse what cannot work, before any work. Returns k."""
    if config.algorithm not in ALGORITHMS:
        raise UserError(f"unknown algorithm '{config.algorithm}': there are {', '.join(ALGORITHMS)}.")
    algorithm = ALGORITHMS[config.algorithm]
    if algorithm.keep is None and (config.pruning_rate or config.keep or config.prune_pooled):
        raise UserError(f"{config.algorithm} keeps every completion: --pruning_rate, --keep and --prune_pooled belong to cppo.")
    if config.keep and config.prune_pooled:
        raise UserError("--prune_pooled is a rule of its own: leave out --keep.")
    if config.group_size < 2:
        raise UserError(f"--group_size must be at least 2, not {config.group_size}: an advantage compares completions of one question.")
    least = {"steps": 1, "questions_per_step": 1, "max_new_tokens": 1, "max_prompt_tokens": 1, "mu": 1, "micro_batch_tokens": 1,
             "eval_questions": 1, "save_every": 1, "epochs": 0, "top_k": 0, "beta": 0, "lr": 0, "warmup": 0}
    for name, value in least.items():
        given = getattr(config, name)
        if given is not None and not value <= given < math.inf:
            raise UserError(f"--{name} must be at least {value}, not {given}.")
    for name in ("temperature", "epochs", "max_grad_norm", "clip_low", "clip_high"):
        if getattr(config, name) is not None and not getattr(config, name) > 0:
            raise UserError(f"--{name} must be above 0, not {getattr(config, name)}.")
    if not 0 < config.top_p <= 1 or not config.warmup < 1:
        raise UserError(f"--top_p must lie in (0, 1] and --warmup in [0, 1), not {config.top_p} and {config.warmup}.")
    for name in filter(None, [config.dataset, config.eval_dataset]):
        data.check_name(name)
    if config.model != "toy":
        policy.resolve(config.model)

    low, high = algorithm.clip
    defaults = {"pruning_rate": algorithm.pruning_rate, "beta": algorithm.beta, "clip_low": low, "clip_high": high,
                "keep": None if config.prune_pooled else algorithm.keep}
    for name, value in (defaults | (TOY if config.dataset == "toy" else REAL)).items():
        if getattr(config, name) is None:
            setattr(config, name, value)
    if config.eval_dataset is None and config.dataset == "toy":
        config.eval_dataset = "toy"
    try:
        k = keep_count(config.group_size, config.pruning_rate)
        select(torch.zeros(1, config.group_size), k, config)  # refuses an unknown rule
    except ValueError as error:
        raise UserError(f"{error}: mend --pruning_rate or --keep.") from None
    return k


def open_run(argv):
    """The options of a new run, or of one to resume (its own, with the command line on top), and k."""
    config = parse(Config, argv)
    if config.resume:
        if config.output_dir is None:
            raise UserError("--resume needs to know the run: --output_dir runs/NAME.")
        if config.recipe:
            raise UserError("--resume goes on with the run's own options: leave out --recipe.")
        saved_file = Path(config.output_dir) / "config.json"
        if not saved_file.exists():
            raise UserError(f"nothing to resume: {config.output_dir} holds no run. Start it without --resume.")
        checkpoint.newest(config.output_dir)
        saved = json.loads(saved_file.read_text())
        config = parse(Config, argv, earlier=as_words(saved, Config, str(saved_file)))
        for name in ("model", "algorithm", "dataset", "group_size", "seed"):
            if getattr(config, name) != saved[name]:
                raise UserError(f"{config.output_dir} was started with --{name} {saved[name]}: resume it with that, or start a new run.")
    k = check(config)
    if config.output_dir and Path(config.output_dir).is_file():
        raise UserError(f"--output_dir {config.output_dir} is a file: name a folder.")
    taken = config.output_dir and any((Path(config.output_dir) / name).exists() for name in ("config.json", "metrics.jsonl"))
    if taken and not config.resume:
        raise UserError(f"{config.output_dir} already holds a run: add --resume to go on with it, or name another --output_dir.")
    return config, k


def learning_rate(progress, config):
    """Linear warm-up over the first `warmup` of the run, then a cosine down to 0. progress in [0, 1]."""
    if progress <= config.warmup:
        return config.lr * progress / config.warmup
    return config.lr * 0.5 * (1 + math.cos(math.pi * (progress - config.warmup) / (1 - config.warmup)))


def select(advantages, k, config, generator=None):
    """Flat indices q·G + i of the completions that are kept, of all (Q, G). Ascending. generator: of --keep random."""
    n_questions, group_size = advantages.shape
    if config.prune_pooled:
        return prune_pooled(advantages, n_questions * k)
    if config.keep is None:
        return torch.arange(advantages.numel())
    kept = prune(advantages, k, rule=config.keep, generator=generator)
    return (kept + group_size * torch.arange(n_questions).unsqueeze(1)).flatten()


def update(model, optimizer, parts, algorithm, config):
    """μ optimizer steps on the kept completions of all devices, `parts` being this device's micro-batches.

    The weights are normalised over the whole step, so gradients add up over micro-batches and devices, however the
    completions were cut. Returns the means over the μ updates, and which of them were skipped as not finite.
    """
    device = model.device
    n = int(distributed.all_sum({"n": sum(len(part.prompts) for part in parts)}, device)["n"])
    history, skipped = [], []
    for epoch in range(config.mu):
        optimizer.zero_grad()
        sums, ratio_max = dict.fromkeys(["loss", "weight", "kl", "clip_fraction", "ratio_mean"], 0.0), 0.0
        for part in parts:
            logp = part.logprobs(model, config.temperature)
            if epoch == 0:
                part.old_logp = logp.detach()  # π_θ is still π_old
            weights = algorithm.weights(part.mask, num_sequences=n)
            loss, stats = algorithm.loss(
                logp, part.old_logp, part.advantages, part.mask, ref_logp=part.ref_logp, beta=config.beta,
                clip_low=config.clip_low, clip_high=config.clip_high, weights=weights,
            )
            loss.backward()
            weight, ratio_max = weights.sum().item(), max(ratio_max, stats["ratio_max"])
            sums["loss"] += loss.item()
            sums["weight"] += weight
            for name in ("kl", "clip_fraction", "ratio_mean"):
                sums[name] += weight * stats[name]
        distributed.sum_gradients(model)
        sums = distributed.all_sum(sums, device)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm).item()
        skipped.append(not (math.isfinite(norm) and math.isfinite(sums["loss"])))
        if not skipped[-1]:
            optimizer.step()
        weight = max(sums.pop("weight"), 1e-12)
        history.append({name: value if name == "loss" else value / weight for name, value in sums.items()} | {"grad_norm": norm})
        history[-1]["ratio_max"] = distributed.all_sum({"max": ratio_max}, device, op="max")["max"]
    means = {name: sum(h[name] for h in history) / len(history) for name in history[0]}
    return means | {"ratio_max": max(h["ratio_max"] for h in history), "skipped_updates": sum(skipped), "skipped": skipped}


def train_step(step, questions, model, reference, optimizer, tokenizer, functions, sampling, k, config):
    """One turn of the algorithm box on this device's `questions`. Returns (metrics, sample): one line for each log."""
    device, algorithm, G = model.device, ALGORITHMS[config.algorithm], config.group_size
    clock = logs.Clock(device)
    # all randomness of a step follows from these three numbers, so a resumed run repeats it exactly
    draw = random.Random(f"{config.seed} {step} {distributed.rank()}").getrandbits(62)
    generator = torch.Generator(device).manual_seed(draw)

    with clock.phase("generate"):  # 1 sample G completions of each question
        drawn = sample(
            model, [q["prompt"] for q in questions], G, sampling,
            stop_ids=stop_tokens(model, tokenizer), pad_id=tokenizer.pad_token_id, generator=generator,
        )
    with clock.phase("score"):  # 2 score them
        texts = drawn.texts(tokenizer)
        columns = {name: [q[name] for q in questions for _ in range(G)] for name in (questions[0] if questions else ())}
        rewards_by_part = data.score(functions, texts, columns) if questions else {f.__name__: torch.zeros(0) for f in functions}
        rewards = sum(rewards_by_part.values()).view(-1, G)  # (Q, G)
        # 3 advantages over all G completions of a question
        advantages = algorithm.advantages(rewards)
        # 4 keep
        kept = select(advantages, k, config, torch.Generator().manual_seed(draw))
    everything = Batch([q["prompt"] for q in questions for _ in range(G)], drawn.tokens, drawn.lengths, advantages.flatten().to(device))
    parts = everything.rows(kept).cut_into(config.micro_batch_tokens) if len(kept) else []

    signal_groups = (rewards.amax(1) > rewards.amin(1)).sum().item() if len(rewards) else 0
    sums = {"questions": len(questions), "completions": len(texts), "kept": len(kept), "signal": signal_groups,
            "accuracy": (rewards_by_part[functions[0].__name__] > 0).sum().item(), "reward": rewards.sum().item(),
            "tokens_generated": drawn.lengths.sum().item(), "tokens_trained": sum(part.lengths.sum().item() for part in parts),
            "truncated": drawn.truncated.sum().item(), "entropy": -drawn.logp.sum().item(),
            **{f"reward/{name}": values.sum().item() for name, values in rewards_by_part.items()}}
    sums = distributed.all_sum(sums, device)
    metrics = {"step": step} | {name: int(sums.pop(name)) for name in COUNTS}
    metrics["no_signal"] = 1 - sums.pop("signal") / metrics["questions"]
    metrics["length"] = metrics["tokens_generated"] / metrics["completions"]
    metrics["entropy"] = sums.pop("entropy") / metrics["tokens_generated"]
    metrics |= {name: value / metrics["completions"] for name, value in sums.items()}

    metrics |= dict.fromkeys(OF_UPDATES) | {"skipped_updates": 0, "skipped": []}
    if metrics["no_signal"] < 1:  # else every advantage is 0 and there is nothing to learn from
        with clock.phase("logprobs"), torch.no_grad():  # 5 log-probabilities of the reference, for the kept only
            for part in parts if config.beta else []:
                part.ref_logp = part.logprobs(reference, config.temperature)
        with clock.phase("update"):  # 6 μ updates on the kept
            metrics |= update(model, optimizer, parts, algorithm, config)
    metrics |= {f"seconds/{name}": seconds for name, seconds in clock.total().items()}

    kept = set(kept.tolist())
    group = [{"completion": text, "reward": r, "advantage": a, "kept": i in kept}
             for i, (text, r, a) in enumerate(zip(texts[:G], rewards.flatten().tolist(), advantages.flatten().tolist()))]
    q = questions[0] if questions else {"question": None, "answer": None}
    return metrics, {"step": step, "question": q["question"], "answer": q["answer"], "completions": group}


def train(config, k, device):
    """The whole run. Returns 0, or 130 where a signal ended it early."""
    first_rank, run_dir = distributed.rank() == 0, Path(config.output_dir)
    say = print if first_rank else lambda *_: None
    source = toy.base() if config.model == "toy" else config.model
    model, tokenizer = policy.load(source, device)
    reference = deepcopy(model).requires_grad_(False) if config.beta else None

    sampling = Sampling(config.max_new_tokens, config.temperature, config.top_p, config.top_k)
    prompts = {"tokenizer": tokenizer, "system_prompt": config.system_prompt or data.SYSTEM_PROMPT,
               "max_prompt_tokens": policy.prompt_room(model, config.max_new_tokens, config.max_prompt_tokens)}
    questions, notes = data.load(config.dataset, **prompts)
    test, more = data.load(config.eval_dataset, split="test", limit=config.eval_questions, **prompts) if config.eval_dataset else ([], [])
    for note in dict.fromkeys(sampling.notes + notes + more):
        say(f"note: {note}")
    functions = data.reward_functions(config.dataset)

    # B questions per device and step; with allocation as many as fill the same places after pruning
    per_device = questions_per_step(config.questions_per_step, config.group_size, k) if config.allocation else config.questions_per_step
    per_step = per_device * distributed.world_size()
    total = max(1, round(config.epochs * len(questions)))
    steps = min(config.steps or math.inf, math.ceil(total / per_step))

    # what a resumed run takes up again; step, order of the questions and random numbers follow from it and from the seed
    state = {"step": 0, "position": 0, "seconds": 0.0, "no_signal_steps": 0, "skipped_updates": 0, "skipped_in_a_row": 0,
             "before": {}, "source": source, "data": data.fingerprint(questions), "per_step": per_step}
    if config.resume:
        folder, state, optimizer_state = checkpoint.resume(run_dir, steps, expect=state)
        model = policy.load(folder, device)[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=0.0)
    if config.resume:
        optimizer.load_state_dict(optimizer_state)

    def judge(label):
        return examine(model, tokenizer, test, functions[0], sampling, seed=config.seed, label=label)[0] if test else {}

    if not config.resume:
        state["before"] = judge("before")
    if first_rank:
        if not config.resume:
            checkpoint.save(run_dir, model, tokenizer, optimizer, state)  # from here on there is something to resume
        for log in ("metrics.jsonl", "samples.jsonl"):
            logs.cut(run_dir / log, state["step"])
        (run_dir / "summary.json").unlink(missing_ok=True)  # it is the mark of a finished run
        logs.write(run_dir / "config.json", json.dumps(asdict(config) | {"resume": False}, indent=2) + "\n")
    distributed.barrier()
    with logs.Interrupt() as interrupt, tqdm(total=steps, initial=state["step"], desc=config.algorithm, disable=not first_rank) as bar:
        while state["step"] < steps and not interrupt.asked:
            step, count = state["step"] + 1, min(per_step, total - state["position"])
            mine = data.take(questions, state["position"], count, config.seed)[distributed.rank() :: distributed.world_size()]
            for group in optimizer.param_groups:
                group["lr"] = learning_rate((step - 0.5) / steps, config)
            metrics, samples = train_step(step, mine, model, reference, optimizer, tokenizer, functions, sampling, k, config)

            for skipped in metrics.pop("skipped"):
                state["skipped_in_a_row"] = state["skipped_in_a_row"] + 1 if skipped else 0
            state |= {"step": step, "position": state["position"] + count, "seconds": state["seconds"] + metrics["seconds/total"],
                      "no_signal_steps": state["no_signal_steps"] + (metrics["no_signal"] == 1),
                      "skipped_updates": state["skipped_updates"] + metrics["skipped_updates"]}
            if first_rank:
                logs.append(run_dir / "metrics.jsonl", metrics | {"lr": optimizer.param_groups[0]["lr"]})
                logs.append(run_dir / "samples.jsonl", samples)
            bar.set_postfix(accuracy=f"{metrics['accuracy']:.2f}", length=f"{metrics['length']:.0f}")
            bar.update()
            if state["skipped_in_a_row"] >= 5:
                raise UserError(f"stopped at step {step}: {state['skipped_in_a_row']} updates in a row had a loss or a gradient that is "
                                f"not finite, and were skipped. Lower --lr, or look into samples.jsonl. {checkpoint.say(run_dir)}")
            interrupt.share(device)
            due = step % config.save_every == 0 and not state["skipped_in_a_row"]  # while updates fail, the last good one stays
            if due or interrupt.asked or step == steps:
                if first_rank:
                    checkpoint.save(run_dir, model, tokenizer, optimizer, state)
                distributed.barrier()
    if state["step"] < steps:
        say(f"stopped after step {state['step']} of {steps}. {checkpoint.say(run_dir)}")
        return 130

    after = judge("after")
    if first_rank:
        rows = logs.read(run_dir / "metrics.jsonl")
        summary = {"algorithm": config.algorithm, "k": k, **{name: sum(row[name] for row in rows) for name in COUNTS}, **state,
                   "phases": logs.phase_totals(rows), "notes": notes, "after": after, "checkpoint": str(checkpoint.newest(run_dir))}
        curves([run_dir], run_dir / "curves.png")
        logs.write(run_dir / "summary.json", json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
        logs.report(summary)
    return 0


def main(argv):
    config, k = open_run(argv)
    device = distributed.start()
    if distributed.rank() == 0:
        config.output_dir = config.output_dir or logs.new_folder(f"{Path(config.dataset).stem}-{config.algorithm}")
        Path(config.output_dir).mkdir(parents=True, exist_ok=True)
    config.output_dir = distributed.from_first(config.output_dir)
    try:
        code = train(config, k, device)
    except KeyboardInterrupt:
        print(f"interrupted. {checkpoint.say(config.output_dir)}")
        code = 130
    distributed.stop()
    return code


if __name__ == "__main__":
    run(main)
