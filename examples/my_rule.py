"""Two pruning rules of your own: another choice, and another weight of what is chosen.

    torchrun train.py --keep examples/my_rule.py:per_token
    torchrun train.py --keep examples/my_rule.py:group_length
"""

if __name__ == "__main__":
    print(__doc__)  # it is no program
    raise SystemExit

from cppo import batch_rows, prune


def per_token(rollout, advantages, k):
    """The k completions of each question with the largest |A_i| / |o_i|.

    rollout: what was sampled (records.py: Rollout). advantages: (Q, G). Returns rows of the batch,
    (Q·k,).
    """
    # |A_i| / |o_i|
    score = advantages.abs() / rollout.lengths
    return batch_rows(prune(score, k), advantages.shape[1])


def group_length(rollout, advantages, k):
    """CPPO's choice. But a completion is divided by the mean length of its group's G completions,
    not by its own.

    Returns (rows, advantages of these rows): the loss divides by |o_i|, so A_i |o_i| / mean |o|
    makes it the mean.
    """
    rows = batch_rows(prune(advantages, k), advantages.shape[1])
    lengths = rollout.lengths.float()
    return rows, (advantages * lengths / lengths.mean(1, keepdim=True)).flatten()[rows]
