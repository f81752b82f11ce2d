"""Evaluation: greedy accuracy, avg@k, pass@k and maj@k on GSM8K, MATH-500, AMC 2023, AIME 2024, the toy, or a file of questions.

    python eval.py --model runs/toy-cppo-1
    torchrun --nproc-per-node 2 eval.py --model Qwen/Qwen2.5-1.5B-Instruct --benchmark gsm8k math500 --samples 8
    python eval.py --from_file completions.jsonl              completions that some other program sampled
    python eval.py --compare A/eval-gsm8k.jsonl B/eval-gsm8k.jsonl

For every benchmark it writes eval-NAME.jsonl, each sampled answer with its verdict, and eval-NAME.json, the score with the
setting it was measured in. Interrupted, the same command goes on. The number of ranks changes nothing but the time.
"""

import hashlib
import json
import time
from collections import Counter
from dataclasses import dataclass, replace
from importlib.metadata import version
from math import comb
from pathlib import Path

import numpy as np
from tqdm import tqdm

from engine.model.folders import prompt_room, resolve_model
from engine.model.loading import load_model
from engine.model.sampling import Sampler, Sampling
from engine.run import logs, ranks
from engine.run.options import UserError, at_least, option, parse, run_program
from engine.scoring import score as scoring
from engine.tasks.questions import base_model, check_dataset, fingerprint, load_questions, read_jsonl, reward_columns
from engine.tasks.table import task_of
from rewards import extract_answer, to_number


@dataclass
class Config:
    model: str = option("toy", "hub name, model folder, folder of a run (its newest checkpoint), or toy: the toy's base model")
    benchmark: list[str] | None = option(None, "toy, toy_code, arithmetic, gsm8k, math500, amc23, aime24, or .jsonl files; none: toy")
    questions: int = option(0, "how many of each, from the first one on; 0: all of them")
    samples: int = option(4, "k of avg@k, pass@k, maj@k: completions sampled per question beside the greedy one; 0: greedy only")
    temperature: float = option(1.0, "of the sampled completions")
    top_p: float = option(1.0, "nucleus of the sampled completions")
    top_k: int = option(0, "most likely tokens that the sampled completions draw from; 0: all")
    max_new_tokens: int | None = option(None, "longest completion in tokens; none: 48 on the toy, 16 on arithmetic, else 1024")
    max_prompt_tokens: int = option(512, "questions with a longer prompt are skipped and counted")
    batch_size: int = option(256, "completions sampled at a time; the draws depend on it")
    system_prompt: str | None = option(None, "of the chat; none: asks for <think> and <answer> tags, on arithmetic to calculate")
    judge: str | None = option(None, "the reward that calls a completion right, above 0, as in train.py's --rewards; none: the benchmark's")
    seed: int = option(42, "of the sampling")
    output_dir: str | None = option(None, "where the results go; none: the model's folder, or here for a hub model")
    from_file: str | None = option(None, "only score a .jsonl file of question, answer, completion or completions; judge: gsm8k_accuracy")
    compare: list[str] | None = option(None, "two files of answers of the same questions: their difference, with a paired test")


# what of the setting must agree for two scores to mean the same. Models and weights are what is compared; seed, batch size and
# versions only make other draws of the same kind; other questions are refused
COMPARABLE = ("data", "judge", "judged_by", "system_prompt", "max_new_tokens", "samples", "temperature", "top_p", "top_k")


def evaluate(sampler, tokenizer, questions, reward, sampling, *, samples=1, batch_size=256, seed=42, label="eval", done=(), keep=None):
    """Sample and judge `samples` completions of every question; the ranks share the batches.

    sampler: an `engine.model.sampling.Sampler`, or the like. reward: a completion is right where it is above 0. sampling: a Sampling;
    temperature 0 is greedy. done: indices of questions that need no answer any more. keep: called with the records of every
    round of batches, on every rank.
    Returns one dict per completion, in the order of the questions, on every rank.
    """
    rank, world, size = ranks.rank(), ranks.world_size(), questions_in_a_batch(batch_size, samples)
    starts = [start for start in range(0, len(questions), size) if start not in done]
    records = []
    for i in tqdm(range(0, len(starts), world), desc=label, leave=False, disable=rank > 0):
        mine = []
        for start in starts[i : i + world][rank : rank + 1]:
            rows = questions[start : start + size]
            # a batch is the same whoever samples it
            drawn = sampler.sample([row["prompt"] for row in rows], samples, sampling, seed * 1_000_003 + start)
            indices = [start + j for j in range(len(rows)) for _ in range(samples)]
            mine = judged(indices, [row for row in rows for _ in range(samples)], drawn.texts(tokenizer, rows), reward)
            for record, length, truncated in zip(mine, drawn.lengths.tolist(), drawn.truncated.tolist(), strict=True):
                record |= {"tokens": length, "truncated": truncated}
        round_ = ranks.gather(mine)
        if keep:
            keep(round_)
        records += round_
    return sorted(records, key=lambda record: record["index"])


def questions_in_a_batch(batch_size, samples):
    return max(1, batch_size // samples)


def judged(indices, rows, texts, reward):
    """One record for every completion. indices: the question's number; rows: its columns. One of each for each text."""
    scores = scoring.score([scoring.Reward(getattr(reward, "__name__", "judge"), reward)], texts, reward_columns(rows))[0]
    return [
        {"index": index, "question": row["question"], "answer": row["answer"], "completion": text, "correct": score > 0, "score": score}
        for index, row, text, score in zip(indices, rows, texts, *(values.tolist() for values in scores.values()), strict=True)
    ]


def pass_at_k(n, right, k):
    """Probability that at least one of k completions drawn from n is right, `right` of n being so. (2107.03374, eq. 1)

    1 − C(n − right, k) / C(n, k), unbiased.
    """
    return 1 - comb(n - right, k) / comb(n, k)


def majority_is_right(records):
    """maj@k of one question: is the most frequent answer right? Equal numbers are one answer; of a tie the first; none do not vote."""
    votes = []
    for record in records:
        answer = extract_answer(record["completion"])
        number = to_number(answer) if answer else None
        votes.append(answer if number is None else number)
    counted = Counter(vote for vote in votes if vote is not None)
    return bool(counted) and records[votes.index(counted.most_common(1)[0][0])]["correct"]


def interval(values, draws=2000):
    """95% confidence interval of the mean over questions, by the percentile bootstrap. Returns (low, high)."""
    values = np.asarray(values, dtype=float)
    means = values[np.random.default_rng(0).integers(len(values), size=(draws, len(values)))].mean(1)
    return tuple(np.quantile(means, [0.025, 0.975]).tolist())


def by_question(records):
    groups = {}
    for record in records:
        groups.setdefault(record["index"], []).append(record)
    return dict(sorted(groups.items()))


def summarize(records):
    """Means over the records of `evaluate`, with intervals: accuracy (avg@k), and from two samples on pass@k and maj@k.

    k is the least number of completions that a question has. maj@k needs answers in one of `extract_answer`'s forms.
    """
    groups = list(by_question(records).values())
    right = [sum(r["correct"] for r in group) for group in groups]
    n = min(map(len, groups))
    scores = {"accuracy": [c / len(group) for c, group in zip(right, groups)]}
    for k in sorted({2**i for i in range(1, n.bit_length())} | ({n} - {1})):
        scores[f"pass@{k}"] = [pass_at_k(len(group), c, k) for c, group in zip(right, groups)]
    if n > 1 and any(extract_answer(record["completion"]) for record in records):
        scores[f"maj@{n}"] = [majority_is_right(group[:n]) for group in groups]
    summary = {name: sum(values) / len(values) for name, values in scores.items()}
    summary["intervals"] = {name: interval(values) for name, values in scores.items()}
    for name, key in [("length", "tokens"), ("truncated", "truncated")]:
        if all(key in r for r in records):
            summary[name] = sum(r[key] for r in records) / len(records)
    return summary | {"questions": len(groups), "samples": n}


def examine(sampler, tokenizer, questions, reward, sampling, *, samples=1, batch_size=256, seed=42, label="eval", path=None, earlier=()):
    """Greedy accuracy, and avg@`samples` and the like (0: leave them out).

    path: a file to which the records are written as they come. earlier: those that need not be made again, of `open_answers`.
    Returns {"greedy": …, "sampled": …, "seconds": of the sampled part, "examples": three questions}.
    """
    summary, there = {}, {"greedy": [], "sampled": []}
    for record in earlier:
        there[record["part"]].append({name: value for name, value in record.items() if name != "part"})
    for part, how, k in [("greedy", replace(sampling, temperature=0.0), 1), ("sampled", sampling, samples)]:
        if k == 0:
            continue
        begin = time.perf_counter()

        def keep(records, part=part):
            if path and ranks.rank() == 0:
                logs.append(path, *({"part": part, **record} for record in records))

        records = there[part] + evaluate(
            sampler, tokenizer, questions, reward, how, samples=k, batch_size=batch_size, seed=seed, label=f"{label}, {part}",
            done={r["index"] for r in there[part]}, keep=keep,
        )
        records.sort(key=lambda record: record["index"])
        summary[part] = summarize(records)
        summary |= {"seconds": time.perf_counter() - begin, "examples": [r for r in records if r["index"] < 3][::k]}
    return summary


def read_answers(path):
    """(setting, records) of a file of answers; a line that was cut off ends it. (None, []) where there is no file."""
    records = logs.read_whole(path)
    if records and not (isinstance(records[0], dict) and "setting" in records[0]):
        raise UserError(f"{path} is no file of answers that eval.py has written: name another --output_dir, or move it.")
    return (records[0]["setting"], records[1:]) if records else (None, [])


def open_answers(path, setting):
    """A new file for the answers, or that of an interrupted evaluation, cut back to its whole batches, whose records it returns."""
    there, records = read_answers(path)
    if there is not None and there != setting:
        other = ", ".join(f"{key} {there.get(key)!r:.60}" for key in setting if there.get(key) != setting[key])
        raise UserError(f"{path} holds answers in another setting ({other}): name another --output_dir, or remove it.")
    whole = []
    for part, samples in [("greedy", 1), ("sampled", setting["samples"])] if records else []:
        mine = by_question([r for r in records if r["part"] == part])
        complete = {i for i, group in mine.items() if len(group) == samples}
        size = questions_in_a_batch(setting["batch_size"], max(1, samples))
        for start in range(0, setting["questions"], size):
            indices = range(start, min(start + size, setting["questions"]))
            if complete.issuperset(indices):
                whole += [record for i in indices for record in mine[i]]
    logs.write(path, logs.as_lines([{"setting": setting}, *whole]))
    return whole


def scored_file(path, reward):
    """The records of completions that some other program sampled: lines with question, answer, and completion or completions.

    If the chat template writes `<think>` into the prompt, the completion must begin with it: here is no template to ask.
    """
    indices, rows, texts, seen = [], [], [], {}
    for number, row in enumerate(read_jsonl(path, reserved=["prompt"]), 1):
        several = row.pop("completions") if "completions" in row else [row.pop("completion", None)]
        if not isinstance(several, list) or not several or not all(isinstance(text, str) for text in several):
            raise UserError(f"{path}, question {number}: each line needs 'completion', a text, or each line 'completions', a list.")
        for text in several:
            indices.append(seen.setdefault(row["question"], len(seen)))
            rows.append(row)
            texts.append(text)
    return judged(indices, rows, texts, reward)


def paired(first, second, draws=10_000):
    """Are two lists of scores of the same questions different? (difference of the means, its 95% interval, two-sided p)

    p is that of the sign-flip permutation test: were the models equal, each question's difference could as well be its negative.
    """
    differences = np.asarray(second, dtype=float) - np.asarray(first, dtype=float)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(draws, len(differences)))
    as_far = np.abs(signs @ differences) >= abs(differences.sum()) - 1e-9
    return differences.mean().item(), interval(differences), (1 + as_far.sum().item()) / (1 + draws)


def compare(paths):
    """Print the difference between two files of answers."""
    sides, settings = [], []
    for path in paths:
        setting, records = read_answers(path)
        if setting is None:
            raise UserError(f"{path} is no file of answers that eval.py has written (eval-NAME.jsonl).")
        print(f"{setting['model']}: {path}")
        sides.append(records)
        settings.append(setting)
    for key in COMPARABLE:
        first, second = (setting.get(key) for setting in settings)
        if first != second:
            print(f"note: not the same {key}: {first!r:.60} and {second!r:.60}.")
    for part in ("greedy", "sampled"):
        first, second = (by_question([r for r in records if r["part"] == part]) for records in sides)
        if not first or not second:
            continue
        if [group[0]["question"] for group in first.values()] != [group[0]["question"] for group in second.values()]:
            raise UserError(f"the two files do not hold the same questions ({part}): only answers to the same questions can be compared.")
        scores = [[sum(r["correct"] for r in group) / len(group) for group in groups.values()] for groups in (first, second)]
        difference, (low, high), p = paired(*scores)
        print(f"{part:8} {np.mean(scores[0]):.4f} → {np.mean(scores[1]):.4f}   {difference:+.4f} [{low:+.4f}, {high:+.4f}], "
              f"p = {p:.4f}, {len(first)} questions")


def stamp_of(name):
    """Changes when the file of a judge does, or the weights in a model's folder; "" if there is neither.

    name: a path, FILE.py:FUNCTION, RewardModel:DIR, or another judge, perhaps with ":WEIGHT".
    """
    name = name.removeprefix("RewardModel:")
    while ":" in name and not Path(name).exists():
        name = name.rpartition(":")[0]
    path = Path(name)
    files = [path] if path.is_file() else sorted([*path.glob("*.safetensors"), *path.glob("*.bin")])
    stamps = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr(stamps).encode()).hexdigest()[:16] if stamps else ""


def report(summary):
    for part in ("greedy", "sampled"):
        for name, (low, high) in summary.get(part, {}).get("intervals", {}).items():
            title = f"avg@{summary[part]['samples']}" if (part, name) == ("sampled", "accuracy") else part if name == "accuracy" else name
            print(f"  {title:8} {summary[part][name]:.4f}  [{low:.4f}, {high:.4f}]")
        if "length" in summary.get(part, {}):
            print(f"           {summary[part]['length']:.1f} tokens, {summary[part]['truncated']:.1%} cut off")


def check(config):
    """The mistakes that can be seen before any work."""
    at_least(config, {"questions": 0, "samples": 0, "top_k": 0, "batch_size": 1, "max_prompt_tokens": 1, "max_new_tokens": 1})
    if config.temperature <= 0 or not 0 < config.top_p <= 1:
        raise UserError("--temperature must be above 0 and --top_p in (0, 1]; the greedy completion is always scored.")
    if config.compare and len(config.compare) != 2:
        raise UserError("--compare takes two files of answers.")
    config.benchmark = config.benchmark or ["toy"]
    for name in config.benchmark:
        check_dataset(name, config.model)
    stems = [Path(name).stem for name in config.benchmark]
    if len(set(stems)) < len(stems):
        raise UserError("--benchmark names two of the same name: their results would overwrite each other.")
    if config.model == "toy" and "toy_code" in config.benchmark and len(config.benchmark) > 1:
        raise UserError("toy_code has a base model of its own: evaluate it alone, or name a --model.")
    if config.judge:
        scoring.choose([config.judge])
    if config.model != "toy":
        resolve_model(config.model)


def main(argv):
    config = parse(Config, argv)
    check(config)
    if config.compare:
        return compare(config.compare)
    device = ranks.start()
    say = print if ranks.rank() == 0 else lambda *_: None
    folder = Path(config.output_dir or (config.model if Path(config.model).is_dir() else "."))
    folder.mkdir(parents=True, exist_ok=True)

    def judge(name):
        return config.judge or task_of(name).rewards[0]

    if config.from_file:
        name = judge(config.from_file)
        summary = summarize(scored_file(config.from_file, scoring.choose([name], device)[0].function))
        path = folder / f"scored-{Path(config.from_file).stem}.json"
        logs.write(path, json.dumps({"from_file": config.from_file, "judge": name, "sampled": summary}, indent=2) + "\n")
        report({"sampled": summary})
        return say(f"judged by {name}; written: {path}")

    source = resolve_model(base_model(config.model, config.benchmark[0]))
    model, tokenizer = load_model(source, device)
    for benchmark in config.benchmark:
        longest = config.max_new_tokens or task_of(benchmark).max_new_tokens
        prompt = config.system_prompt or task_of(benchmark).system_prompt
        questions, notes = load_questions(
            benchmark, tokenizer, split="test", system_prompt=prompt, limit=config.questions or None,
            max_prompt_tokens=prompt_room(model, longest, config.max_prompt_tokens),
        )
        setting = {
            "model": source, "benchmark": benchmark, "questions": len(questions), "data": fingerprint(questions),
            "judge": judge(benchmark), "system_prompt": prompt, "max_new_tokens": longest, "samples": config.samples,
            "temperature": config.temperature, "top_p": config.top_p, "top_k": config.top_k, "seed": config.seed,
            "batch_size": config.batch_size, "torch": version("torch"), "transformers": version("transformers"),
            "judged_by": stamp_of(judge(benchmark)), "weights": stamp_of(source),
        }
        path = folder / f"eval-{Path(benchmark).stem}.jsonl"
        earlier = ranks.from_first(open_answers(path, setting) if ranks.rank() == 0 else None)
        summary = examine(
            Sampler(model, tokenizer), tokenizer, questions, scoring.choose([judge(benchmark)], device)[0].function,
            Sampling(longest, config.temperature, config.top_p, config.top_k), samples=config.samples,
            batch_size=config.batch_size, seed=config.seed, label=benchmark, path=path, earlier=earlier,
        )
        if ranks.rank() == 0:
            logs.write(path.with_suffix(".json"), json.dumps(setting | {"notes": notes} | summary, indent=2, ensure_ascii=False) + "\n")
            print(f"\n{benchmark}: {len(questions)} questions, judged by {setting['judge']}, at most {longest} tokens, "
                  f"temperature {config.temperature:g}; 95% intervals in brackets")
            for note in notes:
                print(f"  note: {note}")
            report(summary)
            print(f"  written: {path.with_suffix('.json')} and {path.name}")
    ranks.stop()


if __name__ == "__main__":
    run_program(main)
