"""Evaluation: greedy accuracy, avg@k, pass@k and maj@k on a benchmark or a file of questions.

    python eval.py --model runs/toy-cppo-1
    torchrun --nproc-per-node 2 eval.py --model Qwen/Qwen2.5-1.5B-Instruct --benchmark gsm8k math500

For each benchmark it writes two files: eval-NAME.jsonl holds each sampled answer with its verdict,
and eval-NAME.json holds the scores with the setting in which they were measured. Another setting
gets files of its own, eval-NAME-2.jsonl and so on. To resume an interrupted evaluation, run the
same command again. The number of processes changes only the time.
tools/compare.py compares two evaluations.
"""

import math
import time
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from answers import to_number
from engine.base import files, progress, ranks
from engine.base.errors import UserError
from engine.base.program import run_program
from engine.data.questions import with_prompts
from engine.data.rows import check_columns, check_dataset
from engine.model.folders import prompt_room, resolve_model
from engine.model.loading import load_model
from engine.model.networks import make_sampler, uses_builtin
from engine.model.sampler import Sampler
from engine.model.sampler_interface import Sampling
from engine.options.command_line import compose, parse_given
from engine.options.options import EvaluationOptions
from engine.report import answers as files_of_answers
from engine.run.checkpoint import BEST
from engine.run.folder import as_in_the_run, rows_for_eval
from engine.scoring.gold_answers import is_right_answer, notes_on_lost
from engine.scoring.score import (
    Reward,
    is_custom,
    is_graded,
    load_rewards,
    read_answer,
    reward_columns,
    score,
)
from scores import summarize, verdict
from tasks.table import TASKS, base_model, task_of

# --- sampling and judging ---


def sample_and_judge(
    sampler, tokenizer, questions, accuracy_reward, sampling, *,
    samples=1, batch_size=256, seed=42, label="eval", path=None, part="sampled", earlier=(),
):  # fmt: skip
    """Sample and judge `samples` completions of every question. The processes share the batches.

    sampler: an `engine.model.sampler.Sampler`, or the like. sampling: a Sampling; temperature 0
    is greedy. accuracy_reward: the reward whose verdict counts. path: a file to which the
    records of each round of batches are added, as those of `part`. earlier: the records of
    `open_answers`, which are not made again.
    Returns one dict per completion, in the order of the questions, on every process.
    """
    records = dict(earlier).get(part, [])
    size = files_of_answers.questions_in_a_batch(batch_size, samples)
    firsts = range(len(records) // samples, len(questions), size * ranks.world_size())
    for first in progress.over(firsts, f"{label}, {part}", "batches"):
        start = first + ranks.rank() * size  # in the last round there may be no question left
        batch = sample_batch(
            sampler, tokenizer, questions, accuracy_reward, sampling, samples, start, size, seed)
        of_all = ranks.gather(batch)
        records += of_all
        if path and ranks.rank() == 0:
            lines = [{"part": part, **record} for record in of_all]
            files.append(path, *lines)
    return records


def sample_batch(
    sampler, tokenizer, questions, accuracy_reward, sampling, samples, start, size, seed
):
    """The records of the questions from `start` on, `size` of them or what is left."""
    rows = questions[start : start + size]
    prompts = [row["prompt"] for row in rows]
    # the same seed, whichever process samples the batch
    sampled = sampler.sample(prompts, samples, sampling, seed * 1_000_003 + start)
    texts = sampled.texts(tokenizer, rows)
    lengths = sampled.mask.sum(1).tolist()  # without what a tool wrote
    truncated = sampled.truncated.tolist()
    judge = Reward(accuracy_reward.__name__, accuracy_reward)
    scores, _ = score([judge], texts, reward_columns(rows, samples))
    values = scores[judge.name].tolist()
    records = []
    for i, text in enumerate(texts):
        number = i // samples
        row = rows[number]
        records.append({
            "index": start + number, "question": row["question"], "answer": row["answer"],
            "completion": text, **record_scores(accuracy_reward, values[i]), "tokens": lengths[i],
            "truncated": truncated[i]})
    return records


def record_scores(accuracy_reward, value):
    """What a record says of the value of a reward. correct: None if it does not apply, or says more
    than right and wrong. score: None if it does not apply."""
    correct = None if is_graded(accuracy_reward, value) else verdict(value)
    return {"correct": correct, "score": None if math.isnan(value) else value}


def answer_of(judge, completion):
    """The answer of a completion as the reward `judge` reads it, or None. Equal numbers are one
    answer."""
    answer = read_answer(judge, completion)
    number = None if answer is None else to_number(answer)
    return answer if number is None else number


def evaluate(
    sampler, tokenizer, questions, accuracy_reward, sampling, *,
    samples=1, measure="accuracy", **options,
):  # fmt: skip
    """Greedy accuracy, and avg@`samples` and the like (0: leave them out).

    measure: "reward", if an accuracy_reward of the user's own is known to be no verdict. Then its
    mean comes in place of these.
    options: batch_size, seed, label, path and earlier, as for `sample_and_judge`.
    Returns {"greedy": …, "sampled": …, "seconds": of the sampled part, "examples": 3 questions,
    "measure": …}; {} without a question.
    """
    if not questions:
        return {}
    parts = [("greedy", 1, replace(sampling, temperature=0.0))]
    if samples:
        parts.append(("sampled", samples, sampling))
    summary, found = {}, {}
    for part, k, how in parts:
        begin = time.perf_counter()
        records = sample_and_judge(
            sampler, tokenizer, questions, accuracy_reward, how, samples=k, part=part, **options)
        if all(record["score"] is None for record in records):
            raise ranks.AgreedError("the reward that judges an evaluation applies to none of its "
                                    "questions: name another one first.")
        found[part] = records
        summary["seconds"] = time.perf_counter() - begin
        summary["examples"] = [row for row in records[: 3 * k : k] if row["score"] is not None]
    key = files_of_answers.score_key(chain(*found.values()))
    if measure == "reward" and is_custom(accuracy_reward):
        key = "score"
    summary["measure"] = "reward" if key == "score" else "accuracy"
    for part, records in found.items():
        summary[part] = summarize(records, partial(answer_of, accuracy_reward.__name__), key)
    return summary


# --- the program ---


def check(chosen):
    """The EvaluationOptions that were given. Mistakes that can be seen before any work are refused.
    """
    config = compose(EvaluationOptions, as_in_the_run(chosen))
    config.benchmark = config.benchmark or ["toy"]
    if config.best:
        if config.run and not Path(config.model, BEST).is_dir():
            raise UserError(f"{config.model} has no best checkpoint, which needs a run with "
                            "--eval_every: leave out --best.")
        config.model += f"/{BEST}"
    for name in config.benchmark:
        check_dataset(name, config.model)
    stems = {Path(name).stem for name in config.benchmark}
    bases = {base_model(config.model, name) for name in config.benchmark}
    if len(stems) < len(config.benchmark):
        raise UserError(
            "--benchmark names two of the same name: their results would overwrite each other.")
    if len(bases) > 1:
        raise UserError("--model toy is another base model for each of these data sets: evaluate "
                        "them one by one, or name a --model.")
    if not uses_builtin(config.sampler):
        raise UserError(f"--sampler {config.sampler} is not built on the project's sampler: write "
                        "--sampler builtin.")
    check_columns(config.columns, config.benchmark)
    if config.judge is not None:
        load_rewards([config.judge], option="--judge")
    return config


def results_folder(config):
    """The folder of the results: --output_dir, or the model's, or under runs/."""
    if config.output_dir:
        return Path(config.output_dir)
    model = Path(config.model)
    return model if model.is_dir() else Path("runs", f"eval-{model.name}")


def evaluate_benchmark(benchmark, rows, asked, config, model, tokenizer, folder):
    """Evaluate one benchmark, write its two files and print its scores. asked: what the run has
    done with its rows, in words."""
    task = task_of(benchmark, config.model)
    config = replace(
        config, judge=config.judge or task.rewards[0],
        max_new_tokens=config.max_new_tokens or task.max_new_tokens)
    if config.system_prompt is None:
        config.system_prompt = task.system_prompt
    room = prompt_room(model, config.max_new_tokens, config.max_prompt_tokens)
    [reward] = load_rewards([config.judge])
    questions, notes = with_prompts(
        rows, benchmark, tokenizer, system_prompt=config.system_prompt, max_prompt_tokens=room,
        template_options=config.chat_template_kwargs or {},
        is_right=partial(is_right_answer, reward))
    if benchmark not in TASKS:
        notes += notes_on_lost(reward, questions)
    sampling = Sampling(
        config.max_new_tokens, config.temperature, config.top_p, config.top_k, config.stop)
    setting = files_of_answers.setting_of(config, benchmark, questions, sampling, model.dtype)
    path = files_of_answers.path_of_setting(folder, benchmark, setting)
    earlier = files_of_answers.open_answers(path, setting) if ranks.rank() == 0 else None
    sampler = Sampler(model, tokenizer)
    if config.sampler != "builtin":
        sampler = make_sampler(config.sampler, model, sampler, tokenizer, sampling)
    summary = evaluate(
        sampler, tokenizer, questions, reward.function, sampling,
        samples=config.samples, measure=config.measure, batch_size=config.batch_size,
        seed=config.seed, label=benchmark, path=path, earlier=ranks.from_first(earlier))
    if ranks.rank() == 0:
        files_of_answers.write_scores(path, setting, asked, notes, summary)


def main(argv):
    config = check(parse_given(EvaluationOptions, argv))
    device = ranks.start()
    folder = results_folder(config)
    # a wrong line of a file is refused before the model is loaded
    rows = [rows_for_eval(name, config) for name in config.benchmark]
    config.model = resolve_model(base_model(config.model, config.benchmark[0]))
    try:
        with files.writing_into(folder):
            model, tokenizer = load_model(config.model, device, frozen=True)
            for benchmark, (its_rows, asked) in zip(config.benchmark, rows):
                evaluate_benchmark(
                    benchmark, its_rows, asked, config, model, tokenizer, folder)
    except torch.OutOfMemoryError:
        raise UserError(f"out of memory: lower --batch_size {config.batch_size}.") from None
    ranks.stop()


if __name__ == "__main__":
    run_program(main)
