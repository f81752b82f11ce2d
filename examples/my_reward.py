"""A reward of your own: a short completion earns more than a long one.

    torchrun train.py --rewards toy_accuracy examples/my_reward.py:brevity:0.1

It lowers the accuracy: docs/experiments.md says why.
"""


def brevity(completions, **columns):
    """1.0 for an empty completion, 0.0 for 100 characters and more; for example 0.8 for 20
    characters.

    completions: N texts. columns: the columns of the data set, N values each; this reward needs
    none of them.
    """
    # max(0, 1 − characters / 100)
    return [max(0.0, 1 - len(text) / 100) for text in completions]
