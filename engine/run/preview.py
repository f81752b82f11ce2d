"""`train.py --check_rewards`: the completions of the first step, and their rewards."""

from answers import gold_answer
from engine.base import progress, ranks
from engine.run.metrics import summarize
from engine.scoring.score import read


def show(rollout, algorithm, tokenizer):
    """Print the first prompt, its completions with their rewards and what was read as the answer,
    and the mean of each reward.

    Returns (the metrics, each completion with its question), for the doctor; on the other ranks the
    latter are [].
    """
    advantages = algorithm.advantages(rollout)
    rows, advantages = algorithm.keep_completions(rollout, advantages)
    metrics = summarize(rollout, advantages, rows)
    if ranks.rank() > 0:
        return metrics, []
    question = rollout.questions[0]
    prompt = tokenizer.decode(question["prompt"])
    gold = gold_answer(question["answer"])
    print("The first prompt, as the model sees it:")
    print(prompt)
    print(f"(here the model goes on; right: {gold!r:.60})\n")
    names = rollout.reward_names
    questions, completions = rollout.lengths.shape
    for text, values in zip(rollout.texts, rollout.rewards[:, 0].T):
        for name, value in zip(names, values):
            print(f"{name} {value:g}", end="  ")
        print(f"read: {read(names[0], text)!r:.60}  {text!r:.400}")

    print(f"\n{progress.count(questions, 'question')} × {completions} completions: "
          f"{metrics['length']:.0f} tokens long, {metrics['truncated']:.0%} cut off, "
          f"{metrics['unreadable']:.0%} without an answer; "
          f"{rollout.failures} calls of a reward failed.")
    for name, weight, values in zip(names, rollout.reward_weights, rollout.rewards):
        print(f"{name}, weight {weight:g}: mean {metrics[f'reward/{name}']:.3f}, "
              f"from {values.min():g} to {values.max():g}")

    samples = []
    for i, text in enumerate(rollout.texts):
        asked = rollout.questions[i // completions]
        samples.append({**asked, "prompt": prompt, "completions": [{"completion": text}]})
    return metrics, samples
