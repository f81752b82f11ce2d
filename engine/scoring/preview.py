"""`train.py --check_rewards`: the completions of the first step, and their rewards."""

from answers import extract_answer


def show(rollout, tokenizer):
    """Print the first prompt, its completions with their rewards and what was read as the answer,
    and the mean of each reward."""
    question = rollout.questions[0]
    prompt = tokenizer.decode(question["prompt"])
    gold = question["answer"].splitlines()[-1]
    print("The first prompt, as the model sees it:")
    print(prompt)
    print(f"(here the model goes on; right: {gold!r:.60})\n")
    questions, completions = rollout.lengths.shape
    for i in range(completions):
        for name, values in zip(rollout.reward_names, rollout.rewards):
            value = values[0, i].item()
            print(f"{name} {value:g}", end="  ")
        text = rollout.texts[i]
        print(f"read: {extract_answer(text)!r:.60}  {text!r:.400}")

    length = rollout.lengths.float().mean()
    truncated = rollout.truncated.float().mean()
    print(f"\n{questions} questions × {completions} completions: {length:.0f} tokens long, "
          f"{truncated:.0%} cut off; {rollout.failures} calls of a reward failed.")
    rewards = zip(rollout.reward_names, rollout.reward_weights, rollout.rewards)
    for name, weight, values in rewards:
        least = values.min()
        mean = values.mean()
        most = values.max()
        print(f"{name}, weight {weight:g}: mean {mean:.3f}, from {least:g} to {most:g}")
