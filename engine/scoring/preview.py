"""`train.py --check_rewards`: the completions of the first step, and their rewards."""


def show(rollout, tokenizer):
    """Print a prompt, and each reward's mean, best and worst completion."""
    print("The first prompt, as the model sees it:")
    print(tokenizer.decode(rollout.questions[0]["prompt"]))
    print("(here the model goes on)\n")
    questions, completions = rollout.lengths.shape
    length = rollout.lengths.float().mean()
    truncated = rollout.truncated.float().mean()
    print(f"{questions} questions × {completions} completions: {length:.0f} tokens long, "
          f"{truncated:.0%} cut off; {rollout.failures} calls of a reward failed.")
    values = rollout.rewards.flatten(1)
    for i, name in enumerate(rollout.reward_names):
        show_reward(rollout, name, rollout.reward_weights[i], values[i])


def show_reward(rollout, name, weight, values):
    """Print a reward's mean, its best and its worst completion. values: (N,)"""
    mean = values.mean()
    least = values.min()
    most = values.max()
    positive = (values > 0).float().mean()
    print(f"\n{name}, weight {weight:g}: mean {mean:.3f}, from {least:g} to {most:g}, "
          f"{positive:.0%} above 0")
    if least == most:
        show_completion(rollout, values, 0, "for example")
    else:
        best = values.argmax().item()
        worst = values.argmin().item()
        show_completion(rollout, values, best, "best")
        show_completion(rollout, values, worst, "worst")


def show_completion(rollout, values, i, label):
    """Print completion i and its question."""
    group_size = rollout.lengths.shape[1]
    row = rollout.questions[i // group_size]
    question = row["question"]
    gold = row["answer"].splitlines()[-1]
    completion = rollout.texts[i]
    print(f"  {label}, {values[i]:g}: {question!r:.150} (gold answer: {gold!r:.60})")
    print(f"    {completion!r:.400}")
