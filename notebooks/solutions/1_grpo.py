"""Solutions to the exercises of 1_grpo.ipynb."""

from grpo import grpo_loss, sequence_mean_weights


def leave_one_out(rewards):
    others = (rewards.sum(dim=1, keepdim=True) - rewards) / (rewards.shape[1] - 1)
    return rewards - others


def without_gradient(ratio, advantages):
    return ((advantages > 0) & (ratio > 1.2)) | ((advantages < 0) & (ratio < 0.8))


def loss_of_a_part(logp, old_logp, advantages, mask, N):
    # N is that of the whole batch
    weights = sequence_mean_weights(mask, num_sequences=N)
    return grpo_loss(logp, old_logp, advantages, mask, beta=0, weights=weights)[0]
