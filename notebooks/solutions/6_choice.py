"""Solutions to the exercises of 6_choice.ipynb."""


def still_without_signal(pass_rate, group_size, rounds):
    return (pass_rate**group_size + (1 - pass_rate) ** group_size) ** rounds


def right_kept_by_pods(right, wrong, m):
    return min(right, max(m // 2, m - wrong))
