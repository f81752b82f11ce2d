"""Solution to the exercise of 7_advantage.ipynb."""


def advantages_of_tokens(rewards, values, gamma, lam):
    advantages, after, value_after = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values)):
        after = reward + gamma * value_after - value + gamma * lam * after
        value_after = value
        advantages.append(after)
    return advantages[::-1]
