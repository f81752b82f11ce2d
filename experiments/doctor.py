"""Why does my reward not rise? The doctor reads the logs of a run and says what is wrong.

    python experiments/doctor.py runs/toy-cppo-1

A finding is a row (is it so, what, evidence, cure) of three tables, a cause before its effects.
"Healthy" in a comment: the extreme of full toy runs. train.py says the same at the end of a run.
"""

import sys
from collections import defaultdict, namedtuple
from pathlib import Path
from statistics import fmean, pvariance

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from engine.base import files
from engine.base.errors import UserError
from engine.run.folder import options_of
from engine.run.options import run_program
from rewards import extract_answer, extract_code, gold_answer, same_number

# AdamW moves a weight by at most about the learning rate in each update; CPPO's recipe adds up to
# 1e-3
LEAST_MOVE = 1e-4
STEPS = 8  # fewer say nothing about the accuracy: four for the start, four for the end
# start: mean of an eighth of the values; end: of a quarter; most: the largest, at `step`
Metric = namedtuple("Metric", "start end mean most step rises count", defaults=[0.0] * 7)


def metrics_of(rows):
    """{name: Metric}. A metric without any value is 0."""
    metrics = defaultdict(Metric)
    for name in rows[-1] if rows else ():
        found = [(row[name], -row["step"]) for row in rows if row.get(name) is not None]
        if values := [value for value, _ in found]:
            parts = values[: max(4, len(values) // 8)], values[-max(4, len(values) // 4) :]
            (start, end), (most, step) = map(fmean, parts), max(found)
            error = sum(pvariance(part) / max(1, len(part) - 1) for part in parts) ** 0.5
            rises = end - start > 2 * error
            metrics[name] = Metric(start, end, fmean(values), most, -step, rises, len(values))
    return metrics


def seen(m, *names, texts=()):
    """What metrics do, and one of some completions."""
    words = [f"{name} {m[name].start:.2g} → {m[name].end:.2g} (at most {m[name].most:.2g}, step "
             f"{m[name].step})" for name in names]
    return "; ".join(words + [f"as {text!r:.120}" for text in texts[len(texts) // 2 :][:1]])


def of_any_run(m, samples, options):
    return [  # healthy: 0, 0, and 3e-7 in float32, 0.008 in bfloat16; weights off by a tenth: 0.08
        (m["reward_failures"].most > 0.01, "A reward function fails on some completions.",
         seen(m, "reward_failures"), "call it on completions of samples.jsonl"),
        (m["skipped_updates"].mean > 0.02, "Updates are skipped: loss or gradient is not finite.",
         seen(m, "skipped_updates"), f"lower --lr {options.get('lr')}"),
        (m["sampler_gap"].mean > 0.03, "Sampler and trainer disagree about the same tokens.",
         seen(m, "sampler_gap"), "--rollout own, or another --dtype; or --importance_cap 2")]


def of_its_samples(m, samples, options):
    """Findings of a run whose accuracy does not rise: what it samples, and what is right of it."""
    T, accuracy, norm = options.get("temperature", 1.0), m["accuracy"], m["grad_norm"]
    first, *others = [name[7:] for name in m if name.startswith("reward/")]
    texts = [(x, extract_answer(x) or extract_code(x), gold_answer(sample["answer"]))
             for sample in samples for x in (row["completion"] for row in sample["completions"])]
    right, wrong = [], []
    for x, own, gold in texts:
        (right if own and (own == gold or same_number(own, gold)) else wrong).append(x)
    late = [x for x, *_ in texts if extract_answer(x[: len(x) // 2])]  # had room, and went on
    endless, cut = len(late) > 0.3 * len(texts), m["truncated"].start > 0.2 and accuracy.mean < 0.5
    never, free = accuracy.mean < 0.01, first == "number_accuracy"  # free: it asks for no form
    no_form = not free and sum(bool(own) for _, own, _ in texts) < len(texts) / 20
    no_form |= any("format" in x and m[f"reward/{x}"].mean < 0.01 for x in others)
    kinds = [
        (never and no_form, "The format is never met.", wrong,
         "show it in --system_prompt, or pay its parts (soft_format_reward)"),
        (never and right, "The reward never fires, not even for right answers.", right,
         f"call {first} on it: it may want another form or column"),
        (accuracy.start < 0.1, "The questions are too hard.", wrong,
         "take easier questions, a better model, or a larger --group_size"),
        (accuracy.start < 0.9, "A question is always right or always wrong.", wrong,
         "take questions in between, --algorithm dapo, or a larger --group_size"),
        (len(wrong) > 0.2 * len(texts), "The reward pays wrong answers.", wrong, f"fix {first}"),
        (True, "The questions are too easy.", right, "take harder questions")]
    what, shown, cure = next(kind[1:] for kind in kinds if kind[0])
    return [
        # healthy, at 1: 0.2 nats, a signal in 80 % of the groups; at 3: 1.9 nats; at 0.05: 10 %
        ((T > 1.2 and m["entropy"].start > 1) or (T < 0.7 and m["no_signal"].start > 0.5),
         f"The samples are {'noise' if T > 1 else 'all alike'} at --temperature {T}.",
         seen(m, "entropy", "no_signal"), "--temperature 1"),
        # healthy: 0.024 (LoRA), 1.4, and 4 times the start; --lr 1e-2: 0.5, 300, 2
        (m["kl_old"].most > 0.1 or m["kl"].most > 10 or norm.most > 100 * norm.start
         or accuracy.end < min(accuracy.start / 5, accuracy.start - 0.1) and not m["reward"].rises,
         "The updates are too large.", seen(m, "accuracy", "kl_old", "kl", "grad_norm"),
         f"a tenth of --lr {options.get('lr')}; --target_kl 0.03 ends updates in time"),
        (cut and endless, "Answers do not end: the model has no EOS.",  # healthy: 0.02
         seen(m, "truncated", texts=late), "set eos_token_id in generation_config.json to the "
         "token that ends its turns, or take a chat model"),
        (cut and not endless, "Answers are cut off.", seen(m, "truncated", "length", texts=wrong),
         f"raise --max_new_tokens {options.get('max_new_tokens')}, or ask for short thoughts"),
        (m[f"no_signal/{first}"].start > 0.6, what,  # healthy: 0.2; a bad model: 0.7
         seen(m, f"no_signal/{first}", "accuracy", texts=shown), cure)]


def of_its_course(m, samples, options):
    """Findings of a run whose accuracy does not rise: what the other metrics do."""
    last = [row["completion"] for row in samples[-1]["completions"]]
    risen = [x for x in [x for x in m if x.startswith("reward/")][1:] if m[x].rises]
    away = m["truncated"].end > m["truncated"].start + 0.2  # healthy: 0.02, and 13 → 35 tokens
    kl_old, updates = m["kl_old"], options.get("mu", 1) * options.get("minibatches", 1)
    moved = updates * kl_old.count * m["lr"].mean  # healthy: 0.02, kl_old 3e-3; --lr 1e-5: 2e-5
    return [
        (risen and m["reward"].rises, "Another reward is gamed: the accuracy does not rise.",
         seen(m, *risen, "accuracy", texts=last), "pay it only for right answers; a smaller weight "
         "may not help, because a group's std divides it away"),
        (away or m["length"].end < 0.5 * m["length"].start,
         f"The length {'runs away' if away else 'collapses'}.",
         seen(m, "length", "truncated", texts=last), "find out which reward pays for it"),
        (m["entropy"].end < 0.5 * m["entropy"].start and m["no_signal"].end > 0.5,
         "The entropy collapses.", seen(m, "entropy", "no_signal", texts=last),
         "lower --lr, raise --clip_high or --beta, or find the safe answer that pays"),
        # healthy: 0.02, GSPO 0.3; a range of 1e-6: 0.3
        (m["clip_fraction"].mean > (0.8 if "gspo" in options.get("algorithm", "") else 0.15),
         "The clip takes the gradient away.", seen(m, "clip_fraction"),
         "raise --clip_low and --clip_high, or lower --lr or --mu"),
        (kl_old.count and (moved < LEAST_MOVE or (updates > 1 and kl_old.most < 1e-4)),
         "The updates hardly move the policy.", f"all learning rates add up to {moved:.1g}; "
         + seen(m, "kl_old", "clip_fraction"),
         f"raise --lr {options.get('lr')} (LoRA: ten times as much) or --epochs")]


def diagnosis(run_dir):
    """(the three likeliest findings as sentences, what to say if there are none; no run: [])."""
    rows = [row for row in files.read(Path(run_dir, "metrics.jsonl")) if "step" in row]
    options, m = options_of(run_dir)[1] if rows else {}, metrics_of(rows)
    stuck = len(rows) >= STEPS and not m["accuracy"].rises
    samples = files.read(Path(run_dir, "samples.jsonl")) if stuck else []
    tables = [of_any_run, of_its_samples, of_its_course] if samples else [of_any_run]
    found = [row for table in tables for row in table(m, samples[-200:], options) if row[0]][:3]
    nothing = f"Nothing was found in {len(rows)} steps: {seen(m, 'accuracy')}."
    if len(rows) < STEPS:
        looked = "reward_failures", "skipped_updates", "sampler_gap"
        nothing = (f"{len(rows)} steps are too few to judge the accuracy: that takes {STEPS}. Only "
                   f"these were looked at, and nothing is wrong with them: {seen(m, *looked)}.")
    return ([f"{what} Seen: {evidence}. Try: {cure}." for _, what, evidence, cure in found],
            rows and nothing)


def main(argv):
    found, nothing = diagnosis(argv[0]) if len(argv) == 1 else ([], "")
    if not nothing:
        raise UserError("name the folder of a run with at least one step: doctor.py runs/NAME.")
    print("\n".join(found) or nothing)


if __name__ == "__main__":
    run_program(main)
