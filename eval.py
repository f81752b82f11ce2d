"""Evaluation: greedy accuracy and avg@k of a model on the toy, GSM8K or a local file of questions.

    python eval.py --model runs/toy-cppo-1 --dataset toy
    python eval.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset gsm8k --samples 4

Writes a JSON summary, and beside it every sampled answer with its verdict.
"""

import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from tqdm import tqdm

from engine import data, distributed, policy, toy
from engine.options import UserError, at_least, option, parse, run
from engine.rollout import Sampling, sample, stop_tokens


@dataclass
class Config:
    model: str = option("toy", "hub name, model folder, folder of a run (its newest checkpoint), or toy: the toy's base model")
    dataset: str = option("toy", "toy (its held-out questions), gsm8k (test split, from the hub), or a .jsonl file")
    questions: int = option(512, "how many questions, from the first one on; 0: all of them")
    samples: int = option(4, "k of avg@k: completions sampled per question beside the greedy one; 0: greedy only")
    temperature: float = option(1.0, "of the sampled completions")
    top_p: float = option(1.0, "nucleus of the sampled completions")
    top_k: int = option(0, "most likely tokens that the sampled completions draw from; 0: all")
    max_new_tokens: int | None = option(None, "longest completion in tokens; none: 48 on the toy, else 1024")
    max_prompt_tokens: int = option(512, "questions with a longer prompt are skipped and counted")
    batch_size: int = option(256, "completions sampled at a time")
    system_prompt: str | None = option(None, "of the chat; none: asks for <think> and <answer> tags")
    seed: int = option(42, "of the sampling")
    output: str | None = option(None, "the JSON summary's path; none: eval-DATASET.json in the model's folder, or here for a hub model")


def evaluate(model, tokenizer, questions, reward, sampling, *, samples=1, batch_size=256, seed=42, label="eval"):
    """Sample and judge `samples` completions of every question; the ranks share the questions.

    reward: a completion is right where it is above 0. sampling: a Sampling; temperature 0 is greedy.
    Returns one dict per completion, in the order of the questions, on every rank.
    """
    rank, world = distributed.rank(), distributed.world_size()
    generator = torch.Generator(model.device).manual_seed(seed * 1000 + rank)
    stop_ids = stop_tokens(model, tokenizer)
    mine = list(range(rank, len(questions), world))
    size = max(1, batch_size // samples)
    records = []
    for start in tqdm(range(0, len(mine), size), desc=label, leave=False, disable=rank > 0):
        batch = mine[start : start + size]
        rows = [questions[i] for i in batch]
        drawn = sample(
            model, [row["prompt"] for row in rows], samples, sampling,
            stop_ids=stop_ids, pad_id=tokenizer.pad_token_id, generator=generator,
        )
        rows = [row for row in rows for _ in range(samples)]
        texts = drawn.texts(tokenizer)
        scores = reward(texts, **{column: [row[column] for row in rows] for column in rows[0]})
        for j, (row, text, score) in enumerate(zip(rows, texts, scores, strict=True)):
            records.append({
                "index": batch[j // samples], "question": row["question"], "answer": row["answer"], "completion": text,
                "correct": score > 0, "score": score, "tokens": int(drawn.lengths[j]), "truncated": bool(drawn.truncated[j]),
            })
    return sorted(distributed.gather(records), key=lambda record: record["index"])


def summarize(records):
    """Means over the records of `evaluate`: accuracy, completion length in tokens, share truncated."""
    n = len(records)
    return {
        "accuracy": sum(r["correct"] for r in records) / n,
        "length": sum(r["tokens"] for r in records) / n,
        "truncated": sum(r["truncated"] for r in records) / n,
    }


def examine(model, tokenizer, questions, reward, sampling, *, samples=1, batch_size=256, seed=42, label="eval"):
    """Greedy accuracy and avg@`samples` (the mean accuracy of that many sampled completions per question; 0: leave it out).

    Returns (summary, records): {"greedy": …, "sampled": …, "seconds": of the sampled part, "examples": three questions},
    and the records of both parts.
    """
    summary, everything = {}, []
    for part, how, k in [("greedy", replace(sampling, temperature=0.0), 1), ("sampled", sampling, samples)]:
        if k == 0:
            continue
        begin = time.perf_counter()
        records = evaluate(
            model, tokenizer, questions, reward, how, samples=k, batch_size=batch_size, seed=seed, label=f"{label}, {part}"
        )
        summary[part] = summarize(records)
        summary |= {"seconds": time.perf_counter() - begin, "examples": [r for r in records if r["index"] < 3][::k]}
        everything += [{"part": part, **record} for record in records]
    return summary, everything


def check(config):
    """The mistakes that can be seen before any work."""
    at_least(config, {"questions": 0, "samples": 0, "top_k": 0, "batch_size": 1, "max_prompt_tokens": 1, "max_new_tokens": 1})
    if config.temperature <= 0 or not 0 < config.top_p <= 1:
        raise UserError("--temperature must be above 0 and --top_p in (0, 1]; the greedy completion is always scored.")
    data.check_name(config.dataset)
    if config.model != "toy":
        policy.resolve(config.model)


def main(argv):
    config = parse(Config, argv)
    check(config)
    device = distributed.start()
    model, tokenizer = policy.load(toy.base() if config.model == "toy" else config.model, device)
    longest = config.max_new_tokens or (toy.MAX_NEW_TOKENS if config.dataset == "toy" else 1024)
    questions, notes = data.load(
        config.dataset, tokenizer, split="test", system_prompt=config.system_prompt or data.SYSTEM_PROMPT,
        max_prompt_tokens=policy.prompt_room(model, longest, config.max_prompt_tokens), limit=config.questions or None,
    )
    for note in notes if distributed.rank() == 0 else []:
        print(f"note: {note}")

    reward = data.reward_functions(config.dataset)[0]
    sampling = Sampling(longest, config.temperature, config.top_p, config.top_k)
    summary, records = examine(
        model, tokenizer, questions, reward, sampling, samples=config.samples, batch_size=config.batch_size, seed=config.seed
    )

    if distributed.rank() == 0:
        folder = Path(config.model) if Path(config.model).is_dir() else Path(".")
        output = Path(config.output or folder / f"eval-{Path(config.dataset).stem}.json")
        output.parent.mkdir(parents=True, exist_ok=True)
        setting = {**asdict(config), "max_new_tokens": longest, "scored": len(questions), "notes": notes}
        output.write_text(json.dumps(setting | summary, indent=2, ensure_ascii=False) + "\n")
        answers = output.with_name(output.stem + "-answers.jsonl")
        answers.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
        for part, name in [("greedy", "greedy"), ("sampled", f"avg@{config.samples}")]:
            if part in summary:
                s = summary[part]
                print(f"{name:8} accuracy {s['accuracy']:.4f}   {s['length']:6.1f} tokens   {s['truncated']:.1%} truncated")
        print(f"written: {output} and {answers}")
    distributed.stop()


if __name__ == "__main__":
    run(main)
