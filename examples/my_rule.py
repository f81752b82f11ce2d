"""A pruning rule of your own: keep the completions with the most |A| per token.

    torchrun train.py --keep examples/my_rule.py:per_token
"""

from cppo import batch_rows, prune


def per_token(rollout, advantages, k):
    """The k completions of each question with the largest |A_i| / |o_i|.

    rollout: what was sampled (records.py: Rollout). advantages: (Q, G). Returns rows of the batch, (Q·k,).
    """
    # |A_i| / |o_i|
    score = advantages.abs() / rollout.lengths
    return batch_rows(prune(score, k), advantages.shape[1])
