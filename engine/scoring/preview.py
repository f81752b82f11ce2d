"""`train.py --check_rewards`: the completions of the first step, and their rewards."""


def show(rollout, tokenizer):
    """Print a prompt, and each reward's mean, best and worst completion."""
    lengths, truncated = rollout.lengths.float(), rollout.truncated.float()
    print("The first prompt, as the model sees it:")
    print(tokenizer.decode(rollout.questions[0]["prompt"]))
    print("(here the model goes on)\n")
    print(f"{len(rollout.questions)} questions × {rollout.lengths.shape[1]} completions: "
          f"{lengths.mean():.0f} tokens long, {truncated.mean():.0%} cut off; "
          f"{rollout.failures} calls of a reward failed.")
    for name, weight, values in zip(
        rollout.reward_names, rollout.reward_weights, rollout.rewards.flatten(1)
    ):
        print(f"\n{name}, weight {weight:g}: mean {values.mean():.3f}, from {values.min():g} to "
              f"{values.max():g}, {(values > 0).float().mean():.0%} above 0")
        if values.min() == values.max():
            example(rollout, values, 0, "for example")
        else:
            example(rollout, values, values.argmax().item(), "best")
            example(rollout, values, values.argmin().item(), "worst")


def example(rollout, values, i, label):
    """Print completion i and its question."""
    question = rollout.questions[i // rollout.lengths.shape[1]]
    gold = question["answer"].splitlines()[-1]
    print(f"  {label}, {values[i]:g}: {question['question']!r:.150} (gold answer: {gold!r:.60})")
    print(f"    {rollout.texts[i]!r:.400}")
