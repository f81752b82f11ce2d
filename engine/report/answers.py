"""The files of an evaluation: eval-NAME.jsonl, its answers, and eval-NAME.json, its scores.

The first line of a file of answers is the setting, each other line one answer with its verdict. An
interrupted evaluation continues its file. Another setting gets a file of its own.
"""

from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from engine.base import files
from engine.base.errors import UserError
from engine.data.questions import fingerprint


def read_answers(path):
    """(setting, {part: its records}) of a file of answers, without lines that cannot be read.
    Raises UserError if eval.py has not written the file."""
    match files.read_lines(path):
        case [{"setting": setting}, *records]:
            answers = {}
            for record in records:
                answers.setdefault(record.pop("part"), []).append(record)
            return setting, answers
    raise UserError(f"{path} is no file of answers that eval.py has written: name another one, or "
                    "another --output_dir.")


def path_of_setting(folder, benchmark, setting):
    """The file of answers of this setting: the first that has it, or does not exist yet."""
    name = f"eval-{Path(benchmark).stem}"
    path = folder / f"{name}.jsonl"
    n = 1
    while path.is_file():
        earlier, _ = read_answers(path)
        if earlier | setting == earlier:
            break
        n += 1
        path = folder / f"{name}-{n}.jsonl"
    return path


def open_answers(path, setting):
    """Start a file of answers, or continue the file of an interrupted evaluation in this setting.

    Returns {part: the records before the first batch that lacks an answer}, because the evaluation
    samples whole batches.
    """
    answers = read_answers(path)[1] if path.is_file() else {}
    lines = [{"setting": setting}]
    for part, records in answers.items():
        samples = 1 if part == "greedy" else setting["samples"]
        size = questions_in_a_batch(setting["batch_size"], samples)
        count = 0  # of those that stand at their place
        for record in records:
            if record["index"] != count // samples:
                break
            count += 1
        if count < setting["questions"] * samples:
            count -= count % (size * samples)
        del records[count:]
        lines += [{"part": part, **record} for record in records]
    files.write(path, files.as_lines(lines))
    return answers


# --- the scores in words ---

MEANS = {  # what a score is the share of
    "greedy": "the most likely answer is right",
    "avg": "a sampled answer is right ({} for each question)",
    "pass": "at least one of {} sampled answers is right",
    "maj": "the most frequent of {} sampled answers is right",
    "reward, greedy": "the mean reward of the most likely answer",
    "reward, avg": "the mean reward of a sampled answer ({} for each question)",
}


def print_scores(part, scores):
    """Print the scores of one part, "greedy" or "sampled", with their intervals."""
    average = "greedy" if part == "greedy" else f"avg@{scores['samples']}"
    for name, (low, high) in scores["intervals"].items():
        title = name.replace("accuracy", average).replace("reward", f"reward, {average}")
        kind, _, k = title.partition("@")
        means = MEANS[kind].format(k)
        value = f"{scores[name]:.3f}"
        interval = f"[{low:.3f}, {high:.3f}]"
        print(f"  {title:8} {value}  {interval}  {means}")
    if "length" in scores:
        print(f"  tokens, {part}: {scores['length']:.1f}; {scores['truncated']:.1%} are cut off")


def score_key(records):
    """What counts of these records: "correct", or "score" if a reward is no verdict."""
    grades = any(row["correct"] is None and row["score"] is not None for row in records)
    return "score" if grades else "correct"


def setting_of(config, benchmark, questions, sampling, dtype):
    """What the scores depend on. An interrupted evaluation goes on only in the same setting."""
    return {
        "model": config.model,
        "benchmark": benchmark,
        "questions": len(questions),
        "data": fingerprint(questions),
        "judge": config.judge,
        "system_prompt": config.system_prompt,
        "chat_template_kwargs": config.chat_template_kwargs,
        **asdict(sampling),
        "samples": config.samples,
        "sampler": config.sampler,
        "seed": config.seed,
        "batch_size": config.batch_size,
        "dtype": str(dtype).removeprefix("torch."),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def write_scores(path, setting, asked, notes, summary):
    """Write the scores beside the answers, which are at `path`, and print them."""
    scores = path.with_suffix(".json")
    content = setting | {"of_the_run": asked, "notes": notes} | summary
    files.write(scores, files.as_json(content, indent=2))
    print(f"\n{setting['benchmark']}: {setting['questions']} questions{asked}, judged by "
          f"{setting['judge']}, temperature {setting['temperature']:g}; 95 % intervals in brackets")
    for note in notes:
        print(f"  note: {note}")
    for part in ("greedy", "sampled"):
        if part in summary:
            print_scores(part, summary[part])
    print(f"  written: {scores} and {path.name}")


def questions_in_a_batch(batch_size, samples):
    return max(1, batch_size // samples)
