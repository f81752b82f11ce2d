"""Step metrics: what is measured of a step, its seconds and its first group."""

import math
from statistics import fmean

import torch

from engine.base import progress, ranks
from engine.scoring.score import read_answer
from family.dapo import has_signal
from judges.programs import program_errors
from scores import verdict

# of a step, over all devices
COUNTS = (
    "questions", "completions", "kept", "tokens_generated", "tokens_trained", "tokens_without_logp")
AXES = {  # how far a run is: (metric of a step that is added up, what the sum is called)
    "seconds": ("seconds/total", "seconds of training"),
    "completions": ("completions", "completions"),
    "questions": ("questions", "questions"),
}


def step_metrics(rollout, advantages, kept):
    """The metrics of steps 1 to 4, over all devices.

    advantages: (Q, G). kept: rows of the batch.
    """
    trained = rollout.mask if rollout.prefix_weights is None else rollout.prefix_weights
    sums = {
        "questions": len(advantages),
        "completions": len(rollout.texts),
        "kept": len(kept),
        "tokens_generated": rollout.lengths.sum(),
        "tokens_trained": trained[kept].count_nonzero(),
        "tokens_without_logp": rollout.logp.isnan().sum(),
    }
    means = means_of_completions(rollout) | means_of_verdicts(rollout, advantages)
    negative = advantages.flatten()[kept] < 0
    means["kept_negative"] = negative.sum(), len(kept)
    for name, (total, count) in means.items():
        sums[name] = total
        sums[f"{name}, count"] = count

    sums = ranks.all_reduce(rollout.tokens.device, sums)
    metrics = {name: int(sums[name]) for name in COUNTS}
    metrics["rollouts"] = rollout.rollouts
    for name in means:
        count = sums[f"{name}, count"]
        metrics[name] = sums[name] / count if count else math.nan
    return metrics


def means_of_completions(rollout):
    """{name: (its sum, over how many)} of what is measured of each completion."""
    generated = rollout.lengths.sum()
    totals = {
        "length": generated,
        "reward": rollout.total.sum(),
        "reward_failures": rollout.failures,
        "verdict_timeouts": rollout.timeouts,
        "truncated": rollout.truncated.sum(),
        "mixed_groups": mixed_groups(rollout),
        "tool_calls": tool_calls(rollout.mask).sum(),
    }
    means = {name: (total, len(rollout.texts)) for name, total in totals.items()}
    means["entropy"] = -rollout.logp.nansum(), generated - rollout.logp.isnan().sum()
    return means


def means_of_verdicts(rollout, advantages):
    """{name: (its sum, over how many)} of what the rewards say."""
    judged = ~rollout.rewards[0].isnan()  # (Q, G): does the first reward apply?
    asked = judged.any(1)
    right = rollout.rewards[0] > 0
    first = rollout.reward_names[0]
    unread = torch.tensor([read_answer(first, text) is None for text in rollout.texts])
    # the advantages of a group add up to 0: if they are equal, each is 0 (PPO: here they are the
    # scores)
    no_signal = ~has_signal(advantages)
    means = {
        "accuracy": sum_and_count(right, judged),
        "answer_not_found": sum_and_count(unread.view_as(judged), judged),
        "frac_reward_zero_std": (no_signal.sum(), len(no_signal)),
        "all_right": sum_and_count((right | ~judged).all(1), asked),
        "all_wrong": sum_and_count((~right).all(1), asked),
    }
    for name, values in zip(rollout.reward_names, rollout.rewards):
        applies = ~values.isnan()
        equal = ~has_signal(values.nan_to_num())
        means[f"reward/{name}"] = sum_and_count(values, applies)
        means[f"frac_reward_zero_std/{name}"] = sum_and_count(equal, applies.any(1))
    return means


def sum_and_count(values, where):
    """(the sum of the values at these places, how many these are). where: bool, of the same
    shape."""
    return values[where].sum(), where.sum()


def mixed_groups(rollout):
    """A sign of groups that hold several questions: the sampler's log-probabilities of equal tokens
    differ.

    Each completion is compared with the first one of its group, over the tokens with which both
    begin. Returns the mean difference of each completion, added up. It is 0 but for rounding if all
    completions of a group follow the same prompt.
    """
    shape = *rollout.lengths.shape, rollout.tokens.shape[1]
    tokens = rollout.tokens.view(shape)
    logp = rollout.logp.view(shape)
    written = rollout.mask.to(tokens.device, non_blocking=True).view(shape)
    alike = ((tokens == tokens[:, :1]) & written).cumprod(-1).bool()
    gaps = (logp - logp[:, :1]).abs().where(alike, math.nan)
    return gaps.nanmean(-1).nansum()


def tool_calls(mask):
    """How often the policy reads something that it did not write, a tool's result, and writes on:
    for each completion, (N,). mask: (N, T)."""
    return (mask[:, 1:] & ~mask[:, :-1]).sum(1)


def first_group(rollout, advantages, kept, tokenizer):
    """What is logged of the first question of a step: its prompt as the model sees it; each
    completion, its reward, whether its first reward is above 0, its advantage, whether it is kept,
    and why its program failed.

    advantages: (Q, G); for PPO the scores. kept: rows of the batch.
    """
    question = rollout.questions[0]
    kept = kept.tolist()
    group = zip(
        rollout.texts, rollout.total[0].tolist(), map(verdict, rollout.rewards[0, 0].tolist()),
        advantages[0].tolist(), program_errors(rollout.texts))
    completions = []
    for i, (text, reward, correct, advantage, error) in enumerate(group):
        row = {"completion": text, "reward": reward, "correct": correct, "advantage": advantage,
               "kept": i in kept, "error": error}
        completions.append(row)
    return {
        "question": question["question"],
        "answer": question["answer"],
        "prompt": tokenizer.decode(question["prompt"]),
        "completions": completions,
    }


def mean(values):
    """The mean of those that are known: in the logs of a run NaN is None."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else math.nan


def phase_totals(rows):
    """{phase: seconds}, added up over the rows of a run's metrics."""
    names = [*progress.WORDS, "total"]
    return {name: sum(row[f"seconds/{name}"] for row in rows) for name in names}
