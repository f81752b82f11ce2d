"""Why does my reward not rise? The doctor reads the logs of a run and says what is wrong.

    python tools/doctor.py runs/toy-cppo-1

A finding is (what, names of the metrics that show it, cure, and maybe completions that show it).
The functions yield findings, a cause before its effects.
"Healthy" in a comment: the extreme of full toy runs. At the end of a run train.py prints the first
finding; if there is none, it prints the command of this program.
"""

import argparse
import json
import shlex
import sys
from collections import defaultdict, namedtuple
from itertools import islice
from pathlib import Path
from statistics import fmean, pvariance

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from answers import extract_answer, gold_answer, same_number
from engine.base import files
from engine.base.errors import UserError
from engine.run.command_line import run_program
from engine.run.folder import options_of
from engine.scoring.score import read
from tools.forms import MARKS, nearest_miss

# AdamW moves a weight by at most about the learning rate in each update; CPPO's recipe adds up to
# 1e-3
LEAST_MOVE = 1e-4
STEPS = 8  # fewer say nothing about the accuracy: four for the start, four for the end
# start: mean of an eighth of the values; end: of a quarter; most: the largest
Metric = namedtuple("Metric", "start end mean most rises falls count", defaults=[0.0] * 7)
# completions: all, the right ones, the wrong ones, those that go on after their answer
Answers = namedtuple("Answers", "texts right wrong late")


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
    return Metric(start, end, fmean(values), max(values), rises, falls, len(values))


def squared_error(values):
    """Of their mean."""
    return pvariance(values) / max(1, len(values) - 1)


def answers_of(samples, first):
    """The Answers of the samples of a run. first: the name of its accuracy."""
    texts, right, wrong, late = [], [], [], []
    for sample in samples:
        gold = gold_answer(sample["answer"])
        for row in sample["completions"]:
            text = row["completion"]
            answer = read(first, text)
            texts.append(text)
            is_right = answer and (answer == gold or same_number(answer, gold))
            (right if is_right else wrong).append(text)
            if extract_answer(text[: len(text) // 2]):  # it had room, and went on
                late.append(text)
    return Answers(texts, right, wrong, late)


def seen(metrics, names, texts=()):
    """What metrics do, and one of some completions. names: of the metrics, in one string."""
    words = []
    for name in names.split():
        m = metrics[name]
        if m.count:  # earlier versions measured less
            words.append(f"{name} {m.start:.2g} → {m.end:.2g} (at most {m.most:.2g})")
    if texts:
        words.append(f"as {texts[len(texts) // 2]!r:.120}")
    return "; ".join(words)


# --- the findings ---


def findings(m, options, samples, steps, below=""):
    """All findings of a run. m: its metrics. samples: its last ones. below: that it ends below its
    start, in words."""
    yield from findings_of_any_run(m, options)
    if not samples:
        return
    names = [name.removeprefix("reward/") for name in m if name.startswith("reward/")]
    first = names[0]
    answers = answers_of(samples, first)
    accuracy = m["accuracy"]
    no_signal = m[f"no_signal/{first}"]
    enough = steps >= STEPS
    if accuracy.most == 0 and no_signal.count and no_signal.mean < 1:  # the reward differs
        yield ("The accuracy says nothing, because the first reward is never above 0.",
               f"reward/{first} accuracy", "look at the reward, or let it pay right answers more")
        accuracy = m[f"reward/{first}"]
    stuck = enough and (below or not accuracy.rises)
    if enough:
        # healthy: 0.02; a run that rises may have begun with more
        cut_off = m["truncated"].start > (0.1 if stuck else 0.2) and accuracy.mean < 0.5
        flat = stuck and no_signal.start > 0.6  # healthy: 0.2; a bad model: 0.7
    else:  # only what even a few steps show for certain
        cut_off = m["truncated"].mean > 0.5
        flat = 1 in (no_signal.mean, m["no_signal"].mean)
    if stuck:
        yield from findings_of_its_start(m, options)
    if cut_off:
        what, texts, cure = why_cut_off(options, answers, samples[-1])
        yield what, "truncated length", cure, texts
    # a reward that pays what nobody can read has another way to read
    unread = m["unreadable"].mean > 0.5 and accuracy.mean + m["unreadable"].mean <= 1
    if (stuck or not enough) and accuracy is m["accuracy"] and accuracy.mean < 0.1 and unread:
        yield ("In most completions no answer is found.", "unreadable accuracy",
               f"show in --system_prompt a form that {first} reads", answers.wrong)
    elif flat:
        what, texts, cure = why_no_signal(m, first, answers)
        yield what, f"no_signal/{first} all_right all_wrong accuracy", cure, texts
    for name in names[1:]:
        marks = MARKS.get(name.removeprefix("soft_"))
        if marks and m[f"reward/{name}"].most == 0:
            nearest, what = nearest_miss(answers.texts, marks)
            yield (f"The format is never met. The nearest completion {what}.", f"reward/{name}",
                   "show it in --system_prompt, or pay its parts (soft_format_reward)", [nearest])
    if stuck:
        last = [row["completion"] for row in samples[-1]["completions"]]
        yield from findings_of_its_course(m, options, names, last)
        yield from findings_of_small_updates(m, options)
    if enough and below:
        yield (f"The run ends below its start: {below}.", "accuracy length truncated",
               "compare the answers before and after it, in summary.json")


def findings_of_any_run(m, options):
    if m["reward_failures"].most > 0.01:  # healthy: 0
        yield ("A reward function fails on some completions.", "reward_failures",
               "call it on completions of samples.jsonl")
    if m["skipped_updates"].mean > 0.02:  # healthy: 0
        yield ("Updates are skipped: loss or gradient is not finite.", "skipped_updates",
               f"lower --lr {options.get('lr')}")
    if m["kept"].most == 0 and m["kept"].count:
        yield ("No completion is kept, so nothing is trained on.", "kept completions",
               f"return rows of the batch from --keep {options.get('keep')}; or the model cuts off "
               "every completion, and --mask_truncated leaves them out")
    if m["tokens_without_logp"].most > 0:  # healthy: 0
        yield ("The sampler does not say how likely some tokens were.", "tokens_without_logp",
               "look for NaN in its log-probabilities; these tokens are not corrected")
    gap = m["sampler_gap"].mean
    # healthy: 0, because the sampler computes a prompt once; groups of two questions: 0.02, 1
    if m["group_gap"].mean > 0.005 and gap > 0.3:
        yield ("A group is not one question.", "group_gap sampler_gap",
               "let the sampler return all G completions of a question one after the other")
    # healthy: 3e-7 in float32, 0.008 in bfloat16; weights off by a tenth: 0.08
    elif gap > 0.03:
        yield ("Sampler and trainer disagree about the same tokens.", "sampler_gap",
               "--sampler ours, or another --dtype; or --importance_weights token_truncate")


def findings_of_its_start(m, options):
    """What makes the samples or the first updates useless."""
    temperature = options.get("temperature", 1.0)
    at = f"at --temperature {temperature}."
    # healthy, at 1: 0.2 nats; at 3: 1.9
    if temperature > 1.2 and m["entropy"].start > 1:
        yield f"The samples are noise {at}", "entropy no_signal", "--temperature 1"
    # healthy, at 1: a signal in 80 % of the groups; at 0.05: in 10 %
    if temperature < 0.7 and m["no_signal"].start > 0.5:
        yield f"The samples are all alike {at}", "entropy no_signal", "--temperature 1"
    if updates_are_too_large(m):
        yield ("The updates are too large.", "accuracy kl_old kl grad_norm",
               f"a tenth of --lr {options.get('lr')}; --target_kl 0.03 ends updates in time")


def updates_are_too_large(m):
    # healthy: 0.024 (LoRA), 1.4, and 4 times the start; --lr 1e-2: 0.5, 300, 2
    accuracy = m["accuracy"]
    norm = m["grad_norm"]
    if m["kl_old"].most > 0.1 or m["kl"].most > 10 or norm.most > 100 * norm.start:
        return True
    falls = accuracy.end < min(accuracy.start / 5, accuracy.start - 0.1)
    return falls and not m["reward"].rises


def why_cut_off(options, answers, sample):
    """Why completions are cut off: (what, completions that show it, cure). sample: the last."""
    plain = f"User: {sample.get('question')}\nAssistant:"
    if sample.get("prompt", "").endswith(plain):
        return ("The chat template is not applied: the model has none.", [sample["prompt"]],
                "take a chat model, or put its chat_template.jinja into its folder")
    if len(answers.late) > 0.3 * len(answers.texts):
        return ("Answers do not end: the model has no EOS.", answers.late,
                "set eos_token_id in generation_config.json to the token that ends its turns, take "
                "a chat model, or name with --stop what comes after an answer")
    return ("Answers are cut off.", answers.wrong,
            f"raise --max_new_tokens {options.get('max_new_tokens')}, or ask for short thoughts")


def why_no_signal(m, first, answers):
    """Why the first reward, the accuracy, pays all completions of most questions the same. Returns
    (what, completions that show it, cure)."""
    accuracy = m["accuracy"]
    if m[f"no_signal/{first}"].mean == 1 and accuracy.mean < 0.01 and answers.right:
        return ("The reward never fires, not even for right answers.", answers.right,
                f"call {first} on it: it may want another form or column")
    if accuracy.start < 0.1:
        return ("The questions are too hard.", answers.wrong,
                "take easier questions, a better model, or a larger --group_size")
    if accuracy.start < 0.9:
        return ("A question is always right or always wrong.", answers.wrong,
                "take questions in between, --algorithm dapo, or a larger --group_size")
    if len(answers.wrong) > 0.2 * len(answers.texts):
        return "The reward pays wrong answers.", answers.wrong, f"fix {first}"
    return "The questions are too easy.", answers.right, "take harder questions"


def findings_of_its_course(m, options, names, texts):
    """What the metrics do later. names: those of the rewards. texts: completions of the last
    step."""
    risen = [f"reward/{name}" for name in names[1:] if m[f"reward/{name}"].rises]
    if risen and m["reward"].rises:
        yield ("Another reward is gamed: the accuracy does not rise.",
               f"{' '.join(risen)} accuracy",
               "give it only when the answer is right; a smaller weight may not help, because a "
               "group's std divides it away", texts)
    length, cut, entropy = m["length"], m["truncated"], m["entropy"]
    cause = "find out which reward pays for it"
    # healthy: 0.02, and 13 → 35 tokens
    if cut.end > cut.start + 0.2:
        yield "The length runs away.", "length truncated", cause, texts
    elif length.end < 0.5 * length.start:
        yield "The length collapses.", "length truncated", cause, texts
    if entropy.end < 0.5 * entropy.start and m["no_signal"].end > 0.5:
        yield ("The entropy collapses.", "entropy no_signal",
               "lower --lr, raise --clip_high or --beta, or find the safe answer that pays", texts)
    # healthy: 0.02, GSPO 0.3; a range of 1e-6: 0.3
    most = 0.8 if "gspo" in options.get("algorithm", "") else 0.15
    if m["clip_fraction"].mean > most:
        yield ("The clip takes the gradient away.", "clip_fraction",
               "raise --clip_low and --clip_high, or lower --lr or --mu")


def findings_of_small_updates(m, options):
    kl_old = m["kl_old"]
    updates = options.get("mu", 1) * options.get("minibatches", 1)
    moved = updates * kl_old.count * m["lr"].mean
    # healthy: 0.02, kl_old 3e-3; --lr 1e-5: 2e-5
    still = moved < LEAST_MOVE or (updates > 1 and kl_old.most < 1e-4)
    if kl_old.count and still:
        yield (f"The updates hardly move the policy: all learning rates add up to {moved:.1g}.",
               "kl_old clip_fraction",
               f"raise --lr {options.get('lr')} (LoRA: ten times as much) or --epochs")


# --- what is said ---


def diagnosis(run_dir):
    """(the conclusions, {name: Metric}, how many steps were looked at) of a run."""
    rows = [row for row in files.read(Path(run_dir, "metrics.jsonl")) if "step" in row]
    if not rows:
        return [], {}, 0
    m = metrics_of(rows)
    steps = len(rows)
    samples = files.read(Path(run_dir, "samples.jsonl"))[-200:]
    below = ends_below(run_dir, m["accuracy"])
    found = findings(m, options_of(run_dir), samples, steps, below)
    return conclusions(found, m, steps), m, steps


def of_one_step(metrics, samples, options):
    """The conclusions of the first step of a run (--check_rewards). options: as attributes."""
    m = metrics_of([metrics])
    return conclusions(findings(m, vars(options), samples, 1), m, 1)


def conclusions(found, m, steps):
    """The three likeliest findings as sentences."""
    sentences = []
    when = f"{steps} steps" if steps > 1 else "1 step"
    for what, names, cure, *texts in islice(found, 3):
        sentences.append(f"{what} Seen in {when}: {seen(m, names, *texts)}. Try: {cure}.")
    return sentences


def ends_below(run_dir, accuracy):
    """In words, that the accuracy ends below its start: that of the evaluations, or of the samples;
    else ""."""
    start, end, falls, kind = accuracy.start, accuracy.end, accuracy.falls, "sampled"
    path = Path(run_dir, "summary.json")
    summary = json.loads(path.read_text()) if path.exists() else {}
    if summary.get("before"):
        kind = "greedy"
        start = summary["before"]["greedy"]["accuracy"]
        end = summary["after"]["greedy"]["accuracy"]
        falls = end < start
    return f"{kind} accuracy {start:.3f} → {end:.3f}" if falls else ""


# --- the program ---


def first_sentence(run_dir):
    """What train.py prints at the end of a run: the likeliest finding, or how to ask for one; None
    before the first step."""
    sentences, _, steps = diagnosis(run_dir)
    command = f"python tools/doctor.py {shlex.quote(str(run_dir))}"
    if sentences:
        return f"{sentences[0]} More: {command}"
    return f"doctor    {command}" if steps else None


def nothing_found(metrics, steps):
    """What is said if there is no finding."""
    if steps >= STEPS:
        return f"Nothing was found in {steps} steps: {seen(metrics, 'accuracy')}."
    looked = seen(
        metrics, "truncated unreadable reward_failures skipped_updates group_gap sampler_gap")
    return (f"{steps} steps are too few to judge the accuracy: that takes {STEPS}. Only "
            f"these were looked at, and nothing is wrong with them: {looked}.")


def main(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="folder of a run, such as runs/toy-cppo-1")
    sentences, metrics, steps = diagnosis(parser.parse_args(argv).run)
    if not steps:
        raise UserError("this folder holds no run with at least one step: name another one.")
    print("\n".join(sentences) or nothing_found(metrics, steps))


if __name__ == "__main__":
    run_program(main)
