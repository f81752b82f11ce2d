"""`train.py --check_rewards`: the completions of the first step, and their rewards."""

from answers import gold_answer
from engine.base import progress, ranks
from engine.run.metrics import summarize
from engine.scoring.score import read


def show(rollout, algorithm, tokenizer):
    """Print the first prompt, its completions with their rewards and what was read as the answer,
    and the mean of each reward.

    Returns (the metrics, the questions with their completions), for the doctor; on the other ranks
    the latter are [].
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
    questions, completions = rollout.lengths.shape
    for i in range(completions):
        for name, values in zip(rollout.reward_names, rollout.rewards):
            print(f"{name} {values[0, i]:g}", end="  ")
        text = rollout.texts[i]
        answer = read(rollout.reward_names[0], text)
        print(f"read: {answer!r:.60}  {text!r:.400}")

    print(f"\n{progress.count(questions, 'question')} × {completions} completions: "
          f"{metrics['length']:.0f} tokens long, {metrics['truncated']:.0%} cut off, "
          f"{metrics['unreadable']:.0%} without an answer; "
          f"{rollout.failures} calls of a reward failed.")
    for name, weight, values in zip(rollout.reward_names, rollout.reward_weights, rollout.rewards):
        print(f"{name}, weight {weight:g}: mean {metrics[f'reward/{name}']:.3f}, "
              f"from {values.min():g} to {values.max():g}")

    samples = []
    for i, question in enumerate(rollout.questions):
        texts = rollout.texts[i * completions : (i + 1) * completions]
        completed = [{"completion": text} for text in texts]
        samples.append({**question, "prompt": prompt, "completions": completed})
    return metrics, samples
