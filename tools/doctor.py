"""Why does my reward not rise? The doctor reads the logs of a run and says what is wrong.

    python tools/doctor.py runs/toy-cppo-1

A finding is (what, names of the metrics that show it, cure, and maybe completions that show it).
The functions yield findings, a cause before its effects. Only the first finding is said: the next
ones may be its effects. It says what was seen. It names a cause only if the logs exclude the other
causes; else its cure names all that are left.
"Healthy" in a comment: the extreme of full toy runs. At the end of a run train.py prints the
finding; if there is none, it prints the command of this program.
"""

import argparse
import json
import shlex
import sys
from collections import defaultdict, namedtuple
from pathlib import Path
from statistics import fmean, pvariance

sys.path.insert(0, str(Path(__file__).parents[1]))  # the project's root

from answers import extract_answer, gold_answer, same_number
from engine.base import files, progress
from engine.base.errors import UserError
from engine.base.program import run_program
from engine.run.folder import options_of
from engine.scoring.score import read
from tools.forms import MARKS, nearest_miss

# AdamW moves a weight by at most about the learning rate in each update; CPPO's recipe adds up to
# 1e-3
LEAST_MOVE = 1e-4
STEPS = 8  # fewer say nothing about the accuracy: four for the start, four for the end
# first: before any update; start: mean of an eighth of the values; end: of a quarter; most: the
# largest
Metric = namedtuple("Metric", "first start end mean most rises falls count", defaults=[0.0] * 8)
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
    return Metric(values[0], start, end, fmean(values), max(values), rises, falls, len(values))


def texts_of(samples):
    return [row["completion"] for sample in samples for row in sample["completions"]]


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


def is_zero(metric):
    """Whether it was measured, and always 0 (or less)."""
    return metric.count and metric.most <= 0


def seen(metrics, names, texts=()):
    """What metrics do, and one of some completions. names: of the metrics, in one string."""
    words = []
    for name in names.split():
        m = metrics[name]
        if m.count:  # earlier versions measured less
            words.append(f"{name} {course_of(m)}")
    if texts:
        words.append(f"as {texts[len(texts) // 2]!r:.120}")
    return "; ".join(words)


def course_of(m):
    if m.count == 1:
        return short(m.mean)
    # start and end of a few values are means of the same ones
    change = f"{short(m.start)} → {short(m.end)}" if m.count >= STEPS else short(m.mean)
    return f"{change} (at most {short(m.most)})"


def short(value):
    """A number with two digits; from 100 on with all digits before the point."""
    return f"{value:.0f}" if abs(value) >= 99.5 else f"{value:.2g}"


# --- the findings ---


def findings(m, options, samples, steps, below=""):
    """The findings of a run. m: its metrics. samples: those of its first steps and of its last one.
    below: that it ends below its start, in words."""
    names = [name.removeprefix("reward/") for name in m if name.startswith("reward/")]
    enough = steps >= STEPS
    measure = options.get("measure", "accuracy")
    stuck = below or not enough or not m[measure].rises
    yield from findings_of_parts(m, options, names[0])
    if not samples:
        return
    if stuck:
        yield from findings_of_its_start(m, options, samples[:4])
    yield from findings_of_sampler(m)
    if measure == "accuracy":
        yield from findings_of_answers(m, options, names, samples, stuck)
    # a reward that is no verdict may rise for another reason than better answers
    if enough and (stuck or measure == "reward"):
        yield from findings_of_its_course(m, options, names, texts_of(samples[-1:]))
    if enough and stuck:
        yield from findings_of_small_updates(m, options)
    if enough and below:
        yield (f"The run ends below its start: {below}.", "accuracy length truncated",
               "compare the answers before and after it, in summary.json: do advantages or rewards "
               "favour wrong answers? Or lower --lr")


def findings_of_parts(m, options, first):
    """What is wrong at once: in rewards, advantages, the rule that keeps, losses. first: the name
    of the first reward."""
    no_signal = m[f"no_signal/{first}"]
    if m["reward_failures"].most > 0.01:  # healthy: 0
        yield ("A reward function fails on some completions.", "reward_failures",
               "call it on completions of samples.jsonl")
    if no_signal.count and no_signal.mean < 1:  # the reward differs
        if m["no_signal"].mean == 1:
            yield ("Rewards differ within groups, but the advantages do not.",
                   f"no_signal no_signal/{first}",
                   "look for 0 in your function of the advantages; or the weights of the "
                   "rewards take the differences away")
        if is_zero(m["accuracy"]):
            yield ("The accuracy says nothing, because the first reward is never above 0.",
                   f"reward/{first} accuracy",
                   "look at the reward, or let it pay right answers more")
    if m["skipped_updates"].mean > 0.02:  # healthy: 0
        yield ("Updates are skipped: loss or gradient is not finite.", "skipped_updates",
               "lower --lr, or look for NaN in a loss of your own")
    if is_zero(m["kept"]):
        yield ("No completion is kept, so nothing is trained on.", "kept completions",
               f"return rows of the batch from --keep {options.get('keep')}; or the model cuts off "
               "every completion, and --mask_truncated leaves them out")
    if is_zero(m["grad_norm"]):
        yield "The gradient is 0.", "grad_norm loss", "look at your loss: it may be a constant"


def findings_of_sampler(m):
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
               "--sampler ours (a sampler of your own may not take the new weights), or another "
               "--dtype; or --importance_weights token_truncate")


def findings_of_its_start(m, options, samples):
    """What makes the samples or the first updates useless."""
    texts = texts_of(samples)
    temperature = options.get("temperature", 1.0)
    # healthy, at 1: 0.2 nats; at 3: 1.9; weights that were never trained: 3
    hot = temperature > 1.2
    if m["entropy"].first > (1 if hot else 2.5):
        cure = "--temperature 1" if hot else "a chat model: this one was not trained to answer"
        yield (f"The samples are noise at --temperature {temperature}.", "entropy no_signal",
               cure, texts)
    # healthy, at 1: 0.2, and 0.4 of the texts are different; at 0.05: 0.4 and 0.1
    no_signal = from_start(m["no_signal"])
    alike = len(set(texts)) < 0.25 * len(texts)
    if temperature < 0.7 and alike and 0.3 < no_signal < 1:
        yield (f"The samples are all alike at --temperature {temperature}.", "entropy no_signal",
               "--temperature 1", texts)
    calling = [text for text in texts if "</tool" in text]
    if is_zero(m["calls"]) and len(calling) > 0.1 * len(texts):
        yield ("The model calls a tool, and nobody answers.", "calls accuracy",
               "a --sampler that does, for example examples/my_tool.py:WithCalculator", calling)
    # healthy: 0.024 (LoRA), 1.4, and 4 times the start; --lr 1e-2: 0.5, 300, 2
    norm = m["grad_norm"]
    kl = max(100 * m["kl_old"].most, m["kl"].most)
    # the logits are divided by the temperature
    if kl * min(1, temperature) ** 2 > 10 or norm.most > 100 * norm.first > 0:
        yield ("The updates are too large.", "accuracy kl_old kl grad_norm",
               f"a tenth of --lr {options.get('lr')}; --target_kl 0.03 ends updates in time")


def from_start(metric):
    """Its value before the first update, if it does not fall at once."""
    return min(metric.first, metric.start)


def findings_of_answers(m, options, names, samples, stuck):
    """What the completions were like before the first update."""
    first = names[0]
    answers = answers_of(samples, first)
    accuracy, unreadable = m["accuracy"], m["unreadable"]
    enough = accuracy.count >= STEPS  # fewer show only the extremes
    most = 0.1 if stuck else 0.2  # healthy: 0.02; a run that rises may have begun with more
    if from_start(m["truncated"]) > (most if enough else 0.5) and accuracy.mean < 0.5:
        yield from why_cut_off(options, answers, samples[0])
    if stuck:
        # a reward that pays what nobody can read has another way to read
        unread = from_start(unreadable) > 0.5 and accuracy.mean + unreadable.mean <= 1
        if accuracy.mean < 0.1 and unread:
            yield ("In most completions no answer is found.", "unreadable accuracy",
                   f"show in --system_prompt a form that {first} reads; or --stop cuts answers off",
                   answers.wrong)
        # healthy: 0.2; a bad model: 0.7
        if from_start(m[f"no_signal/{first}"]) > (0.6 if enough else 0.99):
            yield from why_no_signal(m, first, answers)
    for name in names[1:]:
        marks = MARKS.get(name.removeprefix("soft_"))
        if marks and is_zero(m[f"reward/{name}"]):
            nearest, what = nearest_miss(answers.texts, marks)
            yield (f"The format is never met. The nearest completion {what}.", f"reward/{name}",
                   "show it in --system_prompt, or pay its parts (soft_format_reward)", [nearest])


def why_cut_off(options, answers, sample):
    """Why completions are cut off. sample: the first."""
    seen_in = "truncated length"
    if sample["prompt"].endswith(f"User: {sample['question']}\nAssistant:"):
        yield ("The chat template is not applied: the model has none.", seen_in,
               "take a chat model, or put its chat_template.jinja into its folder",
               [sample["prompt"]])
    if len(answers.late) > 0.3 * len(answers.texts):
        yield ("Answers do not end: the model writes on after them.", seen_in,
               "set eos_token_id in generation_config.json to the token that ends its turns, take "
               "a chat model, or name with --stop what comes after an answer", answers.late)
    yield ("Answers are cut off.", seen_in,
           f"raise --max_new_tokens {options.get('max_new_tokens')}, or ask for short thoughts; "
           "if none ends, set eos_token_id in generation_config.json", answers.wrong)


def why_no_signal(m, first, answers):
    """Why the first reward, the accuracy, pays all completions of most questions the same."""
    accuracy = m["accuracy"]
    seen_in = f"no_signal/{first} all_right all_wrong accuracy"
    if m[f"no_signal/{first}"].mean == 1 and accuracy.mean < 0.01 and answers.right:
        yield ("The reward never fires, not even for right answers.", seen_in,
               f"call {first} on it: it may want another form or column", answers.right)
    if accuracy.start < 0.1:
        yield ("The questions are too hard, or the gold answers or the reward are wrong.", seen_in,
               "compare this answer with the gold one; then take easier questions, a better model, "
               "or a larger --group_size", answers.wrong)
    if accuracy.start < 0.9:
        yield ("A question is always right or always wrong.", seen_in,
               "take questions in between, --algorithm dapo, or a larger --group_size; if all "
               "completions of a question are equal, look at the sampler", answers.wrong)
    if len(answers.wrong) > 0.2 * len(answers.texts):
        yield ("The reward pays answers that are not the gold answer.", seen_in,
               f"fix {first}, if they are wrong", answers.wrong)
    yield "The questions are too easy.", seen_in, "take harder questions", answers.right


def findings_of_its_course(m, options, names, texts):
    """What the metrics do later. names: those of the rewards. texts: completions of the last
    step."""
    risen = [f"reward/{name}" for name in names[1:] if m[f"reward/{name}"].rises]
    if risen and m["reward"].rises:
        yield ("Another reward rises, and the accuracy does not: it is gamed, or learned first.",
               f"{' '.join(risen)} accuracy",
               "more steps; if it is gamed, give it only when the answer is right: a smaller "
               "weight may not help, because a group's std divides it away", texts)
    length, cut, entropy = m["length"], m["truncated"], m["entropy"]
    cause = "find out what pays for it, a reward or advantages of your own; or lower --lr"
    # healthy: 0.02, and 13 → 35 tokens
    if cut.end > cut.start + 0.2:
        yield "The length runs away.", "length truncated", cause, texts
    # CPPO with its 1/|o|: a token of a short right answer weighs more
    pruned = options.get("pruning_rate") and options.get("keep") == "largest_abs"
    favours_short = pruned and options.get("algorithm") in ("cppo", "grpo")
    if length.end < (0.7 if favours_short else 0.5) * length.start:
        if favours_short:
            cause = ("--algorithm cppo_published --keep largest_abs, where every token counts the "
                     f"same; or {cause}")
        yield "The length collapses.", "length truncated", cause, texts
    if entropy.end < 0.5 * entropy.start and m["no_signal"].end > 0.5:
        yield ("The entropy collapses.", "entropy no_signal",
               "lower --lr, raise --clip_high or --beta, or find out what pays for the safe answer",
               texts)
    # healthy: 0.02, GSPO 0.3; a range of 1e-6: 0.3
    most = 0.8 if "gspo" in options.get("algorithm", "") else 0.15
    if m["clip_fraction"].mean > most:
        yield ("The clip takes the gradient away.", "clip_fraction",
               "raise --clip_low and --clip_high, or lower --lr or --mu")


def findings_of_small_updates(m, options):
    kl_old = m["kl_old"]
    updates = options.get("mu", 1) * options.get("minibatches", 1)
    moved = updates * kl_old.count * m["lr"].mean
    # healthy: 0.02, kl_old 3e-3 (LoRA: 4e-5, but kl 1e-3); --lr 1e-5: 2e-5
    alike = updates > 1 and kl_old.most < 1e-4 and m["kl"].most < 1e-3
    still = moved < LEAST_MOVE or alike
    if kl_old.count and still:
        yield ("The updates hardly move the policy.", "kl_old kl lr",
               "raise --lr (LoRA: ten times as much) or --epochs")


# --- what is said ---


def diagnosis(run_dir):
    """(the conclusions, {name: Metric}, how many steps were looked at) of a run."""
    rows = files.read(Path(run_dir, "metrics.jsonl"))
    if not rows:
        return [], {}, 0
    m, steps, options = metrics_of(rows), len(rows), options_of(run_dir)
    samples = files.read(Path(run_dir, "samples.jsonl"))
    measure = options.get("measure", "accuracy")
    if measure == "reward":
        m.pop("accuracy", None)  # of the steps in which the reward seemed to be a verdict
    below = ends_below(run_dir, m[measure], measure)
    found = findings(m, options, samples[:100] + samples[-1:], steps, below)
    return conclusions(found, m, steps), m, steps


def of_one_step(metrics, sample, options):
    """The conclusions of the first step of a run (--check_rewards). sample: its first group.
    options: as attributes."""
    m = metrics_of([metrics])
    return conclusions(findings(m, vars(options), [sample], 1), m, 1)


def conclusions(found, m, steps):
    """The first finding as a sentence, in a list; [] if there is none."""
    when = progress.count(steps, "step")
    for what, names, cure, *texts in found:
        return [f"{what} Seen in {when}: {seen(m, names, *texts)}. Try: {cure}."]
    return []


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


# --- the program ---


def first_sentence(run_dir, steps_before=0):
    """What train.py prints at the end of a run: the likeliest finding, or how to ask for one; None
    if it has made no step. steps_before: those of the folder before it began."""
    sentences, _, steps = diagnosis(run_dir)
    if steps <= steps_before:
        return None
    command = f"python tools/doctor.py {shlex.quote(str(run_dir))}"
    if sentences:
        return f"{sentences[0]} More: {command}"
    return f"doctor    {command}"


def nothing_found(metrics, steps):
    """What is said if there is no finding."""
    if steps >= STEPS:
        course = seen(metrics, "accuracy") or seen(metrics, "reward")
        return f"Nothing was found in {steps} steps. Of the samples: {course}."
    looked = seen(
        metrics, "truncated unreadable reward_failures skipped_updates group_gap sampler_gap")
    return (f"{steps} steps are too few to judge the accuracy: that takes {STEPS}. Only "
            f"these were looked at, and nothing is wrong with them: {looked}.")


def main(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="folder of a run, such as runs/toy-cppo-1")
    sentences, metrics, steps = diagnosis(parser.parse_args(argv).run)
    if not steps:
        raise UserError("this folder holds no run with at least one step: name another one.")
    print("\n".join(sentences) or nothing_found(metrics, steps))


if __name__ == "__main__":
    run_program(main)
