"""`train.py --check_rewards`: the completions of the first step, and their rewards."""

from statistics import mode

from answers import gold_answer
from engine.base import progress, ranks
from engine.report.metrics import first_group, step_metrics
from engine.scoring.score import read_answer
from judges.programs import program_errors


def print_preview(rollout, algorithm, tokenizer):
    """Print the first prompt, its completions with their rewards and what was read as the answer,
    and the mean of each reward.

    Returns (the metrics, the first group as a run logs it), for the doctor.
    """
    advantages = algorithm.advantages(rollout)
    kept, advantages = algorithm.keep_completions(rollout, advantages)
    metrics = step_metrics(rollout, advantages, kept)
    sample = first_group(rollout, advantages, kept, tokenizer)
    if ranks.rank() > 0:
        return metrics, sample
    print("The first prompt, as the model sees it:")
    print(sample["prompt"])
    print(f"(here the model goes on; right: {gold_answer(sample['answer'])!r:.60})\n")
    names = rollout.reward_names
    questions, completions = rollout.lengths.shape
    for text, values in zip(rollout.texts, rollout.rewards[:, 0].T):
        for name, value in zip(names, values):
            print(f"{name} {value:g}", end="  ")
        print(f"read: {read_answer(names[0], text)!r:.60}  {text!r:.400}")

    print(f"\n{progress.count(questions, 'question')} × {completions} completions: "
          f"{metrics['length']:.0f} tokens long, {metrics['truncated']:.0%} cut off, "
          f"{metrics['answer_not_found']:.0%} without an answer; "
          f"{rollout.failures} calls of a reward failed.")
    for name, weight, values in zip(names, rollout.reward_weights, rollout.rewards):
        print(f"{name}, weight {weight:g}: mean {metrics[f'reward/{name}']:.3f}, "
              f"from {values.min():g} to {values.max():g}")
    if errors := [error for error in program_errors(rollout.texts) if error]:
        print(f"{progress.count(len(errors), 'program')} failed, most often with: {mode(errors)}")

    return metrics, sample
