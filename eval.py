"""Evaluation: greedy accuracy, avg@k, pass@k and maj@k on a benchmark or a file of questions.

    python eval.py --model runs/toy-cppo-1
    torchrun --nproc-per-node 2 eval.py --model Qwen/Qwen2.5-1.5B-Instruct --benchmark gsm8k math500
    python eval.py --from_file completions.jsonl       completions that another program sampled
    python eval.py --compare A/eval-gsm8k.jsonl B/eval-gsm8k.jsonl

For each benchmark it writes two files: eval-NAME.jsonl holds each sampled answer with its verdict,
and eval-NAME.json holds the scores with the setting in which they were measured. If an evaluation
was interrupted, the same command goes on with it. The number of processes changes only the time.
"""

import os
import time
from collections import Counter
from dataclasses import dataclass, replace
from importlib.metadata import version
from math import comb
from pathlib import Path

import numpy as np
import torch

from engine.base import files, progress, ranks
from engine.base.errors import CANNOT_WRITE, UserError, refuse
from engine.model.folders import prompt_room, resolve_model
from engine.model.loading import load_model
from engine.model.sampling import Sampler, Sampling
from engine.run.answers import (
    by_question,
    judged,
    open_answers,
    questions_in_a_batch,
    read_answers,
    scored_file,
    stamp_of,
)
from engine.run.options import LARGEST, compose, given, option, run_program
from engine.scoring.score import choose
from engine.tasks.questions import base_model, check_dataset, fingerprint, load_questions
from engine.tasks.table import task_of
from rewards import extract_answer, to_number

# --- scores: numbers from verdicts ---


def pass_at_k(n, right, k):
    """Probability that at least one of k completions is right, of n of which `right` are right.

    1 − C(n − right, k) / C(n, k), the unbiased estimator. (2107.03374, eq. 1)
    """
    return 1 - comb(n - right, k) / comb(n, k)


def majority_is_right(records):
    """maj@k of one question: is the most frequent answer right?

    Equal numbers are one answer. If two answers are as frequent, the first counts. A completion
    without an answer does not vote.
    """
    answers = [extract_answer(record["completion"]) for record in records]
    numbers = [answer and to_number(answer) for answer in answers]
    votes = [answer if number is None else number for answer, number in zip(answers, numbers)]
    counted = Counter(vote for vote in votes if vote is not None)
    return bool(counted) and records[votes.index(counted.most_common(1)[0][0])]["correct"]


def interval(values, least=0.0, draws=2000):
    """95% confidence interval of the mean over questions: (low, high). Values lie in [least, 1].

    A share, of values 0 and 1, gets Wilson's interval, an average over samples a bootstrap. If all
    n values are equal, a bootstrap would call their mean certain. But of all questions a part of
    z² / (n + z²) may have another value (Wilson, 0 of n), from `least` to 1.
    """
    values = np.asarray(values, dtype=float)
    n, mean, z = len(values), values.mean().item(), 1.96
    unlike = z**2 / (n + z**2)
    if values.min() == values.max():
        return mean - unlike * (mean - least), mean + unlike * (1 - mean)
    if least == 0 and np.isin(values, (0, 1)).all():
        # all p with |p − mean| ≤ z √(p (1 − p) / n)
        center = mean + unlike * (0.5 - mean)
        half = z * (mean * (1 - mean) / n + z**2 / (4 * n**2)) ** 0.5 / (1 + z**2 / n)
        return center - half, center + half
    chosen = np.random.default_rng(0).integers(n, size=(draws, n))
    return tuple(np.quantile(values[chosen].mean(1), [0.025, 0.975]).tolist())


def paired(first, second, draws=10_000):
    """Are two lists of scores of the same questions different?

    Returns (difference of the means, its 95% interval, p). p is two-sided, by the sign-flip
    permutation test: if the models were equal, each difference could as well be its negative.
    """
    differences = np.asarray(second, dtype=float) - np.asarray(first, dtype=float)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(draws, len(differences)))
    as_far = np.abs(signs @ differences) >= abs(differences.sum()) - 1e-9
    p = (1 + as_far.sum().item()) / (1 + draws)
    return differences.mean().item(), interval(differences, least=-1.0), p


def summarize(records):
    """Means over the records of `evaluate`, with their intervals.

    accuracy (avg@k); from two completions of a question on also pass@k and maj@k. k is the
    smallest number of completions of a question. maj@k needs answers that `extract_answer` finds.
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
    if "tokens" in records[0]:  # else another program has sampled
        summary |= {name: sum(r[key] for r in records) / len(records)
                    for name, key in [("length", "tokens"), ("truncated", "truncated")]}
    return summary | {"questions": len(groups), "samples": n}


# --- sampling and judging ---


def evaluate(
    sampler, tokenizer, questions, reward, sampling, *,
    samples=1, batch_size=256, seed=42, label="eval", path=None, part="sampled", known=(),
):  # fmt: skip
    """Sample and judge `samples` completions of every question. The processes share the batches.

    sampler: an `engine.model.sampling.Sampler`, or the like. sampling: a Sampling; temperature 0
    is greedy. reward: a completion is right if its reward is above 0. path: a file to which the
    records of each round of batches are written, as those of `part`. known: records of an earlier
    call, which are not made again.
    Returns one dict per completion, in the order of the questions, on every process.
    """
    size, done = questions_in_a_batch(batch_size, samples), {record["index"] for record in known}
    starts = [start for start in range(0, len(questions), size) if start not in done]
    records, world = list(known), ranks.world_size()
    for turn in progress.over(range(0, len(starts), world), label, "batches"):
        mine = []
        for start in ranks.share(starts[turn : turn + world]):  # one, or none
            rows = questions[start : start + size]
            sampled = sampler.sample(
                [row["prompt"] for row in rows], samples, sampling,
                seed * 1_000_003 + start)  # the same, whichever process samples the batch
            indices = [start + j for j in range(len(rows)) for _ in range(samples)]
            answers = judged(
                indices, [questions[i] for i in indices], sampled.texts(tokenizer, rows), reward)
            facts = zip(answers, sampled.lengths.tolist(), sampled.truncated.tolist(), strict=True)
            mine = [answer | {"tokens": n, "truncated": cut} for answer, n, cut in facts]
        of_all = ranks.gather(mine)
        if path and ranks.rank() == 0:
            files.append(path, *({"part": part, **record} for record in of_all))
        records += of_all
    return sorted(records, key=lambda record: record["index"])


def examine(
    sampler, tokenizer, questions, reward, sampling, *,
    samples=1, label="eval", earlier=(), **options,
):  # fmt: skip
    """Greedy accuracy, and avg@`samples` and the like (0: leave them out).

    earlier: the records of `open_answers`, which are not made again. options: batch_size, seed and
    path, as for `evaluate`.
    Returns {"greedy": …, "sampled": …, "seconds": of the sampled part, "examples": 3 questions};
    {} without a question.
    """
    if not questions:
        return {}
    summary, parts = {}, [("greedy", replace(sampling, temperature=0.0), 1)]
    for part, how, k in parts + ([("sampled", sampling, samples)] if samples else []):
        begin = time.perf_counter()
        known = [{key: value for key, value in record.items() if key != "part"}
                 for record in earlier if record["part"] == part]
        records = evaluate(
            sampler, tokenizer, questions, reward, how, samples=k, label=f"{label}, {part}",
            part=part, known=known, **options)
        summary |= {part: summarize(records), "seconds": time.perf_counter() - begin,
                    "examples": [r for r in records if r["index"] < 3][::k]}
    return summary


# --- two files of answers ---

# If these differ, two scores do not mean the same. The models and their weights are what is
# compared. The seed, the batch size and the versions only make other draws of the same kind.
COMPARABLE = (
    "data", "judge", "judged_by", "system_prompt", "max_new_tokens", "samples", "temperature",
    "top_p", "top_k",
)  # fmt: skip


def compare(paths):
    """Print the difference between two files of answers to the same questions."""
    settings, records = zip(*map(read_answers, paths))
    refuse((setting is None, f"{path} is no file of answers that eval.py has written.")
           for path, setting in zip(paths, settings))
    print("\n".join(f"{setting['model']}: {path}" for path, setting in zip(paths, settings)))
    for key in COMPARABLE:
        first, second = (setting.get(key) for setting in settings)
        if first != second:
            print(f"note: not the same {key}: {first!r:.60} and {second!r:.60}.")
    for part in ("greedy", "sampled"):
        sides = [by_question([r for r in rs if r["part"] == part]).values() for rs in records]
        if not all(sides):
            continue
        asked, others = ([group[0]["question"] for group in side] for side in sides)
        refuse([(asked != others, f"the two files do not hold the same questions ({part}): "
                                  "only answers to the same questions can be compared.")])
        scores = [[np.mean([r["correct"] for r in group]) for group in side] for side in sides]
        difference, (low, high), p = paired(*scores)
        before, after = map(np.mean, scores)
        print(f"{part:8} {before:.4f} → {after:.4f}   {difference:+.4f} [{low:+.4f}, {high:+.4f}], "
              f"p = {p:.4f}, {len(asked)} questions")


# --- the program ---


@dataclass
class Config:
    model: str = option("toy", "hub name, model folder, folder of a run, or toy: its base model")
    benchmark: list[str] | None = option(
        None, "toy, toy_code, arithmetic, gsm8k, math500, amc23, aime24, .jsonl files; none: toy")
    questions: int = option(
        0, "how many of each, from the first one on; 0: all of them", limits="[0, ∞)"
    )
    samples: int = option(
        4, "k of avg@k, pass@k, maj@k: completions sampled per question; 0: only the greedy one",
        limits="[0, ∞)")
    temperature: float = option(
        1.0, "of the sampled completions; the greedy one is always scored", limits="(0, ∞)")
    top_p: float = option(1.0, "nucleus of the sampled completions", limits="(0, 1]")
    top_k: int = option(
        0, "sample from so many of the most likely tokens; 0: from all", limits="[0, ∞)"
    )
    max_new_tokens: int | None = option(
        None, "longest completion; none: the benchmark's", limits="[1, ∞)"
    )
    max_prompt_tokens: int = option(
        512, "questions with a longer prompt are skipped and counted", limits="[1, ∞)"
    )
    batch_size: int = option(
        256, "completions sampled at a time; the draws depend on it", limits="[1, ∞)"
    )
    system_prompt: str | None = option(None, "of the chat; none: the benchmark's")
    judge: str | None = option(
        None, "the reward by which a completion is right, above 0, as in train.py's --rewards; "
        "none: the benchmark's")
    seed: int = option(42, "of the sampling", limits=f"[{-LARGEST}, ∞)")
    output_dir: str | None = option(
        None, "where the results go; none: the folder of the model or of --from_file; "
        "runs/eval-NAME for a model of the hub, or if that folder is read-only")
    from_file: str | None = option(
        None, "only score a .jsonl file of question, answer, completion or completions; "
        "judge: gsm8k_accuracy")
    compare: list[str] | None = option(
        None, "two files of answers to the same questions: their difference, with a paired test")


def check(chosen):
    """A Config of the options that were given. Mistakes that can be seen before any work are
    refused."""
    config = compose(Config, chosen)
    names = set(chosen)
    if config.compare:
        refuse_names(names - {"compare"}, "has no effect with --compare")
    if config.from_file:
        allowed = {"from_file", "judge", "output_dir"}
        refuse_names(names - allowed, "has no effect with --from_file")
    if config.samples == 0:
        of_sampling = {"temperature", "top_p", "top_k", "seed"}
        refuse_names(names & of_sampling, "has no effect with --samples 0: nothing is sampled")
    config.benchmark = config.benchmark or ["toy"]
    for name in config.benchmark:
        check_dataset(name, config.model)
    stems = {Path(name).stem for name in config.benchmark}
    refuse([
        (config.compare and len(config.compare) != 2, "--compare takes two files of answers."),
        (len(stems) < len(config.benchmark),
         "--benchmark names two of the same name: their results would overwrite each other."),
        (config.model == "toy" and {"toy_code"} < stems,
         "toy_code has a base model of its own: evaluate it alone, or name a --model."),
    ])
    choose([config.judge] if config.judge else [], option="--judge")
    return config


def refuse_names(names, matter):
    refuse((True, f"--{name} {matter}.") for name in sorted(names))


def report(summary):
    """Print the scores of each part, with their intervals."""
    for part, scores in summary.items():
        titles = {"accuracy": "greedy" if part == "greedy" else f"avg@{scores['samples']}"}
        for name, (low, high) in scores["intervals"].items():
            print(f"  {titles.get(name, name):8} {scores[name]:.4f}  [{low:.4f}, {high:.4f}]")
        if "length" in scores:
            print(f"           {scores['length']:.1f} tokens, {scores['truncated']:.1%} cut off")


def score_file(config, folder, device):
    """`--from_file`: judge completions that another program sampled."""
    judge = config.judge or task_of(config.from_file).rewards[0]
    records = scored_file(config.from_file, choose([judge], device)[0].function)
    path, summary = folder / f"scored-{Path(config.from_file).stem}.json", summarize(records)
    files.write(path, files.as_json(
        {"from_file": config.from_file, "judge": judge, "sampled": summary}, indent=2))
    report({"sampled": summary})
    print(f"judged by {judge}; written: {path}")


def one_benchmark(benchmark, config, source, model, tokenizer, folder):
    """Evaluate one benchmark, write its two files and print its scores."""
    task, first = task_of(benchmark), ranks.rank() == 0
    longest, judge = config.max_new_tokens or task.max_new_tokens, config.judge or task.rewards[0]
    prompt = task.system_prompt if config.system_prompt is None else config.system_prompt
    questions, notes = load_questions(
        benchmark, tokenizer, split="test", system_prompt=prompt, limit=config.questions or None,
        max_prompt_tokens=prompt_room(model, longest, config.max_prompt_tokens),
    )
    setting = {
        "model": source, "benchmark": benchmark, "questions": len(questions),
        "data": fingerprint(questions), "judge": judge, "system_prompt": prompt,
        "max_new_tokens": longest, "samples": config.samples, "temperature": config.temperature,
        "top_p": config.top_p, "top_k": config.top_k, "seed": config.seed,
        "batch_size": config.batch_size,
        "dtype": str(model.dtype).removeprefix("torch."),
        "torch": version("torch"), "transformers": version("transformers"),
        "judged_by": stamp_of(judge), "weights": stamp_of(source),
    }
    path = folder / f"eval-{Path(benchmark).stem}.jsonl"
    summary = examine(
        Sampler(model, tokenizer), tokenizer, questions, choose([judge], model.device)[0].function,
        Sampling(longest, config.temperature, config.top_p, config.top_k), samples=config.samples,
        batch_size=config.batch_size, seed=config.seed, label=benchmark, path=path,
        earlier=ranks.from_first(open_answers(path, setting) if first else None),
    )
    if first:
        files.write(path.with_suffix(".json"), files.as_json(
            setting | {"notes": notes} | summary, indent=2))
        print(f"\n{benchmark}: {len(questions)} questions, judged by {judge}, at most {longest} "
              f"tokens, temperature {config.temperature:g}; 95% intervals in brackets",
              *(f"  note: {note}" for note in notes), sep="\n")
        report({part: summary[part] for part in ("greedy", "sampled") if part in summary})
        print(f"  written: {path.with_suffix('.json')} and {path.name}")


def results_folder(config):
    """The folder of the results: --output_dir, or beside what is evaluated, or under runs/."""
    beside = Path(config.from_file).parent if config.from_file else Path(config.model)
    evaluated = Path(config.from_file or config.model).resolve().name.removesuffix(".jsonl")
    if not (beside.is_dir() and os.access(beside, os.W_OK)):
        beside = f"runs/eval-{evaluated}"
    return Path(config.output_dir or beside)


def main(argv):
    config = check(given(Config, argv))
    if config.compare:
        return compare(config.compare)
    device, folder = ranks.start(), results_folder(config)
    source = config.from_file or resolve_model(base_model(config.model, config.benchmark[0]))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if config.from_file:
            return score_file(config, folder, device)
        model, tokenizer = load_model(source, device, frozen=True)
        for benchmark in config.benchmark:
            one_benchmark(benchmark, config, source, model, tokenizer, folder)
    except torch.OutOfMemoryError:
        raise UserError(f"out of memory: lower --batch_size {config.batch_size}.") from None
    except OSError as error:
        refuse([(error.errno in CANNOT_WRITE, f"{CANNOT_WRITE.get(error.errno)}, or name another "
                                              f"--output_dir than {folder}.")])
        raise
    ranks.stop()


if __name__ == "__main__":
    run_program(main)
