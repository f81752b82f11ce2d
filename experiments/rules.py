"""Rules for the tables of reproduce.py and real.py: which completions are kept.

    torchrun train.py --pruning_rate 0.875 --keep experiments/rules.py:distinct
"""

import torch


def distinct(rollout, advantages, k):
    """One completion of each different advantage, the largest |A| first, at most k of a question.

    If a reward is 0 or 1, a question with a signal keeps one right and one wrong completion. A question without a
    signal keeps one completion, whose advantage is 0. (An ablation of FastRL, 2609.36932)
    """
    rows = []
    for q, group in enumerate(advantages.tolist()):
        order = sorted(range(len(group)), key=lambda i: -abs(group[i]))  # of equal |A| the lower index comes first
        firsts = {}  # rounded advantage → the first completion that has it
        for i in order:
            firsts.setdefault(round(group[i], 4), i)
        rows += [q * len(group) + i for i in list(firsts.values())[:k]]
    return torch.tensor(sorted(rows))
