"""Diagnosis of a run from its logs: the findings of tools/doctor.py and train.py.

A finding is (what a person can change, what is wrong, names of the metrics that show it, and maybe
completions that show it). The functions yield findings, a cause before its effects. Only the first
finding is said, because the next ones may be its effects. If the logs leave several causes, the
finding names a change for each.
"Healthy" in a comment: the extreme of full toy runs. At the end of a run train.py prints the
finding; if there is none, it prints the command of the doctor.
"""

import contextlib
import json
import shlex
from collections import defaultdict, namedtuple
from pathlib import Path
from statistics import fmean, mode, pvariance

from answers import gold_answer, same_quantity, to_number
from engine.base import files, progress, ranks
from engine.run.folder import options_of
from engine.scoring.score import read_answer

# AdamW moves a weight by at most about the learning rate in each update; CPPO's recipe adds up to
# 1e-3
LEAST_MOVE = 1e-4
STEPS = 8  # fewer say nothing about the accuracy: four for the start, four for the end
# first: before any update; start: mean of an eighth of the values; end: of a quarter; most: the
# largest
Metric = namedtuple("Metric", "first start end mean most rises falls count", defaults=[0.0] * 8)


def metrics_of(rows):
    """{name: Metric}. A metric without any value is 0."""
    metrics = defaultdict(Metric)
    for name in rows[-1]:
        values = [row[name] for row in rows if row.get(name) is not None]
        if values:
            metrics[name] = metric_of(values)
    return metrics


def metric_of(values):
    first = values[: max(4, len(values) // 8)]
    last = values[-max(4, len(values) // 4) :]
    start = fmean(first)
    end = fmean(last)
    # of the difference of two means: √(σ₁² / (n₁ − 1) + σ₂² / (n₂ − 1))
    error = (squared_error(first) + squared_error(last)) ** 0.5
    rises = end - start > 2 * error
    falls = start - end > 2 * error
    return Metric(values[0], start, end, fmean(values), max(values), rises, falls, len(values))


def squared_error(values):
    """Of their mean."""
    return pvariance(values) / max(1, len(values) - 1)


def from_start(metric):
    """Its value before the first update, if it does not fall at once."""
    return min(metric.first, metric.start)


def texts_of(samples):
    return [row["completion"] for sample in samples for row in sample["completions"]]


def verdicts(samples, first):
    """[(a completion, whether it gives the gold answer, whether the first reward pays it)]. None:
    earlier versions did not log it, or a text may be equal to the gold answer in another form.
    first: the name of the first reward."""
    found = []
    for sample in samples:
        gold = gold_answer(sample["answer"])
        for row in sample["completions"]:
            answer = read_answer(first, row["completion"]) or ""
            right = answer == gold or same_quantity(answer, gold)
            paid = row.get("correct")
            if not right and None in (to_number(answer), to_number(gold)):
                paid = None
            found.append((row["completion"], right, paid))
    return found


# --- the findings ---


def findings(m, options, samples, steps, below=""):
    """The findings of a run. m: its metrics. samples: those of its first steps and of its last one.
    below: that it ends below its start, in words."""
    rewards = (name.removeprefix("reward/") for name in m if name.startswith("reward/"))
    first = next(rewards, "")  # "": it applies to no completion
    measure = options.get("measure", "accuracy")
    enough = steps >= STEPS
    stuck = below or not enough or not m[measure].rises
    judged = samples if stuck and measure == "accuracy" else []
    yield from findings_of_rewards(m, first, judged)
    yield from findings_of_parts(m, first)
    if stuck:
        yield from findings_of_large_updates(m, options)
    yield from findings_of_sampler(m)
    if measure == "accuracy":
        yield from findings_of_answers(m, first, samples, enough, stuck)
    # a reward that is no verdict may rise for another reason than better answers
    if enough and (stuck or measure == "reward"):
        yield from findings_of_length(m, options, texts_of(samples[-1:]))
    if enough and stuck:
        yield from findings_of_small_updates(m, options)
    if enough and below:
        yield ("Correct advantages or rewards that favour wrong answers (compare the answers "
               "before and after the run, in summary.json), or lower --lr.",
               f"The run ends below its start: {below}.", "accuracy length truncated")


def findings_of_rewards(m, first, samples):
    """first: the name of the first reward. samples: none if it is no verdict, or the run learns."""
    if m["reward_failures"].most > 0.01:  # healthy: 0
        yield ("Correct the reward function that fails.",
               "It raises an error or hangs on some completions.", "reward_failures")
    if m["verdict_timeouts"].mean > 0.01:  # healthy: 0
        yield ("Leave out the questions whose gold answers take long to compare, or raise "
               "MATH_SECONDS in judges/mathematics.py.",
               "Verdicts of math_accuracy run out of time, and these completions count as wrong.",
               "verdict_timeouts seconds/score")
    read = [verdict for verdict in verdicts(samples, first) if verdict[2] is not None]
    different = [text for text, right, paid in read if right != paid]
    agreed = [text for text, right, paid in read if right and paid]
    if len(different) > len(agreed):  # healthy: 0; with the answers of other questions: 9 times
        yield (f"Correct {first}, which may want another form or column, or the answer of another "
               "question.",
               f"The reward and the gold answer disagree on {len(different)} of "
               f"{progress.count(len(read), 'completion')} that were read.", "accuracy", different)


def findings_of_parts(m, first):
    """What is wrong at once: in advantages, losses, the rule that keeps."""
    own_signal = m[f"frac_reward_zero_std/{first}"]
    if own_signal.count and own_signal.mean < 1 and m["frac_reward_zero_std"].mean == 1:
        yield ("Correct your function of the advantages, or the weights of the rewards.",
               "Rewards differ within groups, but the advantages do not.",
               f"frac_reward_zero_std frac_reward_zero_std/{first}")
    if m["skipped_updates"].mean > 0.02:  # healthy: 0
        yield ("Lower --lr, or look for NaN in a loss of your own.",
               "Updates are skipped, because the loss or the gradient is not finite.",
               "skipped_updates")
    if m["kept"].count and m["kept"].most == 0:
        yield ("Let the function of --keep return rows of the batch; or raise --max_new_tokens, if "
               "--mask_truncated leaves out every completion.",
               "No completion is kept, so nothing is trained on.", "kept completions")


def findings_of_large_updates(m, options):
    norm = m["grad_norm"]
    kl = max(100 * m["approx_kl"].most, m["kl"].most)
    # the logits are divided by the temperature
    moved = kl * min(1, options.get("temperature", 1.0)) ** 2
    # healthy: 0.024 (LoRA), 1.4, and 4 times the start; --lr 1e-2: 0.5, 300, 2
    if moved > 10 or norm.most > 100 * norm.first > 0:
        yield ("Take a tenth of --lr, or --target_kl 0.03.",
               "The updates are too large.", "accuracy approx_kl kl grad_norm")


def findings_of_sampler(m):
    # healthy: 3e-7 in float32, 0.008 in bfloat16; weights off by a tenth: 0.08; groups of two
    # questions: 1
    if m["sampler_logp_diff"].mean > 0.03:
        yield ("Correct a sampler of your own, which may use old weights or mix the completions of "
               "several questions, or take another --dtype or --sampler_correction token_truncate.",
               "Sampler and trainer disagree about the same tokens.", "sampler_logp_diff")


def findings_of_answers(m, first, samples, enough, stuck):
    """What the completions were like before the first update. With few steps only the extremes
    count."""
    found = verdicts(samples, first)
    right = [text for text, is_right, _ in found if is_right]
    wrong = [text for text, is_right, _ in found if not is_right]
    accuracy, answer_not_found = m["accuracy"], m["answer_not_found"]
    most = 0.1 if stuck else 0.2  # healthy: 0.02; a run that rises may have begun with more
    if from_start(m["truncated"]) > (most if enough else 0.5) and accuracy.mean < 0.5:
        yield ("Raise --max_new_tokens, or ask for short thoughts; if answers do not end, take a "
               "chat model, set eos_token_id in generation_config.json, or name with --stop what "
               "comes after an answer.",
               "Answers are cut off.", "truncated length", wrong)
    if not stuck:
        return
    rows = [row for sample in samples for row in sample["completions"]]
    errors = [row["error"] for row in rows if row.get("error")]
    if len(errors) > len(rows) / 2:
        yield ("Say in --system_prompt what a program may use: only Python's standard library.",
               f"{len(errors)} of {len(rows)} completions are programs that fail, most often with: "
               f"{mode(errors)}.", "accuracy")
    # a reward that pays what nobody can read has another way to read
    unread = from_start(answer_not_found) > 0.5 and accuracy.mean + answer_not_found.mean <= 1
    if accuracy.mean < 0.1 and unread:
        yield (f"Show in --system_prompt a form that {first} reads, or take a chat model, a lower "
               "--temperature or another --stop.",
               "In most completions no answer is found.", "answer_not_found accuracy", wrong)
    # healthy: 0.2; a bad model: 0.7
    if from_start(m[f"frac_reward_zero_std/{first}"]) > (0.6 if enough else 0.99):
        yield from why_no_signal(m, first, right, wrong)


def why_no_signal(m, first, right, wrong):
    """Why the first reward, the accuracy, pays all completions of most questions the same."""
    accuracy = m["accuracy"]
    names = f"frac_reward_zero_std/{first} all_right all_wrong accuracy"
    if accuracy.start < 0.1:
        yield ("Take easier questions, a better model or a larger --group_size, if the gold answer "
               "and the reward are right.", "The questions are too hard.", names, wrong)
    if accuracy.start < 0.9:
        yield ("Take questions in between, --algorithm dapo or a larger --group_size; or a higher "
               "--temperature, if the completions of a question are alike.",
               "A question is always right or always wrong.", names, wrong)
    yield (f"Take harder questions, or correct {first} if it pays wrong answers.",
           "The questions are too easy.", names, right)


def findings_of_length(m, options, texts):
    """texts: completions of the last step."""
    length, cut = m["length"], m["truncated"]
    # healthy: 0.02, and 13 → 35 tokens
    if cut.end > cut.start + 0.2:
        yield ("Correct a reward or advantages that pay for long answers, or lower --lr.",
               "The length runs away.", "length truncated", texts)
    change = "Correct a reward or advantages that pay for short answers, or lower --lr."
    what, least = "The length collapses.", 0.5
    # docs/pruning.md: CPPO's runs that end below their base have .06 to .31
    negative = m["kept_negative"]
    keeps_both_signs = options.get("keep") in ("random", "unbiased")
    prunes_by_size = options.get("pruning_rate") and not keeps_both_signs
    if prunes_by_size and negative.count and negative.end <= 0.31:
        change = ("Take --keep random or --keep unbiased, which keep both signs; or correct what "
                  "else pays for short answers.")
        what = ("The length collapses, and little that is kept has A < 0: the baseline is pruned "
                "away.")
        least = 0.8
    if length.end < least * length.start:
        yield change, what, "kept_negative length truncated", texts


def findings_of_small_updates(m, options):
    # healthy: 0.02, GSPO 0.3; a range of 1e-6: 0.3
    most = 0.8 if "gspo" in options.get("algorithm", "") else 0.15
    if m["clip_fraction"].mean > most:
        yield ("Raise --clip_low and --clip_high, or lower --lr or --mu.",
               "The clip takes the gradient away.", "clip_fraction")
    approx_kl = m["approx_kl"]
    updates = options.get("mu", 1) * options.get("minibatches", 1)
    moved = updates * approx_kl.count * m["lr"].mean
    # healthy: 0.02, approx_kl 3e-3 (LoRA: 4e-5, but kl 1e-3); --lr 1e-5: 2e-5
    alike = updates > 1 and approx_kl.most < 1e-4 and m["kl"].most < 1e-3
    if approx_kl.count and (moved < LEAST_MOVE or alike):
        yield ("Raise --lr (for LoRA ten times as much) or --epochs.",
               "The updates hardly move the policy.", "approx_kl kl lr")


# --- what is said ---


def diagnosis(run_dir):
    """(the conclusion, {name: Metric}, how many steps were looked at) of a run."""
    rows = files.read_lines(Path(run_dir, "metrics.jsonl"))
    if not rows:
        return "", {}, 0
    m, steps, options = metrics_of(rows), len(rows), options_of(run_dir)
    samples = files.read_lines(Path(run_dir, "samples.jsonl"))
    measure = options.get("measure", "accuracy")
    if measure == "reward":
        m.pop("accuracy", None)  # of the steps in which the reward seemed to be a verdict
    below = ends_below(run_dir, m[measure], measure)
    found = findings(m, options, samples[:100] + samples[100:][-1:], steps, below)
    return conclusion(found, m, steps), m, steps


def of_one_step(metrics, sample, options):
    """The conclusion of the first step of a run (--check_rewards). sample: its first group.
    options: as attributes."""
    m = metrics_of([metrics])
    return conclusion(findings(m, vars(options), [sample], 1), m, 1)


def ends_below(run_dir, metric, measure):
    """In words, that the measure ends below its start: that of the evaluations, or of the samples;
    else ""."""
    start, end, falls, kind = metric.start, metric.end, metric.falls, "sampled"
    path = Path(run_dir, "summary.json")
    summary = json.loads(path.read_text()) if path.exists() else {}
    if summary.get("before"):
        kind = "greedy"
        start = summary["before"]["greedy"][measure]
        end = summary["after"]["greedy"][measure]
        falls = end < start
    return f"{kind} {measure} {start:.3f} → {end:.3f}" if falls else ""


def conclusion(found, m, steps):
    """The first finding in words; "" if there is none."""
    finding = next(found, None)
    if not finding:
        return ""
    change, what, names, *texts = finding
    return f"{change} {what} Seen in {progress.count(steps, 'step')}: {seen(m, names, *texts)}."


def seen(metrics, names, texts=()):
    """What metrics do, and one of some completions. names: of the metrics, in one string."""
    words = []
    for name in names.split():
        m = metrics[name]
        if m.count:  # earlier versions measured less
            words.append(f"{name} {course_of(m)}")
    if texts:
        words.append(f"for example {texts[len(texts) // 2]!r:.120}")
    return "; ".join(words)


def course_of(m):
    if m.count < STEPS:  # start and end would be means of the same values
        return f"{m.mean:.4g}"
    return f"{m.start:.4g} → {m.end:.4g} (at most {m.most:.4g})"


def first_sentence(run_dir, steps_before=0):
    """What train.py prints at the end of a run: the first finding, or how to ask for one; None if
    it has made no step. steps_before: those of the folder before it began."""
    said, _, steps = diagnosis(run_dir)
    if steps <= steps_before:
        return None
    command = f"python tools/doctor.py {shlex.quote(str(run_dir))}"
    return f"{said} More: {command}" if said else f"doctor    {command}"


def tell_first_sentence(run_dir, steps_before):
    """Print the `first_sentence`, on the first rank, if anybody reads the output."""
    sentence = first_sentence(run_dir, steps_before) if ranks.rank() == 0 else None
    if sentence:
        with contextlib.suppress(BrokenPipeError):
            progress.note(sentence)
