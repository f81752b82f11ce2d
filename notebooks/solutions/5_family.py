"""Solutions to the exercises of 5_family.ipynb."""


def still_without_signal(pass_rate, group_size, rounds):
    return (pass_rate**group_size + (1 - pass_rate) ** group_size) ** rounds


def right_kept_by_pods(right, wrong, m):
    return min(right, max(m // 2, m - wrong))


def advantages_of_tokens(rewards, values, gamma, lam):
    advantages, after, value_after = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values)):
        after = reward + gamma * value_after - value + gamma * lam * after
        value_after = value
        advantages.append(after)
    return advantages[::-1]
