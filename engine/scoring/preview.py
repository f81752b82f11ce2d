"""`train.py --check_rewards`: the completions of the first step, and their rewards."""


def show(rollout, tokenizer):
    """Print the first prompt, its completions with their rewards, and the mean of each reward."""
    questions, completions = rollout.lengths.shape
    first = rollout.questions[0]
    gold = first["answer"].splitlines()[-1]
    print("The first prompt, as the model sees it:")
    print(tokenizer.decode(first["prompt"]))
    print(f"(here the model goes on; gold answer: {gold!r:.60})\n")
    for i in range(completions):
        values = rollout.rewards[:, 0, i].tolist()
        for name, value in zip(rollout.reward_names, values):
            print(f"{name} {value:g}", end="  ")
        print(f"{rollout.texts[i]!r:.400}")

    length = rollout.lengths.float().mean()
    truncated = rollout.truncated.float().mean()
    print(f"\n{questions} questions × {completions} completions: {length:.0f} tokens long, "
          f"{truncated:.0%} cut off; {rollout.failures} calls of a reward failed.")
    rewards = zip(rollout.reward_names, rollout.reward_weights, rollout.rewards)
    for name, weight, values in rewards:
        print(f"{name}, weight {weight:g}: mean {values.mean():.3f}, from {values.min():g} to "
              f"{values.max():g}")
