"""Two rewards of your own. The first one helps, the second one harms CPPO.

    torchrun train.py --rewards toy_accuracy examples/my_reward.py:shows_steps:0.1
    torchrun train.py --rewards toy_accuracy examples/my_reward.py:brevity:0.1

With `brevity` the accuracy ends below that of the base model: docs/experiments.md says why.
"""

import re


def shows_steps(completions, **columns):
    """1.0 for a completion that writes a calculation down, such as 7+8=15; 0.0 for another one.

    completions: N texts. columns: the columns of the data set, N values each; this reward needs
    none of them.
    """
    return [float(bool(re.search(r"\d=\d", text))) for text in completions]


def brevity(completions, **columns):
    """1.0 for an empty completion, 0.0 for 100 characters and more; for example 0.8 for 20
    characters. The arguments are those of `shows_steps`.
    """
    # max(0, 1 − characters / 100)
    return [max(0.0, 1 - len(text) / 100) for text in completions]
