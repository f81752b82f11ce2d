"""Evaluation: greedy accuracy, avg@k, pass@k and maj@k on a benchmark or a file of questions.

    python eval.py --model runs/toy-cppo-1
    torchrun --nproc-per-node 2 eval.py --model Qwen/Qwen2.5-1.5B-Instruct --benchmark gsm8k math500
    python eval.py --from_file completions.jsonl       completions that another program sampled
    python eval.py --compare A/eval-gsm8k.jsonl B/eval-gsm8k.jsonl

For each benchmark it writes two files: eval-NAME.jsonl holds each sampled answer with its verdict,
and eval-NAME.json holds the scores with the setting in which they were measured. To resume an
interrupted evaluation, run the same command again. The number of processes changes only the time.
"""

import os
import time
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from answers import extract_answer, to_number
from engine.base import files, progress, ranks
from engine.base.errors import UserError, one_line
from engine.data.questions import fingerprint, with_prompts
from engine.data.rows import check_dataset, open_file, read_rows
from engine.model.contract import Sampling
from engine.model.folders import prompt_room, resolve_model
from engine.model.loading import load_model
from engine.model.networks import sampler_class, uses_own
from engine.model.sampling import Sampler
from engine.run.command_line import compose, given, given_twice, option, run_program
from engine.scoring.score import Reward, load_rewards, reward_columns, score
from scores import group_by_question, mean_value, paired, summarize
from tasks.table import TASKS, base_model, task_of

# --- sampling and judging ---


def evaluate(
    sampler, tokenizer, questions, is_right, sampling, *,
    samples=1, batch_size=256, seed=42, label="eval", path=None, part="sampled", known=(),
):  # fmt: skip
    """Sample and judge `samples` completions of every question. The processes share the batches.

    sampler: an `engine.model.sampling.Sampler`, or the like. sampling: a Sampling; temperature 0
    is greedy. is_right: a reward; a completion is right if it is above 0. path: a file to which the
    records of each round of batches are written, as those of `part`. known: records of an earlier
    call, which are not made again.
    Returns one dict per completion, in the order of the questions, on every process.
    """
    size = questions_in_a_batch(batch_size, samples)
    done = {record["index"] for record in known}
    starts = [start for start in range(0, len(questions), size) if start not in done]
    records = list(known)
    world = ranks.world_size()
    for turn in progress.over(range(0, len(starts), world), label, "batches"):
        mine = []
        for start in ranks.share(starts[turn : turn + world]):  # one, or none
            mine += sample_batch(
                sampler, tokenizer, questions, is_right, sampling, samples, start, size, seed)
        of_all = ranks.gather(mine)
        if path and ranks.rank() == 0:
            files.append(path, *[{"part": part, **record} for record in of_all])
        records += of_all
    return sorted(records, key=lambda record: record["index"])


def sample_batch(sampler, tokenizer, questions, is_right, sampling, samples, start, size, seed):
    """The records of the questions from `start` on, `size` of them."""
    rows = questions[start : start + size]
    # the same seed, whichever process samples the batch
    sampled = sampler.sample(
        [row["prompt"] for row in rows], samples, sampling, seed * 1_000_003 + start)
    indices = [start + j for j in range(len(rows)) for _ in range(samples)]
    texts = sampled.texts(tokenizer, rows)
    records = judge_answers(indices, [questions[i] for i in indices], texts, is_right)
    lengths = sampled.mask.sum(1).tolist()  # without what a tool wrote
    truncated = sampled.truncated.tolist()
    for record, length, cut in zip(records, lengths, truncated, strict=True):
        record["tokens"] = length
        record["truncated"] = cut
    return records


def judge_answers(indices, rows, texts, is_right):
    """One record for each completion, judged by the reward `is_right`.

    texts: the completions. indices, rows: for each text, the number of its question and the columns
    of its question.
    """
    reward = Reward(getattr(is_right, "__name__", "judge"), is_right)
    scores, _ = score([reward], texts, reward_columns(rows))
    values = scores[reward.name].tolist()
    return [
        {"index": index, "question": row["question"], "answer": row["answer"],
         "completion": text, "correct": value > 0, "score": value}
        for index, row, text, value in zip(indices, rows, texts, values, strict=True)
    ]


def questions_in_a_batch(batch_size, samples):
    return max(1, batch_size // samples)


def answer_of(completion):
    """The answer of a completion, or None. Equal numbers are one answer."""
    answer = extract_answer(completion)
    number = None if answer is None else to_number(answer)
    return answer if number is None else number


def examine(
    sampler, tokenizer, questions, is_right, sampling, *,
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
    parts = [("greedy", 1, replace(sampling, temperature=0.0))]
    if samples:
        parts.append(("sampled", samples, sampling))
    summary = {}
    for part, k, how in parts:
        begin = time.perf_counter()
        known = [without_part(record) for record in earlier if record["part"] == part]
        records = evaluate(
            sampler, tokenizer, questions, is_right, how, samples=k, label=f"{label}, {part}",
            part=part, known=known, **options)
        summary[part] = summarize(records, answer_of)
        summary["seconds"] = time.perf_counter() - begin
        summary["examples"] = [record for record in records if record["index"] < 3][::k]
    return summary


def without_part(record):
    return {key: value for key, value in record.items() if key != "part"}


# --- eval-NAME.jsonl ---


def read_answers(path):
    """(setting, records) of a file of answers, without lines that cannot be read. Without a file:
    (None, [])."""
    lines = files.read(path)
    if not lines:
        return None, []
    if not isinstance(lines[0], dict) or "setting" not in lines[0]:
        raise UserError(
            f"{path} is no file of answers that eval.py has written: name another --output_dir, or "
            "move it.")
    return lines[0]["setting"], lines[1:]


def open_answers(path, setting):
    """Start a file of answers, or continue the file of an interrupted evaluation.

    Returns the records that are kept: those of complete batches, because the evaluation samples
    whole batches.
    """
    earlier, records = read_answers(path)
    if earlier is not None:
        refuse_another_setting(path, earlier, setting)
    kept = []
    for part, samples in [("greedy", 1), ("sampled", setting["samples"])]:
        of_part = [record for record in records if record["part"] == part]
        if of_part:
            kept += complete_batches(of_part, samples, setting)
    files.write(path, files.as_lines([{"setting": setting}, *kept]))
    return kept


def refuse_another_setting(path, earlier, setting):
    """Refuse a file of answers that were sampled or judged with another setting."""
    changed = [
        f"{key} {earlier.get(key)!r:.60}" for key in setting if earlier.get(key) != setting[key]]
    if changed:
        raise UserError(
            f"{path} holds answers in another setting ({', '.join(changed)}): name another "
            "--output_dir, or remove it.")


def complete_batches(records, samples, setting):
    """The records of the batches that have all of their answers."""
    questions = setting["questions"]
    size = questions_in_a_batch(setting["batch_size"], samples)
    kept = []
    for start in range(0, questions, size):
        end = min(start + size, questions)
        batch = [record for record in records if start <= record["index"] < end]
        if len(batch) == (end - start) * samples:
            kept += batch
    return kept


# --- completions of another program ---


def judge_file(path, is_right):
    """The records of completions that another program sampled.

    Each line of the file holds question, answer, and either completion (a text) or completions (a
    list of texts). If the model's chat template writes `<think>` into the prompt, each completion
    in the file must begin with it.
    """
    indices, rows, texts = [], [], []
    known = {}  # {question: its index}
    for number, row in enumerate(open_file(path, reserved=["prompt"]), 1):
        single, several = row.pop("completion", None), row.pop("completions", None)
        completions = several or [single]
        one_list = isinstance(completions, list) and not (single and several)
        if not one_list or not all(isinstance(text, str) for text in completions):
            raise UserError(f"{path}, question {number}: each line needs either 'completion', a "
                            "text, or 'completions', a list of texts.")
        index = known.setdefault(row["question"], len(known))
        for text in completions:
            indices.append(index)
            rows.append(row)
            texts.append(text)
    return judge_answers(indices, rows, texts, is_right)


# --- two files of answers ---

# If these differ, two scores do not mean the same. The models and their weights are what is
# compared. The seed, the batch size and the versions only make other draws of the same kind.
COMPARABLE = (
    "data", "judge", "system_prompt", "max_new_tokens", "samples", "temperature", "top_p", "top_k",
    "rollout",
)


def compare(paths):
    """Print the difference between two files of answers to the same questions."""
    (setting, first), (other, second) = map(read_answers, paths)
    for path, found in zip(paths, (setting, other)):
        if found is None:
            raise UserError(f"{path} is no file of answers that eval.py has written.")
    print(f"{setting['model']}: {paths[0]}")
    print(f"{other['model']}: {paths[1]}")
    for key in COMPARABLE:
        if setting.get(key) != other.get(key):
            print(f"note: not the same {key}: {setting.get(key)!r:.60} and {other.get(key)!r:.60}.")
    for part in ("greedy", "sampled"):
        compare_part(part, first, second)


def compare_part(part, first, second):
    """Print the difference between the records of `part` in two files, if both have some."""
    first, second = (
        group_by_question([record for record in records if record["part"] == part])
        for records in (first, second))
    if not first or not second:
        return
    asked = [records[0]["question"] for records in first]
    if asked != [records[0]["question"] for records in second]:
        raise UserError(f"the two files do not hold the same questions ({part}): only answers to "
                        "the same questions can be compared.")
    before = [mean_value(records, "correct") for records in first]
    after = [mean_value(records, "correct") for records in second]
    difference, (low, high), p = paired(before, after)
    print(f"{part:8} {np.mean(before):.4f} → {np.mean(after):.4f}   {difference:+.4f} "
          f"[{low:+.4f}, {high:+.4f}], p = {p:.4f}, {len(asked)} questions")


# --- the program ---


@dataclass
class Config:
    model: str = option("toy", "hub name, model folder, folder of a run, or toy: its base model")
    benchmark: list[str] | None = option(
        None, f"{', '.join(TASKS)}, .jsonl files; none: toy")
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
    rollout: str = option(
        "own", "the sampler: own, or FILE.py:CLASS, one that is built on it (with a tool)")
    judge: str | None = option(
        None, "the reward by which a completion is right, above 0, as in train.py's --rewards; "
        "none: the benchmark's")
    seed: int = option(42, "of the sampling", limits="(-∞, ∞)")
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
        refuse_options(names - {"compare"}, "has no effect with --compare")
    if config.from_file:
        refuse_options(
            names - {"from_file", "judge", "output_dir"}, "has no effect with --from_file")
    if config.samples == 0:
        refuse_options(
            names & {"temperature", "top_p", "top_k", "seed"},
            "has no effect with --samples 0: nothing is sampled")
    config.benchmark = config.benchmark or ["toy"]
    for name in config.benchmark:
        check_dataset(name, config.model)
    stems = {Path(name).stem for name in config.benchmark}
    bases = {base_model(config.model, name) for name in config.benchmark}
    if config.compare and len(config.compare) != 2:
        raise UserError("--compare takes two files of answers.")
    if len(stems) < len(config.benchmark):
        raise UserError(
            "--benchmark names two of the same name: their results would overwrite each other.")
    if len(bases) > 1:
        raise UserError("--model toy is another base model for each of these data sets: evaluate "
                        "them one by one, or name a --model.")
    if not uses_own(config.rollout):
        raise UserError(
            f"--rollout {config.rollout} is not built on the project's own sampler: leave it out.")
    if config.judge:
        load_rewards([config.judge], option="--judge")
    return config


def refuse_options(names, matter):
    for name in sorted(names):
        raise UserError(f"--{name} {matter}.")


MEANS = {  # what a score is the share of
    "greedy": "the most likely answer is right",
    "avg": "a sampled answer is right ({} for each question)",
    "pass": "at least one of {} sampled answers is right",
    "maj": "the most frequent of {} sampled answers is right",
}


def report(summary):
    """Print the scores of each part, with their intervals."""
    for part, scores in summary.items():
        average = "greedy" if part == "greedy" else f"avg@{scores['samples']}"
        for name, (low, high) in scores["intervals"].items():
            title = average if name == "accuracy" else name
            kind, _, k = title.partition("@")
            means = MEANS[kind].format(k)
            print(f"  {title:8} {scores[name]:.3f}  [{low:.3f}, {high:.3f}]  {means}")
        if "length" in scores:
            print(f"  tokens   {scores['length']:.1f}; {scores['truncated']:.1%} are cut off")


def score_file(config, folder):
    """`--from_file`: judge completions that another program sampled."""
    judge = config.judge or task_of(config.from_file).rewards[0]
    [reward] = load_rewards([judge])
    records = judge_file(config.from_file, reward.function)
    summary = summarize(records, answer_of)
    path = folder / f"scored-{Path(config.from_file).stem}.json"
    files.write(path, files.as_json(
        {"from_file": config.from_file, "judge": judge, "sampled": summary}, indent=2))
    report({"sampled": summary})
    print(f"judged by {judge}; written: {path}")


def evaluate_benchmark(benchmark, rows, config, source, model, tokenizer, folder):
    """Evaluate one benchmark, write its two files and print its scores."""
    task = task_of(benchmark)
    longest = config.max_new_tokens or task.max_new_tokens
    judge = config.judge or task.rewards[0]
    prompt = config.system_prompt
    if prompt is None:
        prompt = task.system_prompt
    room = prompt_room(model, longest, config.max_prompt_tokens)
    questions, notes = with_prompts(
        rows, benchmark, tokenizer, system_prompt=prompt, max_prompt_tokens=room)
    sampling = Sampling(longest, config.temperature, config.top_p, config.top_k)
    setting = setting_of(config, source, benchmark, questions, judge, prompt, sampling, model.dtype)
    path = folder / f"eval-{Path(benchmark).stem}.jsonl"
    earlier = None
    if ranks.rank() == 0:
        earlier = open_answers(path, setting)
    [reward] = load_rewards([judge])
    sampler = Sampler(model, tokenizer)
    if config.rollout != "own":
        sampler = sampler_class(config.rollout)(sampler, tokenizer, sampling)
    summary = examine(
        sampler, tokenizer, questions, reward.function, sampling,
        samples=config.samples, batch_size=config.batch_size, seed=config.seed, label=benchmark,
        path=path, earlier=ranks.from_first(earlier))
    if ranks.rank() == 0:
        write_scores(path, setting, notes, summary)


def setting_of(config, source, benchmark, questions, judge, prompt, sampling, dtype):
    """What the scores depend on. An interrupted evaluation goes on only in the same setting."""
    return {
        "model": source,
        "benchmark": benchmark,
        "questions": len(questions),
        "data": fingerprint(questions),
        "judge": judge,
        "system_prompt": prompt,
        **asdict(sampling),
        "samples": config.samples,
        "rollout": config.rollout,
        "seed": config.seed,
        "batch_size": config.batch_size,
        "dtype": str(dtype).removeprefix("torch."),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def write_scores(path, setting, notes, summary):
    """Write the scores beside the answers, which are at `path`, and print them."""
    scores = path.with_suffix(".json")
    content = setting | {"notes": notes} | summary
    files.write(scores, files.as_json(content, indent=2))
    print(f"\n{setting['benchmark']}: {setting['questions']} questions, judged by "
          f"{setting['judge']}, temperature {setting['temperature']:g}; 95 % intervals in brackets")
    for note in notes:
        print(f"  note: {note}")
    report({part: summary[part] for part in ("greedy", "sampled") if part in summary})
    print(f"  written: {scores} and {path.name}")


def results_folder(config):
    """The folder of the results: --output_dir, or beside what is evaluated, or under runs/."""
    if config.output_dir:
        return Path(config.output_dir)
    evaluated = Path(config.from_file or config.model)
    beside = evaluated.parent if config.from_file else evaluated
    if beside.is_dir() and os.access(beside, os.W_OK):
        return beside
    return Path("runs", f"eval-{evaluated.resolve().name.removesuffix('.jsonl')}")


def main(argv):
    config = check(given(Config, argv))
    if config.compare:
        return compare(config.compare)
    device = ranks.start()
    for note in given_twice(argv):
        progress.note(f"note: {note}")
    folder = results_folder(config)
    try:
        if config.from_file:
            if not Path(config.from_file).is_file():
                raise UserError(f"--from_file: the file {config.from_file} does not exist: name a "
                                ".jsonl file of question, answer, and completion or completions.")
            folder.mkdir(parents=True, exist_ok=True)
            return score_file(config, folder)
        evaluate_all(config, folder, device)
    except torch.OutOfMemoryError:
        raise UserError(f"out of memory: lower --batch_size {config.batch_size}.") from None
    except OSError as error:
        raise UserError(f"stopped by the system: {one_line(error)}. The results go to {folder}: "
                        "make room there, or name another --output_dir.") from None
    ranks.stop()


def evaluate_all(config, folder, device):
    """Evaluate each benchmark. A wrong line of a file is refused before the model is loaded."""
    limit = config.questions or None
    rows = {name: read_rows(name, "test", limit, config.model) for name in config.benchmark}
    source = resolve_model(base_model(config.model, config.benchmark[0]))
    folder.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load_model(source, device, frozen=True)
    for name in config.benchmark:
        evaluate_benchmark(name, rows[name], config, source, model, tokenizer, folder)


if __name__ == "__main__":
    run_program(main)
